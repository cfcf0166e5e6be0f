"""Do width, data and mirrored flows lower the error at gaps between two cylinders that training left out?

Three parts:

    flow      the closed form of the flow: differences, the surfaces, and a solution by least squares
    train     one network each, trained on gaps with a hole or on all gaps: over widths, numbers of flows,
              learning rates, and with mirrored flows; and on narrow gaps alone, which was added later
    ensemble  networks from several starts on the same flows: does their spread tell where they are wrong?

References:
    Morimoto, Fukami, Zhang, Fukagata, Generalization techniques of neural networks for fluid flow estimation,
    2020 (arXiv 2011.11911).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from theodolite_studies.extrapolation.claims import CLAIMS
from theodolite_studies.extrapolation.closed_form import checks
from theodolite_studies.extrapolation.readings import EVERYWHERE, HOLE, NARROW, TRAINED, Trainings
from theodolite_studies.extrapolation.report import figures, notes
from theodolite_studies.extrapolation.setting import FULL, SMALL, ExtrapolationSetting
from theodolite_studies.extrapolation.training import Recipe, errors_over_gaps, spread_of_members
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Study


def cells(setting: ExtrapolationSetting) -> list[Cell]:
    """The flow, then all of a seed after the other."""
    found: list[Cell] = [
        {"part": "flow", "gap": gap, "seed": seed}
        for gap in setting.gaps
        for seed in range(setting.flow_seeds)
    ]
    few, num, *_ = setting.nums
    for seed in range(setting.seeds):
        found += [_train(width, num, seed, gaps) for width in setting.widths for gaps in (HOLE, EVERYWHERE)]
        found += [_train(setting.middle, other, seed) for other in setting.nums if other != num]
        found += [_train(setting.middle, other, seed, flips=True) for other in (few, num)]
        found += [{**_train(setting.middle, num, seed), "part": "ensemble"}]
        if seed < setting.few_seeds:
            ends = (setting.widths[0], setting.widths[-1])
            found += [_train(width, num, seed, octave=octave) for width in ends for octave in setting.octaves]
            found += [_train(width, num, seed, NARROW) for width in setting.alone]
    return found


def _train(
    width: int, num: int, seed: int, gaps: str = HOLE, *, flips: bool = False, octave: float = 0.0
) -> Cell:
    own = {"gaps": gaps, "width": width, "num": num, "flips": flips, "octave": octave}
    return {"part": "train", **own, "seed": seed}


def run(cell: Cell, setting: ExtrapolationSetting, *_: object) -> Iterator[Record]:
    """The record of one cell."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _run(cell, setting)
    finally:
        torch.set_num_threads(threads)


def _run(cell: Cell, setting: ExtrapolationSetting) -> Iterator[Record]:
    if cell["part"] == "flow":
        return checks(cell["gap"], cell["seed"])
    recipe = Recipe(cell["width"], setting.steps, cell["octave"], cell["flips"])
    region = TRAINED[cell["gaps"]]
    if cell["part"] == "ensemble":
        return spread_of_members(recipe, region, cell["num"], cell["seed"], setting.members, setting.each)
    return errors_over_gaps(recipe, region, cell["num"], cell["seed"], setting.each)


STUDY = Study(
    "extrapolation",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    data=Trainings,
    full=FULL,
    small=SMALL,
)
