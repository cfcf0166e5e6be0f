"""Which values of a forward pass are features: after each block or before each layer, and before the head.

A forward pass is recorded, and the values are found by the dataflow, without hooks or names. In a network
with residual blocks they are the stream before the first and after each block, after the activation if only
an activation reads the sum. In others they are what each layer with a weight reads, except the data. The head
is the linear map that makes the logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from theodolite.anatomy.recording.operations import BENDING, CONVOLUTIONS, COPIES, RESHAPES, SOFTMAXES
from theodolite.anatomy.recording.trace import Graph, Ref
from theodolite.anatomy.structure.flow import Flow, walk
from theodolite.anatomy.structure.uses import Use, product_operands
from theodolite.probes.scaling.activation_layout import find_layout

ELEMENTWISE = BENDING - SOFTMAXES - {"topk", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"}
"""Activations that act on every entry by itself."""


@dataclass(frozen=True)
class FeaturePlace:
    """A value of the forward pass that holds features."""

    name: str
    """`after block 2`, `before layer 1`, `before the head`."""
    value: int
    channels: int
    """The dimension of the value that holds its channels."""
    block: int | None = None
    """The residual block it is after; −1 before the first one."""


@dataclass(frozen=True)
class LinearHead:
    """The linear map that makes the logits."""

    name: str
    """Of its weight."""
    place: int
    """What it reads: the number of a `FeaturePlace`."""
    weight: int
    """The value that holds its weight."""
    transposed: bool
    """Is the weight (features, classes), not (classes, features)?"""
    class_dim: int
    """The dimension of its output that holds the classes."""

    def matrix(self, weight: Tensor) -> Tensor:
        """The weight as a matrix (classes, features)."""
        flat = weight.flatten(1)
        return flat.T if self.transposed else flat


@dataclass(frozen=True)
class FeatureLayout:
    """Where features are, in the order of the forward pass. Made by `find_features`."""

    places: tuple[FeaturePlace, ...]
    head: LinearHead | None
    no_head: str
    """Why there is none; empty if there is one."""
    graph: Graph = field(repr=False)

    @property
    def values(self) -> set[int]:
        """All values that are to be kept of a pass."""
        found = {place.value for place in self.places}
        return found if self.head is None else found | {self.head.weight}


def find_features(model: nn.Module, inputs: Any) -> FeatureLayout:
    """Record a forward pass and find features and head in it.

    >>> import torch, theodolite as th
    >>> model = th.models.ResidualMLP(8, 2, inputs=4, outputs=3)
    >>> [place.name for place in find_features(model, torch.zeros(5, 4)).places]
    ['before block 0', 'after block 0', 'after block 1, before the head']
    >>> find_features(th.models.LeNet300(30), torch.zeros(5, 784)).head.name
    'layers.5.weight'
    """
    layout = find_layout(model, inputs)
    flow = Flow(layout.graph)
    places = list(_blocks(flow, layout) if layout.stream else _layers(flow))
    found = _find_head(flow)
    if isinstance(found, str):
        return FeatureLayout(tuple(places), None, found, layout.graph)
    use, *read = found
    reads = _unmerged(flow, *read)
    at = next(
        (at for at, one in enumerate(places) if _unmerged(flow, one.value, one.channels) == reads), None
    )
    if at is None:
        places.append(FeaturePlace("before the head", *reads))
        at = len(places) - 1
    elif places[at].block is not None:
        place = places[at]
        named = f"{place.name}, before the head"
        places[at] = FeaturePlace(named, place.value, place.channels, place.block)
    else:
        places[at] = FeaturePlace("before the head", *reads)
    weight, transposed, class_dim = _weight(flow, use)
    head = LinearHead(use.name, at, weight, transposed, class_dim)
    return FeatureLayout(tuple(places), head, "", layout.graph)


def rows_of(value: Tensor, channels: int, targets: tuple[int, ...]) -> Tensor | None:
    """A value as rows (n, D) in float64, one for each target; None if its positions are not those of targets.

    With one target for each example, the row is the mean over positions. With a target for each position,
    every position is a row.

    Args:
        value: with its channels in the dimension `channels`.
        channels: of the value.
        targets: the shape of the targets.

    >>> import torch
    >>> images = torch.arange(24.0).reshape(2, 3, 2, 2)
    >>> rows_of(images, 1, (2,))[0].tolist()
    [1.5, 5.5, 9.5]
    >>> rows_of(images, 1, (2, 2, 2)).shape
    torch.Size([8, 3])
    >>> rows_of(images, 1, (2, 7)) is None
    True
    """
    if not value.is_floating_point() or value.ndim < 2:
        return None
    moved = value.movedim(channels, -1).double()
    shape = tuple(moved.shape[:-1])
    if shape == targets or (1 in (len(shape), len(targets)) and math.prod(shape) == math.prod(targets)):
        return moved.reshape(-1, moved.shape[-1])
    if len(targets) == 1 and targets[0] in shape:
        return moved.movedim(shape.index(targets[0]), 0).flatten(1, -2).mean(1)
    if shape == targets[::-1] and len(targets) == 2:  # positions first
        return moved.transpose(0, 1).flatten(0, 1)
    return None


def _blocks(flow: Flow, layout: Any) -> Iterator[FeaturePlace]:
    """The stream before the first and after each block."""
    yield FeaturePlace("before block 0", layout.starts[0], layout.channels[0], -1)
    last = {block: index for index, (block, _) in enumerate(layout.places)}
    for block, index in last.items():
        value = _activated(flow, layout.stream[index])
        yield FeaturePlace(f"after block {block}", value, layout.channels[index], block)


def _layers(flow: Flow) -> Iterator[FeaturePlace]:
    """What each layer reads."""
    seen: set[int] = set()
    for index, use in enumerate(_weights(flow)):
        read, dim = _reads(flow, use)
        value, channels = _unmerged(flow, read, dim)
        if value not in seen and not {read, value} & flow.uses.raw:
            seen.add(value)
            yield FeaturePlace(f"before layer {index}", value, channels)


def _weights(flow: Flow) -> list[Use]:
    """The uses of weights that the logits depend on, each node once."""
    found: dict[int, Use] = {}
    for use in flow.uses.all:
        if use.kind == "weight" and use.node >= 0 and flow.live >> flow.graph.nodes[use.node].outputs[0] & 1:
            found.setdefault(use.node, use)
    return list(found.values())


def _reads(flow: Flow, use: Use) -> tuple[int, int]:
    """The signal that a weight reads, and the dimension of its channels."""
    node = flow.graph.nodes[use.node]
    signals = flow.signals(node)
    pair = product_operands(node)
    if pair is not None and pair[1] in signals and pair[0] not in signals:
        return pair[1], len(flow.graph.shapes[pair[1]]) - 2
    value = signals[0] if pair is None else pair[0]
    shape = flow.graph.shapes[value]
    if node.op in CONVOLUTIONS and isinstance(weight := node.args[1], Ref):
        return value, len(shape) + 1 - len(flow.graph.shapes[weight.value])
    return value, len(shape) - 1


def _weight(flow: Flow, use: Use) -> tuple[int, bool, int]:
    """The value that holds a head's weight, whether it is transposed, and the classes in its output."""
    node = flow.graph.nodes[use.node]
    pair = product_operands(node)
    if pair is None:
        return node.read(1), False, 1
    left_is_signal = pair[0] in flow.signals(node)
    return pair[left_is_signal], left_is_signal, -1 if left_is_signal else -2


