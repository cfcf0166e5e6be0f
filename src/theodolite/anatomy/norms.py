"""Normalisations: where one is finished, how large what it makes is, and which gains are theirs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.operations import NORMS, REDUCTIONS, VIEWS
from theodolite.anatomy.trace import Graph, Node, Ref
from theodolite.anatomy.uses import Use


def is_normalisation(flow: Flow, node: Node) -> bool:
    """Does the node finish a normalisation: a fused one, or x divided by a statistic of x?"""
    if node.op in NORMS:
        return True
    operands = flow.signals(node)
    if node.op not in ("mul", "div") or len(operands) != 2:
        return False
    return any(_reduced_from(flow, statistic, x) is not None for x, statistic in (operands, operands[::-1]))


def norm_size(flow: Flow, node: Node) -> float:
    """The root mean square of what a normalisation makes: 1/√n if it divides by the length of n entries.

    Else 1, and where it cannot be told.
    """
    operands = flow.signals(node)
    if node.op in NORMS or len(operands) != 2:
        return 1.0
    for x, statistic in (operands, operands[::-1]):
        source = _reduced_from(flow, statistic, x)
        if source is None:
            continue
        size, divisor = (_size_from(flow, source, value) for value in (x, statistic))
        size = size / divisor if node.op == "div" and divisor else size * divisor
        return size if math.isfinite(size) and size > 0 else 1.0
    return 1.0


def _size_from(flow: Flow, source: int, end: int) -> float:
    """The size of a value if that of its source is one, eps left out; nan where that cannot be told."""
    sizes = {source: 1.0}
    for value in bits(flow.between(source, end) & ~(1 << source)):
        node = flow.maker(value)
        assert node is not None
        sizes[value] = size_after(flow.graph, node, sizes)
    return sizes[end]


def size_after(graph: Graph, node: Node, sizes: Mapping[int, float]) -> float:
    """The size of what a node makes of values of known sizes; others count as one, or as their number."""
    held = [sizes.get(value, graph.numbers.get(value, 1.0)) for value in node.inputs]
    numbers = [float(arg) for arg in node.args[:2] if isinstance(arg, (int, float))]
    if node.op == "mul":
        return abs(math.prod(held + numbers))
    if node.op == "div":
        above, below = [*held, *numbers] if isinstance(node.args[0], Ref) else [*numbers, *held]
        return abs(above / below) if below else math.nan
    if node.op in ("sum", "linalg_vector_norm", "norm"):
        return _reduced_size(graph, node, held[0])
    if node.op == "pow" and isinstance(node.args[1], (int, float)):
        return held[0] ** node.args[1] if held[0] else math.nan
    if node.op in POWERS:
        return held[0] ** POWERS[node.op] if held[0] else math.nan
    if node.op in NORMS:
        gain = node.args[NORMS[node.op][1]]
        return sizes.get(gain.value, 1.0) if isinstance(gain, Ref) else 1.0
    if node.op == "_weight_norm_interface":  # g·v/‖v‖ of v and g
        counts = [math.prod(graph.shapes[value]) for value in node.inputs]
        return held[1] / math.sqrt(counts[0] / counts[1])
    return held[0] if node.op in VIEWS | REDUCTIONS | _SIZE_KEPT else math.nan


POWERS = {"square": 2.0, "var": 2.0, "var_mean": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
"""Operations that raise their argument to a power; of several results, the first."""

_SIZE_KEPT = frozenset({"abs", "neg", "add", "sub", "clamp", "clamp_min", "maximum"})
"""With what is small, or of the same size."""


def _reduced_size(graph: Graph, node: Node, size: float) -> float:
    """What a sum or a vector norm makes of entries of one size."""
    before, after = (math.prod(graph.shapes[value]) for value in (node.inputs[0], node.outputs[0]))
    if node.op == "sum":
        return size * before / after
    order = node.args[1] if len(node.args) > 1 else 2
    if not isinstance(order, (int, float)) or not order:
        return math.nan
    return size * (before / after) ** (1 / order)


def _reduced_from(flow: Flow, statistic: int, x: int) -> int | None:
    """What a statistic was reduced from, without a weight: x, or what x was centred or scaled from."""
    shape, small = flow.graph.shapes[x], flow.graph.shapes[_before_expansion(flow, statistic)]
    pairs = list(zip(shape, small, strict=False))
    if len(shape) != len(small) or not any(many > 1 == one for many, one in pairs):
        return None
    for source in _sources(flow, x):
        path = flow.between(source, statistic)
        if path and not flow.weights_between(source, statistic):
            makers = [flow.maker(value) for value in bits(path & ~(1 << source))]
            if any(maker is not None and maker.op in REDUCTIONS for maker in makers):
                return source
    return None


def _before_expansion(flow: Flow, value: int) -> int:
    node = flow.maker(value)
    return flow.signals(node)[0] if node is not None and node.op == "expand" else value


def _sources(flow: Flow, x: int) -> list[int]:
    """x, and what it was before it was centred and before gains were applied to it."""
    found = [flow.back(x)]
    while (node := flow.maker(found[-1])) is not None and flow.signals(node):
        gains = [use for use in flow.uses.at(node.index) if use.kind == "gain"]
        if node.op != "sub" and not (node.op == "mul" and gains):
            break
        found.append(flow.back(flow.signals(node)[0]))
    return found


def follows_normalisation(flow: Flow, use: Use) -> bool:
    """Is this gain a norm's: fused with it, applied to what it made, or applied on the way into it?"""
    node = flow.graph.nodes[use.node]
    if node.op in NORMS:
        return True
    operands = flow.signals(node)
    if node.op != "mul" or len(operands) != 1:
        return False
    maker = flow.maker(flow.back(operands[0]))
    if maker is not None and is_normalisation(flow, maker):
        return not any(other.kind == "gain" for other in flow.uses.at(maker.index))  # it may have its own
    readers = flow.readers(node.outputs[0])
    return len(readers) == 1 and readers[0].op in ("mul", "div") and is_normalisation(flow, readers[0])
