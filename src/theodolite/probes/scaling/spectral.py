"""The spectral condition: does every tensor keep the size, and the size of change, that it should have?

With `‖A‖_R = √(n_in/n_out)·‖A‖₂` and W the tensor as the network uses it (its multiplier α absorbed), going
from a base size to another should change

    C1    the initial size                  ‖W₀‖_R        by α·‖W‖_R of the rule
    C2    the size of one step              ‖ΔW_t‖_R      by α·‖ΔW‖_R of the rule
          and of the change since then      ‖W_t − W₀‖_R  by the same

Only ratios between two sizes are compared: the sizes at base size are right by definition.

References:
    Spectral condition for muP under width–depth scaling, conditions 3.1 and 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import geometric_mean
from typing import Any, ClassVar, Literal, Self

from theodolite.anatomy import dissect
from theodolite.anatomy.part import Part, fold
from theodolite.core import arguments
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.optimizers import Rule
from theodolite.optimizers.condition import Ratios, change, deviation, multiplier
from theodolite.planning.counterparts import counterparts, repeated_branches
from theodolite.planning.factory import MakeOptimizer, check_pure
from theodolite.planning.parameterization import Parameterization, chosen, plan_for
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table
from theodolite.probes.scaling.norm_history import Training, observe
from theodolite.probes.scaling.small_gradients import NEAR_EPS
from theodolite.probes.scaling.spectral_norm import is_matrix
from theodolite.workloads import Workload

Condition = Literal["start", "step", "drift"]
CONDITIONS: tuple[Condition, ...] = ("start", "step", "drift")

ATOL = 0.3
"""On the exponent of growth. The condition holds for large sizes; at small ones the gradient of a batch has a
rank comparable to the width, and the exponent of a step can lie a tenth or two below its limit."""


@dataclass(frozen=True)
class Ratio:
    """A norm at one size and at base size, and the factor by which the condition says they differ.

    >>> Ratio(here=4.0, base=1.0, expected=2.0).off
    2.0
    """

    here: float
    base: float
    expected: float

    @property
    def off(self) -> float:
        """How many times too large it is: 1 is right. nan where there is nothing to compare."""
        if not (self.here > 0 and self.base > 0 and math.isfinite(self.here) and math.isfinite(self.base)):
            return math.nan
        return self.here / self.base / self.expected


@dataclass(frozen=True)
class SpectralRow:
    """One tensor, or all that differ only in their block, against the counterparts at base size."""

    name: str
    pattern: str
    """The name of all that differ only in their block."""
    role: str
    start: Ratio
    """C1."""
    step: Ratio
    """C2, one step."""
    drift: Ratio
    """C2, since the start."""
    converged: bool
    entries: int
    """Numbers in it, in all of those that differ only in their block."""
    only_rounding: bool = False
    """Is its gradient zero up to rounding? Then its steps mean nothing."""
    over_eps: tuple[float, float] = (math.inf, math.inf)
    """Here and at base size: how many times eps its gradient is at the most."""

    @property
    def limited_by_eps(self) -> bool:
        """Is the gradient so small at one of the sizes that eps decides how far the tensor moves?"""
        return any(times < NEAR_EPS for times in self.over_eps) and not self.only_rounding

    def off(self, condition: Condition) -> float:
        """How many times too large it is by one of the conditions; nan where there is nothing to compare."""
        if (self.only_rounding or self.limited_by_eps) and condition != "start":
            return math.nan
        ratio: Ratio = getattr(self, condition)
        return ratio.off


@dataclass(frozen=True)
class Spectral(Result):
    """All tensors of a network against their counterparts at base size. Made by `spectral`.

    A row breaks a condition if it is off by more than `growth^atol`, where `growth` is how much wider, or
    deeper, the network is.
    """

    kind: ClassVar[str] = "spectral condition"
    loads: ClassVar[bool] = True
    size: Size
    base: Size
    growth: float
    rows: tuple[SpectralRow, ...]
    losses: tuple[float, ...]
    base_losses: tuple[float, ...]
    notes: tuple[str, ...] = ()
    """What to know of the own optimizer, such as the tensors that it leaves out."""

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The result from what `to_dict` gave; JSON has no infinity, so `over_eps` has None for it."""
        found = super().from_dict(content)
        pairs = [[math.inf if math.isnan(times) else times for times in row.over_eps] for row in found.rows]
        rows = (replace(row, over_eps=(one[0], one[1])) for row, one in zip(found.rows, pairs, strict=True))
        return replace(found, rows=tuple(rows))

    @property
    def converged(self) -> bool:
        """Did every power iteration converge?"""
        return all(row.converged for row in self.rows)

    @property
    def finite(self) -> bool:
        """Did neither network diverge?"""
        pairs = [getattr(row, name) for row in self.rows for name in CONDITIONS]
        sizes = [size for pair in pairs for size in (pair.here, pair.base)]
        return all(map(math.isfinite, (*self.losses, *self.base_losses, *sizes)))

    def exponent(self, off: float) -> float:
        """The power of the growth that a factor is."""
        return math.log(off) / math.log(self.growth) if off > 0 and self.growth != 1 else math.nan

    @cached_property
    def folded(self) -> tuple[SpectralRow, ...]:
        """One row for all tensors that differ only in their block: geometric means."""
        return tuple(_mean(pattern, rows) for pattern, rows in _grouped(self.rows, "pattern").items())

    def broken(self, condition: Condition, atol: float = ATOL) -> tuple[SpectralRow, ...]:
        """The folded rows that break a condition, worst first."""
        found = [row for row in self.folded if abs(self.exponent(row.off(condition))) > atol]
        return tuple(sorted(found, key=lambda row: -abs(self.exponent(row.off(condition)))))

    def holds(self, atol: float = ATOL) -> bool:
        """Is the condition met, at the start and by every step?"""
        return self.finite and not (self.broken("start", atol) or self.broken("step", atol))

    def blocks(self) -> Iterator[Block]:
        """How many times too large each kind of tensor starts, steps and has moved."""
        met = "met" if self.holds() else "not met"
        yield f"{self.size} against {self.base}: the spectral condition is {met}"
        yield self.table()
        lines = ["1.00 is what the condition asks for (start: C1; step and drift: C2)"]
        rounded = (row for row in self.folded if row.only_rounding)
        lines += [f"{row.name}: its gradient is zero up to rounding" for row in rounded]
        for row in rows_limited_by_eps(self):
            where = self.size if row.over_eps[0] < row.over_eps[1] else self.base
            lines.append(
                f"{row.name}: eps limits its steps, as its gradient at {where} is {min(row.over_eps):.2g}·eps"
            )
        yield "\n".join(lines)
        yield from self.notes

    def table(self) -> Table:
        """One row for each kind of tensor."""
        factors = [Column(name, lambda off: "–" if math.isnan(off) else f"{off:.2f}") for name in CONDITIONS]
        rows = [(row.name, row.role, *(row.off(name) for name in CONDITIONS)) for row in self.folded]
        return Table(("tensor", "role", *factors), rows)


