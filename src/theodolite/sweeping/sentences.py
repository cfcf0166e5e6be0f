"""What the curves of a family say together, in sentences that claim no more than was run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from theodolite.core.size import Size
from theodolite.sweeping.drift import Drift
from theodolite.sweeping.families import Family
from theodolite.sweeping.optimum import Optimum
from theodolite.sweeping.scale import Scale
from theodolite.sweeping.transfer import Change, Reach, Transfer

BOUNDS = {"low": "≤ ", "high": "≥ "}
"""The sign of an optimum that is the first or the last value that was tried."""
SEEN = 0.0005
"""The least change of the loss that its three digits show."""


def verdicts(family: Family) -> Iterator[str]:
    """What the curves of a family say together, a sentence each."""
    for drift in family.drifts:
        yield _drift_sentence(drift, family)
    source = next((optimum for optimum in family.optima if optimum.size == family.base), None)
    if source is not None and not math.isnan(source.best) and len(family.curves) > 1:
        yield from _transfer_sentence(family, source)
        yield _growth_sentence(family, family.scale.text(source.best))
    for reach in family.reaches:
        yield _reach_sentence(reach, family.scale)
    if any(optimum.edge in BOUNDS for optimum in family.optima):
        name = family.scale.name
        yield f"An optimum at the end of the values is a bound (≤ or ≥): try further values of {name}."
    if any(optimum.noisy for optimum in family.optima):
        yield "An optimum is not known where its interval is wider than the range tried: add seeds."
    most = max((optimum.num_seeds for optimum in family.optima), default=0)
    if most == 1:
        yield "One seed has no spread: there are no intervals."
    if most == 2:
        yield "The intervals of two seeds are wide: a third one narrows them much."


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign, and none on zero.

    >>> signed(0.5), signed(-0.25), signed(-0.001)
    ('+0.50', '-0.25', '0.00')
    """
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text


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
    whys = {"bounds": any(optimum.edge for optimum in family.optima)}
    whys["not known"] = any(optimum.noisy for optimum in family.optima)
    return f"some optima are {' or '.join(why for why, holds in whys.items() if holds)}"


def _drift_sentence(drift: Drift, family: Family) -> str:
    first, last, scale = drift.sizes[0], drift.sizes[-1], family.scale
    if not drift.told:
        return (
            f"{drift.along}: how far the optimum moves from {first} to {last} cannot be told, as "
            f"{_why_untold(family)}."
        )
    if drift.bounded:
        return (
            f"{drift.along}: the optimum moves by at least {drift.movement:.2f} {scale.unit} from {first} to "
            f"{last}; {_why_untold(family)}."
        )
    around = ""
    if drift.interval.known:
        around = f" ({signed(drift.interval.low)} to {signed(drift.interval.high)})"
    return (
        f"{drift.along}: the optimum moves by {signed(drift.slope)}{around} {scale.unit} per doubling, by "
        f"{drift.movement:.2f} in all from {first} to {last}."
    )


def _transfer_sentence(family: Family, source: Optimum) -> Iterator[str]:
    scale, base = family.scale, family.base
    if source.edge in BOUNDS:
        bound = f"{BOUNDS[source.edge]}{scale.text(source.best)}"
        yield f"transfer: the optimum of {base} is a bound only ({bound}), so there is none to transfer."
        return
    if source.edge:
        yield f"transfer: {base} was run with one {scale.name}, which is no optimum to transfer."
        return
    others = [transfer for transfer in family.transfers if transfer.size != base]
    tried = {curve.size for curve in family.curves if source.best in curve.values}
    diverging = [transfer.size for transfer in others if math.isinf(transfer.lost)]
    unusable = [optimum.size for optimum in family.optima if math.isnan(optimum.best)]
    diverging += [size for size in unusable if size in tried]
    known = [transfer for transfer in others if not transfer.bound]
    bounds = [transfer for transfer in others if transfer.bound]
    pieces = []
    if diverging:
        many = f"{len(diverging)} sizes diverge: {_listed(diverging)}"
        pieces.append(many if len(diverging) > 1 else f"{diverging[0]} diverges")
    elif known:
        pieces.append(_most_lost(known, of_all=not bounds and not unusable))
    if bounds and not diverging:
        least = max(bounds, key=lambda transfer: transfer.lost)
        pieces.append(f"at least {least.lost:.3f} is lost at {least.size}")
    if pieces:
        best = "the best tried" if source.noisy else "the best"
        yield f"transfer: with {scale.text(source.best)}, {best} at {base}, {'; '.join(pieces)}."


def _most_lost(known: Sequence[Transfer], *, of_all: bool) -> str:
    worst = max(known, key=lambda transfer: (transfer.lost, transfer.interpolated))
    between = f"{worst.interpolated:.3f} between the points"
    if worst.lost == 0:
        return f"no size {'' if of_all else 'of which it is known '}loses anything, at most {between}"
    share = 100 * worst.lost / max(abs(worst.loss - worst.lost), 1e-12)
    most = "the most" if of_all else "the most of those known"
    return f"{worst.size} loses {most}, {worst.lost:.3f} ({share:.1f} %; {between})"


def _growth_sentence(family: Family, value: str) -> str:
    worse = [change for change in family.changes if change.worse]
    noisy = [change for change in family.changes if change.change >= SEEN and not change.worse]
    seeds = "one seed" if all(not change.interval.known for change in family.changes) else "the seeds"
    if worse:
        said = f"larger is worse at {_steps(worse)}"
        said += f"; {seeds} cannot tell at {_steps(noisy)}" if noisy else ""
    elif noisy:
        said = f"the loss rises at {_steps(noisy)}, which {seeds} cannot tell from noise"
    elif not family.changes:
        said = "no size can be compared with a smaller one"
    elif seeds == "one seed":
        said = "the loss never rises, as far as one seed can tell"
    else:
        said = "wider and deeper is never worse"
    return f"growth: with {value}, {said}.{_left_out(family, value)}"


def _left_out(family: Family, value: str) -> str:
    """The sizes that a sentence on growth does not cover, and why."""
    if not family.uncompared:
        return ""
    best = family.optimum(family.base).best
    untried = all(best not in curve.values for curve in family.curves if curve.size in family.uncompared)
    why = f", where {value} was not tried" if untried else ""
    return f" Not compared: {_listed(family.uncompared)}{why}."


def _steps(found: Sequence[Change]) -> str:
    return "; ".join(
        f"{change.smaller} → {change.larger} {signed(change.change, 3)}"
        if math.isfinite(change.change)
        else f"{change.smaller} → {change.larger} diverges"
        for change in found
    )


def _reach_sentence(reach: Reach, scale: Scale) -> str:
    what = f"reach: the best {scale.name} of {reach.largest}"
    if reach.smallest is None:
        return f"{what} is not found at any smaller {reach.along}."
    return f"{what} is found from {reach.smallest} on, along the {reach.along}."


def _listed(sizes: Sequence[Size]) -> str:
    return ", ".join(map(str, sorted(sizes)))
