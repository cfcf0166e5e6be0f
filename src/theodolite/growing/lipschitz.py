"""Upper bounds on Lipschitz constants: how far a part of a network moves its output when its input moves.

A recorded forward pass is walked from one value to a later one. Each operation multiplies the bound: a linear
map by its spectral norm, an activation by its steepest slope; a sum adds up. Two kinds of operation have no
bound on all inputs, and get one for inputs like those seen:

    norm       max|γ| · max 1/√(var + ε)     if no norm reads less than the least that was seen
    product    |A|·L_B + |B|·L_A             if no factor is larger than the largest that was seen

With `var = ‖u‖²/d` the first is `γ_max/√(c²/d + ε)`, c the least `‖u‖`: below `γ_max√d/c`, and below
`γ_max/√ε`, which holds for all inputs and is used if norms are to be bounded anywhere. Attention is made of
products and of a softmax, whose slope is at most 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from theodolite.anatomy.recording.operations import CONVOLUTIONS, NORMS, POOLS, SOFTMAXES, VIEWS
from theodolite.anatomy.recording.trace import Node, Ref
from theodolite.anatomy.structure.flow import Flow, bits
from theodolite.anatomy.structure.norms import is_normalisation
from theodolite.anatomy.structure.uses import product_operands
from theodolite.probes.scaling.spectral_norm import spectral_norm

SLOPES = {
    **dict.fromkeys(SOFTMAXES, 0.5),
    **dict.fromkeys(("relu", "relu6", "hardtanh", "tanh", "softplus", "log_sigmoid_forward"), 1.0),
    **dict.fromkeys(("neg", "abs", "clamp", "clamp_min", "clamp_max", "cos", "sin"), 1.0),
    **dict.fromkeys(POOLS, 1.0),
    "sigmoid": 0.25,
    "hardsigmoid": 1 / 6,
    "hardswish": 1.5,
    "gelu": 1.13,
    "silu": 1.1,
    "mish": 1.09,
    "selu": 1.76,
}
"""The steepest slope of each, rounded up."""

REPEATING = frozenset({"expand", "repeat", "repeat_interleave", "upsample_nearest2d"})
LOOKING_UP = frozenset({"index", "index_select", "gather", "as_strided", "masked_select", "reflection_pad2d"})
"""Views that may repeat an entry many times: no bound."""
ROUNDING = 1e-5
"""Above the error of a spectral norm in float32."""
MATRIX_VIEWS = frozenset(
    {"t", "transpose", "mT", "permute", "detach", "alias", "clone", "contiguous", "_to_copy"}
)
"""A parameter seen through these is the same matrix or its transpose."""


@dataclass(frozen=True)
class Bound:
    """An upper bound, or the operation that has none."""

    value: float
    """inf if there is none."""
    missing: str = ""


@dataclass
class Sizes:
    """The sizes of the values of a recorded pass, over all examples.

    Without passes every size is 1, and only the values asked for are noted: a first walk finds what to keep.
    """

    flow: Flow
    parameters: Mapping[str, Tensor]
    anywhere: bool = False
    """Are norms bounded for all inputs, by their ε?"""
    passes: list[Mapping[int, Tensor]] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)

    def largest(self, value: int) -> float:
        """max|x|."""
        return self.most(value, lambda x: float(x.abs().max()))

    def inverse(self, value: int) -> float:
        """1/min|x|."""
        return self.most(value, lambda x: inverse(float(x.abs().min())))

    def spectral(self, value: int) -> float:
        """The largest singular value of a matrix, or of any of a stack."""
        return self.most(value, spectral)

    def held(self, value: int) -> Tensor | None:
        """A parameter, or a constant that a pass kept."""
        name = self.flow.graph.parameters.get(value)
        if name is not None:
            return self.parameters[name].detach()
        self.asked.add(value)
        return self.passes[0].get(value) if self.passes else None

    def most(self, value: int, measure: Callable[[Tensor], float]) -> float:
        """The largest value of a measure over all passes."""
        name = self._parameter(value)
        if name is not None:
            return measure(self.parameters[name].detach())
        self.asked.add(value)
        found = [measure(one[value]) if value in one else math.nan for one in self.passes]
        return 1.0 if not found else math.nan if any(map(math.isnan, found)) else max(found)

    def _parameter(self, value: int) -> str | None:
        """The parameter that a value is, as it is or transposed."""
        graph = self.flow.graph
        shape = sorted(graph.shapes[value])
        while value not in graph.parameters:
            node = self.flow.maker(value)
            if node is None or node.op not in MATRIX_VIEWS:
                return None
            value = node.inputs[0]
        return graph.parameters[value] if len(shape) < 3 and sorted(graph.shapes[value]) == shape else None


def spectral(matrices: Tensor) -> float:
    """The largest singular value of a matrix, or of any of a stack, rounded up.

    >>> import torch
    >>> round(spectral(torch.stack([torch.eye(3), 2 * torch.eye(3)])), 3)
    2.0
    """
    found = spectral_norm(matrices, rtol=1e-3)
    return float((found.value + found.uncertainty).max()) * (1 + ROUNDING)


def inverse(number: float) -> float:
    """1/x, which is inf at 0."""
    return 1 / number if number else math.inf


def upper_bound(sizes: Sizes, start: int, end: int) -> Bound:
    """The bound of the map from one value of a pass to another."""
    flow = sizes.flow
    found: dict[int, Bound] = {start: Bound(1.0)}
    region = flow.between(start, end) & ~(1 << start)
    for value in bits(region):
        node = flow.maker(value)
        if node is None:
            continue
        inside = [one for one in dict.fromkeys(node.inputs) if one in found]
        if inside:
            found[value] = _passed(sizes, node, value, {one: found[one] for one in inside})
    return found.get(end, Bound(0.0))


def _passed(sizes: Sizes, node: Node, value: int, inside: Mapping[int, Bound]) -> Bound:
    """The bound of a node's output, from those of its inputs."""
    normed = node.op in ("mul", "div") and is_normalisation(sizes.flow, node)
    for bound in inside.values():
        # A path through a norm's statistic is part of the norm.
        if bound.missing and not (normed and bound is not inside.get(_by_size(sizes, node)[0])):
            return bound
    factor = _factor(sizes, node, value, {one: bound.value for one, bound in inside.items()})
    return Bound(factor) if math.isfinite(factor) else Bound(math.inf, node.op)


