"""Where the norms stand, and which of their gains may decay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from theodolite.anatomy.folding import Fold, fold, ranges
from theodolite.anatomy.part import Anatomy, Branch, Part
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
WHY_GAINS = (
    "A gain γ that only linear maps read (Input-Norm) is part of the next matrix, W·diag(γ): under gradient "
    "noise, without decay, γ drifts upwards and amplifies its own steps, so it should decay like W. A gain "
    "that reaches the stream, a softmax or another nonlinearity (Output-Norm) sets the size of a signal: "
    "decay shrinks what the network says. The usual rule “no decay on vectors” is wrong for the first kind, "
    "“decay everything” for the second."
)


def examine(site: Site) -> Iterator[Finding]:
    """TH102 and TH103."""
    yield placement(site.anatomy)
    yield gains(site.anatomy)


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


def gains(anatomy: Anatomy) -> Finding:
    """TH103: which gains may decay."""
    title = "Gains by norm role"
    all_gains = [part for part in anatomy.values() if part.role == "gain"]
    if not all_gains:
        return Finding(
            "TH103", "ok", title, "The network has no gains, so none can decay wrongly.", why=WHY_GAINS
        )
    inputs = [part for part in all_gains if part.norm == "input"]
    outputs = [part for part in all_gains if part.norm == "output"]
    others = [part for part in all_gains if part.norm is None]
    kinds = {
        f"{'belongs to an' if len(parts) == 1 else 'belong to'} {owner}"
        f"{'' if len(parts) == 1 else 's'} and {verdict}": len(parts)
        for owner, parts, verdict in (
            ("Input-Norm", inputs, "may decay"),
            ("Output-Norm", outputs, "must not decay"),
            ("elementwise scale", others, "must not decay"),
        )
        if parts
    }
    if len(kinds) == 1:
        sentence = f"{all_of(len(all_gains), 'gain')} {next(iter(kinds))}."
    else:
        each = "; ".join(f"{count} {kind}" for kind, count in kinds.items())
        sentence = f"Of {len(all_gains)} gains, {each}."
    level: Level = "ok"
    remedy = ""
    if inputs:
        level = "note"
        remedy = f"Give {_listed(fold(inputs))} the weight decay of the matrices"
        if outputs or others:
            remedy += (
                f", and none to {_listed(fold([*outputs, *others]))}: a rule by number of dimensions cannot "
                "tell them apart."
            )
        else:
            remedy += ": the usual rule, which spares vectors from decay, would spare them."
    rows = tuple(_gain_row(one) for one in fold(all_gains))
    return Finding(
        "TH103", level, title, sentence, why=WHY_GAINS, remedy=remedy, evidence=Evidence(rows=rows)
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


def _gain_row(one: Fold) -> dict[str, Value]:
    part: Part = one.part
    return {
        "gain": one.pattern,
        "blocks": one.blocks,
        "role": {"input": "Input-Norm", "output": "Output-Norm", None: "elementwise scale"}[part.norm],
        "entries": part.numel,
        "decay": "yes" if part.norm == "input" else "no",
    }


def _listed(folds: list[Fold]) -> str:
    return ", ".join(one.pattern for one in folds)


def _name(kind: str) -> str:
    return "without a norm" if kind == "none" else f"{kind}-norm"


section = Section("Norms", 30, examine)
