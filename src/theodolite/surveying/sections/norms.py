"""Where the norms are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from theodolite.anatomy.names import ranges
from theodolite.anatomy.part import Anatomy, Branch
from theodolite.present.text import counted
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Level, Value, all_of
from theodolite.surveying.section import Section

FORMULAS = {
    "pre": "x + f(N x)",
    "post": "N(x + f(x))",
    "peri": "x + N f(N x)",
    "out": "x + N f(x)",
    "inner": "x + f(N g(x))",
    "none": "x + f(x)",
}
PLACEMENT = Check(
    "TH102",
    "Norm placement",
    "The placement of the norm decides what depth does to the residual stream. With a norm before or inside "
    "the branch (pre, inner), the stream grows with every block and later branches have less weight. With a "
    "norm at the end of the branch (peri, out), each branch adds a fixed amount. With a norm after the sum "
    "(post), the stream is normalised each time and gradients pass through every norm. Without norms, only "
    "the weight of the branches keeps the stream finite.",
)


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH102."""
    yield placement(context.anatomy)


def placement(anatomy: Anatomy) -> Finding:
    """TH102: the norm placement of each branch."""
    branches = anatomy.branches
    if not branches:
        return PLACEMENT.finding("ok", "The network has no residual branches, so there is no norm to place.")
    counts = Counter(branch.placement for branch in branches)
    level, remedy = _judge(set(counts))
    title = ""
    if len(counts) == 1:
        (kind,) = counts
        are = "is" if len(branches) == 1 else "are"
        sentence = f"{all_of(len(branches), 'branch')} {are} {_name(kind)}: {FORMULAS[kind]}."
    else:
        title = "Branches with different norm placements"
        listed = ", ".join(f"{count} {_name(kind)}" for kind, count in counts.most_common())
        sentence = f"The {counted(len(branches), 'branch')} have different norm placements: {listed}."
    return PLACEMENT.finding(level, sentence, title=title, remedy=remedy, rows=list(_rows(branches)))


def _judge(kinds: set[str]) -> tuple[Level, str]:
    if kinds == {"none"}:
        return "note", (
            "Add a norm at the start of each branch, or rely on a 1/L weight of the branches: without norms, "
            "standard initialisation fails with depth."
        )
    if "none" in kinds:
        return "warn", "Give the branches without a norm the norm that the others have."
    if "post" in kinds:
        return "note", (
            "Post-norm needs a warm-up, and the norm after the sum partly undoes a 1/L weight on a branch. "
            "For great depth, move the norm into the branch: x + f(N x)."
        )
    if len(kinds) > 1:
        return "note", "Check that the mixture is intended: a rule for depth treats all branches alike."
    return "ok", ""


def _rows(branches: tuple[Branch, ...]) -> Iterator[dict[str, Value]]:
    alike: dict[tuple[int, str, int], list[int]] = {}
    for branch in branches:
        alike.setdefault((branch.branch, branch.placement, branch.layers), []).append(branch.block)
    for (index, kind, layers), blocks in alike.items():
        yield {
            "blocks": ranges(blocks),
            "branch": index,
            "placement": kind,
            "computes": FORMULAS[kind],
            "layers": layers,
        }


def _name(kind: str) -> str:
    return "without a norm" if kind == "none" else f"{kind}-norm"


section = Section("Norms", 30, examine)
