"""What the study of stragglers has to show, and how it is drawn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from theodolite.fleet.straggling.simulation import BACKUP, LEAVE
from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, PINK, SvgAxis, SvgFigure, SvgRow, ticks
from theodolite.present.text import Column
from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Decide,
    Observation,
    Observe,
    at_least,
    at_most,
    count_at_most,
    per,
    table,
)
from theodolite_studies.framework.figures import band
from theodolite_studies.framework.paired import POWER, smallest_effect
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.stragglers.waiting import BY_COUNT, GC_MODEL, M_MODEL

LEVEL = 0.05
SLOPES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""a: the share of a round that grows with the examples of a worker."""
USUAL = 0.3
MODELS = (4, 8)
"""Models that may be trained in turn."""
GC, SR, M, ANY = "GC", "SR-SGC", "M-SGC", "planner"
"""ANY: the best of waiting, leaving out workers, GC, SR-SGC and M-SGC."""
SAVING = 0.16
"""What the paper reports of M-SGC over GC."""


def ratios(
    records: Sequence[Record], scheme: str, models: int, slope: float, *, over: str = ""
) -> list[Observation]:
    """In each setting, by seed: time on the second half over that of waiting for all, or of another scheme.

    Parameters are those of the first half. The other scheme has as many models, if it needs several.
    """
    found = []
    rows = select(records, part="times")
    for setting in distinct(rows, "setting"):
        own = curves(rows, setting, scheme, models)
        if over:
            own = own / curves(rows, setting, over, models)
        found.append(Observation(setting, own[:, SLOPES.index(slope)]))
    return found


def curves(records: Sequence[Record], setting: str, scheme: str, models: int, key: str = "chosen") -> Array:
    """The times of a scheme by seed and slope, in units of waiting for all."""
    own = select(records, part="times", setting=setting, scheme=scheme, models=lambda num: num in (1, models))
    return np.array([row[key] for row in sorted(own, key=lambda row: int(row["seed"]))])


def _compared(scheme: str, over: str, slope: float, models: Sequence[int] = MODELS) -> Observe:
    """One scheme over another, for each setting and number of models."""

    def observe(records: Sequence[Record]) -> list[Observation]:
        return [
            Observation(f"{one.where}, {num} models" if len(models) > 1 else one.where, one.values)
            for num in models
            for one in ratios(records, scheme, num, slope, over=over)
        ]

    return observe


def _only(settings: Sequence[str], observe: Observe) -> Observe:
    def observed(records: Sequence[Record]) -> list[Observation]:
        return [one for one in observe(records) if one.where.split(",")[0] in settings]

    return observed


def _regrets(records: Sequence[Record]) -> list[Observation]:
    """Time with the parameters of the first half, over that with the best ones of the second; 4 models."""
    slope = SLOPES.index(USUAL)
    rows = select(records, part="times", models=lambda num: num in (1, MODELS[0]))
    found: dict[str, list[float]] = {}
    for row in select(rows, scheme=lambda scheme: scheme in (LEAVE, BACKUP, GC, SR, M, ANY)):
        found.setdefault(f"{row['setting']}, {row['scheme']}", []).append(
            row["chosen"][slope] / row["best"][slope]
        )
    return [Observation(title, np.array(values)) for title, values in found.items()]


def _logarithm(key: str, least: int = 0) -> Observe:
    """Decimal logarithm, by seed, for each code with so many workers."""
    return per("setting", lambda row: float(np.log10(row[key])), part="codes", workers=lambda n: n >= least)


def _above(records: Sequence[Record]) -> list[Observation]:
    """By how many decades the largest coefficients are above those of the claim."""
    seen = _logarithm("largest amplification")(records)
    return [Observation(one.where, one.values - (4 if "n = 20" in one.where else 7)) for one in seen]


def _lost(way: str) -> Decide:
    return count_at_most(0, "lost job", per("setting", "lost", part="decode", way=way))


