"""The constants of Lemma 1 on depth expansion, measured and bounded on a network.

The network is cut in layers `x_k = N_k(x_{k−1} + F_k(x_{k−1}))`. Branches that read the same stream are one
layer, `N(x + F + G)`. N stands between a sum and the next layer: a norm (post), an activation (ResNet) or
nothing (pre). A change of one branch's parameters is multiplied on its way to the output by at most

    A_k = L_T · L_N,k · L_θ,k · Π_{j>k} L_N,j(s_j + Σ L_x,j)

with the Lipschitz constants of the top, of N, of a branch in its parameters and in its input, and of the
shortcut: 1, or that of a projection. The sum is over the branches of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.recording.rerun import Rerun, rerun
from theodolite.anatomy.structure.branches import names_in, streams_of
from theodolite.anatomy.structure.flow import Flow
from theodolite.anatomy.structure.residual import TracedBranch, find_residuals
from theodolite.core.errors import UseError
from theodolite.core.progress import Progress, share
from theodolite.growing.lipschitz import Bound, Sizes, upper_bound
from theodolite.probes.scaling.activation_layout import ActivationLayout, find_layout

Step = tuple[Literal["norm", "shortcut", "top", "branch"], int]
"""`norm` or `shortcut` of a layer, a `branch`, or the `top`: from the last stream to the logits."""
Ends = tuple[int, tuple[int, ...], tuple[float, ...]]
"""The input of a map, the values whose weighted sum is its output, and their weights."""
LEEWAY = 1e-3
"""Relative rounding error by which a measurement may exceed its bound."""

Side = Literal["measured", "value", "anywhere"]
Edge = GradientEdge | Tensor
"""An edge of the autograd graph, from `theodolite.anatomy.recording.rerun`."""
STEPS = 40
RTOL = 1e-4
"""Of the change in two steps, at which the iteration ends."""


@dataclass(frozen=True)
class LayeredPass:
    """A recorded pass, cut in layers. Made by `cut_in_layers`."""

    model: nn.Module
    layout: ActivationLayout
    flow: Flow
    residuals: tuple[TracedBranch, ...]
    layers: tuple[tuple[int, ...], ...]
    """By layer: its branches."""
    parameters: Mapping[str, Tensor]

    steps: Mapping[Step, Ends]
    """All maps of the network, after its first stream."""

    def names(self, branch: int) -> list[str]:
        """The parameters of a branch."""
        return [name for name in names_in(self.flow, self.residuals[branch]) if name in self.parameters]

    @property
    def is_post_norm(self) -> bool:
        """Is the stream normalised between its layers?"""
        return list(self.layout.stream) != [residual.total for residual in self.residuals]


@dataclass(frozen=True)
class LipschitzConstant:
    """A Lipschitz constant, from both sides."""

    measured: float
    """Lower bound: the largest at the data; nan for a branch that reads the data itself."""
    bound: float
    """Upper bound for inputs like those seen; inf if there is none."""
    bound_anywhere: float
    """The same with norms bounded for all inputs, by their ε."""
    missing: str = ""
    """The operation for which there is no bound."""

    @property
    def value(self) -> float:
        """The bound, or the measurement if there is none."""
        return self.bound if math.isfinite(self.bound) else self.measured

    @property
    def anywhere(self) -> float:
        """The bound for all inputs, if there is one."""
        return self.bound_anywhere if math.isfinite(self.bound_anywhere) else self.value


@dataclass(frozen=True)
class LemmaLayer:
    """One branch, and what its layer does to the stream."""

    block: int
    branch: int
    layer: int
    """Branches that read the same stream are in one layer."""
    norm: LipschitzConstant
    """L_N: of what stands between the sum and the next layer; 1 if nothing does."""
    shortcut: LipschitzConstant
    """s."""
    input: LipschitzConstant
    """L_x."""
    parameter: float
    """L_θ, measured: the largest `‖∂F/∂θ‖` of any example."""
    radius: float
    """R_k, the norm of the branch's parameters."""
    parameters: int
    """p_k."""
    log_amplification: float = math.nan
    """ln A_k."""

    @property
    def how(self) -> str:
        """Are its Lipschitz constants in the input bounds?"""
        lost = {one.missing for one in (self.norm, self.shortcut, self.input)} - {""}
        found = f"measured: no bound for {', '.join(sorted(lost))}" if lost else "bound"
        return found if self.shortcut.value == 1 else f"{found}; shortcut {self.shortcut.value:.3g}"


