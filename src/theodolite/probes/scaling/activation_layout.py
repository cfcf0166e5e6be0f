"""The branches, the residual stream and the logits of a network on a batch, found without hooks or names.

A forward pass is recorded as for the anatomy, on the real weights. The dataflow tells which values are
branches and which are the stream; later passes only keep these.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import unwrap
from theodolite.anatomy.recording.operations import CONVOLUTIONS, NORMS, PRODUCTS
from theodolite.anatomy.recording.trace import Graph, Ref, watch
from theodolite.anatomy.specimen import Specimen, shapes_of
from theodolite.anatomy.structure.branches import stream_after, streams_of
from theodolite.anatomy.structure.expressions import moved, own_axes
from theodolite.anatomy.structure.flow import Flow
from theodolite.anatomy.structure.residual import TracedBranch, find_residuals
from theodolite.core.errors import UseError


@dataclass(frozen=True)
class ActivationLayout:
    """Which values of a recorded forward pass are branches, stream and logits. Made by `find_layout`."""

    places: tuple[tuple[int, int], ...]
    """By branch: its block, and its number within the block."""
    streams: tuple[int, ...]
    """By branch: the residual stream it is added to, counted from 0."""
    layers: tuple[int, ...]
    """By branch: weights on the longest path through it."""
    branches: tuple[tuple[int, ...], ...]
    """By branch: the values whose sum it adds to the stream."""
    factors: tuple[tuple[float, ...], ...]
    """By branch: what each is multiplied by on its way to the stream: alpha in `torch.add(h, f, alpha=…)`,
    and numbers that multiply a sum of several."""
    stream: tuple[int, ...]
    """By branch: the value of the stream after it; with a post-norm, after the norm."""
    starts: tuple[int, ...]
    """By branch: the value of the stream that it reads."""
    channels: tuple[int, ...]
    """By branch: the dimension of the stream that holds its channels."""
    is_routed: bool
    """Is the stream a mixture of all branches, in place of their sum?"""
    outside: Mapping[str, tuple[int, ...]]
    """By weight or table outside every branch: its output values, with the numbers that multiply them. Those
    that no further weight reads are left out: they are the logits."""
    outputs: tuple[int, ...]
    """The logits, or all returned values if the logits are ambiguous."""
    ops: tuple[str, ...]
    """All operations of the pass; a pass with the same operations has the same layout."""
    graph: Graph = field(repr=False, compare=False)

    def added(self, index: int, values: Mapping[int, Tensor]) -> Tensor:
        """What a branch adds to the stream."""
        first, *rest = (
            values[end] if factor == 1 else values[end] * factor
            for end, factor in zip(self.branches[index], self.factors[index], strict=True)
        )
        return sum(rest, first)


@dataclass(frozen=True)
class Activations:
    """The values of one forward pass, as copies."""

    layout: ActivationLayout
    branches: tuple[Tensor, ...]
    stream: tuple[Tensor, ...]
    outside: Mapping[str, tuple[Tensor, ...]]
    logits: Tensor
    """All returned values, concatenated, if the logits are ambiguous."""


def find_layout(model: nn.Module, inputs: Any) -> ActivationLayout:
    """Record a forward pass and find the residual branches in it."""
    model = unwrap(model)
    graph = watch(model, inputs, lambda value, tensor: None)
    flow = Flow(graph)
    residuals = find_residuals(flow)
    return ActivationLayout(
        places=tuple(Specimen(model, shapes_of(model), flow, residuals).places),
        streams=tuple(streams_of(flow, residuals)),
        layers=tuple(residual.layers for residual in residuals),
        branches=tuple(residual.ends for residual in residuals),
        factors=tuple(_factors(flow, residual) for residual in residuals),
        stream=tuple(stream_after(flow, residuals)),
        starts=tuple(residual.start for residual in residuals),
        channels=tuple(_channels(flow, residuals)),
        is_routed=any(residual.history is not None for residual in residuals),
        outside=_outside(flow, residuals),
        outputs=tuple(
            value
            for value in sorted(graph.outputs)
            if len(graph.outputs) == 1 or (graph.floating[value] and graph.maker[value] is not None)
        ),
        ops=_ops(graph),
        graph=graph,
    )


def record_activations(model: nn.Module, inputs: Any, layout: ActivationLayout | None = None) -> Activations:
    """Run the model on the inputs in eval mode and without gradients; it is left unchanged.

    Args:
        model: any module.
        inputs: what it is called with, on its device.
        layout: of an earlier pass, to save finding it. If the pass runs other operations this time (experts
            pick their tokens by value), the layout is found again.

    >>> import torch, theodolite as th
    >>> found = record_activations(th.models.GPT(64, 2), torch.zeros(1, 8, dtype=torch.long))
    >>> len(found.branches), found.logits.shape
    (4, torch.Size([1, 8, 256]))
    """
    found = _record(model, inputs, layout or find_layout(model, inputs))
    if found is None and layout is not None:
        found = _record(model, inputs, find_layout(model, inputs))
    if found is None:
        raise UseError(
            f"two forward passes of {type(model).__name__} on the same inputs ran different operations, so "
            "its activations cannot be matched. Make it deterministic in eval mode"
        )
    return found


def _record(model: nn.Module, inputs: Any, layout: ActivationLayout) -> Activations | None:
    """The values of a layout; None if the pass ran other operations."""
    kept: dict[int, Tensor] = {}
    several = (*layout.branches, *layout.outside.values())
    wanted = {value for values in several for value in values} | {*layout.stream, *layout.outputs}

    def keep(value: int, tensor: Tensor) -> None:
        if value in wanted:
            kept[value] = tensor.detach().clone()

    if _ops(watch(unwrap(model), inputs, keep)) != layout.ops:
        return None
    return Activations(
        layout,
        branches=tuple(layout.added(index, kept) for index in range(len(layout.branches))),
        stream=tuple(kept[value] for value in layout.stream),
        outside={name: tuple(kept[value] for value in values) for name, values in layout.outside.items()},
        logits=kept[layout.outputs[0]]
        if len(layout.outputs) == 1
        else torch.cat([kept[value].flatten() for value in layout.outputs]),
    )


def _outside(flow: Flow, residuals: list[TracedBranch]) -> dict[str, tuple[int, ...]]:
    """The outputs of weights and tables outside every branch, without those of the last layers."""
    inside = 0
    for residual in residuals:
        inside |= residual.region
    found: dict[str, tuple[int, ...]] = {}
    for use in flow.uses.all:
        if use.kind not in ("weight", "table") or use.node < 0:
            continue
        value = flow.graph.nodes[use.node].outputs[0]
        is_read_by_another = flow.descendants[value] & flow.weighted & ~(1 << value)
        if is_read_by_another and not inside >> value & 1:
            found[use.name] = (*found.get(use.name, ()), _multiplied(flow, value))
    return found


def _multiplied(flow: Flow, value: int) -> int:
    """The value after the numbers that multiply it, as in `8 * table(tokens)`; itself if nothing does."""
    found, size = value, math.prod(flow.graph.shapes[value])
    while len(readers := flow.readers(value)) == 1 and flow.is_handed_on(readers[0]):
        value = readers[0].outputs[0]
        if math.prod(flow.graph.shapes[value]) != size:  # a piece of it
            break
        if flow.factor(readers[0]) is not None:
            found = value
    return found


def _factors(flow: Flow, residual: TracedBranch) -> tuple[float, ...]:
    """What multiplies the branch's values on the way to the stream: in additions, and of sums."""
    found = dict.fromkeys(residual.ends, 1.0)
    if residual.history is not None:
        return tuple(found.values())
    waiting = [(residual.total, 1.0)]
    while waiting:
        value, factor = waiting.pop()
        total, multiplier = flow.back_with_factor(value)
        node = flow.maker(total)
        if value in found:
            found[value] = factor
        elif (
            node is not None
            and node.op in ("add", "sub")
            and any(flow.ancestors[value] >> end & 1 for end in found)
        ):
            if math.isfinite(multiplier):  # else it is a scalar that the trace does not show
                factor *= multiplier
            alpha = float(node.kwargs.get("alpha", 1)) * (-1 if node.op == "sub" else 1)
            operands = [arg.value for arg in node.args[:2] if isinstance(arg, Ref)]
            waiting += [(one, factor * weight) for one, weight in zip(operands, (1.0, alpha), strict=False)]
    return tuple(found.values())


