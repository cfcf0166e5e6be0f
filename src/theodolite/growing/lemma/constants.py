"""The constants of Lemma 1 on depth expansion, measured and bounded on a network.

What a change of one branch's parameters is multiplied by on its way to the output is at most

    A_k = L_T · L_N,k · L_θ,k · Π_{j>k} L_N,j(s_j + Σ L_x,j)

with the Lipschitz constants of the top, of what stands on the stream, of a branch in its parameters and in
its input, and of the shortcut: 1, or that of a projection. The sum is over the branches of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from theodolite.anatomy.recording.rerun import Rerun, rerun
from theodolite.core.errors import UseError
from theodolite.growing.lemma.jacobian import jacobian_norm
from theodolite.growing.lemma.layers import Cut, Step
from theodolite.growing.lemma.lipschitz import Bound, upper_bound
from theodolite.growing.lemma.sizes import Sizes

LEEWAY = 1e-3
"""How far what is measured may be above a bound, for rounding."""

Side = Literal["measured", "value", "anywhere"]


@dataclass(frozen=True)
class Factor:
    """A Lipschitz constant, from both sides."""

    measured: float
    """The largest seen at the data: it is not below this; nan for a branch that reads the data themselves."""
    bound: float
    """It is not above this for inputs like those seen; inf if there is no bound."""
    bound_anywhere: float
    """The same with norms bounded for all inputs, by their ε."""
    missing: str = ""
    """The operation for which there is no bound."""

    @property
    def value(self) -> float:
        """The bound, or what was measured where there is none."""
        return self.bound if math.isfinite(self.bound) else self.measured

    @property
    def anywhere(self) -> float:
        """The bound that holds for all inputs, as far as there is one."""
        return self.bound_anywhere if math.isfinite(self.bound_anywhere) else self.value


@dataclass(frozen=True)
class Layer:
    """One branch, and what its layer does to the stream."""

    block: int
    branch: int
    layer: int
    """Branches that read the same stream are in one layer."""
    norm: Factor
    """L_N: of what stands between the sum and the next layer; 1 if nothing does."""
    shortcut: Factor
    """s."""
    input: Factor
    """L_x."""
    parameter: float
    """L_θ, measured: the largest `‖∂F/∂θ‖` of any unit looked at."""
    radius: float
    """R_k, the norm of the branch's parameters."""
    parameters: int
    """p_k."""
    log_amplification: float = math.nan
    """ln A_k."""

    @property
    def how(self) -> str:
        """Whether its Lipschitz constants in the input are bounds."""
        lost = {one.missing for one in (self.norm, self.shortcut, self.input)} - {""}
        found = f"measured: no bound for {', '.join(sorted(lost))}" if lost else "bound"
        return found if self.shortcut.value == 1 else f"{found}; shortcut {self.shortcut.value:.3g}"


def measure(
    cut: Cut, units: Sequence[Any], progress: Callable[[float], None] | None = None
) -> tuple[tuple[Layer, ...], Factor]:
    """All branches, and the top.

    Args:
        cut: the network, on one unit.
        units: the inputs of each unit to look at, of the shapes of the first.
        progress: is told which share of the work is done.
    """
    seen, everywhere = _bounds(cut, units)
    inputs, parameters = dict.fromkeys(cut.steps(), 0.0), [0.0] * len(cut.residuals)
    for number, one in enumerate(units):
        passed = _passed(cut, one)
        by_name = {name: value for value, name in cut.layout.graph.parameters.items()}
        for done, step in enumerate(inputs):
            start, ends, weights = cut.ends(step)
            # What comes first may be data, which has no gradient; nothing depends on how steep it is.
            steep = _norm(passed, [start], ends, weights) if start in passed.edges else math.nan
            inputs[step] = max(steep, inputs[step])
            if step[0] == "branch":
                values = [by_name[name] for name in cut.names(step[1])]
                parameters[step[1]] = max(parameters[step[1]], _norm(passed, values, ends, weights))
            if progress is not None:
                progress((number + (done + 1) / len(inputs)) / len(units))

    def factor(step: Step) -> Factor:
        if inputs[step] > seen[step].value * (1 + LEEWAY):
            return Factor(inputs[step], math.inf, math.inf, "a part that moves by more than its bound")
        return Factor(inputs[step], seen[step].value, everywhere[step].value, seen[step].missing)

    layers = []
    for index, (block, branch) in enumerate(cut.layout.places):
        layer, own = cut.layer_of(index), [cut.parameters[name].detach() for name in cut.names(index)]
        layers.append(
            Layer(
                block,
                branch,
                layer,
                norm=factor(("norm", layer)),
                shortcut=factor(("shortcut", layer)),
                input=factor(("branch", index)),
                parameter=parameters[index],
                radius=math.sqrt(sum(float(one.double().square().sum()) for one in own)),
                parameters=sum(one.numel() for one in own),
            )
        )
    return amplified(layers, factor(("top", 0))), factor(("top", 0))


