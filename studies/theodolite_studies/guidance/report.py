"""What the study of guidance has to show, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from theodolite.present.text import Column
from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Decision,
    Observation,
    at_least,
    at_most,
    per,
    table,
)
from theodolite_studies.framework.paired import POWER, smallest_effect
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.guidance.fields import EXACT, LABELS
from theodolite_studies.guidance.inversion import BEYOND, BRIEF, LONG, SAFE

LEVEL = 0.05
WIDEST = (1.0, 4.0)
"""The scales over which the sensitivity is measured."""
ENOUGH = 0.95
"""Share of targets: below it, steps at the bound do not converge."""
GUIDANCE = ("exact", "learned")
SHOWN = ("plain", "picard 2", "anderson 2", "bare anderson 2")
"""Ways in the table of moments."""


def _is_projected(way: str) -> bool:
    return way != "plain"


def distances(rows: Sequence[Record]) -> Array:
    """Of all candidates of some records of a grid, (candidates, halves); infinite where samples are."""
    found = [pair for row in rows for pair in row["distances"]]
    return np.array([[math.inf if one is None else one for one in pair] for pair in found])


def judged(found: Array) -> float:
    """The distance of the candidate that is best on one half, on the other half: a mean of both directions.

    >>> judged(np.array([[1.0, 2.0], [3.0, 1.0]]))
    2.5
    """
    first, second = found.T
    return float(second[first.argmin()] + first[second.argmin()]) / 2


def ratios(records: Sequence[Record], **only: Any) -> list[Observation]:
    """For each field and budget: the distance of the best projection over that of the best scale, by seed."""
    found = []
    rows = select(records, kind="grid", **only)
    for case in grouped(rows, "layout", "field", "budget"):
        values = []
        for seed in sorted(distinct(case, "seed")):
            own = select(case, seed=seed)
            projected, plain = (
                judged(distances([row for row in own if _is_projected(row["way"]) == wanted]))
                for wanted in (True, False)
            )
            values.append(projected / plain)
        found.append(Observation(named(case[0]), np.array(values)))
    return found


def sensitivities(records: Sequence[Record]) -> list[Observation]:
    """The range of distances over scales, with two iterations over that without, by seed; learned fields."""
    found = []
    rows = select(records, part="learned", kind="grid")
    for case in grouped(rows, "layout", "field", "budget"):
        plain = {row["seed"]: _range(row) for row in select(case, way="plain")}
        for way in ("picard 2", "anderson 2"):
            values = [_range(row) / plain[row["seed"]] for row in select(case, way=way)]
            found.append(Observation(f"{named(case[0])}, {way}", np.array(values)))
    return found


def _range(row: Record) -> float:
    inside = [WIDEST[0] <= scale <= WIDEST[1] for scale in row["scales"]]
    own = distances([row]).mean(1)[inside]
    return float(own.max() - own.min())


def gaps(records: Sequence[Record]) -> list[Observation]:
    """The gap with two iterations over that without, at scale 2, by seed."""
    found = []
    rows = select(records, part=lambda part: part in GUIDANCE, kind="moments", scale=2)
    for case in grouped(rows, "layout", "field"):
        plain = {row["seed"]: row["gap"] for row in select(case, way="plain")}
        for way in ("picard 2", "anderson 2"):
            values = [row["gap"] / plain[row["seed"]] for row in select(case, way=way)]
            found.append(Observation(f"{named(case[0])}, {way}", np.array(values)))
    return found


def accelerations(records: Sequence[Record], method: str = "anderson", count: int = 3) -> list[Observation]:
    """The residual of Anderson's method over that of Picard's after so many iterations, by seed."""
    found = []
    rows = select(records, part=lambda part: part in GUIDANCE, kind="residuals")
    for case in grouped(rows, "layout", "field"):
        picard = {row["seed"]: row["residuals"][count] for row in select(case, method="picard")}
        values = [row["residuals"][count] / picard[row["seed"]] for row in select(case, method=method)]
        found.append(Observation(named(case[0]), np.array(values)))
    return found


def _overestimates(records: Sequence[Record]) -> list[Observation]:
    rows = select(records, part="inversion", kind="bound", layout=lambda layout: layout != "one")
    return [
        Observation(named(case[0]), np.array([row["random"] / row["close"] for row in case]))
        for case in grouped(rows, "layout", "field")
    ]


def _own_steps(records: Sequence[Record]) -> list[Observation]:
    """Shares that converge by themselves, where steps at the bound do not."""
    rows = select(records, part="inversion")
    found = []
    for case in grouped(rows, "layout", "field"):
        bounded = [row["early"] for row in select(case, kind="steps", multiple=SAFE)]
        if bounded and np.mean(bounded) < ENOUGH:
            found.append(
                Observation(named(case[0]), np.array([row["early"] for row in select(case, kind="auto")]))
            )
    return found


def _safe(layouts: Sequence[str], multiple: float, value: str) -> Any:
    return per(
        ("layout",),
        value,
        part="inversion",
        field=EXACT,
        kind="steps",
        multiple=multiple,
        layout=lambda layout: layout in layouts,
    )


def grouped(rows: Sequence[Record], *keys: str) -> list[list[Record]]:
    """The records by their values of the keys."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def named(row: Record) -> str:
    """The layout, the field if it is not exact, and the budget if there is one."""
    words = [row["layout"], *([] if row["field"] == EXACT else [row["field"]])]
    return " ".join(words) + (f", {row['budget']} evaluations" if "budget" in row else "")


