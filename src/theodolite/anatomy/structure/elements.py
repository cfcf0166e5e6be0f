"""Labels carried through views: where do the elements of a tensor go, and which row blocks does one have?

A tensor of labels takes the place of a value, and every view that follows is applied to it with the view's
own code, so that interleaved layouts (heads × (q, k, v)) come out as they are. Labels repeat along all other
dimensions; as those have stride zero, they cost no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from theodolite.anatomy.names import runs
from theodolite.anatomy.recording.operations import CONVOLUTIONS, COPIES, REPLAYED, RESHAPES, VIEWS
from theodolite.anatomy.recording.trace import Graph, Node, Ref
from theodolite.anatomy.structure.flow import Flow, mask_of, walk
from theodolite.anatomy.structure.uses import Use, product_operands


def labels_along(shape: tuple[int, ...], dim: int) -> Tensor:
    """Labels 0, 1, 2, … along one dimension of a shape.

    >>> labels_along((2, 3), -1)
    tensor([[0, 1, 2],
            [0, 1, 2]])
    """
    dim %= len(shape)
    ones = [size if axis == dim else 1 for axis, size in enumerate(shape)]
    return torch.arange(shape[dim]).view(ones).expand(shape)


def varies(labels: Tensor, dim: int) -> bool:
    """Do the labels differ along a dimension?

    >>> varies(labels_along((2, 3), -1), 0), varies(labels_along((2, 3), -1), 1)
    (False, True)
    """
    if labels.shape[dim] < 2 or labels.stride(dim) == 0:
        return False
    if labels.numel() == 0:  # of no token: the stride says it
        return True
    return bool((labels != labels.narrow(dim, 0, 1)).any())


def follow(graph: Graph, node: Node, labels: Tensor) -> list[Tensor] | None:
    """The labels after a view, one for each output; None if the node is no view that can be followed."""
    if node.op in COPIES:
        return [labels]
    if node.op in RESHAPES:
        return [labels.reshape(node.args[1])]
    if node.op in REPLAYED:
        made = getattr(torch.ops.aten, node.op)(labels, *node.args[1:], **node.kwargs)
        return list(made) if isinstance(made, (tuple, list)) else [made]
    shape = graph.shapes[node.outputs[0]]
    if node.op == "index" and (picked := _picked(graph, node, labels)) is not None:
        return [picked]
    if node.op == "as_strided":  # pooling restores a memory format with it
        return [labels] if shape == tuple(labels.shape) else None
    if node.op == "constant_pad_nd" or node.op.startswith(("reflection_pad", "replication_pad")):
        return resized(labels, shape)
    if node.op not in VIEWS or not shape or labels.dim() == 0 or shape[-1] != labels.shape[-1]:
        return None
    # Tokens picked, padded or gathered by indices the trace does not show.
    by_token = any(varies(labels, dim) for dim in range(labels.dim() - 1))
    return None if by_token else [labels[(0,) * (labels.dim() - 1)].expand(shape)]


def _picked(graph: Graph, node: Node, labels: Tensor) -> Tensor | None:
    """The labels at one index that the trace knows, as in `x[:, :, [-1]]`; None if it does not."""
    indices = [(dim, index.value) for dim, index in enumerate(node.args[1]) if index is not None]
    if len(indices) != 1:
        return None
    ((dim, value),) = indices
    size = labels.shape[dim]
    if graph.shapes[value] != (1,) or value not in graph.numbers or size == 1:  # perhaps a mask
        return None
    return labels.narrow(dim, int(graph.numbers[value]) % size, 1)


def resized(labels: Tensor, shape: tuple[int, ...]) -> list[Tensor] | None:
    """The labels after padding or pooling; None if they differ along a dimension whose size changed."""
    changed = [dim for dim, size in enumerate(shape) if size != labels.shape[dim]]
    if any(varies(labels, dim) for dim in changed):
        return None
    return [(labels.amax(changed, keepdim=True) if changed else labels).expand(shape)]


Ranges = tuple[tuple[int, int], ...]

_JOINS = frozenset(["add", "sub", "cat", "stack"])
_CUTS = frozenset(
    ["split", "split_with_sizes", "unsafe_split", "chunk", "slice", "narrow", "select", "unbind"]
)


def row_blocks(flow: Flow, uses: Sequence[Use]) -> tuple[Ranges, ...]:
    """The row blocks of a weight, or of its bias: rows whose outputs are read by different operations.

    So are the groups of a convolution, and slices of a weight that are used apart. Empty if all outputs are
    read together.
    """
    found: list[set[int]] = []
    count = 0
    for use in {use.node: use for use in uses}.values():
        if len(use.out_axes) != 1 or not (use.op in ("linear", "conv") or use.kind == "bias"):
            return ()
        rows = _rows_read(flow, use)
        blocks = _blocks(flow, use)
        if not blocks or rows == []:
            return ()
        for block in blocks:
            group = block if rows is None else {rows[index] for index in block}
            for other in [one for one in found if one & group]:
                found.remove(other)
                group |= other
            found.append(group)
        count = flow.uses.shapes[use.name][use.out_axes[0]]
        if rows is None:
            break  # it reads all of them, as other uses do
    if len(found) < 2 or sorted(index for group in found for index in group) != list(range(count)):
        return ()
    return tuple(sorted(tuple((run.start, run.stop) for run in runs(group)) for group in found))


def _blocks(flow: Flow, use: Use) -> list[set[int]]:
    """The outputs of a weight at one node, by what reads them; empty if that is unknown."""
    node = flow.graph.nodes[use.node]
    output = node.outputs[0]
    shape = flow.graph.shapes[output]
    pair = product_operands(node)
    dim = 1 if node.op in CONVOLUTIONS else -2 if pair and use.name in flow.uses.axes.get(pair[0], ()) else -1
    if len(shape) < abs(dim):
        return []
    if node.op in CONVOLUTIONS and use.kind == "weight" and (groups := node.args[8]) > 1:
        size = shape[1] // groups
        is_depthwise, is_transposed = flow.graph.shapes[node.read(1)][1] == 1, node.args[6]
        outputs = range(shape[1])
        split = [set(outputs[start : start + size]) for start in range(0, shape[1], size)]
        return [] if is_depthwise or is_transposed else split
    read = _readers(flow, output, labels_along(shape, dim))
    if not read or any(labels.numel() == shape[dim] for labels in read.values()):  # something reads all of it
        return [set(range(shape[dim]))]
    return _merge(flow, {value: set(labels.unique().tolist()) for value, labels in read.items()})


def _rows_read(flow: Flow, use: Use) -> list[int] | None:
    """Which rows of the parameter a use reads; None for all of them, empty if that is unknown."""
    graph = flow.graph
    value = next(
        (one for one in graph.nodes[use.node].inputs if use.name in flow.uses.axes.get(one, ())), None
    )
    path: list[tuple[Node, int]] = []
    while value is not None and value not in graph.parameters:
        maker = flow.maker(value)
        if maker is None or len(maker.inputs) != 1 or maker.op not in VIEWS:
            return None  # computed from several
        path.append((maker, value))
        value = maker.inputs[0]
    if value is None or _CUTS.isdisjoint(maker.op for maker, _ in path):
        return None
    labels = labels_along(graph.shapes[value], use.out_axes[0])
    for maker, made in reversed(path):
        pieces = follow(graph, maker, labels)
        if pieces is None:
            return []
        labels = pieces[maker.outputs.index(made)]
    return sorted(set(labels.unique().tolist())) if _in_order(labels) else []


def _in_order(labels: Tensor) -> bool:
    """Do the labels rise along one dimension and stay along the others?"""
    dims = [dim for dim in range(labels.dim()) if varies(labels, dim)]
    if len(dims) != 1:
        return False
    line = labels[tuple(slice(None) if dim == dims[0] else 0 for dim in range(labels.dim()))]
    return bool((line.diff() > 0).all())


def _readers(flow: Flow, output: int, labels: Tensor) -> dict[int, Tensor]:
    """By value that something other than a view reads: the rows whose outputs are in it."""
    carried = {output: labels}
    read: dict[int, Tensor] = {}

    def onward(value: int) -> Iterator[int]:
        for node in flow.readers(value):
            if not any(flow.live >> made & 1 for made in node.outputs):
                continue  # a write into a view that nothing reads any more
            pieces = _carry(flow, node, carried[value])
            if pieces is None:
                read[value] = _without_repeats(carried[value])
            else:
                carried.update(made := dict(zip(node.outputs, pieces, strict=False)))
                yield from made

    list(walk([output], onward))
    return read


def _without_repeats(labels: Tensor) -> Tensor:
    """The labels without the dimensions along which they only repeat, be it not even once."""
    kept = [axis for axis, stride in enumerate(labels.stride()) if stride]
    return labels.as_strided([labels.shape[axis] for axis in kept], [labels.stride(axis) for axis in kept])


def _carry(flow: Flow, node: Node, labels: Tensor) -> list[Tensor] | None:
    """The labels after a view or an added bias; None if the node is something else."""
    if not isinstance(node.args[0], Ref):
        return None
    same = node.op == "add" and flow.graph.shapes[node.outputs[0]] == tuple(labels.shape)
    if len(flow.signals(node)) - _looked_up(flow, node) != 1:
        return [labels] if same and _are_of_weights(flow, node) else None
    return [labels] if same else follow(flow.graph, node, labels)


def _are_of_weights(flow: Flow, node: Node) -> bool:
    """Are all signals results of weights, as in the gates of an LSTM, or of one with another of low rank?"""
    makers = [_before_bias(flow, value) for value in flow.signals(node)]
    return all(maker is not None and "weight" in flow.kinds(maker) for maker in makers)


def _before_bias(flow: Flow, value: int) -> Node | None:
    """What made a value, before a bias was added."""
    maker = flow.maker(flow.back(value))
    while maker is not None and flow.kinds(maker) == {"bias"} and len(flow.signals(maker)) == 1:
        maker = flow.maker(flow.back(flow.signals(maker)[0]))
    return maker


def _looked_up(flow: Flow, node: Node) -> int:
    """How many of a node's signals are rows of a table: the biases of the experts a token was sent to."""
    makers = [flow.maker(flow.back(value)) for value in flow.signals(node)]
    return sum(maker is not None and "table" in flow.kinds(maker) for maker in makers)


