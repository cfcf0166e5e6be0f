"""A sweep for reading in a terminal: losses by size and value, optima, drift, what transfer costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from theodolite.sweeping.drift import Drift
from theodolite.sweeping.families import Best, Family
from theodolite.sweeping.optimum import Optimum
from theodolite.sweeping.scale import Scale
from theodolite.sweeping.transfer import Reach, Transfer

MOST_COLUMNS = 9
"""Values that have room beside each other; of more, those around the optima are shown."""


def family_table(family: Family) -> str:
    """One family: a line for each size, then what the lines say together."""
    return "\n".join([_heading(family), *_lines(family), *verdicts(family)])


def bests_table(bests: Sequence[Best]) -> str:
    """The best over all axes, a line for each size."""
    cells = [["", "size", "best of all", "loss", "lost with the base's"]]
    for best in bests:
        lost = "not run" if math.isnan(best.lost) else number(best.lost)
        name = f"{best.optimizer}, {best.parameterization}"
        cells.append([name, str(best.size), settings_text(best), number(best.loss), lost])
    return "\n".join(_aligned(cells, "lllrr"))


def verdicts(family: Family) -> Iterator[str]:
    """What the curves of a family say together, a sentence each."""
    for drift in family.drifts:
        yield _drift_sentence(drift, family.scale)
    worst = max(
        (transfer for transfer in family.transfers if transfer.size != family.base),
        key=lambda transfer: (transfer.lost, transfer.interpolated),
        default=None,
    )
    if worst is not None:
        yield _transfer_sentence(worst, family)
    if family.changes:
        yield _growth_sentence(family)
    for reach in family.reaches:
        yield _reach_sentence(reach, family.scale)
    if any(optimum.edge in ("low", "high") for optimum in family.optima):
        name = family.scale.name
        yield f"An optimum at the end of the values is a bound (≤ or ≥): try further values of {name}."
    most = max((optimum.num_seeds for optimum in family.optima), default=0)
    if most == 1:
        yield "One seed has no spread: there are no intervals."
    if most == 2:
        yield "The intervals of two seeds are wide: a third one narrows them much."


def optimum_text(optimum: Optimum, scale: Scale) -> str:
    """`2^-7.2 ± 0.1`, the interval being on the scale of the exponent; or a bound such as `≤ 2^-12`."""
    if math.isnan(optimum.value):
        return "all diverged"
    if optimum.edge:
        return {"low": "≤ ", "high": "≥ ", "only": ""}[optimum.edge] + scale.text(optimum.value)
    if not optimum.interval.known:
        return scale.text(optimum.value)
    reach = scale.place(optimum.interval.high) - scale.place(optimum.value)
    return f"{scale.text(optimum.value)} ± {reach:.2g}"


def settings_text(best: Best) -> str:
    """`lr 0.01, weight_decay 0.1`."""
    return ", ".join(f"{name} {_plain(value)}" for name, value in best.settings.items())


def column_text(value: float, scale: Scale) -> str:
    """The exponent of a power of two (in quarters), else the value."""
    whole = scale.log and abs(math.log2(value) * 4 % 1) < 1e-9
    return scale.text(value).removeprefix("2^") if whole else f"{value:.3g}"


def number(value: float) -> str:
    """A loss: three digits behind the point, or what is wrong with it."""
    if math.isnan(value):
        return "–"
    return "diverged" if math.isinf(value) else f"{value:.3f}"


def _heading(family: Family) -> str:
    num = max((count for curve in family.curves for count in curve.num_seeds), default=0)
    from_base = f" from {family.base}" if family.parameterization == "plan" else ""
    seeds = "1 seed" if num == 1 else f"{num} seeds"
    return f"{family.title}{from_base}: held-out loss against {family.scale.label}, {seeds}"


def _lines(family: Family) -> list[str]:
    scale = family.scale
    shown = _shown(family)
    by_size = {transfer.size: transfer for transfer in family.transfers}
    cells = [["size", *(column_text(value, scale) + " " for value in shown), "best", "lost"]]
    for curve, optimum in zip(family.curves, family.optima, strict=True):
        means = dict(zip(curve.values, curve.means, strict=True))
        losses = [
            "" if value not in means else number(means[value]) + ("*" if value == optimum.best else " ")
            for value in shown
        ]
        lost = lost_text(by_size[curve.size], family) if curve.size in by_size else ""
        cells.append([str(curve.size), *losses, optimum_text(optimum, scale), lost])
    lines = _aligned(cells, "l" + "r" * len(shown) + "ll")
    everything = sorted({value for curve in family.curves for value in curve.values})
    if len(everything) > len(shown):
        lines.append(f"({len(shown)} of {len(everything)} values are shown)")
    return lines


def lost_text(transfer: Transfer, family: Family) -> str:
    """`0.045 ± 0.007`, or a bound; nothing at the base itself."""
    if transfer.size == family.base:
        return ""
    found = transfer.interval
    if transfer.beyond:
        return f"≥ {number(transfer.lost)}"
    if not (found.known and math.isfinite(found.high)):
        return number(transfer.lost)
    return f"{number(transfer.lost)} ± {found.high - transfer.lost:.3f}"


def _shown(family: Family) -> list[float]:
    """All values, or those around the optima."""
    values = sorted({value for curve in family.curves for value in curve.values})
    if len(values) <= MOST_COLUMNS:
        return values
    bests = {optimum.best for optimum in family.optima if not math.isnan(optimum.best)}
    far = {
        value: min((abs(values.index(value) - values.index(best)) for best in bests), default=0)
        for value in values
    }
    return sorted(sorted(values, key=lambda value: far[value])[:MOST_COLUMNS])


def _drift_sentence(drift: Drift, scale: Scale) -> str:
    around = ""
    if drift.interval.known:
        around = f" ({signed(drift.interval.low)} to {signed(drift.interval.high)})"
    first, last = drift.sizes[0], drift.sizes[-1]
    bounded = ", and more if the bounds are left behind" if drift.bounded else ""
    return (
        f"{drift.along}: the optimum moves by {signed(drift.slope)}{around} {scale.unit} per doubling, by "
        f"{drift.movement:.2f} in all from {first} to {last}{bounded}."
    )


def _transfer_sentence(worst: Transfer, family: Family) -> str:
    source = family.optimum(family.base)
    with_best = f"{family.scale.text(source.best)}, the best at {family.base}"
    if math.isinf(worst.lost):
        return f"transfer: with {with_best}, {worst.size} diverges."
    if worst.beyond:
        least = f"at least {worst.lost:.3f}, what it loses with {family.scale.text(worst.at)}"
        return f"transfer: with {with_best}, {worst.size} loses {least}."
    between = f"{worst.interpolated:.3f} between the points"
    if worst.lost == 0:
        return f"transfer: with {with_best}, no size loses anything, at most {between}."
    share = 100 * worst.lost / max(abs(worst.loss - worst.lost), 1e-12)
    most = f"{worst.lost:.3f} ({share:.1f} %; {between})"
    return f"transfer: with {with_best}, {worst.size} loses the most, {most}."


def _growth_sentence(family: Family) -> str:
    worse = [change for change in family.changes if change.worse]
    if not worse:
        most = max(family.changes, key=lambda change: change.change)
        if most.change <= 0:
            return "growth: with it, wider and deeper is never worse."
        where = f"{most.smaller} → {most.larger} {signed(most.change, 3)}"
        return f"growth: with it, wider and deeper is never worse beyond the noise of seeds ({where})."
    listed = "; ".join(
        f"{change.smaller} → {change.larger} {signed(change.change, 3)}"
        if math.isfinite(change.change)
        else f"{change.smaller} → {change.larger} diverges"
        for change in worse
    )
    return f"growth: with it, larger is worse at {listed}."


def _reach_sentence(reach: Reach, scale: Scale) -> str:
    what = f"reach: the best {scale.name} of {reach.largest}"
    if reach.smallest is None:
        return f"{what} is not found at any smaller {reach.along}."
    return f"{what} is found from {reach.smallest} on, along the {reach.along}."


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign, and none on zero.

    >>> signed(0.5), signed(-0.25), signed(-0.001)
    ('+0.50', '-0.25', '0.00')
    """
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


def _plain(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _aligned(cells: Sequence[Sequence[str]], sides: str) -> list[str]:
    kept = [column for column in range(len(sides)) if any(row[column].strip() for row in cells[1:])]
    widths = {column: max(len(row[column]) for row in cells) for column in kept}
    return [
        "  ".join(
            row[column].ljust(widths[column]) if sides[column] == "l" else row[column].rjust(widths[column])
            for column in kept
        ).rstrip()
        for row in cells
    ]
