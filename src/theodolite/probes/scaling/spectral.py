"""Does every tensor keep the size, and the size of change, that the spectral condition allows it?

With `‖A‖_R = √(n_in/n_out)·‖A‖₂` and W the tensor as the network uses it (its multiplier α absorbed), going
from a base size to another should change

    C1    the size at the start            ‖W₀‖_R      by α·‖W‖_R of the rule
    C2    the size of one step             ‖ΔW_t‖_R    by α·‖ΔW‖_R of the rule
          and of the change since then     ‖W_t − W₀‖_R  by the same

Only ratios between two sizes are compared: what a tensor has at base size is right by definition.

References:
    Spectral condition for muP under width–depth scaling, conditions 3.1 and 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from theodolite.anatomy import dissect
from theodolite.anatomy.part import Part, Role, fold
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.optimizers.condition import change, deviation, multiplier
from theodolite.optimizers.hyper import Ratios
from theodolite.planning.counterparts import counterparts
from theodolite.planning.plan import Plan
from theodolite.planning.repeating import repeating
from theodolite.probes.scaling.norm_history import Training, observe
from theodolite.probes.scaling.rms_norm import is_matrix
from theodolite.workloads import Workload

Condition = Literal["start", "step", "drift"]
CONDITIONS: tuple[Condition, ...] = ("start", "step", "drift")

TOLERANCE = 0.3
"""On the exponent of growth. The condition speaks of large sizes; at small ones the gradient of a batch has
a rank comparable to the width, and the exponent of a step can lie a tenth or two below its limit."""


@dataclass(frozen=True)
class Ratio:
    """One norm here, at base size, and by which factor the condition wants them to differ.

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
class Line:
    """One tensor, or those that differ in their block alone, against the counterparts at base size."""

    name: str
    pattern: str
    """The name of all that differ in their block alone."""
    role: str
    start: Ratio
    """C1."""
    step: Ratio
    """C2, one step."""
    drift: Ratio
    """C2, since the start."""
    converged: bool
    only_rounding: bool = False
    """Is its gradient zero but for rounding? Then its steps say nothing."""

    def off(self, condition: Condition) -> float:
        """How many times too large it is by one of the conditions; nan where there is nothing to compare."""
        if self.only_rounding and condition != "start":
            return math.nan
        ratio: Ratio = getattr(self, condition)
        return ratio.off


@dataclass(frozen=True)
class Spectral:
    """All tensors of a network against their counterparts at base size.

    A line breaks a condition if it is off by more than `growth^tolerance`, where `growth` is how much wider,
    or deeper, the network is.
    """

    size: Size
    base: Size
    growth: float
    lines: tuple[Line, ...]
    losses: tuple[float, ...]
    base_losses: tuple[float, ...]

    @property
    def converged(self) -> bool:
        """Did every power iteration converge?"""
        return all(line.converged for line in self.lines)

    @property
    def finite(self) -> bool:
        """Did neither network diverge?"""
        pairs = [getattr(line, name) for line in self.lines for name in CONDITIONS]
        sizes = [size for pair in pairs for size in (pair.here, pair.base)]
        return all(map(math.isfinite, (*self.losses, *self.base_losses, *sizes)))

    def exponent(self, off: float) -> float:
        """The power of the growth that a factor is."""
        return math.log(off) / math.log(self.growth) if off > 0 and self.growth != 1 else math.nan

    @cached_property
    def folded(self) -> tuple[Line, ...]:
        """One line for all tensors that differ in their block alone: geometric means."""
        alike: dict[str, list[Line]] = {}
        for line in self.lines:
            alike.setdefault(line.pattern, []).append(line)
        return tuple(_mean(pattern, lines) for pattern, lines in alike.items())

    def broken(self, condition: Condition, tolerance: float = TOLERANCE) -> tuple[Line, ...]:
        """The folded lines that break a condition, the worst first."""
        found = [line for line in self.folded if abs(self.exponent(line.off(condition))) > tolerance]
        return tuple(sorted(found, key=lambda line: -abs(self.exponent(line.off(condition)))))

    def holds(self, tolerance: float = TOLERANCE) -> bool:
        """Is the condition met, at the start and by every step?"""
        return self.finite and not (self.broken("start", tolerance) or self.broken("step", tolerance))

    def __str__(self) -> str:
        """A table: how many times too large each tensor starts, steps and has moved."""
        wide = max(6, *(len(line.name) for line in self.folded))
        rows = [f"{'tensor':<{wide}}  {'role':<6}  {'start':>6}  {'step':>6}  {'drift':>6}"]
        for line in self.folded:
            offs = (line.off(condition) for condition in CONDITIONS)
            numbers = "  ".join("     –" if math.isnan(off) else f"{off:6.2f}" for off in offs)
            rows.append(f"{line.name:<{wide}}  {line.role:<6}  {numbers}")
        holds = "met" if self.holds() else "not met"
        return "\n".join(
            [
                f"{self.size} against {self.base}: the spectral condition is {holds}",
                "",
                *rows,
                "",
                "1.00 is what the condition asks for    start: C1    step, drift: C2",
                *(
                    f"{one.name}: its gradient is zero but for rounding"
                    for one in self.folded
                    if one.only_rounding
                ),
            ]
        )


