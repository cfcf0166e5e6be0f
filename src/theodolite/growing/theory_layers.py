"""The layers of a network as Lemma 1 on depth expansion has them: `x_k = N_k(x_{k−1} + F_k(x_{k−1}))`.

Branches that read the same stream are one layer: `N(x + F + G)`. Between two layers there may be a norm (post),
an activation (ResNet) or nothing (pre). What is multiplied on the way from layer k to the output is

    A_k = L_T · L_N,k · L_θ,k · Π_{j>k} L_N,j(s_j + Σ L_x,j)

with s the Lipschitz constant of the shortcut: 1, or that of its projection.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from theodolite.anatomy.branches import names_in, placement_of, streams_of
from theodolite.anatomy.flow import Flow
from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.rerun import Rerun, rerun
from theodolite.anatomy.residual import Residual, find_residuals
from theodolite.anatomy.uses import find_uses
from theodolite.errors import UseError
from theodolite.growing.jacobian import jacobian_norm
from theodolite.growing.lipschitz import Bound, upper_bound
from theodolite.growing.sizes import Sizes
from theodolite.probes.sighting import Layout, find_layout


@dataclass(frozen=True)
class Factor:
    """A Lipschitz constant, from both sides."""

    measured: float
    """The largest that was seen at the data: it is not below this."""
    bound: float = math.inf
    """It is not above this for inputs like those seen; inf if there is no bound."""
    anywhere: float = math.inf
    """The same with norms bounded for all inputs, by their ε."""
    missing: str = ""
    """The operation for which there is no bound."""

    @property
    def value(self) -> float:
        """The bound, or what was measured where there is none."""
        return self.bound if math.isfinite(self.bound) else self.measured

    @property
    def how(self) -> str:
        """`bound` or `measured`."""
        return "bound" if math.isfinite(self.bound) else "measured"


@dataclass(frozen=True)
class Layer:
    """One branch, and what its layer does to the stream."""

    block: int
    branch: int
    placement: str
    norm: Factor
    """L_N: of what stands between the sum and the next layer; 1 if nothing does."""
    shortcut: Factor
    """s."""
    branch_lipschitz: Factor
    """L_x."""
    parameter_lipschitz: float
    """L_θ, measured: the largest `‖∂F/∂θ‖` of any unit looked at."""
    radius: float
    """R_k, the norm of the branch's parameters."""
    parameters: int
    log_amplification: float = math.nan
    """ln A_k."""

    @property
    def how(self) -> str:
        """Which of its constants are bounds."""
        lost = sorted(
            {one.missing for one in (self.norm, self.shortcut, self.branch_lipschitz) if one.missing}
        )
        return f"measured: no bound for {', '.join(lost)}" if lost else "bound"


def find_layers(
    model: nn.Module, units: Sequence[Any], progress: Any = None
) -> tuple[tuple[Layer, ...], Factor, int, int]:
    """All branches; the top map; how many layers they form; and how many parameters they have, each once.

    Args:
        model: bare, in eval mode.
        units: the inputs of each unit to look at, all of the same shapes.
        progress: is told which share of the work is done.
    """
    found = _Network.of(model, units[0])
    bounds = _bounds(found, units)
    branches, top = [_Measured() for _ in found.residuals], 0.0
    between = {step: 0.0 for step in found.steps()}
    for number, inputs in enumerate(units):
        for index, one in enumerate(_measured(found, inputs, between)):
            branches[index] = _Measured(*map(max, branches[index], one))
            if progress is not None:
                progress((number + (index + 1) / len(branches)) / len(units))
    layers = []
    for index, residual in enumerate(found.residuals):
        layer = found.layer_of[index]
        names = names_in(found.flow, residual)
        own = [found.parameters[name].detach() for name in names if name in found.parameters]
        block, branch = found.layout.places[index]
        layers.append(
            Layer(
                block,
                branch,
                placement_of(found.flow, residual),
                norm=_factor(between["norm", layer], bounds["norm", layer]),
                shortcut=_factor(between["shortcut", layer], bounds["shortcut", layer]),
                branch_lipschitz=_factor(branches[index].input, bounds["branch", index]),
                parameter_lipschitz=branches[index].parameter,
                radius=math.sqrt(sum(float(one.double().square().sum()) for one in own)),
                parameters=sum(one.numel() for one in own),
            )
        )
    top_factor = _factor(between["top", 0], bounds["top", 0])
    every = {name for residual in found.residuals for name in names_in(found.flow, residual)}
    total = sum(found.parameters[name].numel() for name in every if name in found.parameters)
    return amplified(layers, found.layer_of, top_factor), top_factor, len(found.layers), total


def amplified(
    layers: Sequence[Layer], layer_of: Sequence[int], top: Factor, which: str = "value"
) -> tuple[Layer, ...]:
    """The layers with their `ln A_k`, from the `value`, the `measured` or the `anywhere` side of the factors."""

    def side(one: Factor) -> float:
        if which == "anywhere" and not math.isfinite(one.anywhere):
            return _log(one.value)
        return _log(getattr(one, which))

    behind, done = side(top), list(layers)
    for layer in sorted(set(layer_of), reverse=True):
        members = [index for index, own in enumerate(layer_of) if own == layer]
        norm = side(layers[members[0]].norm)
        for index in members:
            own = behind + norm + _log(layers[index].parameter_lipschitz)
            done[index] = replace(layers[index], log_amplification=own)
        parts = [side(layers[members[0]].shortcut), *(side(layers[one].branch_lipschitz) for one in members)]
        most = max(parts)
        behind += (
            norm + most + math.log(sum(math.exp(part - most) for part in parts)) if most > -math.inf else most
        )
    return tuple(done)


