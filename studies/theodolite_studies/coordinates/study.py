"""The coordinate check over the whole range: seven networks, two optimizers, widths and depths, seeds.

The claim: with width–depth muP every branch, the stream and the change of the logits keep their size from
width 64 to 1024 and from depth 2 to 32, and with the standard parameterization they do not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from theodolite.core.files import plain
from theodolite.core.size import Size
from theodolite.planning import Plan
from theodolite.planning.parameterization import WITHOUT_FACTORY, plan_for, with_zero_readout
from theodolite.probes.scaling.first_steps import follow
from theodolite_studies.coordinates.report import OPTIMIZERS, QUANTITIES, claims, figures
from theodolite_studies.framework.networks import NETWORKS, network
from theodolite_studies.framework.records import Record, short
from theodolite_studies.framework.study import Cell, Setting, Study

_OURS = {"adamw": 2**-8, "muon-kimi": 2**-6, "beside muon-kimi": 2**-8}
_THEIRS = {"adamw": 2**-11, "muon-kimi": 2**-7, "beside muon-kimi": 2**-11}
LEARNING_RATES = {
    **dict.fromkeys(("gpt-pre", "gpt-post", "gpt-peri", "gpt-out"), _OURS),
    "gpt-none": {**_OURS, "adamw": 2**-12},
    **dict.fromkeys(("hf-llama", "hf-gpt2"), _THEIRS),
}
"""At base size; `beside` is of what AdamW trains beside Muon. Found by trying several on the depths and
looking at the slopes: for `gpt-none` and the networks of transformers the verdict at ±0.1 depends on them.
The study's page says what others gave."""


@dataclass(frozen=True)
class CoordinateSetting(Setting):
    """Widths at one depth and depths at one width, and how each network is trained there."""

    widths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    depths: tuple[int, ...] = (2, 4, 8, 16, 32)
    centre: Size = field(default=Size(128, 4))
    """Where both lines of sizes meet."""
    base: Size = field(default=Size(128, 1))
    """Of the plan. At depth 1, so that a branch of L blocks starts at 1/L of what it is by itself: L random
    branches of size b/L add up to b/√L, which must be small beside the stream at every depth that is
    compared for the stream to be flat before anything is learnt."""
    steps: int = 10
    seeds: tuple[int, ...] = (3, 4, 5)
    """Not those that the learning rates were chosen with."""
    num: int = 8
    """Sequences in a batch."""
    length: int = 128

    @property
    def sizes(self) -> tuple[Size, ...]:
        """All sizes, each once."""
        wide = [Size(width, self.centre.depth) for width in self.widths]
        deep = [Size(self.centre.width, depth) for depth in self.depths]
        return tuple(dict.fromkeys([*wide, *deep]))

    def about(self) -> dict[str, Any]:
        """The grid, and what is kept."""
        grid = {name: value for name, value in plain(self).items() if name != "small"}
        return {**grid, "lr": LEARNING_RATES, "quantities": QUANTITIES}


FULL = CoordinateSetting()
SMALL = CoordinateSetting(
    small=True,
    widths=(64, 128, 192),
    depths=(2, 4, 8),
    centre=Size(64, 2),
    base=Size(64, 1),
    seeds=(0, 1),
    num=4,
    length=32,
)
"""A minute instead of many."""


def cells(setting: CoordinateSetting) -> list[Cell]:
    """Networks by optimizers, parameterizations, sizes and seeds; those that take long first."""
    found: list[Cell] = [
        {
            "network": name,
            "optimizer": optimizer,
            "parameterization": parameterization,
            "width": size.width,
            "depth": size.depth,
            "seed": seed,
        }
        for name in NETWORKS
        for optimizer in OPTIMIZERS
        for parameterization in WITHOUT_FACTORY
        for size in setting.sizes
        for seed in setting.seeds
    ]
    return sorted(found, key=lambda cell: -cell["depth"] * (1 + (cell["width"] / 256) ** 2))


def run(cell: Cell, setting: CoordinateSetting, device: str) -> Iterator[Record]:
    """One run: its values after the first, a third and the last of its steps."""
    workload = network(cell["network"], num=setting.num, length=setting.length)
    plan = _plan(setting, *(cell[key] for key in list(cell)[:-1]))
    track = follow(workload, plan, seed=cell["seed"], steps=setting.steps, device=device)
    kept = (0, setting.steps // 3, setting.steps)
    values = [[short(track.values[name][step], 4) for step in kept] for name in QUANTITIES]
    yield {"status": track.status, "values": values}


@functools.lru_cache(maxsize=1)
def _plan(
    setting: CoordinateSetting, name: str, optimizer: str, parameterization: Any, width: int, depth: int
) -> Plan:
    """The same for all seeds, which follow one another."""
    workload, rates = network(name, num=setting.num, length=setting.length), LEARNING_RATES[name]
    beside = rates.get(f"beside {optimizer}")
    vectors: dict[str, Any] = {"vector_lr": beside} if beside else {}
    plan = plan_for(
        workload.build,
        workload.batch(0, 0)[0],
        Size(width, depth),
        parameterization=parameterization,
        base=setting.base,
        optimizer=optimizer,
        lr=rates[optimizer],
        **vectors,
    )
    return with_zero_readout(plan)


STUDY = Study(
    "coordinates",
    cells,
    run,
    claims,
    figures,
    data=lambda records, setting: (records, setting.centre, setting.steps),
    full=FULL,
    small=SMALL,
)
