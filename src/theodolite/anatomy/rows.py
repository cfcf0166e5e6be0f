"""The row blocks of a fused tensor: which of its outputs go which way.

Each output carries its number through the views that follow, so that interleaved layouts (heads × (q, k, v))
come out as they are.
"""

from __future__ import annotations

import itertools

from torch import Tensor

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.labels import follow, labels_along
from theodolite.anatomy.trace import Node, Ref
from theodolite.anatomy.uses import Use

Ranges = tuple[tuple[int, int], ...]

_JOINS = frozenset(["add", "sub", "cat", "stack"])


def row_blocks(flow: Flow, use: Use) -> tuple[Ranges, ...]:
    """The blocks the outputs of a weight, or of its bias, fall into; empty if all go one way."""
    output = flow.graph.nodes[use.node].outputs[0]
    shape = flow.graph.shapes[output]
    if not shape or not use.out_axes or not (use.op == "linear" or use.kind == "bias"):
        return ()
    read = _readers(flow, output, labels_along(shape, -1))
    if any(labels.numel() == shape[-1] for labels in read.values()):  # something reads all of it
        return ()
    groups = _merge(flow, {value: set(labels.unique().tolist()) for value, labels in read.items()})
    rows = sorted(index for group in groups for index in group)
    if len(groups) < 2 or rows != list(range(shape[-1])):
        return ()
    return tuple(sorted(_ranges(sorted(group)) for group in groups))


def _readers(flow: Flow, output: int, labels: Tensor) -> dict[int, Tensor]:
    """By value that something other than a view reads: the numbers of the outputs in it."""
    carried = {output: labels}
    read: dict[int, Tensor] = {}
    waiting = [output]
    while waiting:
        value = waiting.pop()
        for node in flow.readers(value):
            pieces = _carry(flow, node, carried[value])
            if pieces is None:
                read[value] = _once(carried[value])
                continue
            for made, piece in zip(node.outputs, pieces, strict=False):
                carried[made] = piece
                waiting.append(made)
    return read


def _carry(flow: Flow, node: Node, labels: Tensor) -> list[Tensor] | None:
    """The labels after a view or an added bias; None if the node is something else."""
    if not isinstance(node.args[0], Ref) or len(flow.signals(node)) - _looked_up(flow, node) != 1:
        return None
    if node.op == "add" and flow.graph.shapes[node.outputs[0]] == tuple(labels.shape):
        return [labels]
    return follow(flow.graph, node, labels)


def _looked_up(flow: Flow, node: Node) -> int:
    """How many of a node's signals are rows of a table: the biases of the experts a token was sent to."""
    makers = [flow.maker(flow.back(value)) for value in flow.signals(node)]
    return sum(
        maker is not None and any(u.kind == "table" for u in flow.uses.at(maker.index)) for maker in makers
    )


def _once(labels: Tensor) -> Tensor:
    """The labels without the dimensions along which they only repeat."""
    return labels[tuple(0 if stride == 0 else slice(None) for stride in labels.stride())]


def _merge(flow: Flow, read: dict[int, set[int]]) -> list[set[int]]:
    """Blocks: what overlaps is one, and so are pieces that are put together again unbent (rotary halves)."""
    blocks = [({value}, rows) for value, rows in read.items()]
    merging = True
    while merging:
        merging = False
        for first, second in itertools.combinations(blocks, 2):
            if first[1] & second[1] or _rejoined(flow, first[0], second[0]):
                blocks.remove(first)
                blocks.remove(second)
                blocks.append((first[0] | second[0], first[1] | second[1]))
                merging = True
                break
    return [rows for _, rows in blocks]


def _rejoined(flow: Flow, first: set[int], second: set[int]) -> bool:
    """Do two pieces meet again in a sum or a concatenation, only moved and multiplied by constants?"""
    below = [_below(flow, piece) for piece in (first, second)]
    common = below[0] & below[1]
    if not common:
        return False
    meeting = (common & -common).bit_length() - 1
    joint = flow.maker(meeting)
    if joint is None or joint.op not in _JOINS:
        return False
    for piece, mask in zip((first, second), below, strict=True):
        for value in bits(mask & flow.ancestors[meeting] & ~(1 << meeting)):
            node = flow.maker(value)
            if value in piece:
                continue
            if node is None or flow.uses.at(node.index) or not _is_straight(flow, node, mask):
                return False
    return True


def _below(flow: Flow, piece: set[int]) -> int:
    mask = 0
    for value in piece:
        mask |= flow.descendants[value]
    return mask


def _is_straight(flow: Flow, node: Node, below: int) -> bool:
    """Does the node move the piece, multiply it by a constant, or put parts of it together?"""
    signals = flow.signals(node)
    if node.op in _JOINS:
        return all(below >> signal & 1 for signal in signals)
    return len(signals) == 1 and (flow.is_handed_on(node) or node.op in ("mul", "neg"))


def _ranges(numbers: list[int]) -> Ranges:
    """Consecutive numbers as half-open ranges.

    >>> _ranges([0, 1, 2, 6, 7])
    ((0, 3), (6, 8))
    """
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return tuple(found)
