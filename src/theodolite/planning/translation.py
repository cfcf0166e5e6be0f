"""Learning rates from AdamW's to Muon's, by the shape of a weight.

In training, AdamW's update has a root mean square (RMS) of about 0.2, whatever the shape (Liu et al., 2025).
Muon's is `s·UVᵀ`; with full rank its Frobenius norm is `s·√min(in, out)`, so its RMS is `s/√max(in, out)`.
Equal RMS therefore needs

    lr_Muon = lr_AdamW · 0.2·√max(in, out) / s

which for muon-kimi, whose s is 0.2·√max(in, out), is the same number. Equal RMS is not an equal change of
what the layer does. That is `‖A‖_R = √(in/out)·‖A‖₂`, and `‖A‖₂ = ‖A‖_F/√k` with the stable rank k of A.
Muon's update has k = min(in, out); if AdamW's has a smaller one, equal `‖·‖_R` needs

    lr_Muon = lr_AdamW · 0.2·√(in·out/k) / s

which is √(min(in, out)/k) times the other one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.matrices import MatrixLayout
from theodolite.optimizers.muon import SCALES
from theodolite.planning.rows import PlanRow
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, number

ADAMW_RMS = 0.2
"""The root mean square of AdamW's update in training, by Liu et al."""
STABLE_RANK = 4.0
"""That of AdamW's updates, which depends on task and time: docs/muon.md measures it."""
MUONS = {name: str(spec.fixed["scale"]) for name, spec in OPTIMIZERS.items() if "scale" in spec.fixed}
"""The optimizers with a scale of Muon, and its name."""

_WRITTEN: dict[str, str] = {
    "none": "1",
    "original": "√({out}/{in})",
    "rms": "0.2·√{most}",
    "spectral": "√({out}/{in})",
}
"""The scales with numbers for their fans."""


@dataclass(frozen=True)
class ShapeRates:
    """The learning rates of the weights of one shape that move by the same root mean square."""

    shape: str
    """As Muon sees it."""
    tensors: int
    adamw: float
    muon: Mapping[str, float]
    """By optimizer."""
    spectral: float
    """What the rates of Muon are multiplied by for the same change of `‖·‖_R`."""


@dataclass(frozen=True)
class Translation(Result):
    """Learning rates of AdamW and of Muon that move weights alike, by shape. Made by `Groups.translation`."""

    kind: ClassVar[str] = "translation of learning rates"
    loads: ClassVar[bool] = True

    lines: tuple[ShapeRates, ...]
    rms: float = ADAMW_RMS
    """Of AdamW's update."""
    stable_rank: float = STABLE_RANK
    """Of AdamW's update."""

    def blocks(self) -> Iterator[Block]:
        """The formulas, and a line for each shape."""
        yield (
            f"Equal RMS: lr(Muon) = lr(AdamW) · {number(self.rms)}·√max(in, out) / s, as AdamW's update has "
            f"an RMS of about {number(self.rms)} and Muon's, s·UVᵀ, one of s/√max(in, out)."
        )
        yield self.table()
        yield (
            "Equal ‖·‖_R = √(in/out)·‖·‖₂, the largest change of the layer's output: √(min(in, out)/k) times "
            "as much, where k is the stable rank ‖A‖_F²/‖A‖₂² of AdamW's update. The last column assumes "
            f"k = {number(self.stable_rank)}."
        )

    def table(self) -> Table:
        """A line for each shape."""
        rates = [Column(name, show=number, side="right") for name in ("adamw", *MUONS)]
        times = Column("equal ‖·‖_R", show=lambda value: f"× {number(value)}", side="right")
        return Table(
            ("shape", "tensors", *rates, times),
            [
                (one.shape, one.tensors, one.adamw, *(one.muon[name] for name in MUONS), one.spectral)
                for one in self.lines
            ],
        )


def translate(rows: Iterable[PlanRow]) -> Translation:
    """The rates of weights that AdamW or Muon trains; a line for each shape and rate."""
    alike: dict[tuple[str, str], list[PlanRow]] = {}
    for row in rows:
        key = shape_of_matrices(row), f"{adamw_rate(row):.6e}"
        alike.setdefault(key, []).append(row)
    return Translation(
        tuple(
            ShapeRates(
                shape,
                len(members),
                adamw_rate(members[0]),
                {
                    name: adamw_rate(members[0]) * ADAMW_RMS / muon_rms(members[0], scale)
                    for name, scale in MUONS.items()
                },
                math.sqrt(min(min(one) for one in fans_seen(members[0])) / STABLE_RANK),
            )
            for (shape, _), members in alike.items()
        )
    )


def adamw_rate(row: PlanRow) -> float:
    """The learning rate of AdamW that moves the tensor by the same root mean square."""
    return row.lr / rate_ratio(row)


def rate_ratio(row: PlanRow) -> float:
    """The tensor's learning rate over that of AdamW which moves it by the same root mean square."""
    scale = scale_of(row)
    return 1.0 if scale is None else ADAMW_RMS / muon_rms(row, scale)


def muon_rms(row: PlanRow, scale: str) -> float:
    """The root mean square of Muon's update of a tensor, `s·UVᵀ` of each of its matrices."""
    fans = fans_seen(row)
    squares = sum(SCALES[scale](*one) ** 2 * min(one) for one in fans)
    return math.sqrt(squares / sum(fan_in * fan_out for fan_in, fan_out in fans))


def scale_of(row: PlanRow) -> str | None:
    """Muon's scale, by name; None for another optimizer."""
    return MUONS.get(row.rule)


def factor(row: PlanRow) -> str | None:
    """What Muon multiplies its update by, for the shape of this tensor."""
    scale = scale_of(row)
    if scale is None:
        return None
    found = []
    for fan_in, fan_out in fans_seen(row):
        value = SCALES[scale](fan_in, fan_out)
        written = _WRITTEN[scale].format(**{"in": fan_in, "out": fan_out, "most": max(fan_in, fan_out)})
        found.append("1" if value == 1 else f"{written} = {number(value)}")
    return "; ".join(dict.fromkeys(found))


def shape_seen(row: PlanRow) -> str:
    """The shape as the tensor's optimizer sees it.

    A matrix optimizer sees rows of a fused tensor, experts of a stack, kernels as matrices
    (out × in·positions), and a weight that is stored as (in, out) the other way round.
    """
    stored = "×".join(map(str, row.shape)) or "()"
    spec = OPTIMIZERS.get(row.rule)
    if spec is None or not spec.matrices_only:
        return stored
    seen = shape_of_matrices(row)
    return seen if len(row.shape) == 2 and row.out_axes == (0,) else f"{seen}, stored {stored}"


def shape_of_matrices(row: PlanRow) -> str:
    """The matrices that a weight holds: `3 of 256×256`."""
    inside = {*row.in_axes, *row.out_axes}
    stack = math.prod(length for axis, length in enumerate(row.shape) if axis not in inside)
    counts = Counter(fans_seen(row))
    return " + ".join(
        f"{stack * times} of {fan_out}×{fan_in}" if stack * times > 1 else f"{fan_out}×{fan_in}"
        for (fan_in, fan_out), times in counts.items()
    )


def fans_seen(row: PlanRow) -> list[tuple[int, int]]:
    """(in, out) of the matrices of a weight: several if its rows are fused; of a stack, of one member."""
    return MatrixLayout((row.in_axes, row.out_axes), row.rows).fans(row.shape)