def _merge(flow: Flow, read: dict[int, set[int]]) -> list[set[int]]:
    """Merge pieces that overlap, and those that are joined again by linear operations (rotary halves)."""
    blocks: list[tuple[set[int], set[int]]] = []
    for value, rows in read.items():
        pieces = {value}
        while joined := [one for one in blocks if one[1] & rows or _rejoined(flow, one[0], pieces)]:
            blocks.remove(joined[0])
            pieces, rows = pieces | joined[0][0], rows | joined[0][1]
        blocks.append((pieces, rows))
    return [rows for _, rows in blocks]


def _rejoined(flow: Flow, first: set[int], second: set[int]) -> bool:
    """Do two pieces meet again in a sum or a concatenation, only moved and multiplied by constants?"""
    below = [flow.below(piece) for piece in (first, second)]
    common = below[0] & below[1]
    if not common:
        return False
    meeting = (common & -common).bit_length() - 1
    joint = flow.maker(meeting)
    if joint is None or joint.op not in _JOINS:
        return False
    for piece, mask in zip((first, second), below, strict=True):
        between = mask & flow.ancestors[meeting] & ~(1 << meeting) & ~mask_of(piece)
        for node in flow.makers(between):
            if flow.uses.at(node.index) or not _is_straight(flow, node, mask):
                return False
    return True


def _is_straight(flow: Flow, node: Node, below: int) -> bool:
    """Does the node move the piece, multiply it by a constant, or put parts of it together?"""
    signals = flow.signals(node)
    if node.op in _JOINS:
        return all(below >> signal & 1 for signal in signals)
    return len(signals) == 1 and (flow.is_handed_on(node) or node.op in ("mul", "neg"))