CLAIMS = (
    Claim(
        "loads are those of the formulas, exactly",
        "formulas",
        "0 others, where workers are grouped evenly",
        count_at_most(0, "other load", per("scheme", "wrong", part="load")),
    ),
    Claim(
        "with all stragglers that a scheme is made for every job decodes (3 to 5 workers)",
        "theorems",
        "0 jobs lost, all patterns",
        _lost("all"),
    ),
    Claim(
        "and so it does with random ones (6 workers)",
        "theorems",
        "0 jobs lost, 400 patterns each",
        _lost("random"),
    ),
    Claim(
        "M-SGC takes less time than GC, which ends a round once each group has answered",
        "16 % less",
        "≤ 0.85 of GC, a = 0.3",
        at_most(1 - 0.15, _compared(M, GC, USUAL), level=LEVEL),
    ),
    Claim(
        "M-SGC takes less time than GC, both after waiting for 2 × the fastest worker",
        "16 % less",
        "≤ 0.84 of GC, a = 0.3, 64 and 256 workers",
        at_most(
            1 - SAVING,
            _only(("64 workers", "256 workers"), _compared(M_MODEL, GC_MODEL, USUAL)),
            level=LEVEL,
        ),
    ),
    Claim(
        "where rounds are all computing, GC is no better than waiting for all",
        "not said",
        "≥ 1 × waiting, a = 1",
        at_least(1.0, _compared(GC, "", 1.0, MODELS[:1]), level=LEVEL),
    ),
    Claim(
        "and GC that waits for 2 × the fastest worker is no better at a = 0.3 either",
        "not said",
        "≥ 1 × waiting, a = 0.3",
        at_least(1.0, _compared(GC_MODEL, "", USUAL, MODELS[:1]), level=LEVEL),
    ),
    Claim(
        "where rounds are all computing, M-SGC is better than GC",
        "lower load",
        "≤ 1 × GC, a = 1",
        at_most(1.0, _compared(M, GC, 1.0), level=LEVEL),
    ),
    Claim(
        "where load costs nothing, GC is better than M-SGC",
        "not said",
        "≤ 1 × M-SGC, a = 0",
        at_most(1.0, _compared(GC, M, 0.0), level=LEVEL),
    ),
    Claim(
        "groups make GC better than codes that wait for any n − s answers",
        "not said",
        "≤ 0.95 of it, a = 0.3",
        at_most(0.95, _compared(GC, BY_COUNT, USUAL, MODELS[:1]), level=LEVEL),
    ),
    Claim(
        "backup workers take less time than any exact scheme",
        "not said",
        "≤ 0.85 of the planner's best, a = 0.3",
        at_most(0.85, _compared(BACKUP, ANY, USUAL), level=LEVEL),
    ),
    Claim(
        "parameters that are chosen on the first half are good on the second",
        "not said",
        "≤ 1.05 × the best of the second, a = 0.3",
        at_most(1.05, _regrets, level=LEVEL),
    ),
    Claim(
        "random cyclic codes have large coefficients",
        "not said",
        "largest max|a|·max|B| ≥ 10⁴ at n = 20, ≥ 10⁷ at n = 64 and 128",
        at_least(0.0, _above, unit=" decades above", level=LEVEL),
    ),
    Claim(
        "their gradients are useless in float32 at n = 64 and n = 128",
        "not said",
        "largest relative error ≥ 10⁻²",
        at_least(
            -2.0,
            _logarithm("largest single", least=64),
            unit=" (log₁₀)",
            level=LEVEL,
        ),
    ),
    Claim(
        "those of fractional repetition are as exact as float32",
        "not said",
        "relative error ≤ 10⁻⁶",
        at_most(-6.0, _logarithm("repetition"), unit=" (log₁₀)", level=LEVEL),
    ),
)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Times by the share of computing: of the planner's schemes, and of M-SGC and GC by their model."""
    rows = select(records, part="times")
    if not rows:
        return
    lines = ((GC, 4, BLUE), (SR, 4, ORANGE), (M, 4, PINK), (M, 8, GREEN), (BACKUP, 4, INK))
    legend = [(GC, BLUE), (SR, ORANGE), (M, PINK), (f"{M}, 8 models", GREEN), (f"{BACKUP} (dashed)", INK)]
    yield "times", _grid(rows, "Time over that of waiting for all, by the share of computing", lines, legend)
    models = ((BY_COUNT, 4, BLUE), (GC_MODEL, 4, ORANGE), (M_MODEL, 4, PINK), (M_MODEL, 8, GREEN))
    legend = [(BY_COUNT, BLUE), (GC_MODEL, ORANGE), (M_MODEL, PINK), (f"{M_MODEL}, 8 models", GREEN)]
    yield "waiting", _grid(rows, "The same where rounds end by a count or by a model", models, legend)


def _grid(
    rows: Sequence[Record],
    title: str,
    lines: Sequence[tuple[str, int, str]],
    legend: Sequence[tuple[str, str]],
) -> str:
    panels, settings = [], distinct(rows, "setting")
    for setting in settings:
        own = [
            band(SLOPES, curves(rows, setting, scheme, models), colour, dashed=scheme == BACKUP)
            for scheme, models, colour in lines
        ]
        panels.append([replace(own[0], label=setting), *own[1:]])
    across, up = SvgAxis(0, 1, ticks([0, 0.5, 1])), SvgAxis(0, 2, ticks([0, 0.5, 1, 1.5, 2]), strong=1)
    wide = 4
    grid = [
        SvgRow("time", across, up, panels[start : start + wide], "share of computing a")
        for start in range(0, len(panels), wide)
    ]
    return SvgFigure(title, legend, [""] * min(len(panels), wide), grid).svg()