@exclusive()
def spectral(
    workload: Workload,
    size: Size,
    *,
    base: Size,
    lr: float | None = None,
    optimizer: str | Rule | MakeOptimizer | None = None,
    weight_decay: float = 0.0,
    parameterization: Parameterization = "plan",
    steps: int = 8,
    seed: int = 0,
    device: str = "cpu",
    **planning: Any,
) -> Spectral:
    """Train a network at a size and at base size, and compare the norms of all tensors and of their steps.

    Args:
        workload: what is trained.
        size: the size in question.
        base: the size to compare with, at which `lr` was tuned.
        lr: learning rate at base size; under `own` that of the optimizer by default.
        optimizer: as in `theodolite.plan`, which also takes `weight_decay` and `planning` (eps, roles, …),
            AdamW by default; under `own` the function (model) -> Optimizer, the workload's by default.
        weight_decay: at base size.
        parameterization: `plan`; `standard`: the network's own initialisation and one learning rate for
            all tensors at both sizes; or `own`: the network as it builds itself, with the optimizer that its
            author makes.
        steps: steps of training.
        seed: of the initial weights and of the batches.
        device: where to train.

    To check a plan that was made by hand, compare two trainings: `compare(observe(…), observe(…))`.

    >>> import theodolite as th
    >>> mlp, small, large = th.workload("mlp-mixture"), th.Size(32, 2), th.Size(256, 2)
    >>> spectral(mlp, large, base=small, lr=2**-8, steps=2).holds()
    True
    >>> standard = spectral(mlp, large, base=small, lr=2**-8, steps=2, parameterization="standard")
    >>> sorted(row.name for row in standard.broken("step"))
    ['blocks.*.layers.0.weight', 'blocks.*.layers.1.weight', 'readout.weight']
    """
    for name, value in (("size", size), ("base", base)):
        if not isinstance(value, Size):
            raise UseError(f"{name} is {value!r}: give one Size, such as Size(256, 4)")
    arguments.whole("steps", steps, least=1)
    options = chosen(
        parameterization,
        factory=workload.optimizer,
        base=base,
        lr=lr,
        optimizer=optimizer,
        weight_decay=weight_decay,
        planning=planning,
    )
    if parameterization == "own" and options["make_optimizer"] is not None:
        check_pure(options["make_optimizer"], workload.build, min(size, base))
    inputs = workload.draw(seed, 0)[0]
    roles = workload.roles_with(planning.get("roles"))
    anatomies = {one: dissect(workload.build, inputs, size=one, roles=roles) for one in {size, base}}

    plans = [plan_for(workload.build, inputs, one, anatomies=anatomies, **options) for one in (size, base)]
    here, there = (
        observe(workload, plan, anatomies[plan.size], steps=steps, seed=seed, device=device) for plan in plans
    )
    notes = plans[0].notes if parameterization == "own" else ()
    return replace(compare(here, there), notes=notes)


