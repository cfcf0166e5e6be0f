"""Analyse the rows of a sweep: families of curves over sizes, their optima, and sentences about them."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from theodolite.core.size import Size
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Column, Table, cell, counted, signed
from theodolite.sweeping.curves import (
    LOSS,
    Criterion,
    Key,
    Optimum,
    Row,
    Scale,
    SweepCurve,
    curves_of,
    labels,
    resampled,
    resamples,
    scale_of,
    setting,
)
from theodolite.sweeping.horizons import HorizonFit, horizon_fit
from theodolite.sweeping.transfer import (
    Along,
    Change,
    OptimumDrift,
    Transfer,
    TransferReach,
    changes,
    drifts,
    reaches,
    transfers,
)

MOST_COLUMNS = 9
"""Most values in a table; if there are more, those around the optima are shown."""
BOUNDS = {"low": "≤ ", "high": "≥ "}
"""The sign of an optimum that is the first or the last value that was tried."""


@dataclass(frozen=True, eq=False)
class Family(Result):
    """Runs of one optimizer and one parameterization that differ in size, swept quantity and seed."""

    kind = "family of a sweep"

    optimizer: str
    parameterization: str
    others: Mapping[str, Any]
    """The values of further axes."""
    scale: Scale
    base: Size
    curves: tuple[SweepCurve, ...]
    """One for each size, from small to large."""
    optima: tuple[Optimum, ...]
    """Of each curve."""
    drifts: tuple[OptimumDrift, ...]
    transfers: tuple[Transfer, ...]
    changes: tuple[Change, ...]
    reaches: tuple[TransferReach, ...]
    criterion: Criterion = LOSS
    """What its curves show."""
    horizon: HorizonFit | None = None
    """How the best learning rate follows batch and tokens, if they were varied."""

    @property
    def title(self) -> str:
        """Which family it is."""
        further = [f"{name} {cell(value) or value}" for name, value in self.others.items()]
        return ", ".join([kind_of(self.optimizer, self.parameterization), *further])

    def optimum(self, size: Size) -> Optimum:
        """The optimum at a size."""
        return next(optimum for optimum in self.optima if optimum.size == size)

    def drift(self, along: Along) -> OptimumDrift | None:
        """How the optimum moves along width, depth, batch or tokens, if there are two sizes."""
        return next((drift for drift in self.drifts if drift.along == along), None)

    @functools.cached_property
    def labels(self) -> Mapping[Size, str]:
        """By size, what tells it from the others."""
        return labels([curve.size for curve in self.curves])

    @property
    def uncompared(self) -> tuple[Size, ...]:
        """Networks without a change: the base's best was not tried there, or none is on a line with them."""
        compared = {size for change in self.changes for size in (change.smaller, change.larger)}
        others = [curve.size for curve in self.curves if curve.size.network != self.base.network]
        return tuple(size for size in others if size not in compared)

    @property
    def never_worse(self) -> bool:
        """Are all sizes compared, and is none worse than the next smaller one by more than noise?"""
        return not self.uncompared and not any(change.worse or change.untold for change in self.changes)

    def blocks(self) -> Iterator[Block]:
        """A row for each size, then what the rows say together."""
        num = max((count for curve in self.curves for count in curve.num_seeds), default=0)
        from_base = f" from {self.base}" if self.parameterization == "plan" else ""
        about = f"{self.criterion.name} against {self.scale.label}, {counted(num, 'seed')}"
        yield Heading(f"{self.title}{from_base}: {about}")
        values = sorted({value for curve in self.curves for value in curve.values})
        bests = [values.index(optimum.best) for optimum in self.optima if not math.isnan(optimum.best)]
        around = sorted(range(len(values)), key=lambda k: min((abs(k - best) for best in bests), default=0))
        shown = [values[k] for k in sorted(around[:MOST_COLUMNS])]
        lost = {transfer.size: lost_text(transfer, self) for transfer in self.transfers}
        rows = []
        for curve, optimum in zip(self.curves, self.optima, strict=True):
            means = dict(zip(curve.values, curve.means, strict=True))
            texts = {
                value: self.criterion.text(mean) + " *"[value == optimum.best]
                for value, mean in means.items()
            }
            losses = [texts.get(value, "") for value in shown]
            best = optimum_text(optimum, self.scale, self.criterion)
            rows.append((self.labels[curve.size], *losses, best, lost.get(curve.size, "")))
        heads = [Column(_head(value, self.scale) + " ", side="right") for value in shown]
        yield Table(("size", *heads, "best", "lost"), rows)
        left_out = [f"({len(shown)} of {len(values)} values are shown)"] * (len(values) > len(shown))
        yield "\n".join([*left_out, *verdicts(self)])
        if self.horizon is not None and self.horizon.losses:
            yield self.horizon.table(self.criterion, self.labels)


