"""The residual stream: how its size, its direction and its gradient change with depth.

With h the stream and f the branch that reads it, for every branch of every block:

    RMS(h), RMS(f), RMS(∂L/∂h), RMS(∂L/∂f),  ‖f‖/‖h‖ and cos(h, h + f),  L without f minus L,
    max|h|/median|h|

Three things go wrong with depth. The stream grows, so that late branches change it less and less. The
gradient explodes or vanishes on its way back. Blocks become redundant: the loss is the same without them.

Values and gradients are those of the network's own forward and backward pass (`anatomy.recording.rerun`), in
eval mode, except that a batch norm in training mode uses the statistics of the batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import unwrap
from theodolite.anatomy.recording.rerun import rerun
from theodolite.core.batches import Batch, device_of, differentiable
from theodolite.core.building import in_one_line
from theodolite.core.calling import Loss, described, require_logits
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.present.figure import FAINT, QUIET, Figure, Panel, bars, frame, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Table
from theodolite.probes.example_losses import HALVES, scalar_loss
from theodolite.probes.scaling.activation_layout import ActivationLayout, find_layout
from theodolite.probes.stream.growth import GrowthLaw, fit_growth
from theodolite.probes.stream.readings import (
    BranchReading,
    HeadroomWatch,
    LargestValue,
    read_branch,
    size_of,
)

NOT_FINITE = "not finite"
"""How the note begins that names a loss, stream or gradient that is not finite."""
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
"""An entry is massive if it is larger than `MASSIVE` and `MASSIVE_RATIO` times the median of the stream.

