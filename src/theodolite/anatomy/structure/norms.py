"""Normalisations: where one is finished, how large its output is, which gains belong to it, who reads them.

A gain that only linear maps read can be folded into them (Input-Norm); one that reaches the residual
stream, a softmax or another nonlinearity cannot (Output-Norm).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.anatomy.recording import operations as ops
from theodolite.anatomy.recording.trace import Graph, Node, Ref
from theodolite.anatomy.structure.elements import follow, labels_along, resized, varies
from theodolite.anatomy.structure.flow import Flow
from theodolite.anatomy.structure.uses import Use, product_operands


def is_normalisation(flow: Flow, node: Node) -> bool:
    """Does the node finish a normalisation: a fused one, or x divided by a statistic of x?"""
    if node.op in ops.NORMS:
        return True
    operands = flow.signals(node)
    if node.op not in ("mul", "div") or len(operands) != 2:
        return False
    return any(_reduced_from(flow, statistic, x) is not None for x, statistic in (operands, operands[::-1]))


def norm_size(flow: Flow, node: Node) -> float:
    """The root mean square after a normalisation: 1/√n if it divides by the length of n entries, else 1."""
    operands = flow.signals(node)
    if node.op in ops.NORMS or len(operands) != 2:
        return 1.0
    for x, statistic in (operands, operands[::-1]):
        source = _reduced_from(flow, statistic, x)
        if source is None:
            continue
        size, divisor = (
            size_through(flow.graph, flow.makers(flow.after(source, end)), [source])[end]
            for end in (x, statistic)
        )
        size = size / divisor if node.op == "div" and divisor else size * divisor
        return size if math.isfinite(size) and size > 0 else 1.0
    return 1.0


def size_through(graph: Graph, nodes: Iterable[Node], sources: Iterable[int]) -> dict[int, float]:
    """The sizes of what nodes make if those of the sources are 1, without eps; nan where unknown."""
    sizes = dict.fromkeys(sources, 1.0)
    for node in nodes:
        sizes.update(dict.fromkeys(node.outputs, _size_after(graph, node, sizes)))
    return sizes


def _size_after(graph: Graph, node: Node, sizes: Mapping[int, float]) -> float:
    """The size of a node's output from the sizes of its inputs; an unknown one counts as 1."""
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
    if node.op in ops.NORMS:
        gain = node.args[ops.NORMS[node.op][1]]
        return sizes.get(gain.value, 1.0) if isinstance(gain, Ref) else 1.0
    if node.op == "_weight_norm_interface":  # g·v/‖v‖ of v and g
        counts = [math.prod(graph.shapes[value]) for value in node.inputs]
        return held[1] / math.sqrt(counts[0] / counts[1])
    return held[0] if node.op in ops.VIEWS | ops.REDUCTIONS | _SIZE_KEPT else math.nan