def notes(records: Sequence[Record]) -> str:
    """Times, winners, M-SGC over GC, rounding errors, and what was decoded."""
    found = (_times(records), _winners(records), _savings(records), _rounding(records), _decoded(records))
    return "\n\n".join(each for each in found if each)


def _times(records: Sequence[Record]) -> str:
    rows, slope = select(records, part="times"), SLOPES.index(USUAL)
    shown = (
        (LEAVE, 4, "leave out"),
        (BACKUP, 4, "backup"),
        (GC, 4, GC),
        (SR, 4, SR),
        (M, 4, M),
        (M, 8, f"{M} 8"),
        (BY_COUNT, 4, "any n − s"),
        (GC_MODEL, 4, "GC μ=1"),
        (M_MODEL, 4, "M μ=1"),
        (M_MODEL, 8, "M 8 μ=1"),
    )
    lines = [
        (
            setting,
            *(curves(rows, setting, scheme, models)[:, slope].mean() for scheme, models, _ in shown),
            np.mean([1 - 1 / row["load"] for row in select(rows, setting=setting, scheme=BACKUP)]),
        )
        for setting in distinct(rows, "setting")
    ]
    if not lines:
        return ""
    columns: list[str | Column] = [
        "setting",
        *(Column(title, "{:.2f}".format, "right") for *_, title in shown),
        Column("left out", "{:.0%}".format, "right"),
    ]
    title = (
        f"time over that of waiting for all, a = {USUAL:g}, with 4 models in turn, or 8; left out: share\n"
        "of the examples that backup workers do without"
    )
    return f"{title}\n{table(columns, lines)}"


def _winners(records: Sequence[Record]) -> str:
    slopes = (0.0, 0.1, 0.3, 0.5, 1.0)
    lines = []
    for models in MODELS:
        rows = select(records, part="times", scheme=ANY, models=models)
        for setting in distinct(rows, "setting"):
            own = select(rows, setting=setting)
            usual = [statistics.mode(row["schemes"][SLOPES.index(slope)] for row in own) for slope in slopes]
            parameters = statistics.mode(row["parameters"] for row in own)
            lines.append((setting, models, *usual, parameters))
    if not lines:
        return ""
    columns = ("setting", "models", *(f"a = {slope:g}" for slope in slopes), f"parameters at {USUAL:g}")
    return f"the best exact scheme by the first half, in most seeds\n{table(columns, lines)}"


def _savings(records: Sequence[Record]) -> str:
    lines = []
    for title, scheme, other in (("groups", M, GC), ("μ = 1", M_MODEL, GC_MODEL)):
        for models in MODELS:
            for seen in ratios(records, scheme, models, USUAL, over=other):
                rows = select(records, part="times")
                whole = curves(rows, seen.where, scheme, models) / curves(rows, seen.where, other, models)
                lines.append(
                    (
                        seen.where,
                        title,
                        models,
                        seen.mean,
                        seen.error,
                        smallest_effect(seen.values),
                        _reached(whole),
                    )
                )
    if not lines:
        return ""
    columns: list[str | Column] = [
        "setting",
        "rounds end by",
        "models",
        *(Column(name, "{:.3f}".format, "right") for name in ("M-SGC/GC", "±", "visible")),
        Column(f"saves {SAVING:.0%} at a", str, "right"),
    ]
    title = (
        f"time of M-SGC over that of GC, a = {USUAL:g}; visible: the smallest difference from a threshold\n"
        f"that is found with a power of {POWER:g}; and the smallest a at which M-SGC saves {SAVING:.0%}"
    )
    return f"{title}\n{table(columns, lines)}"


def _reached(whole: Array) -> str:
    """The smallest share of computing at which the saving is as large as the paper's."""
    enough = np.flatnonzero(whole.mean(0) <= 1 - SAVING)
    return f"{SLOPES[enough[0]]:g}" if len(enough) else "none"


def _rounding(records: Sequence[Record]) -> str:
    rows = select(records, part="codes")
    names = ("median amplification", "largest amplification", "median single", "largest single", "repetition")
    lines = [
        (code, *(np.median([row[name] for row in select(rows, setting=code)]) for name in names))
        for code in distinct(rows, "setting")
    ]
    if not lines:
        return ""
    columns: list[str | Column] = ["code", *(Column(name, "{:.0e}".format, "right") for name in names)]
    title = (
        "random cyclic codes: max|a|·max|B| over patterns of late workers; relative errors in float32, and\n"
        "those of fractional repetition; medians over the seeds"
    )
    return f"{title}\n{table(columns, lines)}"


def _decoded(records: Sequence[Record]) -> str:
    lines = [
        (row["setting"], row["way"], row["patterns"], row["lost"]) for row in select(records, part="decode")
    ]
    return table(("scheme", "patterns", "number", "jobs lost"), lines) if lines else ""
