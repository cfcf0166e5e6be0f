"""What growing gives: each block with the points it was chosen from, and how sure it is that it helps."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from theodolite.growing.certificate import Certificate
from theodolite.growing.line_search import Jump
from theodolite.probes.signal.result import PointSignal, Signal
from theodolite.surgery.blocks import InsertionPoint
from theodolite.surgery.proof import Proof


@dataclass(frozen=True)
class Contender:
    """A point where a block was tried."""

    point: InsertionPoint
    signal: PointSignal = field(repr=False)
    slope: float
    """How fast the loss falls at first along the direction of the jump, and its standard error."""
    error: float
    jump: Jump
    train_gain: float
    """By how much the loss fell on the units that the signal was estimated on. A block with which it rose is
    not kept."""


@dataclass(frozen=True)
class Stage:
    """One block more, or why there is none."""

    signal: Signal = field(repr=False)
    contenders: tuple[Contender, ...]
    chosen: Contender | None
    """None, where no jump lowered the loss, or no signal is above its noise."""
    proof: Proof | None
    """That the block changed nothing before it jumped."""
    certificate: Certificate | None

    def __str__(self) -> str:
        if self.chosen is None:
            return f"no block: {self.why}"
        lines = [f"{self.chosen.point.name}, a copy of {self.chosen.point.like}: {self.chosen.jump}"]
        if self.certificate is not None:
            lines.append(str(self.certificate))
        return "\n".join(lines)

    @property
    def why(self) -> str:
        """Why there is no block."""
        if self.contenders and not any(one.jump.tried for one in self.contenders):
            return "the signal points nowhere at the points above their noise"
        if self.contenders:
            return f"none of {len(self.contenders)} blocks that were tried lowered the loss"
        return (
            f"no point has a gain above its noise (the largest is {self.signal.best.significance:.2g} "
            f"standard errors, {self.signal.threshold:.2g} are needed): to first order, depth does not pay"
        )


@dataclass(frozen=True)
class Means:
    """Mean losses on the three splits."""

    estimate: float
    choose: float
    certify: float


@dataclass(frozen=True)
class Grown:
    """A network with more blocks, and how sure it is that they help. Made by `grow`."""

    model: nn.Module = field(repr=False)
    stages: tuple[Stage, ...]
    certificate: Certificate | None
    """Of all blocks together against the network as it was; None if there are none."""
    before: Means
    after: Means
    units: tuple[int, int, int]
    """To estimate, to choose, to certify."""

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of the new blocks, in the order they were inserted; later ones may have moved them."""
        return tuple(stage.chosen.point.name for stage in self.stages if stage.chosen is not None)

    def __str__(self) -> str:
        from theodolite.growing.table import table

        return table(self)
