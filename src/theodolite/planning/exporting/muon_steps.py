"""Muon in other programs: the learning rate with which their step is the planned one.

A plan moves each matrix by `lr·s·UVᵀ` with a scale s of the fans, and decays it by `lr·weight_decay`. Another
Muon has a factor f of its own in place of s, and may see other matrices in the tensor. With the learning rate
`lr·s/f` and the decay `weight_decay·f/s` its step is the same. Where it sees other matrices, or its factors
have other ratios between blocks, the learning rate makes the root mean square of the step the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.matrices import LINEAR, MatrixLayout
from theodolite.optimizers.muon import SCALES, Muon
from theodolite.planning.rows import PlanRow

JORDAN, KIMI = SCALES["original"], SCALES["rms"]


@dataclass(frozen=True)
class Seen:
    """Matrices of one shape that an optimizer orthogonalises, each by itself."""

    count: int
    fan_in: int
    fan_out: int
    factor: float = 1.0
    """What it multiplies the orthogonal update by."""


class Step(NamedTuple):
    """What another Muon is given for one tensor."""

    lr: float
    weight_decay: float
    exact: bool
    """Is its step the planned one? Otherwise only its size is."""


def is_muon(rule: str) -> bool:
    """Is it one of the rules of Muon?"""
    return rule in OPTIMIZERS and OPTIMIZERS[rule].implementation is Muon


def scale_of(rule: str) -> str:
    """The name of the scale of a rule of Muon: `none`, `original`, `rms` or `spectral`."""
    return str(OPTIMIZERS[rule].fixed["scale"])


def planned_matrices(row: PlanRow) -> list[Seen]:
    """The matrices of a tensor as the plan orthogonalises them, block by block, with its scales."""
    layout = MatrixLayout((row.in_axes, row.out_axes), row.rows)
    fans = layout.fans(row.shape)
    count = math.prod(row.shape) // max(1, sum(fan_in * fan_out for fan_in, fan_out in fans))
    scale = SCALES[scale_of(row.rule)]
    return [Seen(count, fan_in, fan_out, scale(fan_in, fan_out)) for fan_in, fan_out in fans]


def step_for(row: PlanRow, seen: Sequence[Seen]) -> Step:
    """The learning rate and the decay for a Muon that sees these matrices, with its factors.

    >>> from theodolite.planning.init_distribution import InitDistribution
    >>> layout = {"fan_in": 4, "fan_out": 16, "in_axes": (1,), "out_axes": (0,), "rows": ()}
    >>> row = PlanRow("w", (16, 4), "hidden", 0, **layout, scale_free=False, init=InitDistribution("kept"),
    ...               rule="muon", lr=0.1, weight_decay=0.5)
    >>> step_for(row, [Seen(1, 4, 16, factor=2.0)])     # √(16/4), as Jordan's
    Step(lr=0.05, weight_decay=1.0, exact=True)
    """
    planned = planned_matrices(row)
    same = len(planned) == len(seen) and all(
        one.count == other.count and {one.fan_in, one.fan_out} == {other.fan_in, other.fan_out}
        for one, other in zip(planned, seen, strict=True)
    )
    ratios = [one.factor / other.factor for one, other in zip(planned, seen, strict=True)] if same else []
    exact = bool(ratios) and all(math.isclose(ratio, ratios[0], rel_tol=1e-12) for ratio in ratios)
    ratio = ratios[0] if exact else math.sqrt(_squares(planned) / _squares(seen))
    if math.isclose(ratio, 1, rel_tol=1e-12):
        return Step(row.lr, row.weight_decay, exact)
    return Step(row.lr * ratio, row.weight_decay / ratio, exact)


def _squares(matrices: Sequence[Seen]) -> float:
    """The square of the Frobenius norm of a step with learning rate 1."""
    return sum(one.count * one.factor**2 * min(one.fan_in, one.fan_out) for one in matrices)


def flat(row: PlanRow) -> tuple[int, int]:
    """(out, in) of a tensor whose first dimension is taken as outputs, all others as inputs."""
    return row.shape[0], math.prod(row.shape[1:])


def is_flat(row: PlanRow) -> bool:
    """Is it a matrix (out, in) or a kernel (out, in, …), whose blocks of rows may be matrices?"""
    return row.out_axes == (0,) and row.in_axes == tuple(range(1, len(row.shape)))


def is_stack(row: PlanRow) -> bool:
    """Is it a stack (count, out, in) or (count, in, out) of matrices?"""
    return len(row.shape) == 3 and {row.in_axes, row.out_axes} == {(1,), (2,)}


def stack_seen(row: PlanRow, factor: Callable[[float, float], float]) -> list[Seen]:
    """A stack as seen by an optimizer that takes the last two dimensions as (out, in)."""
    count, fan_out, fan_in = row.shape
    return [Seen(count, fan_in, fan_out, factor(fan_in, fan_out))]


def split_sizes(row: PlanRow) -> tuple[int, ...] | None:
    """The sizes of blocks of rows that follow each other; None if there are no such blocks."""
    if (row.in_axes, row.out_axes) != LINEAR or len(row.rows) < 2:
        return None
    sizes, end = [], 0
    for block in row.rows:
        if len(block) != 1 or block[0][0] != end:
            return None
        end = block[0][1]
        sizes.append(block[0][1] - block[0][0])
    return tuple(sizes)


def describe(row: PlanRow) -> str:
    """The matrices of a tensor in words."""
    blocks = planned_matrices(row)
    stack = f"{blocks[0].count} × " if blocks[0].count > 1 else ""
    shapes = " + ".join(f"{one.fan_out}×{one.fan_in}" for one in blocks[:4]) + " + …" * (len(blocks) > 4)
    return f"{stack}{shapes}"


def not_trained_by(who: str, rows: Sequence[PlanRow], why: str) -> UseError:
    """The refusal of tensors that another Muon cannot train."""
    named = ", ".join(f"{row.name} {row.shape} (matrices {describe(row)})" for row in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return UseError(
        f"{who} cannot train {named}{more} by Muon: {why}. Export for torch or huggingface, which cut such "
        "tensors into their matrices, or train with plan.optimizer(model)"
    )