@exclusive()
def spectral(
    workload: Workload,
    plan: Plan,
    base: Plan,
    *,
    steps: int = 8,
    seed: int = 0,
    device: str = "cpu",
    roles: Mapping[str, Role] | None = None,
) -> Spectral:
    """Train under a plan, and under the plan for the base size, and compare the norms of all tensors.

    Args:
        workload: what is trained.
        plan: for the size in question.
        base: for the base size, from the same hyperparameters: `th.plan(…, size=b, base=b)`.
        steps: steps of training.
        seed: of the initial weights and of the batches.
        device: where to train.
        roles: what `dissect` is to take tensors for that it cannot classify.

    New networks are built; nothing of the caller's is touched.

    >>> import theodolite as th
    >>> mlp, small, large = th.workload("mlp-mixture"), th.Size(32, 2), th.Size(256, 2)
    >>> def planned(size, base):
    ...     return th.plan(mlp.build, mlp.batch(0, 0)[0], size=size, base=base, lr=2**-8)
    >>> spectral(mlp, planned(large, small), planned(small, small), steps=2).holds()
    True
    >>> standard = spectral(mlp, planned(large, large), planned(small, small), steps=2)
    >>> sorted(line.name for line in standard.broken("step"))
    ['blocks.*.layers.0.weight', 'blocks.*.layers.1.weight', 'readout.weight']
    """
    inputs = workload.draw(seed, 0)[0]

    def train(one: Plan) -> Training:
        anatomy = dissect(workload.build, inputs, size=one.size, roles=roles)
        return observe(workload, one, anatomy, steps=steps, seed=seed, device=device)

    return compare(train(plan), train(base))


def compare(here: Training, base: Training) -> Spectral:
    """Hold one training against another of a different size."""
    branches = repeating(here.anatomy, base.anatomy)
    depth = branches.ratio
    width = here.size.width / base.size.width
    growth = width if abs(math.log(width)) >= abs(math.log(depth)) else depth
    patterns = {part.name: one.pattern for one in fold(here.anatomy.values()) for part in one.parts}
    lines = []
    for name, partner in counterparts(here.anatomy, base.anatomy).items():
        mine, theirs = here.courses[name], base.courses[partner.name]
        part = mine.part
        own = part.factor / partner.factor
        fans = part.fan_in / partner.fan_in, part.fan_out / partner.fan_out
        ratios = Ratios(*fans, branches.depth(part), own)
        alpha = multiplier(part, ratios)
        size = alpha * deviation(part, ratios) * _spread(part) / _spread(partner)
        lines.append(
            Line(
                name=name,
                pattern=patterns[name],
                role=part.role,
                start=Ratio(mine.start, theirs.start, size),
                step=Ratio(mine.step, theirs.step, alpha * change(part, ratios)),
                drift=Ratio(mine.drift, theirs.drift, alpha * change(part, ratios)),
                converged=mine.converged and theirs.converged,
                only_rounding=mine.only_rounding or theirs.only_rounding,
            )
        )
    return Spectral(here.size, base.size, growth, tuple(lines), here.losses, base.losses)


def _spread(part: Part) -> float:
    """`‖W‖_R` of a random matrix of std 1: its largest singular value is `√n_in + √n_out`.

    With both fans in proportion, or one of them large, the rule's own `‖W‖_R` follows; an input or a readout
    of a narrow network is not there yet, and its start should not be called wrong for that.
    """
    if not is_matrix(part):
        return 1.0
    return math.sqrt(part.fan_in / part.fan_out) * (math.sqrt(part.fan_in) + math.sqrt(part.fan_out))


def _mean(pattern: str, lines: Sequence[Line]) -> Line:
    def mean(condition: Condition) -> Ratio:
        ratios: list[Ratio] = [getattr(line, condition) for line in lines]
        live = [getattr(line, condition) for line in lines if not math.isnan(line.off(condition))] or ratios
        return Ratio(
            _geometric([ratio.here for ratio in live]),
            _geometric([ratio.base for ratio in live]),
            _geometric([ratio.expected for ratio in live]),
        )

    return Line(
        name=pattern,
        pattern=pattern,
        role=lines[0].role,
        start=mean("start"),
        step=mean("step"),
        drift=mean("drift"),
        converged=all(line.converged for line in lines),
        only_rounding=all(line.only_rounding for line in lines),
    )


def _geometric(values: Sequence[float]) -> float:
    if not all(value > 0 for value in values):  # zero, or nan
        return min(values) if all(value >= 0 for value in values) else math.nan
    return math.exp(sum(map(math.log, values)) / len(values))
