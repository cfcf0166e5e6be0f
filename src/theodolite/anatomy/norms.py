"""Normalisations, and who reads their gains.

A gain that only linear maps read could be folded into them (Input-Norm); one that reaches the residual
stream, a softmax or another nonlinearity could not (Output-Norm).
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.labels import follow, labels_along, varies
from theodolite.anatomy.operations import CONVOLUTIONS, NORMS, POOLS, REDUCTIONS, VIEWS
from theodolite.anatomy.part import Norm
from theodolite.anatomy.trace import Node, Ref
from theodolite.anatomy.uses import Use, factors

POWERS = {"square": 2.0, "var": 2.0, "var_mean": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
"""Operations that raise their argument to a power; of several results, the first."""


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


def is_scale_free(flow: Flow, use: Use) -> bool:
    """Does the use read parameters divided by a norm of themselves, so that scaling them changes nothing?

    `g·v/‖v‖` is not of this kind, as it grows with g.
    """
    for value in flow.graph.nodes[use.node].inputs:
        if value not in flow.uses.signal:
            nodes, names = _expression(flow, value)
            if use.name in names:
                return _degrees(flow, nodes).get(value) == 0
    return False


def _expression(flow: Flow, value: int) -> tuple[list[Node], set[str]]:
    """The nodes that made a value and the parameters it is made of."""
    nodes, names = set(), set()
    waiting, seen = [value], {value}
    while waiting:
        value = waiting.pop()
        if value in flow.graph.parameters:
            names.add(flow.graph.parameters[value])
        elif (node := flow.maker(value)) is not None:
            nodes.add(node.index)
            waiting += [source for source in node.inputs if source not in seen]
            seen.update(node.inputs)
    return [flow.graph.nodes[index] for index in sorted(nodes)], names


def _degrees(flow: Flow, nodes: list[Node]) -> dict[int, float]:
    """By value: the power of s it goes with when all parameters are scaled by s; nan if that is not known."""
    found = dict.fromkeys(flow.graph.parameters, 1.0)
    for node in nodes:
        held = [found[value] for value in node.inputs if value in found]
        if not held:
            continue  # a constant
        same = held[0] if len(set(held)) == 1 else math.nan
        degree = math.nan
        if node.op in ("mul", "dot", "vdot", "mm", "mv", "bmm"):
            degree = sum(held)
        elif node.op == "div":
            degree = found.get(node.inputs[0], 0.0) - sum(found.get(value, 0.0) for value in node.inputs[1:])
        elif node.op == "_weight_norm_interface":  # g·v/‖v‖ of v and g
            degree = found.get(node.inputs[1], 0.0)
        elif node.op == "pow" and isinstance(node.args[1], (int, float)):
            degree = same * node.args[1]
        elif node.op in POWERS:
            degree = same * POWERS[node.op]
        elif node.op in VIEWS | REDUCTIONS | {"add", "sub", "clamp", "clamp_min", "maximum", "neg", "abs"}:
            degree = same
        found.update(dict.fromkeys(node.outputs, degree))
    return found


def norm_role(flow: Flow, uses: list[Use]) -> Norm:
    """`input` if only linear maps with weights of their own sum over the gain's channels, else `output`."""
    tables = {other.name for other in flow.uses.all if other.kind == "table"}
    carried = {_finished(flow, use): _channels(flow, use) for use in uses}
    waiting = sorted({node.index for start in carried for node in flow.readers(start)})
    read = False
    while waiting:  # in the order of execution: when a node is reached, all it reads has been
        index = heapq.heappop(waiting)
        node = flow.graph.nodes[index]
        if not any(flow.live >> output & 1 for output in node.outputs):
            continue
        value = next(value for value in node.inputs if value in carried)
        weights = [other for other in flow.uses.at(index) if other.kind == "weight"]
        if weights and _sums_channels(node, value, carried[value]):
            read = True
            if any(weight.name in tables for weight in weights):  # a tied head: its weight is not its own
                return "output"
            continue
        made = _carry(flow, node, value, carried)
        if made is None:
            return "output"
        for output, labels in zip(node.outputs, made, strict=False):
            carried[output] = labels
            for reader in flow.readers(output):
                if reader.index not in waiting:
                    heapq.heappush(waiting, reader.index)
    return "input" if read and not flow.graph.outputs & carried.keys() else "output"


