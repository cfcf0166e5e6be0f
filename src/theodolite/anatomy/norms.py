"""Normalisations: where one is finished, and which gains are theirs."""

from __future__ import annotations

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.operations import NORMS, REDUCTIONS
from theodolite.anatomy.trace import Node
from theodolite.anatomy.uses import Use


def is_normalisation(flow: Flow, node: Node) -> bool:
    """Does the node finish a normalisation: a fused one, or x divided by a statistic of x?"""
    if node.op in NORMS:
        return True
    operands = flow.signals(node)
    if node.op not in ("mul", "div") or len(operands) != 2:
        return False
    return any(_is_statistic(flow, statistic, x) for x, statistic in (operands, operands[::-1]))


def _is_statistic(flow: Flow, statistic: int, x: int) -> bool:
    """Was it reduced, without a weight, from x or from what x was centred or scaled from?"""
    shape, small = flow.graph.shapes[x], flow.graph.shapes[_before_expansion(flow, statistic)]
    pairs = list(zip(shape, small, strict=False))
    if len(shape) != len(small) or not any(many > 1 == one for many, one in pairs):
        return False
    for source in _sources(flow, x):
        path = flow.between(source, statistic)
        if path and not flow.weights_between(source, statistic):
            makers = [flow.maker(value) for value in bits(path & ~(1 << source))]
            if any(maker is not None and maker.op in REDUCTIONS for maker in makers):
                return True
    return False


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