def _better(kind: str) -> Any:
    def decided(records: Sequence[Record]) -> Decision | None:
        return at_most(1.0, lambda rows: ratios(rows, field=kind), level=LEVEL)(records)

    return decided


CLAIMS = (
    Claim(
        "exact fields: no projection is better than the best scale without",
        "projection is better",
        "distance ≥ 0.95 of it, at equal evaluations",
        at_least(0.95, lambda records: ratios(records, field=EXACT), level=LEVEL),
    ),
    Claim(
        "projection narrows the gap |c − u|",
        "narrows",
        "≤ 0.95 of that without (w = 2, 10 steps, 2 iterations)",
        at_most(0.95, gaps, level=LEVEL),
    ),
    Claim(
        "networks of 150 steps: a projection is better than the best scale without",
        "better",
        "distance ≤ it, at equal evaluations",
        _better("150 steps"),
    ),
    Claim(
        "networks of 1500 steps: a projection is better than the best scale without",
        "better",
        "distance ≤ it, at equal evaluations",
        _better("1500 steps"),
    ),
    Claim(
        "noisy labels: a projection is better than the best scale without (added later)",
        "better",
        "distance ≤ it, at equal evaluations",
        _better(LABELS),
    ),
    Claim(
        "networks: with projection the distance depends less on the scale",
        "robust to the scale",
        "range over w = 1 to 4 ≤ that without, 2 iterations",
        at_most(1.0, sensitivities, level=LEVEL),
    ),
    Claim(
        "Anderson's method comes nearer to the fixed point than Picard's",
        "faster",
        "residual after 3 iterations ≤ Picard's",
        at_most(1.0, accelerations, level=LEVEL),
    ),
    Claim(
        "linear flow: 0.9 of the bound converges",
        "sufficient",
        f"for all targets in {LONG} iterations",
        at_least(1.0, _safe(("one",), SAFE, "converged"), level=LEVEL),
    ),
    Claim(
        "linear flow: 1.1 of the bound diverges",
        "not said",
        "for all targets",
        at_least(1.0, _safe(("one",), BEYOND, "diverged"), level=LEVEL),
    ),
    Claim(
        "overlapping mixtures: 0.9 of the bound of close pairs converges",
        "sufficient",
        f"for ≥ 0.99 of targets in {LONG} iterations",
        at_least(0.99, _safe(("wide", "overlap"), SAFE, "converged"), level=LEVEL),
    ),
    Claim(
        "random pairs overestimate the bound",
        "not said",
        "≥ 1.5 of that of close pairs",
        at_least(1.5, _overestimates, unit=" ×", level=LEVEL),
    ),
    Claim(
        "where the bound is too small a step, each target finds its own",
        "not said",
        f"≥ 0.95 of targets in {BRIEF} iterations",
        at_least(ENOUGH, _own_steps, level=LEVEL),
    ),
)


def notes(records: Sequence[Record]) -> str:
    """The best of each case, moments of the classes, residuals, and inversions."""
    found = [
        _bests(records),
        _earlier(records),
        _moments(records),
        _residuals(records),
        _bounds(records),
        _converged(records),
    ]
    return "\n\n".join(each for each in found if each)


def _bests(records: Sequence[Record]) -> str:
    rows = []
    for observation, case in zip(
        ratios(records),
        grouped(select(records, kind="grid"), "layout", "field", "budget"),
        strict=True,
    ):
        plain, projected = _best(select(case, way="plain")), _best(select(case, way=_is_projected))
        about = {"layout": case[0]["layout"], "field": case[0]["field"]}
        floor = np.mean([row["distances"] for row in select(records, kind="floor", **about)])
        seen = smallest_effect(observation.values)
        errors = [row["error"] for row in select(records, kind="field", **about)]
        error = f"{np.mean(errors):.2f}" if errors else ""
        judgement = (observation.mean, observation.error, seen)
        rows.append((observation.where, error, floor, *plain[:2], *projected, *judgement))
    if not rows:
        return ""
    columns = (
        "field",
        "error",
        Column("data", "{:.4f}".format),
        Column("plain", "{:.4f}".format),
        Column("w", "{:g}".format),
        Column("projected", "{:.4f}".format),
        Column("w", "{:g}".format),
        "by",
        Column("ratio", "{:.2f}".format),
        Column("±", "{:.2f}".format),
        Column("visible", "{:.2f}".format),
    )
    title = (
        "error of the conditional field as a share of the velocity (root mean square);\n"
        "distance of two sets of data, of the best scale and of the best projection (mean over seeds);\n"
        "ratio: tuned on one half of the noise and judged on the other; visible: the smallest difference of\n"
        f"the ratio that is found with a power of {POWER:g}"
    )
    return f"{title}\n{table(columns, rows)}"


