"""A sweep for reading in a terminal: losses by size and value, optima, drift, what transfer costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from theodolite.sweeping.families import Best, Family
from theodolite.sweeping.optimum import Optimum
from theodolite.sweeping.scale import Scale
from theodolite.sweeping.sentences import BOUNDS, signed, verdicts
from theodolite.sweeping.transfer import Transfer

__all__ = ["bests_table", "column_text", "family_table", "lost_text", "number", "optimum_text"]
__all__ += ["settings_text", "signed"]

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


def optimum_text(optimum: Optimum, scale: Scale) -> str:
    """`2^-7.2 ± 0.1`, the interval being on the scale of the exponent; or a bound such as `≤ 2^-12`.

    `not known` where the interval is wider than the values that were tried.
    """
    if math.isnan(optimum.value):
        return "all diverged"
    if optimum.noisy:
        return "not known"
    if optimum.edge:
        return BOUNDS.get(optimum.edge, "") + scale.text(optimum.value)
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
    """`0.045 ± 0.007`, or a bound; nothing at the base itself, and where it has no optimum to transfer."""
    if transfer.size == family.base or math.isnan(transfer.lost):
        return ""
    if transfer.bound:
        return f"≥ {number(transfer.lost)}"
    reach = transfer.interval.high - transfer.lost
    if not math.isfinite(reach) or (transfer.lost == 0 and reach < 0.0005):
        return number(transfer.lost)
    return f"{number(transfer.lost)} ± {reach:.3f}"


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