def cut_in_layers(model: nn.Module, inputs: Any) -> LayeredPass:
    """Record a forward pass and cut it."""
    layout = find_layout(model, inputs)
    flow = Flow(layout.graph)
    residuals = tuple(find_residuals(flow))
    name = type(model).__name__
    if not residuals:
        raise UseError(f"{name} has no residual branches; the theory is about layers x + F(x)")
    if layout.is_routed:
        raise UseError(f"the stream of {name} is a mixture; the theory is about sums x + F(x)")
    if len(set(streams_of(flow, list(residuals)))) > 1:
        raise UseError(f"{name} has several residual streams; the theory is about one")
    by_start: dict[int, list[int]] = {}
    for index, residual in enumerate(residuals):
        by_start.setdefault(flow.back(residual.start), []).append(index)
    layers = sorted(by_start.values(), key=lambda members: max(residuals[one].total for one in members))
    parameters = dict(canonical_parameters(model))
    steps = _steps(layout, flow, residuals, layers)
    return LayeredPass(model, layout, flow, residuals, tuple(map(tuple, layers)), parameters, steps)


def _steps(
    layout: ActivationLayout, flow: Flow, residuals: Sequence[TracedBranch], layers: Sequence[Sequence[int]]
) -> dict[Step, Ends]:
    # The input of the top; with post-norm the output of the last norm.
    last_stream = layout.stream[max(layers[-1], key=lambda one: residuals[one].total)]
    starts = [residuals[members[0]].start for members in layers]
    found: dict[Step, Ends] = {}
    for index, (start, behind) in enumerate(pairwise([*starts, last_stream])):
        members = sorted((residuals[one] for one in layers[index]), key=lambda one: one.total)
        addition = flow.maker(members[0].total)
        assert addition is not None
        # The branches are added to the stream or to a projection of it, which lies between the branch's start
        # and the sum too, but no branch ends in it.
        beside = [value for value in addition.inputs if not any(one.region >> value & 1 for one in members)]
        found["norm", index] = members[-1].total, (behind,), (1.0,)
        found["shortcut", index] = start, ((beside or [members[0].start])[0],), (1.0,)
    for index, residual in enumerate(residuals):
        found["branch", index] = residual.start, residual.ends, layout.factors[index]
    found["top", 0] = last_stream, layout.outputs, (1.0,)
    return found


