"""Would one more block lower the loss, to first order, and where?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from theodolite.core.errors import UseError
from theodolite.present.figure import Figure
from theodolite.present.text import counted, listed
from theodolite.probes.signal.result import PointSignal, Signal
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value, rounded, times, with_minus
from theodolite.surveying.section import Section, measuring
from theodolite.surveying.sections.depth.measurement import (
    EXAMPLES,
    FEWEST_JUDGES,
    PLACE,
    Distinct,
    SignalMeasurement,
    draw_judges,
    measure,
    train_briefly,
)

WHY = (
    "A new block that ends in zeros changes nothing, and the gradient with respect to these zeros says how "
    "fast the loss falls when they start to move. If that is no more than noise on held-out examples, no "
    "block helps at first. It says no more than that: in the two networks of the growing study, the point "
    "with the largest gain was not where a trained block helped most, and for the same compute two more "
    "blocks did not beat further training without them."
)
HELPS = Check("TH601", "One more block", WHY)
NO_HELP = Check("TH602", "No block is seen to help", WHY)
LEAK = 0.01
"""Share of held-out examples that may be training examples by chance, such as duplicate images."""


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH601 or TH602, or TH603 if it cannot be measured."""
    if not context.anatomy.branches:
        yield PLACE.finding("ok", "The network has no residual branches, so no block can be inserted.")
        return
    with measuring(PLACE, (UseError, RuntimeError)):  # of autograd, and of memory
        network = train_briefly(context)
        judges = draw_judges(context, network)
        if context.workload.held_out is not None and judges.barred > LEAK * judges.drawn:
            yield leaked(judges)
            if judges.examples < FEWEST_JUDGES:
                return
        found = measure(context, network, judges)
    yield one_more(found)


def one_more(found: SignalMeasurement) -> Finding:
    """TH601 if a point has a gain above its noise, else TH602."""
    signal = found.signal
    points = counted(len(signal.points), "point")
    best = max(signal.above or signal.points, key=lambda one: one.gain)
    gain = with_minus(f"{rounded(best.gain)} ± {times(best.error)} per unit of step")
    noted = f" ({'; '.join(signal.notes)}.)" if signal.notes else ""
    numbers, rows, figures = found.setting | _numbers(signal), list(_rows(signal)), [_figure(signal)]
    if signal.deepest:
        return NO_HELP.finding(
            "note",
            f"{found.where} a new block lowers the held-out loss by more than its noise at none of {points}. "
            f"The largest gain is {gain}, at {best.name}; {signal.threshold:.2g} standard errors are needed."
            + noted,
            remedy=f"{signal.judged_on} examples may be too few: survey again with --deep. For a trained "
            "network, theodolite grow tells more, on your data and with a certificate.",
            numbers=numbers,
            rows=rows,
            figures=figures,
        )
    where = f"at {len(signal.above)} of {points}" if len(signal.points) > 1 else "at the only point"
    return HELPS.finding(
        "ok" if found.network.learns else "note",
        f"{found.where} a new block lowers the held-out loss, to first order, {where}, most at {best.name}: "
        f"by {gain}{_by_branch(best)}. How much a trained block helps is another question.{noted}",
        remedy="Ask again when the network is trained: theodolite grow inserts a block where it helps, and "
        "certifies on held-out examples by how much the loss falls.",
        numbers=numbers,
        rows=rows,
        figures=figures,
    )


def leaked(judges: Distinct) -> Finding:
    """TH603: held-out examples that are also training examples."""
    return EXAMPLES.finding(
        "warn",
        f"{judges.barred} of {judges.drawn} held-out examples are also in the first few training batches.",
        title="Held-out examples in the training data",
        remedy="Give held_out(seed, step) data of its own, split off before batches are drawn.",
        numbers={"held-out examples": judges.drawn, "trained on": judges.barred},
    )


def _by_branch(best: PointSignal) -> str:
    """The share of each branch in the gain, if there are several."""
    if len(best.shares) < 2 or best.gain <= 0:
        return ""
    shares = [f"{share / best.gain:.0%} by branch {at}" for at, share in enumerate(best.shares)]
    return f" ({with_minus(listed(shares))})"


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
