"""Can a plan be made: does every tensor have an initialisation and a learning rate at another size?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from theodolite.planning import Plan
from theodolite.planning.rows import fold_rows
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Finding, Value, all_of
from theodolite.surveying.section import PLANNABLE, Section
from theodolite.surveying.trials import LR, OPTIMIZER, trials_of


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH204."""
    trials = trials_of(context)
    yield planned([trials.planned(size) for size in trials.largest])


def planned(plans: Sequence[Plan]) -> Finding:
    """TH204, when plans were made: what they change."""
    rows: dict[str, dict[str, Value]] = {}
    for made in plans:
        base = made.base
        axis = "width" if made.size.width != base.width else "depth"
        factor = made.size.width // base.width if axis == "width" else made.size.depth // base.depth
        for pattern, members in fold_rows(made.trained, lambda row: (row.role, row.init.factor, row.lr)):
            row = members[0]
            entry = rows.setdefault(pattern, {"tensor": pattern, "role": row.role})
            entry[f"lr at {factor}× {axis}"] = row.lr / LR
    (first, *_) = plans
    trained = len(first.trained)
    return PLANNABLE.finding(
        "ok",
        f"A plan covers {all_of(trained, 'tensor').lower()} "
        f"({OPTIMIZER}, from {first.base} to {' and '.join(str(made.size) for made in plans)}).",
        rows=list(rows.values()),
    )


section = Section("Plan", 50, examine)
