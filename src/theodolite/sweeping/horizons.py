"""How the best learning rate follows batch and tokens: measured exponents, and what each rule would lose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.horizon import Horizon, Stretch
from theodolite.present.text import Column, Table, signed
from theodolite.sweeping.curves import (
    UNKNOWN,
    Criterion,
    Floats,
    Resampled,
    Scale,
    SeedInterval,
    interval,
    losses_at,
)
from theodolite.sweeping.transfer import OptimumDrift

PUBLISHED: Mapping[str, str] = {
    "none": "the same rate for all",
    "sde": "√(m_B/m_D)",
    "power(0, 0.5)": "√batch alone",
    "power(0.28, 0.5)": "√batch, tokens^−0.28",
    "power(0.3, 0.5)": "√batch, tokens^−0.3",
    "power(0.32, 0.5)": "√batch, tokens^−0.32",
}
"""Rules to compare with, and what each does to the learning rate of AdamW."""


@dataclass(frozen=True)
class RatePower:
    """The power of batch or tokens that the best learning rate goes as."""

    along: str
    value: float
    """nan where one of the optima is only a bound."""
    interval: SeedInterval

    def __str__(self) -> str:
        reach = self.interval.high - self.value
        around = f" ± {reach:.2g}" if self.interval.known else ""
        return f"{self.along}^{signed(self.value)}{around}"


@dataclass(frozen=True)
class RuleLoss:
    """What the learning rates of a rule lose against the best ones, from the best of the base."""

    rule: str
    words: str
    """What it does to the learning rate of the optimizer."""
    mean: float
    """Over the sizes; infinite if one diverges."""
    interval: SeedInterval
    """Of the mean."""
    tied: bool
    """Can the seeds not tell it from the rule that loses least?"""
    most: float
    at: Size
    """Where it loses most."""
    outside: int
    """Sizes at which its rate lies outside of what was tried, so that the nearest value stands for it."""


@dataclass(frozen=True)
class HorizonFit:
    """What a family of a sweep says about batch and tokens."""

    exponents: tuple[RatePower, ...]
    losses: tuple[RuleLoss, ...]
    """By rule, the least mean first; none where the optimum of the base is not known."""
    rule: str
    """The rule that the runs were planned by."""

    @property
    def horizon(self) -> Horizon:
        """The measured rule, for `theodolite.plan(…, horizon=…)`."""
        unknown = [one.along for one in self.exponents if not math.isfinite(one.value)]
        if unknown:
            raise UseError(
                f"how the best learning rate follows {unknown[0]} is not known, as the optimum of a size is "
                "only a bound or lost in the noise: try further learning rates, or more seeds"
            )
        found = {one.along: one.value for one in self.exponents}
        timescale = Horizon.of(self.rule).timescale
        digits = {name: round(value, 3) + 0.0 for name, value in found.items()}
        return Horizon("power", 0.0 - digits.get("tokens", 0.0), digits.get("batch", 0.0), timescale)

    def sentences(self) -> Iterator[str]:
        """The exponents, and the rule that fits best."""
        for one in self.exponents:
            if math.isfinite(one.value):
                alone = "" if one.interval.known else ", by one seed"
                yield f"the best rate goes as {one}{alone}."
        if not self.losses:
            return
        best, *others = self.losses
        tied = [one.rule for one in others if one.tied]
        if len(tied) == len(others):
            yield "the seeds do not tell which of the rules compared loses least."
        else:
            beside = f"; not told from it: {', '.join(tied)}" if tied else ""
            yield f"of the rules compared, {best.rule} loses least{beside}."

    def table(self, criterion: Criterion, labels: Mapping[Size, str]) -> Table:
        """What each rule loses."""
        rows = []
        for one in self.losses:
            mean, reach = criterion.text(one.mean), one.interval.high - one.mean
            said = f"{mean} ± {criterion.text(reach)}" if math.isfinite(reach) else mean
            rows.append((one.rule, one.words, said, one.most, labels[one.at], one.outside))
        mean_lost, most = Column("lost, mean", side="right"), Column("most", show=criterion.text)
        return Table(("rule", "learning rate", mean_lost, most, "at", "not tried"), rows)


def horizon_fit(
    curves: Mapping[Size, Resampled],
    drifts: Sequence[OptimumDrift],
    base: Size,
    scale: Scale,
    *,
    optimizer: str,
    rule: str,
) -> HorizonFit | None:
    """What optima over batches and tokens say; None if neither was varied.

    Args:
        curves: by size.
        drifts: of the optimum.
        base: where the learning rate is right.
        scale: of the learning rate.
        optimizer: its name.
        rule: by which the runs were planned: the swept rates are those of the base.
    """
    own = Horizon.of(rule)
    exponents = tuple(
        RatePower(drift.along, drift.slope + shift, _shifted(drift.interval, shift))
        for drift in drifts
        if drift.along in ("batch", "tokens")
        for shift in [math.log2(_rate(own, Stretch(**{drift.along: 2.0}), optimizer))]
    )
    if not exponents or not scale.log:
        return None
    found = HorizonFit(exponents, (), rule)
    rules = dict.fromkeys(PUBLISHED)
    if all(math.isfinite(one.value) for one in exponents):
        rules[str(replace(found.horizon, timescale=False))] = None
    if base not in curves or not curves[base].optimum.found:
        return found
    others = [size for size in curves if size != base and size.network == base.network]
    if not others:  # batch and tokens were varied for other networks only
        return found
    lost = {name: _lost(Horizon.of(name), own, curves, base, others, scale, optimizer) for name in rules}
    num_seeds = min(curves[size].optimum.num_seeds for size in (base, *others))
    return HorizonFit(exponents, tuple(_compared(lost, others, num_seeds, optimizer)), rule)


def _lost(
    horizon: Horizon,
    own: Horizon,
    curves: Mapping[Size, Resampled],
    base: Size,
    sizes: Sequence[Size],
    scale: Scale,
    optimizer: str,
) -> tuple[Floats, int]:
    """Resamples × sizes: the loss at a rule's rate, less the least; at how many sizes it was not tried."""
    columns, outside = [], 0
    for size in sizes:
        stretch, curve = Stretch.between(base, size), curves[size]
        shift = math.log2(_rate(horizon, stretch, optimizer) / _rate(own, stretch, optimizer))
        at = curves[base].vertex + shift
        outside += not curve.places[0] - 1e-9 <= at[0] <= curve.places[-1] + 1e-9
        columns.append(np.maximum(losses_at(curve.places, curve.means, at, scale) - curve.lowest, 0.0))
    return np.stack(columns, axis=1), outside


