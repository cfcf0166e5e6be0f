"""The audit of weight decay for reading in a terminal."""

from __future__ import annotations

import math
import shutil
import textwrap

from rich import box
from rich.console import Console
from rich.table import Table

from theodolite.anatomy.names import gather
from theodolite.probes.gains.decay import Decay, Treatment
from theodolite.probes.gains.handling import Handling

MANY = {"bias": "biases", "direction": "directions", "scale vector": "scale vectors"}
"""Kinds that are counted, with their plurals."""


def table(audit: Decay, width: int | None = None) -> str:
    """What was found, a line for each kind of tensor but plain weights, and what to know about each."""
    width = width or min(max(shutil.get_terminal_size((100, 24)).columns, 40), 140)
    shown = [row for row in audit.rows if row.kind != "weight" or row.verdict != "right"]
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for title in ("tensor", "what it is", "decay now", "should be", ""):
        rows.add_column(title, overflow="fold", no_wrap=title != "tensor")
    for pattern, members in _folded(shown):
        first = members[0]
        mark = "" if first.verdict == "right" else first.verdict
        rows.add_row(pattern, first.kind, _now(first.now), _should(first), mark)
    console = Console(width=width, no_color=True, highlight=False, emoji=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(rows)
    body = [line.rstrip() for line in captured.get().splitlines()] if shown else []
    lines = [*_wrapped(_head(audit), width), ""]
    lines += [*body, ""] if body else []
    for verdict in ("wrong", "advice", "note"):
        for why, kinds in _reasons(audit, verdict).items():
            lines += _wrapped(f"{verdict}: {', '.join(kinds)}: {why}.", width)
    if any(row.should is not None for row in audit.wrong):
        lines.append("apply() puts the optimizer's groups right; groups() makes such groups for a new one.")
    if audit.advised:
        lines += _wrapped(
            "The advice is the scale-vector paper's and may not pay. apply(inputs=True) and "
            "groups(inputs=True) follow it: tune λ again then.",
            width,
        )
    return "\n".join(lines).rstrip()


def _folded(shown: list[Treatment]) -> list[tuple[str, tuple[Treatment, ...]]]:
    """Equal rows of equal blocks in one; last, what there is a lot of: those that fare alike in one."""
    many: dict[tuple[str, ...], list[Treatment]] = {}
    for row in shown:
        if row.kind in MANY:
            many.setdefault((row.kind, _now(row.now), _should(row)), []).append(row)
    folds = gather(
        (row for row in shown if row.kind not in MANY),
        lambda row: (row.kind, _now(row.now), row.should, row.verdict, row.why),
    )
    return folds + [
        (same[0].name if len(same) == 1 else f"{len(same)} {MANY[kind]}", tuple(same))
        for (kind, *_), same in many.items()
    ]


def _head(audit: Decay) -> str:
    gains, wrong = audit.gains, [row for row in audit.wrong if row.part.kind == "gain"]
    if not gains:
        said = "This network has no gains: nothing to do."
    else:
        unknown = sum(row.now.state == "unknown" for row in gains)
        said = f"Weight decay is wrong for {len(wrong) or 'none'} of {_count(len(gains), 'gain')}"
        said += f", and not known for {unknown}." if unknown else "."
    if audit.advised:
        more = f"{len(audit.advised)}{' more' if wrong else ''}"
        said += f" By the scale-vector paper {more} could decay."
    said = f"{said} {_weights(audit)}"
    if audit.strangers:
        said += (
            f" The optimizer also trains {_count(audit.strangers, 'tensor')} that this network does not have."
        )
    return said


def _weights(audit: Decay) -> str:
    """What becomes of the weights, and how decay is done."""
    weights = [row for row in audit.rows if row.kind in ("weight", "tied table")]
    decaying = [row for row in weights if row.now.weight_decay > 0]
    unknown = sorted({row.now.rule for row in weights if row.now.state == "unknown"})
    if unknown:
        return f"Whether weights decay is not known: {', '.join(unknown)} has no option weight_decay."
    if not decaying:
        return "No weight decays, so no gain has to."
    kinds = sorted({_way(row.now) for row in decaying})
    rates = sorted({_number(row.now.rate) for row in decaying if not math.isnan(row.now.rate)}, key=float)
    per_step = f", lr·λ = {' to '.join(dict.fromkeys((rates[0], rates[-1])))} per step" if rates else ""
    return f"{len(decaying)} of {_count(len(weights), 'weight')} decay{per_step}: {'; '.join(kinds)}."


def _way(now: Handling) -> str:
    if now.decoupled is None:
        return f"{now.rule} (coupled or decoupled: it does not say)"
    if now.decoupled:
        return f"{now.rule}, decoupled"
    through = "momentum" if now.rule in ("SGD", "ASGD") else "its preconditioner"
    return f"{now.rule}, coupled (λ·W joins the gradient and goes through {through})"


def _now(now: Handling) -> str:
    if now.state != "trained":
        return {"absent": "in no group", "twice": f"in {now.count} groups"}.get(now.state, now.state)
    if not now.weight_decay:
        return "0"
    per_step = "" if math.isnan(now.rate) else f" (lr·λ {_number(now.rate)})"
    return f"{_number(now.weight_decay)}{per_step}"


def _should(row: Treatment) -> str:
    if row.now.state != "trained":
        return ""
    return "either" if row.should is None else _number(row.should)


def _reasons(audit: Decay, verdict: str) -> dict[str, list[str]]:
    """By sentence, the kinds of tensors it is about."""
    found: dict[str, list[str]] = {}
    for row in audit.rows:
        if row.verdict == verdict and row.kind not in found.setdefault(row.why, []):
            found[row.why].append(row.kind)
    return found


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _number(value: float) -> str:
    return f"{value:.3g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
