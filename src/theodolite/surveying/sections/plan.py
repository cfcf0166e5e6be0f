"""Can a plan be made: does every tensor have an initialisation and a learning rate at another size?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from theodolite.core.errors import UseError
from theodolite.planning import Plan
from theodolite.planning.rows import fold_rows
from theodolite.surveying.finding import Evidence, Finding, Value
from theodolite.surveying.section import Section
from theodolite.surveying.site import Site
from theodolite.surveying.trials import LR, OPTIMIZER, Trials, Unplannable, Untried
from theodolite.surveying.wording import all_of, listed

WHY = (
    "A plan absorbs the multiplier of every layer into its initialisation, learning rate and decay, and "
    "leaves the forward pass alone. It has to know which tensors end a branch, which counterpart each has at "
    "base size, and where a tied embedding is read out. What it cannot place it does not scale by guesswork."
)
TITLE = "A plan for every tensor"


def examine(site: Site) -> Iterator[Finding]:
    """TH204."""
    try:
        trials = site.trials
    except Untried as error:
        yield untried(error)
    else:
        yield planned([trials.planned(size) for size in trials.largest])


def planned(plans: list[Plan]) -> Finding:
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
    return Finding(
        "TH204",
        "ok",
        TITLE,
        f"{all_of(trained, 'tensor')} {'has' if trained == 1 else 'have'} a place in a plan "
        f"({OPTIMIZER}, from {first.base} to {' and '.join(str(made.size) for made in plans)}).",
        why=WHY,
        evidence=Evidence(rows=tuple(rows.values())),
    )


def untried(error: Untried) -> Finding:
    """TH204: no plan can be made, or no network is small enough to be tried."""
    if isinstance(error, Unplannable):
        return Finding(
            "TH204",
            "fail",
            "Tensors that a plan cannot scale",
            f"No plan can be made for this network. {' '.join(str(error).split())}.",
            why=WHY,
            remedy="Change what the message names. Until then the checks that train are missing.",
        )
    return Finding(
        "TH204",
        "note",
        TITLE,
        f"No small network could be tried: {' '.join(str(error).split())}. "
        "The checks that train under a plan are missing.",
        why=WHY,
        remedy="Survey the network at a smaller size, or with --deep, which tries larger ones.",
    )


def on_trials(finding: Finding, trials: Trials) -> Finding:
    """The finding with what it was measured on, and a sentence on what was left out."""
    said = finding.sentence
    if trials.left_out:
        said += f" {listed([str(size) for size in trials.left_out])} would take too much work and "
        said += f"{'was' if len(trials.left_out) == 1 else 'were'} left out."
    evidence = dataclasses.replace(finding.evidence, numbers={**finding.evidence.numbers, **trials.ground})
    return dataclasses.replace(finding, sentence=said, evidence=evidence)


def unmeasured(code: str, title: str, why: str, error: UseError) -> Finding:
    """A check that a network of another size did not allow."""
    return Finding(
        code,
        "note",
        title,
        f"This could not be measured: {' '.join(str(error).split())}.",
        why=why,
        remedy="Mend what the message names, if a larger network is to be trained at all.",
    )


section = Section("Plan", 50, examine)