def compare(here: Training, base: Training) -> Spectral:
    """Compare one training with another of a different size."""
    branches = repeated_branches(here.anatomy, base.anatomy)
    depth = branches.ratio
    width = here.size.width / base.size.width
    growth = width if abs(math.log(width)) >= abs(math.log(depth)) else depth
    patterns = {part.name: one.pattern for one in fold(here.anatomy.values()) for part in one.parts}
    rows = []
    for name, partner in counterparts(here.anatomy, base.anatomy).items():
        mine, theirs = here.histories[name], base.histories[partner.name]
        part = mine.part
        own = part.factor / partner.factor
        fans = part.fan_in / partner.fan_in, part.fan_out / partner.fan_out
        ratios = Ratios(*fans, branches.depth(part), own)
        alpha = multiplier(part, ratios)
        size = alpha * deviation(part, ratios) * _spread(part) / _spread(partner)
        rows.append(
            SpectralRow(
                name=name,
                pattern=patterns[name],
                role=part.role,
                start=Ratio(mine.start, theirs.start, size),
                step=Ratio(mine.step, theirs.step, alpha * change(part, ratios)),
                drift=Ratio(mine.drift, theirs.drift, alpha * change(part, ratios)),
                converged=mine.converged and theirs.converged,
                entries=math.prod(part.shape),
                only_rounding=mine.only_rounding or theirs.only_rounding,
                over_eps=(mine.most_over_eps, theirs.most_over_eps),
            )
        )
    return Spectral(here.size, base.size, growth, tuple(rows), here.losses, base.losses)


def rows_limited_by_eps(measured: Spectral) -> tuple[SpectralRow, ...]:
    """One row for all tensors that differ only in their block and whose steps eps limits.

    If it does not limit all of them, the name says how many: `7 of 8 of blocks.*.w`. `over_eps` is that of
    the smallest gradients.
    """
    found = []
    for pattern, rows in _grouped(measured.rows, "pattern").items():
        # A tensor has several rows where seeds are pooled.
        tensors = [_mean(name, same) for name, same in _grouped(rows, "name").items()]
        if few := [row for row in tensors if row.limited_by_eps]:
            name = pattern if len(few) == len(tensors) else f"{len(few)} of {len(tensors)} of {pattern}"
            here, base = (min(row.over_eps[side] for row in few) for side in (0, 1))
            found.append(replace(_mean(pattern, few), name=name, over_eps=(here, base)))
    return tuple(found)


def _spread(part: Part) -> float:
    """`‖W‖_R` of a random matrix of std 1: its largest singular value is `√n_in + √n_out`.

    If both fans grow in proportion, or one is large, this gives the rule's own `‖W‖_R`; the input or readout
    of a narrow network is not there yet, and its start should not count as wrong for that.
    """
    if not is_matrix(part):
        return 1.0
    return math.sqrt(part.fan_in / part.fan_out) * (math.sqrt(part.fan_in) + math.sqrt(part.fan_out))


def _grouped(rows: Sequence[SpectralRow], by: Literal["pattern", "name"]) -> dict[str, list[SpectralRow]]:
    found: dict[str, list[SpectralRow]] = {}
    for row in rows:
        found.setdefault(getattr(row, by), []).append(row)
    return found


def _mean(pattern: str, rows: Sequence[SpectralRow]) -> SpectralRow:
    def mean(condition: Condition) -> Ratio:
        live = [row for row in rows if not math.isnan(row.off(condition))] or rows
        ratios: list[Ratio] = [getattr(row, condition) for row in live]
        here, base, expected = zip(*((one.here, one.base, one.expected) for one in ratios), strict=True)
        return Ratio(_geometric(here), _geometric(base), _geometric(expected))

    # A tensor that never moves is not judged either, but not because of eps.
    judged = [row for row in rows if not math.isnan(row.off("step"))]
    limited = [row for row in rows if row.limited_by_eps]
    return SpectralRow(
        name=pattern,
        pattern=pattern,
        role=rows[0].role,
        start=mean("start"),
        step=mean("step"),
        drift=mean("drift"),
        converged=all(row.converged for row in rows),
        entries=sum(row.entries for row in rows),
        only_rounding=all(row.only_rounding for row in rows),
        over_eps=max((row.over_eps for row in judged or limited or rows), key=min),
    )


def _geometric(values: Sequence[float]) -> float:
    if not all(value > 0 for value in values):  # zero, or nan
        return min(values) if all(value >= 0 for value in values) else math.nan
    return geometric_mean(values)
