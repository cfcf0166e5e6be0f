"""Weights that mix positions in place of channels, as in an MLP-Mixer.

The channels of a stream are those that its first weight makes. They are followed through views, norms and
sums; a weight that reads or makes another dimension mixes positions, and there are as many as the data have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from theodolite.anatomy.recording.operations import CONVOLUTIONS, RESHAPES, VIEWS
from theodolite.anatomy.recording.trace import Node
from theodolite.anatomy.structure.elements import follow, labels_along, varies
from theodolite.anatomy.structure.flow import Flow, walk
from theodolite.anatomy.structure.uses import product_operands

_MOST = 2**25
"""Entries of a value that is followed through a reshape, which may copy the labels."""


@dataclass(frozen=True)
class Mixing:
    """The nodes of weights whose inputs, and of those whose outputs, are positions."""

    reads: frozenset[int]
    makes: frozenset[int]


def find_mixing(flow: Flow) -> Mixing:
    """Follow the channels through the whole network."""
    channels: dict[int, Tensor] = {}
    labels = functools.cache(labels_along)  # values of one shape share their labels
    sides: dict[int, tuple[int, int, int]] = {}
    reads: set[int] = set()
    makes: set[int] = set()
    for node in flow.graph.nodes:
        if (found := _sides(flow, node)) is not None:
            signal, read, made = sides[node.index] = found
            if signal in channels and not varies(channels[signal], read):
                reads.add(node.index)
            output = node.outputs[0]
            channels[output] = labels(flow.graph.shapes[output], made)
        elif "table" in flow.kinds(node) and flow.graph.shapes[node.outputs[0]] and not flow.signals(node):
            output = node.outputs[0]
            channels[output] = labels(flow.graph.shapes[output], -1)
        else:
            makes.update(_hand_on(flow, node, channels))
        for value in node.inputs:
            if flow.graph.readers[value][-1] == node.index:
                channels.pop(value, None)  # nothing reads it any more
    numbers = {flow.graph.shapes[signal][read] for signal, read, _ in map(sides.__getitem__, reads)}
    makes = {
        index
        for index in makes
        if index in sides
        and flow.graph.shapes[flow.graph.nodes[index].outputs[0]][sides[index][2]] in numbers
    }
    return Mixing(frozenset(reads), frozenset(makes))


def _sides(flow: Flow, node: Node) -> tuple[int, int, int] | None:
    """Of a weight: the signal it reads, the dimension of that which it sums over, and the one it makes."""
    if "weight" not in flow.kinds(node) or len(flow.signals(node)) != 1:
        return None
    signal = flow.signals(node)[0]
    if node.op in CONVOLUTIONS:
        return signal, 1, 1
    if (pair := product_operands(node)) is None:
        return None
    return (signal, -1, -1) if pair[0] == signal else (signal, -2, -2)


def _hand_on(flow: Flow, node: Node, channels: dict[int, Tensor]) -> Iterable[int]:
    """Label what a node makes of labelled signals. The weights that made positions of what it joins."""
    signals = flow.signals(node)
    shape = flow.graph.shapes[node.outputs[0]] if node.outputs else ()
    known = [one for one in signals if one in channels and flow.graph.shapes[one] == shape]
    if len(signals) == 1 and signals[0] in channels:
        labels = channels[signals[0]]
        if node.op not in VIEWS:
            if known:
                channels[node.outputs[0]] = labels
        elif node.op not in RESHAPES or labels.numel() <= _MOST:
            channels.update(zip(node.outputs, follow(flow.graph, node, labels) or (), strict=False))
        return ()
    if node.op not in ("add", "sub", "mul", "div") or len(known) != len(signals) or not known:
        return ()
    first, *others = sorted(known)  # the stream is older than what is added to it
    channels[node.outputs[0]] = channels[first]
    return {
        index
        for other in others
        if _dims(channels[other]).isdisjoint(_dims(channels[first]))
        for index in _made_by(flow, other)
    }


def _dims(labels: Tensor) -> set[int]:
    return {dim for dim in range(labels.dim()) if varies(labels, dim)}


def _made_by(flow: Flow, value: int) -> list[int]:
    """The nodes of the weights that a value was made by, with no other weight in between."""

    def sources(one: int) -> list[int]:
        maker = flow.maker(one)
        return [] if maker is None or flow.weighted >> one & 1 else flow.signals(maker)

    made = (flow.maker(one) for one in walk([value], sources) if flow.weighted >> one & 1)
    return [node.index for node in made if node is not None]
