"""The results of growing: each new block with the points it was chosen from, and what is certified."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from theodolite.core.files import plain
from theodolite.growing.certificate import Certificate
from theodolite.growing.line_search import Jump
from theodolite.present.figure import ACCENT, Figure, Panel, frame, guide, line
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Table, counted
from theodolite.probes.signal.result import SILENT, PointSignal, Signal
from theodolite.surgery.blocks import InsertionPoint
from theodolite.surgery.proof import Proof


@dataclass(frozen=True)
class Contender:
    """A point where a block was tried."""

    point: InsertionPoint
    signal: PointSignal = field(repr=False, compare=False)
    slope: float
    """How fast the loss falls at first along the direction of the jump, …"""
    error: float
    """… and its standard error."""
    jump: Jump
    train_gain: float
    """By how much the loss fell on the examples of the signal. A block with which it rose is not kept."""


@dataclass(frozen=True)
class GrowthStep(Result):
    """One more block, or why there is none."""

    kind: ClassVar[str] = "growth step"

    signal: Signal = field(repr=False)
    contenders: tuple[Contender, ...]
    chosen: Contender | None
    """None if no jump lowered the loss, or no signal is above its noise."""
    proof: Proof | None
    """That the block changed nothing before it jumped."""
    certificate: Certificate | None

    @property
    def why(self) -> str:
        """Why there is no block."""
        if self.contenders and not any(one.jump.tried for one in self.contenders):
            return "the signal has no direction at the points above their noise"
        if self.contenders:
            return f"none of {counted(len(self.contenders), 'tried block')} lowered the loss"
        if self.signal.silent:
            return f"undecided: {SILENT}"
        if seeming := self.signal.seeming:
            best = max(seeming, key=lambda one: one.significance)
            return (
                f"undecided: the gain at {best.name} seems to be above its noise ({best.significance:.2g} "
                f"standard errors, {self.signal.threshold:.2g} are needed), but {self.signal.doubt}. Use "
                "more examples: half of the first split is held out"
            )
        return (
            f"no point has a gain above its noise (the largest is {self.signal.best.significance:.2g} "
            f"standard errors, {self.signal.threshold:.2g} are needed): to first order, more depth does not "
            f"help, as far as {self.signal.judged_on} examples can tell"
        )

    def table(self) -> Table:
        """The points where a block was tried."""
        return Table(
            ("tried at", "slope", "±", "step", "predicted", "fell by", "on the first split", "chosen"),
            [
                (
                    *(one.point.name, one.slope, one.error, one.jump.length, one.jump.predicted),
                    *(one.jump.gain, one.train_gain, "←" if one is self.chosen else ""),
                )
                for one in self.contenders
            ],
        )

    def blocks(self) -> Iterator[Block]:
        """The signal, the points tried, and the block that was kept."""
        found = self.signal
        yield f"{len(found.above)} of {len(found.points)} points have a gain above their noise"
        yield found.figure()
        if self.contenders:
            yield self.table()
            yield self._figure()
        yield from (f"note: {note}" for note in found.notes)
        if self.chosen is None:
            yield f"no block: {self.why}"
            return
        said = [f"{self.chosen.point.name}, a copy of {self.chosen.point.like}: {self.chosen.jump.sentence}"]
        if self.proof is not None and self.proof.outputs is not None:
            said.append(f"before the jump, outputs differ by {self.proof.outputs:.1e}, {self.proof.dtype}")
        if self.certificate is not None:
            said.append(self.certificate.verdict)
        yield "\n".join(said)

    def _figure(self) -> Figure:
        """The loss against the length of the step, for each point that was tried."""
        panels = []
        for one in self.contenders:
            unit = one.jump.length / one.jump.step if one.jump.step else 1.0
            steps, losses = zip(*sorted(one.jump.tried), strict=True) if one.jump.tried else ((), ())
            before = one.jump.before
            lengths = plain([step * unit for step in steps])
            # The falling part of the curve is shown, wherever its other end is.
            low = min([before, *losses])
            room = max(before - low, 1e-9 * abs(before), 1e-12)
            layout = frame(height=220, x="length of the step")
            layout["xaxis"] |= {"type": "log", "nticks": 4}
            layout["yaxis"] |= {"nticks": 5, "range": [low - 0.3 * room, before + 1.5 * room]}
            layout["shapes"] = [guide(y=before)]
            drawn = line(lengths, plain(list(losses)), hover="%{x:.3g}: %{y:.5g}", markers=6)
            predicted = line(lengths, plain([before - one.slope * step for step in steps]))
            panels.append(Panel(f"A block at {one.point.name}", (drawn, predicted), layout))
        return Figure(
            caption="Mean loss of the second split against the length of the step along the signal. Level: "
            "without the block. Dotted: first-order prediction.",
            alt="; ".join(f"{one.point.name}: {one.jump.sentence}" for one in self.contenders),
            panels=tuple(panels),
        )


@dataclass(frozen=True)
class SplitLosses:
    """Mean losses on the three splits."""

    estimate: float
    choose: float
    certify: float


@dataclass(frozen=True)
class Grown(Result):
    """A network with more blocks, and what is certified about them. Made by `grow`."""

    kind: ClassVar[str] = "growth"

    model: nn.Module = field(repr=False, compare=False)
    steps: tuple[GrowthStep, ...]
    certificate: Certificate | None
    """Of all new blocks together against the network as it was; None if there are none."""
    before: SplitLosses
    after: SplitLosses
    examples: tuple[int, ...]
    """To estimate, to choose, to certify."""
    name: str = ""
    """Of the network, for the page."""

    @property
    def new_blocks(self) -> tuple[str, ...]:
        """The names of the new blocks, in the order of insertion. Later ones may have moved earlier ones."""
        return tuple(step.chosen.point.name for step in self.steps if step.chosen is not None)

    @property
    def title(self) -> str:
        """The result in one sentence."""
        start = f"{self.name}: " if self.name else ""
        if self.certificate is None:
            return f"{start}no block was inserted: {self.steps[-1].why}"
        names = ", ".join(self.new_blocks)
        return f"{start}{counted(len(self.new_blocks), 'new block')} ({names}), {self.certificate.verdict}"

    def table(self) -> Table:
        """The mean losses on the three splits."""
        splits = ("estimate", "choose", "certify")
        return Table(
            ("split", "examples", "mean loss before", "after"),
            [
                (f"to {split}", number, getattr(self.before, split), getattr(self.after, split))
                for split, number in zip(splits, self.examples, strict=True)
            ],
        )

    def blocks(self) -> Iterator[Block]:
        """The losses, each block with the points it was chosen from, and what is certified."""
        yield f"{counted(len(self.new_blocks), 'block')} inserted" if self.new_blocks else "no block inserted"
        yield self.table()
        for number, step in enumerate(self.steps, 1):
            yield Heading(f"Block {number}")
            yield from step.blocks()
        if self.certificate is not None:
            many = len(self.new_blocks)
            which = self.new_blocks[0] if many == 1 else f"all {many} new blocks"
            yield Heading(f"The network with {which} against the one without")
            yield from self.certificate.blocks()
            yield self._figure(self.certificate)

    def to_dict(self) -> dict[str, Any]:
        """All but the model, with the names of the new blocks and whether they are certified to help."""
        certified = self.certificate is not None and self.certificate.holds
        return {"new_blocks": list(self.new_blocks), "certified": certified, **super().to_dict()}

    def _figure(self, overall: Certificate) -> Figure:
        """The certified intervals of the fall of the loss."""
        known = [
            (step.chosen.point.name, step.certificate)
            for step in self.steps
            if step.chosen is not None and step.certificate is not None
        ]
        if len(known) > 1:
            known.append(("all together", overall))
        layout = frame(height=90 + 34 * len(known), x="mean fall of the loss of an example")
        layout["xaxis"] |= {"nticks": 6}
        layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
        layout["shapes"] = [guide(x=0)]
        bars = {
            "type": "data",
            "symmetric": False,
            "array": plain([one.upper - one.mean for _, one in known]),
            "arrayminus": plain([one.mean - one.lower for _, one in known]),
            "color": ACCENT,
            "thickness": 2,
        }
        names: list[Any] = [name for name, _ in known]
        means = plain([one.mean for _, one in known])
        drawn = line(means, names, hover="%{y}: %{x:.4g}", markers=8, mode="markers", error_x=bars)
        return Figure(
            caption="The fall of the clipped loss on the third split. Each end of a bar holds at "
            f"{100 * (1 - overall.delta):g} %. Right of the dotted line the loss fell.",
            alt="; ".join(f"{name}: {one.verdict}" for name, one in known),
            panels=(Panel("Certified fall", (drawn,), layout),),
        )
