"""`Stream`: the residual stream of a network on one batch, as a table, a summary and a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from theodolite.present.figure import FAINT, QUIET, Figure, Panel, bars, frame, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Table
from theodolite.probes.scaling.activation_layout import ActivationLayout
from theodolite.probes.stream.growth import FLAT, GrowthLaw, fit_growth
from theodolite.probes.stream.readings import BranchReading, LargestValue

NOT_FINITE = "not finite"
"""How the note begins that names a loss, stream or gradient that is not finite."""
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
"""An entry is massive if it is larger than `MASSIVE` and `MASSIVE_RATIO` times the median of the stream.

Sun et al., Massive activations in large language models, 2024."""

SAME = 1e-3
"""Relative difference below which two sizes of the stream are the same."""


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
    def is_asleep(self) -> bool:
        """Is the gradient zero after the last block, as with a readout that starts at zero?"""
        return self.branches[-1].stream_gradient == 0

    @property
    def silent(self) -> tuple[BranchReading, ...]:
        """Branches that add zeros, as behind a gate that starts at zero."""
        return tuple(one for one in self.branches if one.added == 0)

    @property
    def growth_in_words(self) -> str:
        """The law of the stream, or why there is none."""
        law = _no_ratio(self.profile, "it is not known") or f"{self.growth}{_dip(self.profile)}"
        if len(self.silent) < len(self.branches):
            return law
        yet = "no branch adds anything yet, as with gates that start at zero"
        ratios = [(one.stream, one.before) for one in self.branches]
        ratios += [(one.carried, 1.0) for one in self.branches]
        if all(_same(*pair) for pair in ratios) or all(
            _same(one.stream, self.start) for one in self.branches
        ):
            return f"as at its start: {yet}"
        said = f"{law}; {yet}" if self._is_one else yet
        if all(_same(*pair) or any(map(math.isnan, pair)) for pair in ratios):
            return said
        return f"{said}: what changes it is no branch, such as a norm, a projection of the skip or a factor"

    @property
    def gradient_in_words(self) -> str:
        """The law of its gradient, or why there is none."""
        if self.is_asleep:
            return "no gradient yet: after the last block it is zero, as with a readout that starts at zero"
        lost = _no_ratio(self.gradient_profile, "there is none")
        return lost or f"{self.backward}, from the last block to the first{_dip(self.gradient_profile)}"

    @property
    def narrowing(self) -> BranchReading | None:
        """The branch before which the stream shrinks most without any branch, by a factor of 1.5 or more."""
        found = [one for one in self.branches if one.carried < 1 / FLAT]
        return min(found, key=lambda one: one.carried, default=None)

    @property
    def massive(self) -> tuple[BranchReading, ...]:
        """Where the stream has massive entries."""
        return tuple(
            one for one in self.branches if MASSIVE < one.largest < math.inf and one.peak > MASSIVE_RATIO
        )

    @property
    def _is_one(self) -> bool:
        """Does each branch read the stream that the one before it left? Some networks have several."""
        left = (self.start, *(one.stream for one in self.branches))
        pairs = zip(left, self.branches, strict=False)
        return all(_same(one.before, one.carried * size) for size, one in pairs)

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
        yield f"stream    {self.growth_in_words}"
        yield f"gradient  {self.gradient_in_words}"
        if (one := self.narrowing) is not None:
            yield (
                f"between   block {one.block}, branch {one.branch} and the branch before it, the stream "
                f"shrinks to {one.carried:.3g}×: by no branch, but by what is done to the stream itself"
            )
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
            alt=f"Stream: {self.growth_in_words}. Gradient: {self.gradient_in_words}",
            panels=tuple(panels),
        )


def _same(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=SAME)


def _no_ratio(sizes: Sequence[float], missing: str) -> str:
    """Why the sizes have no ratio, with the first place to blame; empty if they have."""
    for place, size in enumerate(sizes):
        if not math.isfinite(size) or size <= 0:
            why = "it is zero" if size == 0 else missing if math.isnan(size) else "it is not finite"
            return f"no ratio: {f'after block {place - 1}' if place else 'before the first block'} {why}"
    return ""


def _dip(profile: Sequence[float]) -> str:
    """The smallest of the sizes, if both ends hide it."""
    least = min(profile)
    if least * FLAT > min(profile[0], profile[-1]):
        return ""
    return f"; smallest after block {profile.index(least) - 1}: {least:.4g}"


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