def kind_of(optimizer: str, parameterization: str) -> str:
    """What runs of an optimizer and a parameterization are called; their own optimizer has no other name.

    >>> kind_of("adamw", "plan"), kind_of("own", "own")
    ('adamw, plan', 'own')
    """
    return parameterization if optimizer == parameterization else f"{optimizer}, {parameterization}"


def analyse(
    rows: Sequence[Row],
    *,
    base: Size,
    over: str = "lr",
    axes: Sequence[str] = (),
    criterion: Criterion = LOSS,
) -> tuple[Family, ...]:
    """The families in the rows of a ledger, in the order of their first run, plan before standard.

    Args:
        rows: as `Ledger.rows` gives them.
        base: the size from which optima are transferred.
        over: the swept quantity.
        axes: further ones: each combination of their values is a family.
        criterion: what runs are compared by.

    >>> rows = [
    ...     {"optimizer": "adamw", "parameterization": "plan", "width": width, "depth": 4, "seed": seed,
    ...      "lr": 2.0**e, "status": "finished", "held_out": (e + 7) ** 2 / width + 1 + seed / 100}
    ...     for width in (64, 128) for e in (-9, -8, -7, -6) for seed in range(3)
    ... ]
    >>> (family,) = analyse(rows, base=Size(64, 4))
    >>> round(math.log2(family.optimum(Size(128, 4)).value), 6)
    -7.0
    """
    scale = scale_of(over, {setting(row, over) for row in rows})
    found = curves_of(rows, over, axes, criterion)
    optimizers, combinations = ([*dict.fromkeys(key[index] for key in found)] for index in (0, 2))
    keys = sorted(found, key=lambda key: (optimizers.index(key[0]), combinations.index(key[2]), key[1]))
    rules = {row["parameterization"]: row.get("horizon", "none") for row in rows}
    rule_of = {key: json.loads(key[2]).get("horizon", rules[key[1]]) for key in keys}  # it may be an axis
    return tuple(_family(key, scale, base, found[key], criterion, rule_of[key]) for key in keys)


def _family(
    key: Key, scale: Scale, base: Size, curves: Sequence[SweepCurve], criterion: Criterion, rule: str
) -> Family:
    seeds = sorted({seed for curve in curves for seed in curve.seeds})
    weights = resamples(len(seeds))
    drawn = {curve.size: resampled(curve, scale, seeds, weights) for curve in curves}
    optimizer, parameterization, others = key
    moves = tuple(drifts(drawn))
    return Family(
        optimizer=optimizer,
        parameterization=parameterization,
        others=json.loads(others),
        scale=scale,
        base=base,
        curves=tuple(curves),
        optima=tuple(one.optimum for one in drawn.values()),
        drifts=moves,
        transfers=tuple(transfers(drawn, base, scale)),
        changes=tuple(changes(drawn, base)),
        reaches=tuple(reaches(drawn, scale)),
        criterion=criterion,
        horizon=horizon_fit(drawn, moves, base, scale, optimizer=optimizer, rule=rule)
        if scale.name == "lr"
        else None,
    )


def optimum_text(optimum: Optimum, scale: Scale, criterion: Criterion = LOSS) -> str:
    """`2^-7.2 ± 0.1`, the interval being on the scale of the exponent; or a bound such as `≤ 2^-12`.

    `not known` where the interval is wider than the values that were tried.
    """
    if math.isnan(optimum.value):
        return "all infinite" if criterion.metric else "all diverged"
    if optimum.noisy:
        return "not known"
    text = BOUNDS.get(optimum.edge, "") + scale.text(optimum.value)
    if not optimum.interval.known:
        return text
    return f"{text} ± {scale.place(optimum.interval.high) - scale.place(optimum.value):.2g}"