def _earlier(records: Sequence[Record]) -> str:
    """The best projection and the best scale, compared with a larger scale in early steps alone."""
    rows = []
    for case in grouped(select(records, kind="early"), "layout", "field", "budget"):
        about = {key: case[0][key] for key in ("layout", "field", "budget")}
        bests = {"early": case, "plain": select(records, kind="grid", way="plain", **about)}
        bests["projected"] = select(records, kind="grid", way=_is_projected, **about)
        tuned = {
            name: np.array([judged(distances(select(own, seed=seed))) for seed in distinct(case, "seed")])
            for name, own in bests.items()
        }
        distance, scale, way = _best(case)
        compared = [Observation("", tuned[name] / tuned["early"]) for name in ("plain", "projected")]
        numbers = [one for each in compared for one in (each.mean, each.error)]
        rows.append((named(case[0]), distance, scale, way, *numbers))
    if not rows:
        return ""
    columns: list[str | Column] = [
        "field",
        Column("early", "{:.4f}".format),
        Column("w", "{:g}".format),
        "by",
        *(Column(name, "{:.2f}".format) for name in ("plain/early", "±", "projected/early", "±")),
    ]
    title = "a scale w before t = 0.6 and another one after it, without projection (explored afterwards)"
    return f"{title}\n{table(columns, rows)}"


def _best(rows: Sequence[Record]) -> tuple[float, float, str]:
    """The least mean distance over the seeds, its scale and its way."""
    means: dict[tuple[float, str], float] = {}
    for case in grouped(rows, "way"):
        stacked = np.stack([distances([row]).mean(1) for row in case]).mean(0)
        means |= {(scale, case[0]["way"]): one for scale, one in zip(case[0]["scales"], stacked, strict=True)}
    scale, way = min(means, key=lambda key: means[key])
    return float(means[scale, way]), scale, way


def _moments(records: Sequence[Record]) -> str:
    rows = []
    for case in grouped(select(records, kind="moments", scale=2), "layout", "field"):
        for way in SHOWN:
            own = select(case, way=way)
            if not own:
                continue
            means = [np.mean([row[name] for row in own]) for name in ("gap", "off", "spread")]
            rows.append((named(case[0]), way, *means))
    if not rows:
        return ""
    columns: list[str | Column] = [
        "field",
        "way",
        *(Column(name, "{:.2f}".format) for name in ("gap", "mean off by", "std (1: right)")),
    ]
    return f"10 steps at w = 2: the gap |c − u| before t = 0.6, and the classes\n{table(columns, rows)}"


def _residuals(records: Sequence[Record]) -> str:
    rows = []
    for case in grouped(select(records, kind="residuals"), "layout", "field"):
        for method in distinct(case, "method"):
            means = np.mean([row["residuals"] for row in select(case, method=method)], axis=0)
            rows.append((named(case[0]), method, *means))
    if not rows:
        return ""
    columns: list[str | Column] = [
        "field",
        "method",
        *(Column(str(k), "{:.4f}".format) for k in range(len(rows[0]) - 2)),
    ]
    return f"residual |G(x) − x| of the projection after iterations, half a step 0.05\n{table(columns, rows)}"


def _bounds(records: Sequence[Record]) -> str:
    cases = grouped(select(records, kind="bound"), "layout", "field")
    if not cases:
        return ""
    names = ("close", "random", "median", "opposed")
    rows = [(named(case[0]), *(np.mean([row[name] for row in case]) for name in names)) for case in cases]
    columns: list[str | Column] = [
        "field",
        *(Column(name, "{:.3g}".format) for name in ("close pairs", "random pairs", "median", "opposed")),
    ]
    title = "bounds of the step: least ratio of close and of random pairs; of close ones the median, and ≤ 0"
    return f"{title}\n{table(columns, rows)}"


def _converged(records: Sequence[Record]) -> str:
    rows = []
    for case in grouped(select(records, part="inversion"), "layout", "field"):
        for kind in ("steps", "auto"):
            own = select(case, kind=kind)
            for multiple in distinct(own, "multiple") if kind == "steps" else (None,):
                some = select(own, multiple=multiple)
                means = [np.mean([row[name] for row in some]) for name in ("early", "converged")]
                step = "its own" if multiple is None else f"{multiple:g} × bound"
                rows.append((named(case[0]), step, *means, np.mean([row["iterations"] for row in some])))
    if not rows:
        return ""
    share = "{:.3f}".format
    columns = (
        "field",
        "step",
        Column(f"converged by {BRIEF}", share),
        Column("at the end", share),
        Column("iterations", "{:.0f}".format),
    )
    return f"share of targets with a residual of at most 0.001\n{table(columns, rows)}"
