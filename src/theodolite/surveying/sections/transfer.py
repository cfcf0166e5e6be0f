"""Does the best learning rate of a small network stay the best when it grows, without a plan and with one?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.present.figure import signed
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.rates import Move, Rates, Untold, moves, seek
from theodolite.surveying.section import Section
from theodolite.surveying.sections.plan import unmeasured, untried
from theodolite.surveying.site import Site
from theodolite.surveying.trials import OPTIMIZER, Untried
from theodolite.surveying.wording import listed
from theodolite.sweeping.families import Family, optimum_text
from theodolite.sweeping.figures import figures
from theodolite.sweeping.transfer import Along

TITLES: Mapping[Level, str] = {
    "ok": "A learning rate that transfers",
    "note": "A learning rate that transfers under a plan only",
    "warn": "A learning rate that moves under a plan too",
}
UNTOLD = "Learning-rate transfer"
WHY = (
    "A learning rate that is tuned on a small network is worth its price if it is the best one of the large "
    "network too. Where the optimum moves, the large network is trained with a rate that is several times "
    "too large or too small, and tuning at its own size is what nobody can afford."
)
SWEEP = "theodolite sweep: more steps and seeds, and sizes nearer to yours"


def examine(site: Site) -> Iterator[Finding]:
    """TH401."""
    try:
        trials = site.trials
    except Untried as error:
        yield untried(error)
    else:
        try:
            rates = seek(trials)
        except Untold as error:
            yield untold(error)
        except UseError as error:
            yield unmeasured("TH401", UNTOLD, WHY, error)
        else:
            yield rate_transfers(rates)


def rate_transfers(rates: Rates) -> Finding:
    """TH401: where the optimum lies at each size, and what it costs to take over that of the base."""
    planned, standard = (moves(family, rates.progress) for family in (rates.plan, rates.standard))
    moved, moved_without = ([move for move in some if move.counts] for some in (planned, standard))
    surely = [move for move in moved if move.sure]
    base = rates.plan.base
    title, remedy = "", ""
    level: Level
    if surely:
        level = "warn"
        said = [_moves(rates.plan, surely, "Under a plan the best learning rate moves")]
        remedy = f"{_tune_larger(rates.plan)}Look at TH201, TH202 and TH203, and confirm it with {SWEEP}."
    elif moved:
        level, title = "note", UNTOLD
        said = [
            _moves(rates.plan, moved, "Under a plan the best learning rate seems to move"),
            "The seeds differ by as much, so that this may be noise.",
        ]
        remedy = f"Find out with --deep, or {SWEEP}."
    elif moved_without:
        level = "note"
        said = [_stays(rates.plan, planned, "Under a plan the best learning rate")]
        remedy = (
            f"Tune the learning rate at {base}, and train larger networks with it under "
            f"th.plan(build, inputs, size=…, base=Size({base.width}, {base.depth}), lr=…)."
        )
    else:
        level = "ok"
        said = [_stays(rates.plan, planned, "Under a plan the best learning rate")]
    if moved_without:
        said.append(_moves(rates.standard, moved_without, "Without one it moves"))
    else:
        said.append(_stays(rates.standard, standard, "Without one it"))
    num_seeds = rates.plan.optimum(base).num_seeds
    numbers: dict[str, Value] = {
        "optimizer": OPTIMIZER,
        "steps": rates.steps,
        "seeds": num_seeds,
        "targets in a batch": rates.targets,
    }
    evidence = Evidence(numbers, tuple(_rows(rates)), figures((rates.plan, rates.standard)))
    return Finding(
        "TH401", level, title or TITLES[level], " ".join(said), why=WHY, remedy=remedy, evidence=evidence
    )


def untold(error: Untold) -> Finding:
    """TH401, where a few small runs cannot tell."""
    return Finding(
        "TH401",
        "note",
        UNTOLD,
        f"Whether the learning rate transfers cannot be told from a few small runs: {error}.",
        why=WHY,
        remedy=f"Find out with {SWEEP}.",
    )


def _stays(family: Family, found: Sequence[Move], what: str) -> str:
    """How far it moves at most, and what that costs."""
    farthest = max(abs(move.octaves) for move in found)
    most = max(move.share for move in found)
    cost = f"at most {_percent(most)} of the progress" if most >= 0.0005 else "nothing"
    near = "at" if farthest < 0.05 else f"within {farthest:.1f} octaves of"
    return (
        f"{what} stays {near} the {_value(family, family.base)} of {family.base} up to {_ends(family)}, "
        f"which with that of {family.base} lose {cost}."
    )


def _moves(family: Family, found: Sequence[Move], what: str) -> str:
    """The worst of the moves in words: one that diverges, or the farthest."""
    worst = max(found, key=lambda move: (math.isinf(move.share), math.isnan(move.octaves), abs(move.octaves)))
    if math.isnan(worst.octaves):
        return f"{what} out of reach: {worst.size} diverges at all that were tried."
    here, there = (_value(family, size) for size in (family.base, worst.size))
    axis: Along = "width" if worst.size.width != family.base.width else "depth"
    drift = family.drift(axis)
    pace = ""
    if drift is not None and not drift.bounded:
        pace = f", {signed(drift.slope)} octaves per doubling of the {axis}"
    lost = "diverges" if math.isinf(worst.share) else f"loses {_percent(worst.share)} of the progress"
    return (
        f"{what} from {here} at {family.base} to {there} at {worst.size}{pace}; with that of "
        f"{family.base} it {lost}."
    )


def _tune_larger(family: Family) -> str:
    """From where on it stays, if there is such a size."""
    found = [reach for reach in family.reaches if reach.smallest not in (None, family.base)]
    said = [f"From {reach.smallest} on it stays up to {reach.largest}: tune there. " for reach in found]
    return "".join(said)


def _ends(family: Family) -> str:
    """The largest size along each axis."""
    base, sizes = family.base, [curve.size for curve in family.curves]
    ends: list[Size] = [
        max(size for size in sizes if size.depth == base.depth),
        max(size for size in sizes if size.width == base.width),
    ]
    return listed([str(size) for size in ends if size != base])


def _rows(rates: Rates) -> Iterator[Mapping[str, Value]]:
    """The optimum at every size, and what the best value of the base loses there."""
    families = {"plan": rates.plan, "standard": rates.standard}
    lost = {
        how: {move.size: move.share for move in moves(family, rates.progress)}
        for how, family in families.items()
    }
    for size in (curve.size for curve in rates.plan.curves):
        row: dict[str, Value] = {"size": str(size)}
        for how, family in families.items():
            optimum = family.optimum(size)
            row[f"best, {how}"] = _best(family, size)
            row[f"loss, {how}"] = round(optimum.loss, 3) if math.isfinite(optimum.loss) else None
            row[f"lost, {how}"] = _percent(lost[how][size]) if size in lost[how] else None
        yield row


def _best(family: Family, size: Size) -> str:
    return optimum_text(family.optimum(size), family.scale)


def _value(family: Family, size: Size) -> str:
    """The optimum with its interval, where that says something; else without."""
    optimum = family.optimum(size)
    return family.scale.text(optimum.value) if optimum.noisy else optimum_text(optimum, family.scale)


def _percent(share: float) -> str:
    return "diverges" if math.isinf(share) else f"{100 * share:.1f} %"


section = Section("Learning-rate transfer", 75, examine, measures=True)