def _factor(sizes: Sizes, node: Node, value: int, inside: Mapping[int, float]) -> float:
    op, shapes = node.op, sizes.flow.graph.shapes
    grown = {one: math.prod(shapes[value]) / max(1, math.prod(shapes[one])) for one in inside}
    if op in POOLS and not _is_plain_average(node, shapes[node.inputs[0]], shapes[value]):
        return math.inf
    if op in SLOPES:
        return SLOPES[op] * max(inside.values())
    if op == "leaky_relu":
        return max(1.0, abs(_number(node, 1, 0.01))) * max(inside.values())
    if op == "pow" and len(inside) == 1 and _number(node, 1, 0.0) >= 1:
        (one, L), power = next(iter(inside.items())), _number(node, 1, 0.0)
        return L * power * sizes.largest(one) ** (power - 1)
    if op in ("add", "sub"):
        alpha = abs(float(node.kwargs.get("alpha", 1)))
        first = node.args[0].value if isinstance(node.args[0], Ref) else None
        return sum(
            inside[one] * (1.0 if not place and one == first else alpha) * math.sqrt(max(1.0, grown[one]))
            for place, one in enumerate(node.inputs)  # h + h reads one value twice
            if one in inside
        )
    if op in ("mul", "div"):
        return _scaled(sizes, node, inside, grown)
    if op in NORMS:
        return _normed(sizes, node, inside)
    if op in CONVOLUTIONS:
        return _convolved(sizes, node, inside)
    if (pair := product_operands(node)) is not None:
        return _multiplied(sizes, node, pair, inside)
    if op in ("cat", "stack", "where", "write", "copy", "masked_fill", "slice_scatter"):
        return math.hypot(*(inside[one] for one in node.inputs if one in inside))
    if op in ("mean", "sum"):
        spread = 1 / math.sqrt(next(iter(grown.values())))  # √ of how many entries meet in one
        return max(inside.values()) * (1 / spread if op == "mean" else spread)
    if op in REPEATING:
        return max(inside.values()) * math.sqrt(max(1.0, *grown.values()))
    if op in VIEWS and op not in LOOKING_UP:
        return max(inside.values())
    return math.inf


def _is_plain_average(node: Node, read: Sequence[int], made: Sequence[int]) -> bool:
    """Do all windows weigh entries alike? If those at an edge weigh more, a slope may exceed 1."""
    if "adaptive" in node.op:
        return all(one % other == 0 for one, other in zip(read, made, strict=True))
    given = [*node.args[3:7], *(0, False, True, None)[len(node.args[3:7]) :]]
    padding, rounds_up, counts_padding, divisor = given
    padded = any(padding) if isinstance(padding, (list, tuple)) else bool(padding)
    return not rounds_up and divisor is None and (counts_padding or not padded)


def _scaled(sizes: Sizes, node: Node, inside: Mapping[int, float], grown: Mapping[int, float]) -> float:
    refs = [arg.value for arg in node.args[:2] if isinstance(arg, Ref)]
    if is_normalisation(sizes.flow, node):
        x, statistic = _by_size(sizes, node)
        if x not in inside:
            return math.inf
        if sizes.anywhere:
            return inside[x] * inverse(math.sqrt(_eps_behind(sizes.flow, statistic)))
        return inside[x] * (sizes.largest(statistic) if node.op == "mul" else sizes.inverse(statistic))
    others = [one for one in refs if one not in inside]
    if len(inside) == 1 and len(refs) == 1 and len(node.args) > 1:
        number = next(float(arg) for arg in node.args[:2] if not isinstance(arg, Ref))
        if node.op == "div" and not isinstance(node.args[0], Ref):
            return math.inf
        return next(iter(inside.values())) * (abs(number) if node.op == "mul" else inverse(abs(number)))
    if len(others) == 1 and len(inside) == 1:
        (one, L), other = next(iter(inside.items())), others[0]
        L *= math.sqrt(max(1.0, grown[one]))
        if node.op == "mul":
            return L * sizes.largest(other)
        return L * sizes.inverse(other) if refs[1] == other else math.inf
    if node.op == "mul" and refs:
        first, second = refs[0], refs[-1]
        return inside[first] * sizes.largest(second) * math.sqrt(max(1.0, grown[first])) + inside[
            second
        ] * sizes.largest(first) * math.sqrt(max(1.0, grown[second]))
    return math.inf


