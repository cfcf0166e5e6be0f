"""Does NC1 fall along the central path and over depth? Which decay lowers it more?

NC1 is the spread of features within classes over that between class means, Tr S_W/Tr S_B. Four parts:

    central   features that follow the gradient with the best head at every time (`tied.py`)
    joint     the same with a head that follows the gradient too, from random entries
    minima    features that are tied to given ones with strength β: NC1 of the minimum, and with ten times
              the decay of features or of the head
    network   networks that were trained until they fit their data, by block, and with more decay in a part

λ_W is in λ_W/2·‖W‖² throughout, as in an optimizer. The paper's λ_W/(2K)·‖W‖² has K times this λ_W.

References:
    Tirer, Huang and Niles-Weed, Perturbation analysis of neural collapse, 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from theodolite_studies.collapse.figures import figures
from theodolite_studies.collapse.networks import ARMS, TASKS, USUAL, networks
from theodolite_studies.collapse.report import CLAIMS, notes
from theodolite_studies.collapse.tied import BASES, DECAY, central, joint, minima
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Setting, Study

NOISES = (0.1, 0.3, 1.0, 3.0)
OFFSETS = (0.0, 3.0)
FIRST_SEED = 10
"""Of a full run. A small one has the seeds below, so what it shows is not seen again."""
TIES = (1.0, 0.1, 0.03, 0.01, 0.003, 0.001)
"""β."""


@dataclass(frozen=True)
class CollapseSetting(Setting):
    """How much is run."""

    seeds: int = 10
    """Of the model with tied features."""
    network_seeds: int = 5

    def about(self) -> dict[str, int]:
        """Both numbers."""
        return {"seeds": self.seeds, "network seeds": self.network_seeds}


def cells(setting: CollapseSetting) -> list[Cell]:
    """Flows, minima, and networks, times seeds."""
    noises = NOISES[1:2] if setting.small else NOISES
    names = list(TASKS)[:1] if setting.small else list(TASKS)
    arms = (USUAL,) if setting.small else ARMS
    first = 0 if setting.small else FIRST_SEED
    found: list[Cell] = []
    for seed in range(first, first + setting.seeds):
        found += [
            {"part": part, "noise": noise, "decay": decay, "offset": offset, "seed": seed}
            for part in ("central", "joint")
            for noise in noises
            for decay in (0.0, DECAY)
            for offset in OFFSETS
        ]
        found += [
            {"part": "minima", "noise": noise, "base": base, "seed": seed}
            for noise in NOISES[:2]
            for base in BASES
        ]
    found += [
        {"part": "network", "network": name, "arm": arm, "seed": seed}
        for seed in range(first, first + setting.network_seeds)
        for name in names
        for arm in arms
    ]
    return found


def run(cell: Cell, *_: object) -> Iterator[Record]:
    """The records of a cell, by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if cell["part"] == "network":
            yield from networks(TASKS[cell["network"]], cell["arm"], cell["seed"])
        elif cell["part"] == "minima":
            yield from minima(cell["noise"], cell["seed"], cell["base"], TIES)
        else:
            flow = {"central": central, "joint": joint}[cell["part"]]
            yield from flow(cell["noise"], cell["seed"], cell["decay"], cell["offset"])
    finally:
        torch.set_num_threads(threads)


STUDY = Study(
    "collapse",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    full=CollapseSetting(),
    small=CollapseSetting(small=True, seeds=2, network_seeds=2),
)