POWERS = {"square": 2.0, "var": 2.0, "var_mean": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
"""Operations that raise their argument to a power; of several results, the first."""

_SIZE_KEPT = frozenset({"abs", "neg", "add", "sub", "clamp", "clamp_min", "maximum"})
"""With what is small, or of the same size."""


def _reduced_size(graph: Graph, node: Node, size: float) -> float:
    """The size of a sum or a vector norm of entries of one size."""
    before, after = (math.prod(graph.shapes[value]) for value in (node.inputs[0], node.outputs[0]))
    if node.op == "sum":
        return size * before / after
    order = node.args[1] if len(node.args) > 1 else 2
    if not isinstance(order, (int, float)) or not order:
        return math.nan
    return size * (before / after) ** (1 / order)


def _reduced_from(flow: Flow, statistic: int, x: int) -> int | None:
    """What a statistic was reduced from without a weight: x, or x before centring or scaling."""
    shape, small = flow.graph.shapes[x], flow.graph.shapes[_before_expansion(flow, statistic)]
    pairs = list(zip(shape, small, strict=False))
    if len(shape) != len(small) or not any(many > 1 == one for many, one in pairs):
        return None
    for source in _sources(flow, x):
        reduces = any(node.op in ops.REDUCTIONS for node in flow.makers(flow.after(source, statistic)))
        if reduces and not flow.weights_between(source, statistic):
            return source
    return None


def _before_expansion(flow: Flow, value: int) -> int:
    node = flow.maker(value)
    return flow.signals(node)[0] if node is not None and node.op == "expand" else value


def _sources(flow: Flow, x: int) -> list[int]:
    """x, and the values it was before centring and before gains."""
    found = [flow.back(x)]
    while (node := flow.maker(found[-1])) is not None and flow.signals(node):
        if node.op != "sub" and not (node.op == "mul" and "gain" in flow.kinds(node)):
            break
        found.append(flow.back(flow.signals(node)[0]))
    return found


def follows_normalisation(flow: Flow, use: Use) -> bool:
    """Does this gain belong to a norm: fused with it, applied to its result, or applied to its input?"""
    node = flow.graph.nodes[use.node]
    if node.op in ops.NORMS:
        return True
    operands = flow.signals(node)
    if node.op != "mul" or len(operands) != 1:
        return False
    maker = flow.maker(flow.back(operands[0]))
    if maker is not None and is_normalisation(flow, maker):
        return "gain" not in flow.kinds(maker)  # it may have its own
    readers = flow.readers(node.outputs[0])
    return len(readers) == 1 and readers[0].op in ("mul", "div") and is_normalisation(flow, readers[0])


@dataclass(frozen=True)
class Read:
    """One matrix product or convolution that sums over a gain's channels."""

    node: int
    weights: tuple[str, ...]
    channels: tuple[int, ...]
    """By input of the weight: the entry of the gain that multiplies it; -1 for what is concatenated to it."""


@dataclass(frozen=True)
class Readings:
    """Everything that reads a gain."""

    reads: tuple[Read, ...]
    obstacle: str
    """Why it is not read only by linear maps with weights of their own; empty if it is."""
    shifts: tuple[str, ...] = ()
    """What is added to it before it is read: names of parameters, `a constant` for anything else."""
    straight: bool = True
    """Is it only moved and copied on the way, not multiplied by a gate or averaged over tokens?"""


def read_by(flow: Flow, uses: list[Use], *, returned: bool = False, tied: bool = False) -> Readings:
    """Follow a gain from the norms that use it to the linear maps that read it, or to an obstacle.

    Values that are returned beside the logits, such as hidden states, are obstacles if `returned`. A weight
    that is an embedding too, as a tied readout, is an obstacle unless `tied`.
    """
    tables = flow.tables
    carried = {_finished(flow, use): _channels(flow, use) for use in uses}
    shifts = [shift for use in uses for shift in _shifts(flow, flow.graph.nodes[use.node])]
    reads: list[Read] = []
    straight, obstacle = True, ""
    waiting = sorted({node.index for start in carried for node in flow.readers(start)})
    while waiting and not obstacle:  # in the order of execution: all that a node reads was reached before it
        node = flow.graph.nodes[waiting.pop(0)]
        if not any(flow.live >> output & 1 for output in node.outputs):
            continue
        value = next(value for value in node.inputs if value in carried)
        weights = tuple(other.name for other in flow.uses.at(node.index) if other.kind == "weight")
        if weights and _sums_channels(node, value, carried[value]):
            shared = [name for name in weights if name in tables]
            if shared and not tied:  # a tied head: its weight is not its own
                obstacle = f"{shared[0]}, which reads it, is an embedding too"
            else:
                reads.append(Read(node.index, weights, _along(node, value, carried[value])))
        elif (made := _carry(flow, node, value, carried)) is None:
            obstacle = f"it reaches {_said(flow, node)}"
        else:
            shifts += _shifts(flow, node)
            straight &= node.op in ops.VIEWS | {"add"} and node.op not in _MASKS
            carried |= (labelled := dict(zip(node.outputs, made, strict=False)))
            waiting = sorted({*waiting, *(index for one in labelled for index in flow.graph.readers[one])})
    ends = flow.graph.outputs | (flow.graph.returned if returned else set())
    if not obstacle and ends & carried.keys():
        obstacle = "it reaches the network's output"
    elif not obstacle and not reads:
        obstacle = "no linear map reads it"
    return Readings(tuple(reads), obstacle, tuple(dict.fromkeys(shifts)), straight)


def _shifts(flow: Flow, node: Node) -> list[str]:
    """What a node adds to its signal: names of parameters, `a constant` for anything else."""
    added = [use.name for use in flow.uses.at(node.index) if use.kind == "bias"]
    constant = node.op in ("add", "sub") and not added and len(flow.signals(node)) == 1
    return ["a constant"] if constant else added


_MASKS = frozenset({"constant_pad_nd", "masked_fill", "where"})
"""Views that replace some values by a constant."""


def _said(flow: Flow, node: Node) -> str:
    """A node that a gain cannot pass, in words."""
    if node.op in ops.BENDING:
        return f"a nonlinearity, {node.op}"
    if _before_softmax(flow, node):
        return "a softmax"
    return "the residual stream or another sum" if node.op in ("add", "sub") else f"the operation {node.op}"


def _before_softmax(flow: Flow, node: Node) -> bool:
    """Does a softmax read the node's result, with no weight between?"""
    readers = flow.reading(node.outputs, lambda reader: "weight" not in flow.kinds(reader))
    return any(reader.op in ops.SOFTMAXES for reader in readers)


def _along(node: Node, value: int, labels: Tensor) -> tuple[int, ...]:
    """The labels by input of the weight; none if they differ along more than one of its dimensions."""
    summed = _summed_dims(node, value, labels.dim())
    varying = [dim for dim in summed if varies(labels, dim)]
    if len(varying) > 1:
        return ()
    dim = varying[0] if varying else summed[0]
    index = tuple(slice(None) if one == dim else 0 for one in range(labels.dim()))
    return tuple(labels[index].tolist())


def _finished(flow: Flow, use: Use) -> int:
    """The value at which both the gain and the normalisation are done."""
    made = flow.graph.nodes[use.node].outputs[0]
    readers = flow.readers(made)
    if len(readers) == 1 and len(flow.signals(readers[0])) == 2 and is_normalisation(flow, readers[0]):
        return readers[0].outputs[0]
    return made


def _channels(flow: Flow, use: Use) -> Tensor:
    """Labels of the result's elements: the entry of the gain that multiplied them."""
    node = flow.graph.nodes[use.node]
    shape = flow.graph.shapes[node.outputs[0]]
    if node.op in ops.NORMS:
        return labels_along(
            shape, -1 if node.op in ("native_layer_norm", "_fused_rms_norm", "rms_norm") else 1
        )
    gain = next(flow.graph.shapes[value] for value in node.inputs if value not in flow.uses.signal)
    return torch.arange(math.prod(gain)).view(gain).expand(shape)


def _summed_dims(node: Node, value: int, rank: int) -> list[int]:
    """The dimensions of a value that a matrix product or a convolution sums over."""
    if node.op in ops.CONVOLUTIONS:
        return list(range(1, rank))
    pair = product_operands(node)
    return [rank - 1] if pair is None or pair[0] == value or rank == 1 else [rank - 2]


def _sums_channels(node: Node, value: int, labels: Tensor) -> bool:
    """Does a weight sum over all dimensions along which the labels differ?"""
    summed = _summed_dims(node, value, labels.dim())
    return not any(varies(labels, dim) for dim in range(labels.dim()) if dim not in summed)


def _carry(flow: Flow, node: Node, value: int, carried: dict[int, Tensor]) -> list[Tensor] | None:
    """The labels after a node that keeps channels separate; None if it mixes them or is nonlinear."""
    labels = carried[value]
    shape = flow.graph.shapes[node.outputs[0]]
    if product_operands(node) is not None:
        # A map over tokens, or attention averaging values: the sum must not run over the channels.
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
    if node.op in ops.POOLS:
        return resized(labels, shape)
    if isinstance(node.args[0], Ref) and (moved := follow(flow.graph, node, labels)) is not None:
        return moved
    return [labels.expand(shape)] if node.op in ("add", "sub") or flow.factor(node) is not None else None


def _beside(flow: Flow, node: Node, value: int, labels: Tensor) -> Tensor:
    """The labels of a concatenation; -1 for the other tensors in it."""
    dim = node.args[1] if len(node.args) > 1 else 0
    if not varies(labels, dim):
        return labels.narrow(dim, 0, 1).expand(flow.graph.shapes[node.outputs[0]])
    shapes = flow.graph.shapes
    pieces = [
        labels if ref.value == value else labels.new_full(shapes[ref.value], -1) for ref in node.args[0]
    ]
    return torch.cat(pieces, dim)