def _channels(flow: Flow, residuals: list[TracedBranch]) -> Iterator[int]:
    """By branch: the dimension that holds a weight's outputs in most branches of its rank; else the last."""
    votes: dict[int, Counter[int]] = {}
    for residual in residuals:
        for end in residual.ends:
            rank, found = len(flow.graph.shapes[end]), _outputs_of_a_weight(flow, end, residual.region)
            if found is not None:
                votes.setdefault(rank, Counter())[found] += 1
    for residual in residuals:
        rank = len(flow.graph.shapes[residual.ends[0]])
        counts = votes.get(rank, Counter())
        yield max(counts, key=lambda dim: (counts[dim], dim), default=rank - 1)


def _outputs_of_a_weight(flow: Flow, value: int, region: int) -> int | None:
    """The dimension of a value that holds the outputs of the weight before it; None if it is lost."""
    node, shape = flow.maker(value), flow.graph.shapes[value]
    if node is None or not region >> value & 1:
        return None
    if node.op in CONVOLUTIONS and isinstance(weight := node.args[1], Ref):
        return len(shape) + 1 - len(flow.graph.shapes[weight.value])
    if node.op in PRODUCTS:
        return len(shape) - 1
    for signal in flow.signals(node):
        channels, before = _outputs_of_a_weight(flow, signal, region), flow.graph.shapes[signal]
        if channels is None:
            continue
        if node.op in NORMS:
            return channels
        args = tuple(arg for arg in node.args[1:] if not isinstance(arg, Ref))
        after = moved(node.op, own_axes(before), before, shape, args)
        return next((dim for dim, axes in enumerate(after) if channels in axes), None)
    return None


def _ops(graph: Graph) -> tuple[str, ...]:
    return tuple(node.op for node in graph.nodes)