def lost_text(transfer: Transfer, family: Family) -> str:
    """`0.045 ± 0.007`, or a bound; empty at the base, and if that has no optimum to transfer."""
    if transfer.size == family.base or math.isnan(transfer.lost):
        return ""
    by = family.criterion
    if transfer.bound:
        return f"≥ {by.text(transfer.lost)}"
    reach = transfer.interval.high - transfer.lost
    if not math.isfinite(reach) or (transfer.lost == 0 and reach < by.least_shown):
        return by.text(transfer.lost)
    return f"{by.text(transfer.lost)} ± {by.text(reach)}"


def verdicts(family: Family) -> Iterator[str]:
    """What the curves of a family say together, a sentence each."""
    scale = family.scale
    for drift in family.drifts:
        yield _drift_sentence(drift, family)
    if family.horizon is not None:
        yield from family.horizon.sentences()
    source = next((optimum for optimum in family.optima if optimum.size == family.base), None)
    if source is not None and not math.isnan(source.best) and len(family.curves) > 1:
        yield from _transfer_sentence(family, source)
        if any(curve.size.network != family.base.network for curve in family.curves):
            yield _growth_sentence(family, scale.text(source.best))
    for reach in family.reaches:
        largest, where = (
            family.labels[reach.largest],
            f"is not found at any {'fewer tokens' if reach.along == 'tokens' else f'smaller {reach.along}'}",
        )
        if reach.smallest is not None:
            where = f"is found from {family.labels[reach.smallest]} on, along the {reach.along}"
        yield f"reach: the best {scale.name} of {largest} {where}."
    if any(optimum.edge in BOUNDS for optimum in family.optima):
        yield f"An optimum at the end of the values is a bound (≤ or ≥): try further values of {scale.name}."
    if any(optimum.noisy for optimum in family.optima):
        yield "An optimum is not known where its interval is wider than the range tried: add seeds."
    most = max((optimum.num_seeds for optimum in family.optima), default=0)
    if most == 1:
        yield "With one seed there are no intervals."
    if most == 2:
        yield "The intervals of two seeds are wide; a third seed narrows them much."


def movement_sentence(families: Sequence[Family], what: str, where: str) -> str:
    """How far the optimum of `what` moves in each family; claims no more than the drifts of `verdicts` do."""
    known, untold = [], []
    for family in families:
        told = [drift for drift in family.drifts if drift.told]
        if told:
            least = "at least " if any(drift.bounded for drift in family.drifts) else ""
            known.append(f"{least}{max(drift.movement for drift in told):.2f} ({family.title})")
        elif family.drifts:
            untold.append(family)
    if not known and not untold:
        return f"The best {what} at {where}."
    said = []
    if known:
        said.append(f"The best {what} moves by {', '.join(known)} {families[0].scale.unit} over the sizes.")
    for why in dict.fromkeys(_why_untold(family) for family in untold):
        titles = "; ".join(family.title for family in untold if _why_untold(family) == why)
        subject = "it" if said else f"the best {what}"
        said.append(f"How far {subject} moves over the sizes cannot be told ({titles}), as {why}.")
    return " ".join(said)


def _why_untold(family: Family) -> str:
    """Why the optima of a family do not give its drift."""
    bounds = ["bounds"] * any(optimum.edge for optimum in family.optima)
    unknown = ["not known"] * any(optimum.noisy for optimum in family.optima)
    return f"some optima are {' or '.join(bounds + unknown)}"


def _drift_sentence(drift: OptimumDrift, family: Family) -> str:
    span, unit, why = (
        f"from {family.labels[drift.sizes[0]]} to {family.labels[drift.sizes[-1]]}",
        family.scale.unit,
        _why_untold(family),
    )
    if not drift.told:
        return f"{drift.along}: how far the optimum moves {span} cannot be told, as {why}."
    moves = f"{drift.along}: the optimum moves by"
    if drift.bounded:
        return f"{moves} at least {drift.movement:.2f} {unit} {span}; {why}."
    around = f" ({signed(drift.interval.low)} to {signed(drift.interval.high)})"
    pace = f"{signed(drift.slope)}{around if drift.interval.known else ''} {unit} per doubling"
    return f"{moves} {pace}, a span of {drift.movement:.2f} {span}."