def measure(
    cut: LayeredPass, examples: Sequence[Any], progress: Progress | None = None
) -> tuple[tuple[LemmaLayer, ...], LipschitzConstant]:
    """All branches, and the top.

    Args:
        cut: the network, on one example.
        examples: the inputs of each example to measure, of the shapes of the first.
        progress: called with a title and the fraction done.
    """
    tell = share(progress, "Lipschitz constants")
    seen, everywhere = _bounds(cut, examples)
    inputs, parameters = dict.fromkeys(cut.steps, 0.0), [0.0] * len(cut.residuals)
    for number, one in enumerate(examples):
        passed = _passed(cut, one)
        by_name = {name: value for value, name in cut.layout.graph.parameters.items()}
        for done, step in enumerate(inputs):
            start, ends, weights = cut.steps[step]
            # The first input may be data, which has no gradient; nothing depends on its slope.
            steep = _norm(passed, [start], ends, weights) if start in passed.edges else math.nan
            inputs[step] = max(steep, inputs[step])
            if step[0] == "branch":
                values = [by_name[name] for name in cut.names(step[1])]
                parameters[step[1]] = max(parameters[step[1]], _norm(passed, values, ends, weights))
            tell((number + (done + 1) / len(inputs)) / len(examples))

    def factor(step: Step) -> LipschitzConstant:
        if inputs[step] > seen[step].value * (1 + LEEWAY):
            return LipschitzConstant(inputs[step], math.inf, math.inf, "a part that exceeds its bound")
        return LipschitzConstant(inputs[step], seen[step].value, everywhere[step].value, seen[step].missing)

    layers, layer_of = [], {one: layer for layer, members in enumerate(cut.layers) for one in members}
    for index, (block, branch) in enumerate(cut.layout.places):
        layer, own = layer_of[index], [cut.parameters[name].detach() for name in cut.names(index)]
        layers.append(
            LemmaLayer(
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


def amplified(
    layers: Sequence[LemmaLayer], top: LipschitzConstant, side: Side = "value"
) -> tuple[LemmaLayer, ...]:
    """The layers with their `ln A_k`, from one side of the factors."""

    def log(one: LipschitzConstant) -> float:
        return _log(getattr(one, side))

    behind, done = log(top), list(layers)
    for layer in sorted({one.layer for one in layers}, reverse=True):
        members = [index for index, one in enumerate(layers) if one.layer == layer]
        norm = log(layers[members[0]].norm)
        for index in members:
            own = behind + norm + _log(layers[index].parameter)
            done[index] = replace(layers[index], log_amplification=own)
        parts = [log(layers[members[0]].shortcut), *(log(layers[index].input) for index in members)]
        behind += norm + float(np.logaddexp.reduce(parts))
    return tuple(done)


def _bounds(cut: LayeredPass, examples: Sequence[Any]) -> list[dict[Step, Bound]]:
    """By step: the bounds for inputs like those seen, and for all inputs."""
    both = [Sizes(cut.flow, cut.parameters), Sizes(cut.flow, cut.parameters, anywhere=True)]

    def walk(sizes: Sizes) -> dict[Step, Bound]:
        return {step: _bound(sizes, *ends) for step, ends in cut.steps.items()}

    for sizes in both:
        walk(sizes)
    asked = both[0].asked | both[1].asked
    for inputs in examples:
        values = rerun(cut.model, inputs, cut.layout.graph, keep=asked).values
        for sizes in both:
            sizes.passes.append(values)
    return [walk(sizes) for sizes in both]


def _bound(sizes: Sizes, start: int, ends: Sequence[int], weights: Sequence[float]) -> Bound:
    parts = [upper_bound(sizes, start, end) for end in ends]
    lost = next((part for part in parts if part.missing), None)
    return lost or Bound(sum(abs(weight) * part.value for weight, part in zip(weights, parts, strict=True)))


def _passed(cut: LayeredPass, inputs: Any) -> Rerun:
    kept = set(cut.layout.graph.parameters)
    for start, ends, _ in cut.steps.values():
        kept |= {start, *ends}
    passed = rerun(cut.model, inputs, cut.layout.graph, keep=kept, gradients=True)
    if passed.lost - set(cut.layout.graph.parameters):
        raise UseError(
            f"two forward passes of {type(cut.model).__name__} on inputs of the same shapes ran different "
            "operations, so its layers are not known. Make it deterministic in eval mode"
        )
    if any(end not in passed.edges for residual in cut.residuals for end in residual.ends):
        raise UseError(
            f"there is no gradient through the branches of {type(cut.model).__name__}: are they "
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


def jacobian_norm(
    outputs: Sequence[Edge], weights: Sequence[float], like: Tensor, inputs: Sequence[Edge]
) -> float:
    """`‖∂(Σ wᵢ outputᵢ)/∂inputs‖₂`, a lower bound: Lanczos iteration on `JJᵀ`.

    Args:
        outputs: values of one shape.
        weights: of their sum.
        like: a tensor of their shape.
        inputs: values or parameters, taken as one vector.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = x * torch.tensor([3.0, 1.0])
    >>> round(jacobian_norm([y], [2.0], y, [x]), 3)
    6.0
    """
    with torch.enable_grad():
        # Linear in u: the derivative with respect to u of the product with v is the Jacobian times v.
        u = torch.zeros_like(like).requires_grad_()
        back = _grad(outputs, inputs, [weight * u for weight in weights], create_graph=True)
    moving = [(edge, one) for edge, one in zip(inputs, back, strict=True) if one is not None]
    if not moving:
        return 0.0
    edges, products = [edge for edge, _ in moving], [one for _, one in moving]
    vector = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
    vector /= vector.norm()
    basis: list[Tensor] = []
    across: list[list[Tensor]] = []  # the products of each image with all earlier vectors
    found = [0.0, 0.0]
    for _ in range(min(STEPS, like.numel())):
        basis.append(vector)
        pulled = _grad(outputs, edges, [weight * vector for weight in weights])
        given = [
            torch.zeros_like(one) if new is None else new for one, new in zip(products, pulled, strict=True)
        ]
        (image,) = _grad(products, [u], given)
        if image is None:
            break
        across.append([(image * one).sum() for one in basis])
        found.append(_largest(across))
        # Twice, because rounding errors of one pass grow from step to step.
        for _ in range(2):
            for one in basis:
                image = image - (image * one).sum() * one
        rest = image.norm()
        if found[-1] <= found[-3] * (1 + RTOL) or float(rest) <= 1e-6 * found[-1] ** 2:
            break
        vector = image / rest
    return found[-1]


def _largest(across: Sequence[Sequence[Tensor]]) -> float:
    """The root of the largest eigenvalue of a symmetric matrix, given by its lower rows."""
    size = len(across)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for row, entries in enumerate(across):
        matrix[row, : row + 1] = torch.stack(list(entries)).double().cpu()
    return float(torch.linalg.eigvalsh(matrix).amax().clamp(min=0).sqrt())


def _grad(
    outputs: Sequence[Edge], inputs: Sequence[Edge], along: Sequence[Tensor], *, create_graph: bool = False
) -> tuple[Tensor | None, ...]:
    ends: Any = list(outputs)  # torch's types do not allow a mix of edges and tensors
    starts: Any = list(inputs)
    try:
        return torch.autograd.grad(
            ends,
            starts,
            list(along),
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise UseError(
            "the network is checkpointed, which hides values from second derivatives: switch that off"
        ) from error
