"""Growing a trained GPT: does the signal find the place, is it worth it, and can a certificate be trusted?

Four parts. `growing`: blocks added where the signal is strongest against evenly spaced copies, stacking,
random places and the deep network from scratch, at equal compute. `ranking`: the signal of every point
against what a block there gains. `coverage`: how often certificates are wrong, where the truth is known.
`envelope`: successive growths from one block on, and the power law of Appendix M.
"""

from __future__ import annotations

from collections.abc import Iterator

from theodolite.core.building import one_thread
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Study
from theodolite_studies.growing.claims import claims
from theodolite_studies.growing.coverage import REGIMES, SPLITS, covered
from theodolite_studies.growing.envelope import coupled, grown_block_by_block
from theodolite_studies.growing.ranking import ranked
from theodolite_studies.growing.report import figures, notes
from theodolite_studies.growing.training import ADDED, FULL, FURTHER_SEEDS, SEEDS, SMALL, GrowingSetting
from theodolite_studies.growing.ways import grown_in_all_ways


def cells(setting: GrowingSetting) -> list[Cell]:
    """The most telling first; what needs no GPU last."""
    seeds = SEEDS[:2] if setting.small else SEEDS
    found: list[Cell] = [
        *({"part": "growing", "seed": seed, "added": ADDED} for seed in seeds),
        *({"part": "ranking", "seed": seed} for seed in seeds),
        *({"part": "envelope", "seed": seed, "networks": "grown"} for seed in seeds),
        *({"part": "envelope", "seed": seed, "networks": "coupled"} for seed in seeds),
    ]
    if not setting.small:
        found += [
            *({"part": "growing", "seed": seed, "added": setting.depth} for seed in seeds),
            *({"part": "growing", "seed": seed, "added": ADDED} for seed in FURTHER_SEEDS),
        ]
    found += [{"part": "coverage", "regime": regime, "splits": way} for way in SPLITS for regime in REGIMES]
    return [{**cell, "small": setting.small} for cell in found]


def run(cell: Cell, setting: GrowingSetting, device: str) -> Iterator[Record]:
    """The records of a cell."""
    with one_thread():
        if cell["part"] == "growing":
            yield from grown_in_all_ways(setting, cell["seed"], cell["added"], device)
        elif cell["part"] == "ranking":
            yield from ranked(setting, cell["seed"], device)
        elif cell["part"] == "coverage":
            yield from covered(setting, cell["regime"], cell["splits"])
        elif cell["networks"] == "grown":
            yield from grown_block_by_block(setting, cell["seed"], device)
        else:
            yield from coupled(setting, cell["seed"], device)


STUDY = Study("growing", cells, run, claims, figures, notes, full=FULL, small=SMALL)
