"""Where the norms stand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from theodolite.anatomy.names import ranges
from theodolite.anatomy.part import Anatomy, Branch
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.section import Section
from theodolite.surveying.site import Site
from theodolite.surveying.wording import all_of, counted

FORMULAS = {
    "pre": "x + f(N x)",
    "post": "N(x + f(x))",
    "peri": "x + N f(N x)",
    "out": "x + N f(x)",
    "inner": "x + f(N g(x))",
    "none": "x + f(x)",
}
WHY_PLACEMENT = (
    "The norm's place decides what depth does to the stream. Before the branch or inside it (pre, inner), "
    "the stream grows with every block and later branches count for less. After it (peri, out), each branch "
    "adds a fixed amount. After the sum (post), the stream is renewed each time and gradients "
    "pass through every norm. Without any, nothing but the branch's weight keeps the stream finite."
)


def examine(site: Site) -> Iterator[Finding]:
    """TH102."""
    yield placement(site.anatomy)


def placement(anatomy: Anatomy) -> Finding:
    """TH102: the norm placement of each branch."""
    title = "Norm placement"
    branches = anatomy.branches
    if not branches:
        return Finding(
            "TH102", "ok", title, "There are no residual branches to place a norm in.", why=WHY_PLACEMENT
        )
    counts = Counter(branch.placement for branch in branches)
    level, remedy = _judge(set(counts))
    if len(counts) == 1:
        (kind,) = counts
        are = "is" if len(branches) == 1 else "are"
        sentence = f"{all_of(len(branches), 'branch')} {are} {_name(kind)}: {FORMULAS[kind]}."
    else:
        title = "Branches that place their norms differently"
        listed = ", ".join(f"{count} {_name(kind)}" for kind, count in counts.most_common())
        sentence = f"The {counted(len(branches), 'branch')} do not place their norms alike: {listed}."
    return Finding(
        "TH102",
        level,
        title,
        sentence,
        why=WHY_PLACEMENT,
        remedy=remedy,
        evidence=Evidence(rows=tuple(_placement_rows(branches))),
    )


def _judge(kinds: set[str]) -> tuple[Level, str]:
    if kinds == {"none"}:
        return "note", (
            "Either add a norm at the head of each branch, or rely on the 1/L weight of the branches: "
            "without a norm, standard initialisation fails with depth."
        )
    if "none" in kinds:
        return "warn", "Give the branches without a norm the norm that the others have."
    if "post" in kinds:
        return "note", (
            "Post-norm needs a warm-up, and a 1/L weight on a branch is partly undone by the norm after the "
            "sum. For great depth move the norm into the branch: x + f(N x)."
        )
    if len(kinds) > 1:
        return "note", "Check that the mixture is meant; a rule for depth treats all branches alike."
    return "ok", ""


def _placement_rows(branches: tuple[Branch, ...]) -> Iterator[dict[str, Value]]:
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
