"""A Signal as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from theodolite.probes.signal.signal import PointSignal, Signal

COLUMNS = ("‖M‖²", "gain", "±", "gain/±", "precond.", "±", "‖v‖", "aligned", "C", "chance")


def table(signal: Signal) -> str:
    """A row for each point, then what they say together."""
    width = max(5, *(len(one.name) for one in signal.points)) + 2
    head = "".join(f"{name:>10}" for name in COLUMNS)
    lines = [
        f"loss {signal.loss:.4f}; directions from {signal.estimated_on} units, judged by {signal.judged_on}",
        "",
        f"{'point':<{width}}{head}",
        *(_row(one, width) + _mark(one, signal) for one in signal.points),
        "",
        *_said(signal),
    ]
    return "\n".join(lines)


def _row(one: PointSignal, width: int) -> str:
    cells = (
        one.norm**2,
        one.gain,
        one.error,
        one.significance,
        one.preconditioned,
        one.preconditioned_error,
        one.gradient,
        one.alignment,
        one.covariance.effective,
        one.covariance.chance,
    )
    return f"{one.name:<{width}}" + "".join(f"{_cell(cell):>10}" for cell in cells)


def _mark(one: PointSignal, signal: Signal) -> str:
    if one.significance <= signal.threshold:
        return ""
    return " ?" if one.unsure else " *"


def _said(signal: Signal) -> Iterator[str]:
    best = signal.best
    needed = f"{signal.threshold:.2f} standard errors (δ = {signal.delta:g} over {len(signal.points)} points)"
    if signal.deepest:
        yield (
            f"deepest   no point has a gain above its noise, {needed}: to first order no block helps, as far "
            f"as {signal.judged_on} units can tell"
        )
    else:
        yield (
            f"signal    {len(signal.above)} of {len(signal.points)} points (*) have a gain above "
            f"{needed}; the largest is at {best.name}"
        )
    shares = " and ".join(f"{_share(one, best.gain)} by branch {at}" for at, one in enumerate(best.shares))
    yield f"branches  at {best.name} the gain is {shares}"
    bounds = [one.alignment_bound for one in signal.points]
    yield (
        "aligned   two samples' mean gradients fail to align with a probability of at most "
        f"{min(bounds):.2g} to {max(bounds):.2g} (Theorem 5 with estimates: a diagnostic; 1 says nothing)"
    )
    yield from (f"left      {name}: {reason}" for name, reason in signal.left.items())
    yield from (f"note      {note}" for note in signal.notes)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 and math.isfinite(part / whole) else f"{part:.3g}"


def _cell(value: float) -> str:
    if math.isnan(value):
        return ""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:.4g}"
