"""Would one more block still lower the loss, to first order, and where?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from theodolite.core.building import in_one_line
from theodolite.core.errors import UseError
from theodolite.present.figure import Figure
from theodolite.probes.signal.result import PointSignal, Signal
from theodolite.surveying.budget import TooLong
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.section import Section
from theodolite.surveying.sections.depth.look import (
    FEWEST_JUDGES,
    Look,
    NoPlace,
    Sample,
    TooFew,
    draw_judges,
    find_ground,
    look_at,
)
from theodolite.surveying.sections.plan import untried
from theodolite.surveying.site import Site
from theodolite.surveying.trials import Untried
from theodolite.surveying.wording import counted, listed, plain, times, with_minus

TITLES = {
    "TH601": "One more block",
    "TH602": "No block is seen to help",
    "TH603": "Where a block could be inserted",
}
WHY = (
    "A new block that ends in zeros changes nothing, and the gradient by these zeros says how fast the loss "
    "falls when they begin to move. Where that is no more than noise on held-out units, no block helps at "
    "first. More it does not say: in the two networks that the study of growing looked at, the largest gain "
    "was not where a block helped most once it was trained, and for the same compute two more blocks did not "
    "beat training on without them."
)
WHY_PLACE = (
    "A trained network can be made deeper if its blocks stand in a list: a copy of a block, closed so that "
    "it adds nothing, goes between two of them, and the function stays. A network that is built anew at "
    "another depth does not need it."
)
WHY_UNITS = (
    "Whether a loss falls is told by its spread over units that are independent: sequences or images, each "
    "drawn by itself, none of them trained on. A unit that comes twice makes the error too small, and on "
    "units that it was trained on any network looks better than it is."
)
LEAK = 0.01
"""Of the held-out units: so many may be trained on by chance, as images that a data set has twice."""


def examine(site: Site) -> Iterator[Finding]:
    """TH601 or TH602, or TH603 where it cannot be asked."""
    if not site.anatomy.branches:
        said = "There are no residual branches, so there is no place for a block that adds nothing."
        yield Finding("TH603", "ok", TITLES["TH603"], said, why=WHY_PLACE)
        return
    try:
        ground = find_ground(site)
        judges = draw_judges(site, ground)
        if site.workload.held_out is not None and judges.barred > LEAK * judges.drawn:
            yield leaked(judges)
            if judges.units < FEWEST_JUDGES:
                return
        yield one_more(look_at(site, ground, judges))
    except Untried as error:
        yield untried(error)
    except (UseError, RuntimeError) as error:  # of autograd, and of memory
        yield unasked(error)


def one_more(look: Look) -> Finding:
    """TH601 if a point has a gain above its noise, else TH602."""
    found = look.signal
    points = counted(len(found.points), "point")
    best = max(found.above or found.points, key=lambda one: one.gain)
    gain = with_minus(f"{plain(best.gain)} ± {times(best.error)} for a unit of step")
    evidence = Evidence(look.numbers | _numbers(found), tuple(_rows(found)), (_figure(found),))
    if found.deepest:
        return Finding(
            "TH602",
            "note",
            TITLES["TH602"],
            f"{look.where} a new block lowers the held-out loss by more than its noise at none of {points}. "
            f"The largest gain is {gain}, at {best.name}; above noise is {found.threshold:.2g} standard "
            f"errors.{_noted(found)}",
            why=WHY,
            remedy=f"{found.judged_on} units may be too few to see it: ask again with --deep. Of a network "
            "that is trained, theodolite grow tells more, on your data and with a certificate.",
            evidence=evidence,
        )
    where = f"at {len(found.above)} of {points}" if len(found.points) > 1 else "at the only point"
    level: Level = "ok" if look.ground.learns else "note"
    return Finding(
        "TH601",
        level,
        TITLES["TH601"],
        f"{look.where} a new block lowers the held-out loss, to first order, {where}, most at {best.name}: "
        f"by {gain}{_by_branch(best)}. What training it brings is another question.{_noted(found)}",
        why=WHY,
        remedy="Ask again when the network is trained: theodolite grow inserts a block where it helps, and "
        "certifies on held-out units by how much the loss falls.",
        evidence=evidence,
    )


def leaked(judges: Sample) -> Finding:
    """TH603: held-out units that were trained on."""
    return Finding(
        "TH603",
        "warn",
        "Held-out units that are trained on",
        f"Of {judges.drawn} held-out units {judges.barred} are among those of the first few batches that are "
        "trained on.",
        why=WHY_UNITS,
        remedy="Give held_out(seed, step) data of its own, cut off before batches are drawn.",
        evidence=Evidence({"held-out units": judges.drawn, "trained on": judges.barred}),
    )


def unasked(error: Exception) -> Finding:
    """TH603: what keeps it from being asked."""
    text = (str(error) if isinstance(error, UseError) else in_one_line(error)).strip()
    said = f"{' '.join(text.split()).rstrip('.')}."
    if isinstance(error, NoPlace):
        return Finding(
            "TH603",
            "note",
            "No place for a block",
            f"No block can be inserted into this network: {said}",
            why=WHY_PLACE,
            remedy="If a trained network is to be made deeper: keep its blocks in an nn.ModuleList or "
            "nn.Sequential, and let each return the stream with what it adds.",
        )
    if isinstance(error, TooFew):
        return Finding(
            "TH603",
            "note",
            "Too few independent units",
            f"Whether a block would help cannot be told: {said}",
            why=WHY_UNITS,
            remedy="Let batch(seed, step) and held_out(seed, step) draw other units at every step.",
        )
    return Finding(
        "TH603",
        "note",
        TITLES["TH603"],
        f"This could not be measured: {said}",
        why=WHY_PLACE,
        remedy="Survey the network at a smaller size, or with --deep, which may take longer."
        if isinstance(error, TooLong)
        else "Mend what the message names, or leave the section out: skip=['depth'].",
    )


def _by_branch(best: PointSignal) -> str:
    """Which part of a gain is of which branch, if it has several."""
    if len(best.shares) < 2 or best.gain <= 0:
        return ""
    shares = [f"{share / best.gain:.0%} by branch {at}" for at, share in enumerate(best.shares)]
    return f" ({with_minus(listed(shares))})"


def _noted(found: Signal) -> str:
    """What could not be measured as it should be, as a sentence to follow another."""
    return f" ({'; '.join(found.notes)}.)" if found.notes else ""


def _numbers(found: Signal) -> dict[str, Value]:
    bounds = [one.alignment_bound for one in found.points]
    numbers: dict[str, Value] = {
        "points above noise": f"{len(found.above)} of {len(found.points)}",
        "noise, in standard errors": found.threshold,
        "two samples do not align, at most": f"{min(bounds):.2g} to {max(bounds):.2g}",
    }
    return numbers | ({"places for no block": listed(list(found.left))} if found.left else {})


def _rows(found: Signal) -> Iterator[dict[str, Value]]:
    branches = max(len(one.shares) for one in found.points)
    for one in found.points:
        row: dict[str, Value] = {
            "point": one.name,
            "gain": one.gain,
            "±": one.error,
            "above": "unsure" if one.unsure else one in found.above,
        }
        for branch in range(branches if branches > 1 else 0):
            row[f"branch {branch}"] = one.shares[branch] if branch < len(one.shares) else None
        yield row | {
            "unaligned": one.alignment_bound,
            "C": one.covariance.effective,
            "chance": one.covariance.chance,
        }


def _figure(found: Signal) -> Figure:
    """Without the covariance matrix, which would be most of the page."""
    drawn = found.figure()
    return dataclasses.replace(
        drawn, panels=tuple(one for one in drawn.panels if one.data[0]["type"] != "heatmap")
    )


section = Section("Depth", 78, examine, measures=True)