def amplified(layers: Sequence[Layer], top: Factor, side: Side = "value") -> tuple[Layer, ...]:
    """The layers with their `ln A_k`, from one side of the factors."""

    def log(one: Factor) -> float:
        return _log(getattr(one, side))

    behind, done = log(top), list(layers)
    for layer in sorted({one.layer for one in layers}, reverse=True):
        members = [index for index, one in enumerate(layers) if one.layer == layer]
        norm = log(layers[members[0]].norm)
        for index in members:
            own = behind + norm + _log(layers[index].parameter)
            done[index] = replace(layers[index], log_amplification=own)
        parts = [log(layers[members[0]].shortcut), *(log(layers[index].input) for index in members)]
        behind += norm + _log_of_sum(parts)
    return tuple(done)


def _bounds(cut: Cut, units: Sequence[Any]) -> list[dict[Step, Bound]]:
    """By step: the bounds for inputs like those seen, and for all."""
    both = [Sizes(cut.flow, cut.parameters), Sizes(cut.flow, cut.parameters, anywhere=True)]

    def walk(sizes: Sizes) -> dict[Step, Bound]:
        return {step: _bound(sizes, *cut.ends(step)) for step in cut.steps()}

    for sizes in both:
        walk(sizes)
    asked = both[0].asked | both[1].asked
    for inputs in units:
        values = rerun(cut.model, inputs, cut.layout.graph, keep=asked).values
        for sizes in both:
            sizes.passes.append(values)
    return [walk(sizes) for sizes in both]


def _bound(sizes: Sizes, start: int, ends: Sequence[int], weights: Sequence[float]) -> Bound:
    parts = [upper_bound(sizes, start, end) for end in ends]
    lost = next((part for part in parts if part.missing), None)
    return lost or Bound(sum(abs(weight) * part.value for weight, part in zip(weights, parts, strict=True)))


def _passed(cut: Cut, inputs: Any) -> Rerun:
    kept = set(cut.layout.graph.parameters)
    for step in cut.steps():
        start, ends, _ = cut.ends(step)
        kept |= {start, *ends}
    passed = rerun(cut.model, inputs, cut.layout.graph, keep=kept, gradients=True)
    if passed.lost - set(cut.layout.graph.parameters):
        raise UseError(
            f"two forward passes of {type(cut.model).__name__} on inputs of the same shapes ran different "
            "operations, so its layers cannot be told apart. Make it deterministic in eval mode"
        )
    if any(end not in passed.edges for residual in cut.residuals for end in residual.ends):
        raise UseError(
            f"autograd finds no way through the branches of {type(cut.model).__name__}: are they "
            "checkpointed, or run without gradients? Switch that off"
        )
    return passed


def _norm(passed: Rerun, starts: Sequence[int], ends: Sequence[int], weights: Sequence[float]) -> float:
    if tuple(starts) == tuple(ends):
        return 1.0
    inputs = [passed.edges[one] for one in starts if one in passed.edges]
    outputs = [passed.edges[end] for end in ends]
    return jacobian_norm(outputs, weights, passed.values[ends[0]], inputs) if inputs else 0.0


def _log(number: float) -> float:
    return math.log(number) if number > 0 else -math.inf


def _log_of_sum(logs: Sequence[float]) -> float:
    most = max(logs)
    return most + math.log(sum(math.exp(one - most) for one in logs)) if math.isfinite(most) else most
