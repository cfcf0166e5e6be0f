"""Large and small batches: one basin? And what do data and width do to the spectrum of the Hessian?

Three parts, on mixtures of Gaussians:

    lines       barriers on the line between two trained networks: small batches after large ones, large and
                small ones from one start, and different starts
    spectra     the whole spectrum of the Hessian of small networks, over widths, classes and their
                separation, and what the probes say of it
    shifts      r_e and K_Hn of networks that were trained in different ways, against accuracy on shifted
                data

References:
    Sagun, Evci, Güney, Dauphin and Bottou, Empirical analysis of the Hessian of over-parametrized neural
    networks, 2017. Gabdullin, Investigating generalization capabilities of neural networks by means of loss
    landscapes and Hessian analysis, 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from theodolite_studies.basins.claims import BASE, CLAIMS
from theodolite_studies.basins.lines import NETWORKS, RATES, lines
from theodolite_studies.basins.report import figures, notes
from theodolite_studies.basins.shifts import grid, shifts
from theodolite_studies.basins.spectra import spectra
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Setting, Study

VARIED: tuple[Mapping[str, float], ...] = (
    {},
    {"width": 8},
    {"width": 32},
    {"classes": 2},
    {"classes": 6},
    {"classes": 8},
    {"separation": 2.0},
    {"separation": 4.0},
)
"""What differs from the base, one thing at a time."""


@dataclass(frozen=True)
class BasinsSetting(Setting):
    """How much is run."""

    line_seeds: int = 5
    seeds: int = 8
    """Of spectra and shifts."""
    points: int = 2048
    """Of a line."""
    goal: float = 0.02
    """The loss at which a training of a line ends."""

    def about(self) -> dict[str, Any]:
        """All four numbers."""
        return {
            "line seeds": self.line_seeds,
            "seeds": self.seeds,
            "points": self.points,
            "goal": self.goal,
        }


def cells(setting: BasinsSetting) -> list[Cell]:
    """Of all parts. Seed 0 is that of the small setting and of trials, which the full one does not see."""
    first = 0 if setting.small else 1
    kinds = (
        [("plain", "high rates")] if setting.small else [(one, rate) for one in NETWORKS for rate in RATES]
    )
    found: list[Cell] = [
        {"part": "lines", "network": network, "rates": rates, "seed": seed}
        for seed in range(first, first + setting.line_seeds)
        for network, rates in kinds
    ]
    found += [
        {"part": "spectra", **BASE, **change, "seed": seed}
        for seed in range(first, first + setting.seeds)
        for change in VARIED
        if not setting.small or change.get("width", 8) <= 8
    ]
    return [*found, *({"part": "shifts", "seed": seed} for seed in range(first, first + setting.seeds))]


def run(cell: Cell, setting: BasinsSetting, *_: object) -> Iterator[Record]:
    """The records of a cell, computed with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    own = {key: value for key, value in cell.items() if key != "part"}
    try:
        if cell["part"] == "lines":
            yield from lines(**own, num=setting.points, goal=setting.goal)
        elif cell["part"] == "spectra":
            yield from spectra(**own)
        else:
            yield from shifts(**own, hows=grid(small=setting.small))
    finally:
        torch.set_num_threads(threads)


STUDY = Study(
    "basins",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    full=BasinsSetting(),
    small=BasinsSetting(small=True, line_seeds=1, seeds=1, points=512, goal=0.1),
)