def _finished(flow: Flow, use: Use) -> int:
    """Where both the gain and the normalisation are done, whichever comes first."""
    made = flow.graph.nodes[use.node].outputs[0]
    readers = flow.readers(made)
    if len(readers) == 1 and len(flow.signals(readers[0])) == 2 and is_normalisation(flow, readers[0]):
        return readers[0].outputs[0]
    return made


def _channels(flow: Flow, use: Use) -> Tensor:
    """Labels that say which entry of the gain an element of its result was multiplied by."""
    node = flow.graph.nodes[use.node]
    shape = flow.graph.shapes[node.outputs[0]]
    if node.op in NORMS:
        return labels_along(
            shape, -1 if node.op in ("native_layer_norm", "_fused_rms_norm", "rms_norm") else 1
        )
    gain = next(flow.graph.shapes[value] for value in node.inputs if value not in flow.uses.signal)
    count = torch.Size(gain).numel()
    return torch.arange(count).view(gain).expand(shape)


def _summed_dims(node: Node, value: int, rank: int) -> list[int]:
    """The dimensions of a value that a matrix product or a convolution sums over."""
    if node.op in CONVOLUTIONS:
        return list(range(1, rank))
    pair = factors(node)
    return [rank - 1] if pair is None or pair[0] == value or rank == 1 else [rank - 2]


def _sums_channels(node: Node, value: int, labels: Tensor) -> bool:
    """Does a weight sum over all that the gain tells apart?"""
    summed = _summed_dims(node, value, labels.dim())
    return not any(varies(labels, dim) for dim in range(labels.dim()) if dim not in summed)


def _carry(flow: Flow, node: Node, value: int, carried: dict[int, Tensor]) -> list[Tensor] | None:
    """The labels after a node that leaves channels apart; None if it mixes or bends them."""
    labels = carried[value]
    shape = flow.graph.shapes[node.outputs[0]]
    if factors(node) is not None:
        # A map over tokens, or attention averaging values: what is summed must not be the channels.
        (summed,) = _summed_dims(node, value, labels.dim())
        if varies(labels, summed) or flow.signals(node).count(value) > 1 or not shape:
            return None
        return [labels.narrow(summed, 0, 1).expand(shape)]
    if node.op == "cat":
        return [_beside(flow, node, value, labels)]
    if node.op == "mul" and sum(signal in carried for signal in flow.signals(node)) == 1:
        return [labels.expand(shape)]  # by a constant, or by a gate that the gain is not in
    if len(flow.signals(node)) > 1:
        both = [carried.get(signal) for signal in flow.signals(node)]
        mixed = node.op in ("add", "sub") and all(
            other is not None and other.shape == labels.shape and bool((other == labels).all())
            for other in both
        )
        return [labels] if mixed else None  # a token mixed with another one, channel by channel
    if node.op in ("mean", "sum"):
        named = len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) and len(node.args[1]) > 0
        dims = [dim % labels.dim() for dim in (node.args[1] if named else range(labels.dim()))]
        if any(varies(labels, dim) for dim in dims):
            return None
        return [labels.amax(dims, keepdim=len(shape) == labels.dim())]
    if node.op in POOLS:
        spatial = [dim for dim, size in enumerate(shape) if size != labels.shape[dim]]
        if any(varies(labels, dim) for dim in spatial):
            return None
        return [labels.amax(spatial, keepdim=True).expand(shape) if spatial else labels]
    if isinstance(node.args[0], Ref) and (moved := follow(flow.graph, node, labels)) is not None:
        return moved
    return [labels.expand(shape)] if node.op in ("add", "sub") or flow.factor(node) is not None else None


def _beside(flow: Flow, node: Node, value: int, labels: Tensor) -> Tensor:
    """Labels of a concatenation; what else stands there has none of its own."""
    dim = node.args[1] if len(node.args) > 1 else 0
    if not varies(labels, dim):
        return labels.narrow(dim, 0, 1).expand(flow.graph.shapes[node.outputs[0]])
    shapes = flow.graph.shapes
    pieces = [
        labels if ref.value == value else labels.new_full(shapes[ref.value], -1) for ref in node.args[0]
    ]
    return torch.cat(pieces, dim)
