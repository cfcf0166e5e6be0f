"""Normalisations, and who reads their gains.

A gain that only linear maps read could be folded into them (Input-Norm); one that reaches the residual
stream, a softmax or another nonlinearity could not (Output-Norm).
"""

from __future__ import annotations

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.operations import NORMS, POOLS, REDUCTIONS
from theodolite.anatomy.part import Norm
from theodolite.anatomy.trace import Node
from theodolite.anatomy.uses import Use, factors


def is_normalisation(flow: Flow, node: Node) -> bool:
    """Does the node finish a normalisation: a fused one, or x divided by a statistic of x?"""
    if node.op in NORMS:
        return True
    operands = flow.signals(node)
    if node.op not in ("mul", "div") or len(operands) != 2:
        return False
    shapes = [flow.graph.shapes[value] for value in operands]
    for (x, shape), (statistic, small) in (
        zip(operands, shapes, strict=True),
        zip(operands[::-1], shapes[::-1], strict=True),
    ):
        reduced = len(shape) == len(small) and any(
            many > 1 and one == 1 for many, one in zip(shape, small, strict=True)
        )
        if reduced and _is_statistic(flow, statistic, x):
            return True
    return False


def _is_statistic(flow: Flow, statistic: int, x: int) -> bool:
    """Was it computed from x, or from what x was centred from, by a reduction and no weight?"""
    source = flow.back(x)
    node = flow.maker(source)
    if node is not None and node.op == "sub" and flow.signals(node):
        source = flow.back(flow.signals(node)[0])
    path = flow.between(source, statistic)
    if not path or flow.weights_between(source, statistic):
        return False
    makers = [flow.maker(value) for value in bits(path) if value != source]
    return any(maker is not None and maker.op in REDUCTIONS for maker in makers)


def follows_normalisation(flow: Flow, use: Use) -> bool:
    """Is this gain a norm's: fused with it, or applied to what it made?"""
    node = flow.graph.nodes[use.node]
    if node.op in NORMS:
        return True
    operands = flow.signals(node)
    if node.op != "mul" or len(operands) != 1:
        return False
    maker = flow.maker(flow.back(operands[0]))
    return maker is not None and is_normalisation(flow, maker)


def norm_role(flow: Flow, use: Use) -> Norm:
    """`input` if only linear maps with weights of their own read the gain, else `output`."""
    tables = {other.name for other in flow.uses.all if other.kind == "table"}
    waiting = [flow.graph.nodes[use.node].outputs[0]]
    seen: set[int] = set()
    read = False
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in flow.graph.outputs:
            return "output"
        for node in flow.readers(value):
            if not any(flow.live >> output & 1 for output in node.outputs):
                continue
            weights = [other for other in flow.uses.at(node.index) if other.kind == "weight"]
            if weights:
                read = True
                if any(weight.name in tables for weight in weights):  # a tied head: its weight is not its own
                    return "output"
            elif _is_linear_in(flow, node, value):
                waiting += node.outputs
            else:
                return "output"
    return "input" if read else "output"


def _is_linear_in(flow: Flow, node: Node, value: int) -> bool:
    """Does the node hand on each channel by itself: moved, averaged over tokens, shifted, scaled?"""
    signals = flow.signals(node)
    if flow.is_product_of_signals(node):
        pair = factors(node)
        # Attention averages its right factor, the values, channel by channel; the left one's it sums.
        return pair is not None and pair[1] == value and pair[0] != value
    if len(signals) != 1:
        return node.op in ("cat", "stack")
    if node.op in POOLS:
        return True
    if node.op in ("mean", "sum"):
        rank = len(flow.graph.shapes[value])
        dims = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else range(rank)
        channel = 1 if rank == 4 else rank - 1
        return channel not in {dim % rank for dim in dims}
    return flow.is_handed_on(node) or node.op in ("add", "sub", "mul")
