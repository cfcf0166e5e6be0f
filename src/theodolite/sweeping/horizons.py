"""How the best learning rate follows batch and tokens: measured exponents, and what each rule would lose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.horizon import Horizon, Stretch
from theodolite.present.text import Column, Table, signed
from theodolite.sweeping.curves import UNKNOWN, Criterion, Resampled, Scale, SeedInterval, loss_at
from theodolite.sweeping.transfer import OptimumDrift

PUBLISHED: Mapping[str, str] = {
    "none": "the same rate for all",
    "sde": "√(m_B/m_D)",
    "power(0, 0.5)": "√batch alone",
    "power(0.28, 0.5)": "√batch, tokens^−0.28",
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
        if self.losses:
            best = self.losses[0]
            yield f"of the rules compared, {best.rule} loses least."

    def table(self, criterion: Criterion, labels: Mapping[Size, str]) -> Table:
        """What each rule loses."""
        rows = [
            (
                one.rule,
                one.words,
                one.mean,
                one.most,
                labels[one.at],
                one.outside,
            )
            for one in self.losses
        ]
        lost = [Column(name, show=criterion.text) for name in ("lost, mean", "most")]
        return Table(("rule", "learning rate", *lost, "at", "beyond the rates"), rows)


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
    losses = [_rule_loss(Horizon.of(one), own, curves, base, others, scale, optimizer) for one in rules]
    return HorizonFit(exponents, tuple(sorted(losses, key=lambda one: one.mean)), rule)


def _rule_loss(
    horizon: Horizon,
    own: Horizon,
    curves: Mapping[Size, Resampled],
    base: Size,
    sizes: Sequence[Size],
    scale: Scale,
    optimizer: str,
) -> RuleLoss:
    start, lost, outside = float(curves[base].vertex[0]), {}, 0
    for size in sizes:
        stretch, curve = Stretch.between(base, size), curves[size]
        place = start + math.log2(_rate(horizon, stretch, optimizer) / _rate(own, stretch, optimizer))
        outside += not curve.places[0] - 1e-9 <= place <= curve.places[-1] + 1e-9
        at = loss_at(curve.places, curve.means[0], place, scale)
        lost[size] = max(0.0, at - float(curve.lowest[0]))
    worst = max(lost, key=lambda size: lost[size])
    words = PUBLISHED.get(str(horizon), "measured here")
    if horizon.rates == "sde":
        words = _sde_words(optimizer)
    return RuleLoss(str(horizon), words, sum(lost.values()) / len(lost), lost[worst], worst, outside)


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