def _compared(
    lost: Mapping[str, tuple[Floats, int]], sizes: Sequence[Size], num_seeds: int, optimizer: str
) -> Iterator[RuleLoss]:
    """The rules, the one that loses least first."""
    means = {rule: each.mean(1) for rule, (each, _) in lost.items()}
    order = sorted(means, key=lambda rule: float(means[rule][0]))
    for rule in order:
        each, outside = lost[rule]
        with np.errstate(invalid="ignore"):
            behind = interval(means[rule] - means[order[0]], num_seeds)
        worst = int(each[0].argmax())
        yield RuleLoss(
            rule=rule,
            words=_sde_words(optimizer) if rule == "sde" else PUBLISHED.get(rule, "measured here"),
            mean=float(means[rule][0]),
            interval=interval(means[rule], num_seeds),
            tied=rule != order[0] and math.isfinite(means[rule][0]) and not behind.low > 0,
            most=float(each[0, worst]),
            at=sizes[worst],
            outside=outside,
        )


def _sde_words(optimizer: str) -> str:
    spec = OPTIMIZERS.get(optimizer)
    if spec is not None and spec.fades:
        return PUBLISHED["none"]
    return Horizon("sde").words(Stretch(), spec.degree if spec else 0).partition(" = ")[0]


def _rate(horizon: Horizon, stretch: Stretch, optimizer: str) -> float:
    spec = OPTIMIZERS.get(optimizer)
    return horizon.rate(stretch, spec.degree if spec else 0, fades=bool(spec and spec.fades))


def _shifted(interval: SeedInterval, by: float) -> SeedInterval:
    return SeedInterval(interval.low + by, interval.high + by) if interval.known else UNKNOWN