def _multiplied(sizes: Sizes, node: Node, pair: tuple[int, int], inside: Mapping[int, float]) -> float:
    if node.op == "_grouped_mm":
        return math.inf
    left, right = pair
    found = inside[left] * sizes.spectral(right) if left in inside else 0.0
    found += inside[right] * sizes.spectral(left) if right in inside else 0.0
    added = list(node.inputs)
    for one in pair:
        added.remove(one)
    found += sum(inside.get(one, 0.0) for one in added)
    return found * (SLOPES["gelu"] if node.op == "_addmm_activation" else 1.0)


def _convolved(sizes: Sizes, node: Node, inside: Mapping[int, float]) -> float:
    """The kernel acts on patches, and an entry is in as many patches as windows overlap there."""
    signal, weight = (arg.value for arg in node.args[:2])
    stride, _, dilation, transposed, _, groups = node.args[3:9]
    if transposed or weight in inside:
        return math.inf
    kernel = sizes.flow.graph.shapes[weight][2:]
    overlap = math.prod(
        min(size, math.ceil(((size - 1) * apart + 1) / step))
        for size, apart, step in zip(kernel, _each(dilation, kernel), _each(stride, kernel), strict=True)
    )

    def norm(one: Tensor) -> float:
        return spectral(one.reshape(groups, one.shape[0] // groups, -1))

    held = sizes.held(weight)
    return inside[signal] * math.sqrt(overlap) * (norm(held) if held is not None else 1.0)


def _normed(sizes: Sizes, node: Node, inside: Mapping[int, float]) -> float:
    signal, gain, _ = NORMS[node.op]
    x = node.args[signal].value
    if x not in inside:
        return math.inf
    scale = 1.0
    if "batch_norm" in node.op:
        if node.args[5] is True or node.op == "_batch_norm_with_update":  # by the batch's own statistics
            return math.inf
        variance = sizes.held(node.args[4].value) if isinstance(node.args[4], Ref) else None
        weight = sizes.held(node.args[gain].value) if isinstance(node.args[gain], Ref) else None
        if variance is None:
            return inside[x] if not sizes.passes else math.inf
        steep = (variance.double() + _eps(node)).rsqrt()
        return inside[x] * float((steep if weight is None else steep * weight.double().abs()).max())
    if isinstance(node.args[gain], Ref):
        scale = sizes.largest(node.args[gain].value)
    if sizes.anywhere:
        return inside[x] * scale * inverse(math.sqrt(_eps(node)))
    return inside[x] * scale * sizes.most(x, lambda one: _steepest(node, one))


def _steepest(node: Node, x: Tensor) -> float:
    """The largest 1/√(var + ε) of the input of a fused norm."""
    x = x.double()
    if node.op == "native_group_norm":
        x = x.reshape(x.shape[0], node.args[6], -1)
        variance = x.var(-1, unbiased=False)
    else:
        dims = tuple(range(-len(node.args[1]), 0))
        centre = 0.0 if "rms" in node.op else x.mean(dims, keepdim=True)
        variance = (x - centre).square().mean(dims)
    return inverse(math.sqrt(float(variance.min()) + _eps(node)))


def _eps(node: Node) -> float:
    numbers = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, float)]
    return numbers[-1] if numbers else 0.0


def _eps_behind(flow: Flow, statistic: int) -> float:
    """The number added to a variance before it becomes a statistic; 0 if unknown."""
    value: int | None = statistic
    while value is not None and (node := flow.maker(value)) is not None:
        numbers = [arg for arg in node.args[1:] if isinstance(arg, float)]
        if node.op == "add" and numbers:
            return numbers[0]
        if node.op not in ("rsqrt", "sqrt", "reciprocal", "pow", "expand", "unsqueeze", "_to_copy"):
            break
        value = node.inputs[0]
    return 0.0


def _by_size(sizes: Sizes, node: Node) -> list[int]:
    """The dividend and the divisor of a norm."""

    def size(value: int) -> int:
        maker = sizes.flow.maker(value)
        expanded = maker is not None and maker.op == "expand"
        return math.prod(sizes.flow.graph.shapes[maker.inputs[0] if maker and expanded else value])

    return sorted((arg.value for arg in node.args[:2] if isinstance(arg, Ref)), key=size, reverse=True)


def _number(node: Node, place: int, default: float) -> float:
    given = node.args[place] if len(node.args) > place else None
    return float(given) if isinstance(given, (int, float)) else default


def _each(option: Any, kernel: tuple[int, ...]) -> list[int]:
    given = list(option) if isinstance(option, (list, tuple)) else [option]
    return given * len(kernel) if len(given) == 1 else given