class _Measured(NamedTuple):
    input: float = 0.0
    parameter: float = 0.0


Step = tuple[str, int]
"""`norm` or `shortcut` of a layer, or `top`."""


@dataclass(frozen=True)
class _Network:
    """A recorded pass, cut in layers."""

    model: nn.Module
    layout: Layout
    flow: Flow
    residuals: tuple[Residual, ...]
    layers: tuple[tuple[int, ...], ...]
    """By layer: its branches."""
    parameters: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, inputs: Any) -> _Network:
        layout = find_layout(model, inputs)
        flow = Flow(find_uses(layout.graph))
        residuals = tuple(find_residuals(flow))
        name = type(model).__name__
        if not residuals:
            raise UseError(f"{name} has no residual branches, and the theory is about layers x + F(x)")
        if layout.is_routed:
            raise UseError(f"the stream of {name} is a mixture, and the theory is about sums x + F(x)")
        if len(set(streams_of(flow, list(residuals)))) > 1:
            raise UseError(f"{name} has several residual streams, and the theory is about one")
        by_start: dict[int, list[int]] = {}
        for index, residual in enumerate(residuals):
            by_start.setdefault(flow.back(residual.start), []).append(index)
        layers = sorted(
            by_start.values(), key=lambda members: max(residuals[one].addition for one in members)
        )
        return cls(
            model, layout, flow, residuals, tuple(map(tuple, layers)), dict(canonical_parameters(model))
        )

    @property
    def layer_of(self) -> list[int]:
        return [
            next(layer for layer, members in enumerate(self.layers) if index in members)
            for index in range(len(self.residuals))
        ]

    def total(self, layer: int) -> int:
        """The sum of the stream and all branches of a layer."""
        addition = max(self.residuals[index].addition for index in self.layers[layer])
        return self.flow.graph.nodes[addition].outputs[0]

    def start(self, layer: int) -> int:
        return self.residuals[self.layers[layer][0]].start

    def steps(self) -> Iterator[Step]:
        yield from ((kind, layer) for layer in range(len(self.layers)) for kind in ("norm", "shortcut"))
        yield "top", 0

    def ends(self, step: Step) -> tuple[int, int, tuple[int, ...]]:
        """From where to where a step goes, and which values do not count on the way."""
        kind, layer = step
        last = len(self.layers) - 1
        final = self.layout.stream[max(self.layers[last], key=lambda index: self.residuals[index].addition)]
        if kind == "top":
            return final, self.layout.logits, ()
        if kind == "norm":
            return self.total(layer), self.start(layer + 1) if layer < last else final, ()
        cut = tuple(end for index in self.layers[layer] for end in self.residuals[index].ends)
        return self.start(layer), self.total(layer), cut


def _bounds(found: _Network, units: Sequence[Any]) -> dict[Step, tuple[Bound, Bound]]:
    """By step and by branch: the bound for inputs like those seen, and for all."""
    seen = Sizes(found.flow, found.parameters)
    everywhere = Sizes(found.flow, found.parameters, anywhere=True)

    def walk() -> dict[Step, tuple[Bound, Bound]]:
        known = {
            step: tuple(upper_bound(sizes, *found.ends(step)) for sizes in (seen, everywhere))
            for step in found.steps()
        }
        for index, residual in enumerate(found.residuals):
            known["branch", index] = tuple(
                _summed(
                    partial(upper_bound, sizes, residual.start), residual.ends, found.layout.factors[index]
                )
                for sizes in (seen, everywhere)
            )
        return known

    walk()
    asked = seen.asked | everywhere.asked
    for inputs in units:
        values = rerun(found.model, inputs, found.layout.graph, keep=asked).values
        seen.passes.append(values)
        everywhere.passes.append(values)
    return walk()


def _summed(bound: Any, ends: Sequence[int], factors: Sequence[float]) -> Bound:
    parts = [bound(end) for end in ends]
    lost = next((part for part in parts if part.missing), None)
    return lost or Bound(sum(abs(weight) * part.value for weight, part in zip(factors, parts, strict=True)))


def _measured(found: _Network, inputs: Any, between: dict[Step, float]) -> Iterator[_Measured]:
    """Of one unit, branch by branch; what lies between the layers is noted on the way."""
    graph = found.layout.graph
    by_name = {name: value for value, name in graph.parameters.items()}
    kept = {value for step in found.steps() for value in found.ends(step)[:2]}
    kept |= {value for residual in found.residuals for value in (residual.start, *residual.ends)}
    kept |= set(graph.parameters)
    passed = rerun(found.model, inputs, graph, keep=kept, gradients=True)
    if passed.lost - set(graph.parameters):
        raise UseError(
            f"two forward passes of {type(found.model).__name__} on inputs of the same shapes ran different "
            "operations, so its layers cannot be told apart. Make it deterministic in eval mode"
        )
    for step in found.steps():
        start, end, cut = found.ends(step)
        if cut and found.flow.lineage[end] >> start & 1:
            between[step] = 1.0  # the stream itself
        elif cut:
            between[step] = max(between[step], _shortcut(found, passed, start, end, cut))
        else:
            between[step] = max(between[step], _norm(passed, [start], [end], [1.0]))
    for index, residual in enumerate(found.residuals):
        weights = found.layout.factors[index]
        own = [by_name[name] for name in names_in(found.flow, residual) if name in by_name]
        yield _Measured(
            _norm(passed, [residual.start], residual.ends, weights),
            _norm(passed, own, residual.ends, weights),
        )