Sun et al., Massive activations in large language models, 2024."""


@dataclass(frozen=True)
class Stream(Result):
    """The residual stream of a network on a batch. Made by `stream`."""

    kind: ClassVar[str] = "residual stream"
    loads: ClassVar[bool] = True
    loss: float
    start: float
    """RMS of the stream before the first branch."""
    start_gradient: float
    branches: tuple[BranchReading, ...]
    skipped_blocks: tuple[float | None, ...]
    """By block: the loss without all of its branches minus the loss."""
    largest: LargestValue
    """The largest of all values that would be in half precision."""
    notes: tuple[str, ...]
    """What could not be measured, and why."""
    layout: ActivationLayout | None = field(default=None, repr=False, compare=False)

    @property
    def finite(self) -> bool:
        """Are the loss, the stream and its gradients finite, as far as they were found?"""
        return not any(note.startswith(NOT_FINITE) for note in self.notes)

    @cached_property
    def profile(self) -> tuple[float, ...]:
        """RMS of the stream before the first block and after each."""
        return (self.start, *(one.stream for one in self._ends))

    @cached_property
    def gradient_profile(self) -> tuple[float, ...]:
        """The same of its gradient."""
        return (self.start_gradient, *(one.stream_gradient for one in self._ends))

    @cached_property
    def growth(self) -> GrowthLaw:
        """How the stream grows from the first block to the last."""
        return fit_growth(self.profile)

    @cached_property
    def backward(self) -> GrowthLaw:
        """How its gradient grows from the last block back to the first."""
        return fit_growth(self.gradient_profile[::-1])

    @property
    def massive(self) -> tuple[BranchReading, ...]:
        """Where the stream has massive entries."""
        return tuple(
            one for one in self.branches if MASSIVE < one.largest < math.inf and one.peak > MASSIVE_RATIO
        )

    @property
    def _ends(self) -> list[BranchReading]:
        """The last branch of each block."""
        return list({one.block: one for one in self.branches}.values())

    def blocks(self) -> Iterator[Block]:
        """A row for each branch, then a summary."""
        yield f"loss {self.loss:.4f}"
        yield self.table()
        yield "\n".join(self._summary())
        yield self.figure()

    def table(self) -> Table:
        """One row for each branch."""
        columns = {"stream": "stream", "branch": "added", "f/h": "share", "cosine": "cosine"}
        columns |= {"∂L/∂h": "stream_gradient", "∂L/∂f": "branch_gradient", "max/med": "peak"}
        columns |= {"−branch": "skipped"}
        rows = [("start", self.start, *[None] * 3, self.start_gradient, *[None] * 4)]
        for one in self.branches:
            block = self.skipped_blocks[one.block] if one in self._ends else None
            values = (getattr(one, name) for name in columns.values())
            rows.append((f"{one.block}.{one.branch}", *values, block))
        return Table(("block", *columns, "−block"), rows)

    def _summary(self) -> Iterator[str]:
        yield f"stream    {self.growth}"
        yield f"gradient  {self.backward}, from the last block to the first"
        largest, made = self.largest, f"made by {self.largest.op}, {self.largest.where}"
        if math.isnan(largest.value):
            yield "float16   not known: all values are statistics"
        elif math.isinf(largest.value):
            yield f"float16   no headroom: some values are not finite, first {made}"
        else:
            room = f"{largest.headroom:.1f} doublings of headroom"
            yield f"float16   {room}: {largest.value:.4g} is the largest value, {made}"
        if smallest := min(
            (one for one in self.branches if one.share > 0), key=lambda one: one.share, default=None
        ):
            yield (
                f"bfloat16  keeps 8 bits: block {smallest.block}, branch {smallest.branch} adds least, "
                f"2^{math.log2(smallest.share):.1f} of the stream"
            )
        for one in self.massive[:1]:
            yield (
                f"massive   block {one.block}, branch {one.branch}: {one.largest:.4g} at {one.peak_at}, "
                f"{one.peak:.0f} times the median"
            )
        for note in self.notes:
            yield f"note      {note}"

    def figure(self) -> Figure:
        """Sizes, gradients and the loss without each block, against depth."""
        counts = [
            sum(one.block == block for one in self.branches) for block in range(len(self.skipped_blocks))
        ]
        places = [0.0, *(one.block + (one.branch + 1) / counts[one.block] for one in self.branches)]
        added = [one.added for one in self.branches]
        sizes = [self.start, *(one.stream for one in self.branches)]
        gradients = [self.start_gradient, *(one.stream_gradient for one in self.branches)]
        panels = [
            _lines("Stream (line) and branches (dots)", places, sizes, added),
            _lines("Gradient in the stream", places, gradients),
        ]
        if any(one is not None for one in self.skipped_blocks):
            drawn = bars(range(len(counts)), self.skipped_blocks, hover="block %{x}: %{y:.3g}")
            layout = frame(height=220, x="block")
            layout["yaxis"] |= {"zeroline": True, "zerolinecolor": FAINT, "nticks": 5}
            panels.append(Panel("Loss without the block, minus the loss", (drawn,), layout))
        return Figure(
            caption="Root mean squares of the stream, of the branches and of the stream's gradient, from the "
            "first block to the last; and the increase of the loss without each block.",
            alt=f"Stream: {self.growth}. Gradient, from the last block to the first: {self.backward}",
            panels=tuple(panels),
        )


@exclusive()
def stream(
    model: nn.Module, loss: Loss, batch: Batch, *, skip: bool = True, layout: ActivationLayout | None = None
) -> Stream:
    """Measure the residual stream of a network on a batch; the network is left unchanged.

    Args:
        model: any module with residual branches, on any device, wrapped or not.
        loss: `loss(logits, targets) -> scalar`.
        batch: a pair (inputs, targets).
        skip: also measure the loss without each branch and without each block: a forward pass for each.
        layout: of an earlier call with the same model and inputs of the same shapes, to save finding it.

    A branch is skipped by adding zeros in its place. Everything else stays: the norm of a post-norm, the
    activation after a sum, the projection of a ResNet's shortcut. If the stream is a mixture (routing), no
    branch is skipped: a mixture with zeros in it is not the mixture without them.

    A block whose branches end in zeros is not missed:

    >>> import theodolite as th
    >>> model = th.models.GPT(64, 2, vocab=16)
    >>> for residual in (model.blocks[1].attention.branch.out, model.blocks[1].feed_forward.branch.down):
    ...     _ = nn.init.zeros_(residual.weight)
    >>> found = stream(model, th.workloads.next_token_loss, (torch.arange(8)[None], torch.arange(8)[None]))
    >>> found.skipped_blocks[1], found.branches[-1].cosine > 0.999, found.branches[0].share > 0.01
    (0.0, True, True)
    """
    require_logits(loss, "The residual stream")
    if not isinstance(model, nn.Module):
        raise UseError(f"model is {described(model)}, not a torch.nn.Module")
    model = unwrap(model)
    own = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss  # it may have state
    with torch.inference_mode(False), torch.enable_grad():
        return _stream(model, own, differentiable(batch, str(device_of(model))), skip, layout)


def _stream(
    model: nn.Module, loss: Loss, batch: Batch, skip: bool, layout: ActivationLayout | None
) -> Stream:
    inputs, targets = batch
    found = layout or find_layout(model, inputs)
    if not found.stream:
        raise UseError(
            f"{type(model).__name__} has no residual branches, so it has no stream: nothing is added to the "
            "value it was computed from"
        )
    notes: list[str] = []
    watch = HeadroomWatch()
    values = {*found.stream, *found.starts, *(end for ends in found.branches for end in ends)}
    passed = rerun(model, inputs, found.graph, keep=values, gradients=True, seen=watch)
    if passed.lost and layout is not None:  # the network ran other operations than those of the layout
        return _stream(model, loss, batch, skip, None)
    total = _loss(loss, passed.output, targets)
    gradients = passed.gradients(total)
    if passed.lost:
        notes.append(f"{len(passed.lost)} of {len(values)} values were not found again in a second pass")
    if not gradients:
        notes.append("no gradient reaches the stream from the loss")
    notes += _not_finite(found, float(total.detach()), passed.values, gradients)
    number = found.places[-1][0] + 1
    skipped: tuple[list[float | None], list[float | None]] = [None] * len(found.stream), [None] * number
    if skip and found.is_routed:
        notes.append("the stream is a mixture, and zeros in it still have a weight: no branch was skipped")
    elif skip:
        skipped = _skipped(model, loss, batch, found, notes)
    return Stream(
        loss=float(total.detach()),
        start=size_of(found.starts[0], passed.values),
        start_gradient=size_of(found.starts[0], gradients),
        branches=tuple(
            read_branch(found, index, passed.values, gradients, without)
            for index, without in enumerate(skipped[0])
        ),
        skipped_blocks=tuple(skipped[1]),
        largest=watch.largest(found),
        notes=tuple(dict.fromkeys(notes)),
        layout=found,
    )


def _not_finite(
    layout: ActivationLayout, loss: float, values: Mapping[int, Tensor], gradients: Mapping[int, Tensor]
) -> list[str]:
    """A note on the first value and the last gradient that are not finite, if any."""
    streams = {"before the first block": layout.starts[0]}
    for (block, branch), after in zip(layout.places, layout.stream, strict=True):
        streams[f"after block {block}, branch {branch}"] = after

    def bad(found: Mapping[int, Tensor]) -> list[str]:
        return [name for name, at in streams.items() if at in found and not bool(found[at].isfinite().all())]

    said = [] if math.isfinite(loss) else [f"the loss is {loss}"]
    said += [f"the stream, first {name}" for name in bad(values)[:1]]
    said += [f"the gradient of the stream, last {name}" for name in bad(gradients)[-1:]]
    return [f"{NOT_FINITE}: {', '.join(said)}"] if said else []


def _skipped(
    model: nn.Module, loss: Loss, batch: Batch, layout: ActivationLayout, notes: list[str]
) -> tuple[list[float | None], list[float | None]]:
    """The increase of the loss without each branch, and without each block."""
    inputs, targets = batch

    def without(branches: list[int]) -> float | None:
        ends = [end for index in branches for end in layout.branches[index]]
        try:
            found = rerun(model, inputs, layout.graph, zero=ends)
        except Exception as error:  # the network may fail on zeros
            notes.append(f"without a branch the network failed: {in_one_line(error)}")
            return None
        if found.lost:
            notes.append("without a branch the network runs other operations: it was not skipped")
            return None
        return float(_loss(loss, found.output, targets).detach())

    whole = without([])
    assert whole is not None
    each = [without([index]) for index in range(len(layout.places))]
    members: dict[int, list[int]] = {}
    for index, (block, _) in enumerate(layout.places):
        members.setdefault(block, []).append(index)
    blocks = [each[some[0]] if len(some) == 1 else without(some) for some in members.values()]
    added, added_blocks = ([None if one is None else one - whole for one in some] for some in (each, blocks))
    return added, added_blocks


def _loss(loss: Loss, found: Tensor, targets: Any) -> Tensor:
    """The loss of logits; half precision in float32, where small differences are not lost."""
    return scalar_loss(loss(found.float() if found.dtype in HALVES else found, targets))


def _lines(title: str, places: Sequence[float], sizes: Sequence[float], dots: Sequence[float] = ()) -> Panel:
    """A line against depth, and dots at the same places but the first."""
    hover = "block %{x:.1f}: %{y:.3g}"
    data = [line(places, sizes, hover=hover)]
    if dots:
        marker = {"color": QUIET, "size": 5}
        data.append(line(places[1:], dots, hover=hover, mode="markers", marker=marker))
    layout = frame(height=220, x="block")
    layout["yaxis"] |= {"type": "log", "exponentformat": "power", "nticks": 5}
    return Panel(title, tuple(data), layout)
