"""Does manifold projection beat a re-tuned scale of guidance? Does a bound predict if inversion works?

Five parts, on Gaussian mixtures whose fields are known:

    exact       guidance with exact fields: distances from the classes over scales and projections, at equal
                numbers of evaluations; the gap |c − u|; residuals of the projection's fixed point
    learned     the same with networks that were trained for a short and for a longer time
    labels      the same with exact fields of data with wrong labels, where a scale above 1 helps
    early       with these fields: two scales, one before t = 0.6 and one after it, and no projection
    inversion   steps at multiples of the bound of close pairs, and steps that each target finds itself

References:
    Cai et al., Improving classifier-free guidance of flow matching via manifold projection, 2026. Ronai,
    Kulikov, Michaeli, FlowOpt: fast optimization through whole flow processes for training-free editing,
    2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from theodolite_studies.framework.records import Record, short
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.guidance.fields import EXACT, LABELS, field_error, fields
from theodolite_studies.guidance.figures import figures
from theodolite_studies.guidance.inversion import BRIEF, LONG, MULTIPLES, SAFE, inversions
from theodolite_studies.guidance.report import CLAIMS, notes
from theodolite_studies.guidance.sampling import EARLY, HALVES, LATER, SCALES, early, grid, moments, residuals

SHORT, LONGER = "150 steps", "1500 steps"
BUDGETS = {"exact": (20, 40, 80), "learned": (40, 80), "labels": (40, 80), "early": (40, 80)}


@dataclass(frozen=True)
class GuidanceSetting(Setting):
    """How much is run."""

    seeds: int = 5
    points: int = 1000
    """Of each class and half."""

    def about(self) -> dict[str, Any]:
        """Both numbers."""
        return {"seeds": self.seeds, "points": self.points}


def cells(setting: GuidanceSetting) -> list[Cell]:
    """Parts, layouts and fields, times seeds."""
    if setting.small:
        cases = [("exact", "overlap", EXACT), ("inversion", "one", EXACT), ("inversion", "overlap", EXACT)]
        cases += [("learned", "three", SHORT)]
    else:
        cases = [("exact", layout, EXACT) for layout in ("three", "overlap", "uneven", "simplex")]
        cases += [("inversion", layout, EXACT) for layout in ("one", "wide", "overlap", "three")]
        cases += [("inversion", layout, LONGER) for layout in ("overlap", "three")]
        cases += [("learned", layout, kind) for layout in ("three", "overlap") for kind in (SHORT, LONGER)]
        cases += [(part, layout, LABELS) for part in ("labels", "early") for layout in ("three", "overlap")]
    return [
        {"part": part, "layout": layout, "field": kind, "seed": seed}
        for part, layout, kind in cases
        for seed in range(setting.seeds)
    ]


def run(cell: Cell, setting: GuidanceSetting, *_: object) -> Iterator[Record]:
    """The records of one field and seed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from (_inverted if cell["part"] == "inversion" else _guided)(cell, setting)
    finally:
        torch.set_num_threads(threads)


def _guided(cell: Cell, setting: GuidanceSetting) -> Iterator[Record]:
    layout, kind, seed, num = cell["layout"], cell["field"], cell["seed"], setting.points
    both = fields(layout, kind, seed, HALVES * num)
    scales: dict[str, Sequence[float]] = dict(SCALES)
    if setting.small:
        scales = {name: values[::3] for name, values in SCALES.items()}
    if cell["part"] == "early":
        yield from early(layout, both, seed, num, BUDGETS["early"], EARLY, LATER)
        return
    if kind != EXACT:
        yield {"kind": "field", "error": short(field_error(layout, both, HALVES * num, seed))}
    with torch.no_grad():
        yield from grid(layout, both, seed, num, BUDGETS[cell["part"]], scales)
        yield from moments(layout, both, seed, num)
        yield from residuals(layout, fields(layout, kind, seed, num), seed, num)


def _inverted(cell: Cell, setting: GuidanceSetting) -> Iterator[Record]:
    is_exact = cell["field"] == EXACT
    yield from inversions(
        cell["layout"],
        cell["field"],
        cell["seed"],
        num_targets=setting.points // 5,
        multiples=MULTIPLES if is_exact else (SAFE,),
        iterations=LONG if is_exact and not setting.small else BRIEF,
    )


STUDY = Study(
    "guidance",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    full=GuidanceSetting(),
    small=GuidanceSetting(small=True, seeds=2, points=100),
)