def _find_head(flow: Flow) -> tuple[Use, int, int] | str:
    """The weight that alone makes the logits, what it reads, and its channels; or why there is none."""
    if len(flow.graph.outputs) != 1:
        return f"the model returns {len(flow.graph.outputs)} tensors"
    (output,) = flow.graph.outputs

    def makes(use: Use) -> int:
        return flow.graph.nodes[use.node].outputs[0]

    def is_last(use: Use) -> bool:
        later = flow.descendants[makes(use)] & ~(1 << makes(use))
        return not later & flow.weighted & flow.ancestors[output]

    last = [use for use in _weights(flow) if is_last(use)]
    if len(last) != 1:
        return f"{len(last) or 'no'} linear maps together make the logits" if last else "no weight makes them"
    (use,) = last
    node = flow.graph.nodes[use.node]
    if node.op not in CONVOLUTIONS and product_operands(node) is None:
        return f"{use.name} makes the logits by {node.op}, which is no matrix product"
    if node.op in CONVOLUTIONS and (math.prod(flow.graph.shapes[node.read(1)][2:]) > 1 or node.args[8] > 1):
        return f"{use.name} makes the logits by a convolution with a kernel or groups"
    if node.op in CONVOLUTIONS and node.args[6]:
        return f"{use.name} makes the logits by a transposed convolution"
    if len(flow.graph.shapes[_weight(flow, use)[0]]) != 2 and node.op not in CONVOLUTIONS:
        return f"{use.name} makes the logits as a stack of matrices"

    def sources(value: int) -> list[int]:
        maker = flow.maker(value)
        return [] if maker is None or value == makes(use) else flow.signals(maker)

    for value in walk([output], sources):
        if value != makes(use) and not sources(value):
            return f"the logits do not depend on the network through {use.name} alone"
    for after in flow.makers(flow.after(makes(use), output)):
        kinds = flow.kinds(after)
        if any(value in flow.uses.axes for value in after.inputs) and not (
            kinds and kinds <= {"bias", "gain"}
        ):
            return f"{use.name} is the last weight, but {after.op} combines its output with other parameters"
    return use, *_reads(flow, use)


def _unmerged(flow: Flow, value: int, channels: int) -> tuple[int, int]:
    """The value and its channels before copies, and before reshapes that leave the channels last."""
    shapes = flow.graph.shapes
    while (node := flow.maker(value)) is not None and len(signals := flow.signals(node)) == 1:
        (before,) = signals
        same = shapes[before] == shapes[value]
        is_last = channels in (-1, len(shapes[value]) - 1)
        merges = node.op in RESHAPES and is_last and shapes[before][-1:] == shapes[value][-1:]
        if not merges and not (
            same and node.op in COPIES | RESHAPES and node.op not in ("masked_fill", "where")
        ):
            break
        channels = channels if same else len(shapes[before]) - 1
        value = before
    return value, channels


def _activated(flow: Flow, value: int) -> int:
    """The activation of a sum, if nothing else reads the sum."""
    readers = [node for node in flow.readers(value) if node.op != "write"]
    if len(readers) == 1 and readers[0].op in ELEMENTWISE and flow.live >> readers[0].outputs[0] & 1:
        return readers[0].outputs[0]
    return value