def _transfer_sentence(family: Family, source: Optimum) -> Iterator[str]:
    scale, base, by = family.scale, family.labels[family.base], family.criterion
    if source.edge in BOUNDS:
        bound = f"{BOUNDS[source.edge]}{scale.text(source.best)}"
        yield f"transfer: the optimum of {base} is only a bound ({bound}), so there is none to transfer."
        return
    if source.edge:
        yield f"transfer: {base} was run with one {scale.name}, which is no optimum to transfer."
        return
    others = [transfer for transfer in family.transfers if transfer.size != family.base]
    tried = {curve.size for curve in family.curves if source.best in curve.values}
    unusable = [optimum.size for optimum in family.optima if math.isnan(optimum.best)]
    diverging = [transfer.size for transfer in others if math.isinf(transfer.lost)]
    diverging += [size for size in unusable if size in tried]
    bounds = [transfer for transfer in others if transfer.bound]
    pieces = []
    if len(diverging) > 1:
        verb = "have no finite value" if by.metric else "diverge"
        pieces.append(f"{len(diverging)} sizes {verb}: {_listed(diverging, family)}")
    elif diverging:
        pieces.append(f"{family.labels[diverging[0]]} {'has no finite value' if by.metric else 'diverges'}")
    else:
        if known := [transfer for transfer in others if not transfer.bound]:
            pieces.append(_most_lost(known, family, of_all=not bounds and not unusable))
        if bounds:
            least = max(bounds, key=lambda transfer: transfer.lost)
            pieces.append(f"at least {by.text(least.lost)} is lost at {family.labels[least.size]}")
    if pieces:
        best = "the best tried" if source.noisy else "the best"
        yield f"transfer: with {scale.text(source.best)}, {best} at {base}, {'; '.join(pieces)}."


def _most_lost(known: Sequence[Transfer], family: Family, *, of_all: bool) -> str:
    by = family.criterion
    worst = max(known, key=lambda transfer: (transfer.lost, transfer.interpolated))
    most = by.text(worst.interpolated) if math.isfinite(worst.interpolated) else "inf"
    if worst.lost == 0:
        who = "no size" if of_all else f"no size whose {by.noun} is known"
        return f"{who} loses anything at the values tried, at most {most} between them"
    share = 100 * worst.lost / max(abs(worst.loss - worst.lost), 1e-12)
    ranked = "the most" if of_all else "the most of those known"
    lost = f"{by.text(worst.lost)} ({share:.1f} %; {most} between the points)"
    return f"{family.labels[worst.size]} loses {ranked}, {lost}"


def _growth_sentence(family: Family, value: str) -> str:
    by = family.criterion
    worse = [change for change in family.changes if change.worse]
    noisy = [change for change in family.changes if change.change >= by.least_shown and not change.worse]
    seeds = "the seeds" if any(change.interval.known for change in family.changes) else "one seed"
    if worse:
        said = f"larger is worse at {_steps(worse, family)}"
        said += f"; {seeds} cannot tell at {_steps(noisy, family)}" if noisy else ""
    elif noisy:
        said = f"the {by.noun} rises at {_steps(noisy, family)}, which {seeds} cannot tell from noise"
    elif not family.changes:
        said = "no size can be compared with a smaller one"
    elif seeds == "one seed":
        said = f"the {by.noun} never rises, as far as one seed can tell"
    else:
        said = "wider and deeper is never worse"
    if not family.uncompared:
        return f"growth: with {value}, {said}."
    best = family.optimum(family.base).best
    untried = all(best not in curve.values for curve in family.curves if curve.size in family.uncompared)
    why = f", where {value} was not tried" if untried else ""
    return f"growth: with {value}, {said}. Not compared: {_listed(family.uncompared, family)}{why}."


def _steps(found: Sequence[Change], family: Family) -> str:
    by = family.criterion
    infinite = "+inf" if by.metric else "diverges"
    return "; ".join(
        f"{family.labels[change.smaller]} → {family.labels[change.larger]} "
        + (f"+{by.text(change.change)}" if math.isfinite(change.change) else infinite)
        for change in found
    )


def _listed(sizes: Sequence[Size], family: Family) -> str:
    return ", ".join(family.labels[size] for size in sorted(sizes))


def _head(value: float, scale: Scale) -> str:
    """The exponent of a power of two (in quarters), else the value."""
    whole = scale.log and abs(math.log2(value) * 4 % 1) < 1e-9
    return scale.text(value).removeprefix("2^") if whole else f"{value:.3g}"
