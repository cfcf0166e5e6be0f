"""How do networks learn to add modulo p: waves, the lottery of frequencies, and the stages of grokking?

Three parts, all of `logits = W_out φ(W_in (e_x + e_y))` trained on whole batches:

    waves      all pairs are trained on: neurons as waves, predicted frequencies, other activations
    grokking   three quarters of the unordered pairs modulo 59, over widths, with and without weight decay
    ordered    the paper's own setting: three quarters of the ordered pairs modulo 23

References:
    He, Wang, Chen and Yang, On the mechanism and dynamics of modular addition: Fourier features, lottery
    ticket, and grokking, 2026.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from theodolite.workloads.modular import FRACTION, GENERALISED
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Cell, Setting, Study
from theodolite_studies.modular_addition.claims import CLAIMS
from theodolite_studies.modular_addition.reading import (
    lottery,
    mechanism,
    neurons,
    progress,
    swapped,
    waves_of,
    winners_of,
)
from theodolite_studies.modular_addition.report import figures, notes
from theodolite_studies.modular_addition.training import Adder, Pairs, adamw, sgd, start, train

MEMORISED = 0.99
"""Train accuracy. Test accuracy has to reach `GENERALISED`."""
KEPT = 60
"""Steps of a curve."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a network is made and trained."""

    modulus: int
    width: int
    activation: str = "relu"
    optimizer: str = "adamw"
    lr: float
    scale: float = 0.1
    """c: weights are N(0, c²/P), as in the paper's code."""
    workload_start: bool = False
    """W_out is N(0, c²/D) instead, as in the workload `grokking`."""
    equal: bool = False
    """All frequencies start with the same amplitude."""
    steps: int
    every: int = 50
    """Steps between evaluations."""
    decays: tuple[float, ...] = (0.0,)

    def start(self, seed: int) -> Adder:
        """The untrained network."""
        std_in = self.scale / self.modulus**0.5
        std_out = self.scale / self.width**0.5 if self.workload_start else std_in
        return start(
            self.modulus,
            self.width,
            self.activation,
            std_in=std_in,
            std_out=std_out,
            seed=seed,
            equal=self.equal,
        )


_PAPER: dict[str, Any] = {"modulus": 23, "width": 512, "lr": 5e-5, "steps": 20_000}
_WIDER: dict[str, Any] = {"modulus": 59, "width": 256, "steps": 1000}
_DESCENT: dict[str, Any] = {"activation": "square", "optimizer": "sgd"}
_GROKKING: dict[str, Any] = {"modulus": 59, "lr": 1e-3, "scale": 1.0, "workload_start": True}
_ORDERED: dict[str, Any] = {"modulus": 23, "lr": 1e-4}

RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "waves": {
        "p 23, ReLU": Recipe(**_PAPER),
        "p 23, x²": Recipe(**_PAPER, activation="square"),
        "p 59, ReLU": Recipe(**_WIDER, lr=1e-3),
        "p 59, x²": Recipe(**_WIDER, activation="square", lr=5e-4),
        "p 23, SGD": Recipe(modulus=23, width=512, lr=0.5, steps=3000, **_DESCENT),
        "p 23, SGD, c 0.02": Recipe(modulus=23, width=256, lr=0.5, steps=15_000, scale=0.02, **_DESCENT),
        "p 59, SGD": Recipe(modulus=59, width=256, lr=2.0, steps=4000, **_DESCENT),
        "p 23, SGD, equal": Recipe(modulus=23, width=512, lr=0.5, steps=5000, equal=True, **_DESCENT),
    },
    "grokking": {
        f"p 59, width {width}": Recipe(width=width, steps=5000, every=20, decays=decays, **_GROKKING)
        for width, decays in ((64, (1.0,)), (128, (1.0, 0.0)), (256, (1.0, 0.0)), (512, (1.0,)))
    },
    "ordered": {"p 23": Recipe(width=512, steps=30_000, every=100, decays=(2.0, 0.0), **_ORDERED)},
}
SMALL: Mapping[str, Mapping[str, Recipe]] = {
    "waves": {
        "p 23, ReLU": Recipe(modulus=23, width=128, lr=2e-3, steps=600),
        "p 23, x²": Recipe(modulus=23, width=128, lr=2e-3, steps=600, activation="square"),
        "p 23, SGD": Recipe(modulus=23, width=128, lr=0.5, steps=3000, **_DESCENT),
    },
    "grokking": {
        "p 59, width 128": Recipe(width=128, steps=1200, every=20, decays=(1.0, 0.0), **_GROKKING),
    },
    "ordered": {
        "p 23": Recipe(modulus=23, width=128, lr=1e-3, steps=3000, every=20, decays=(1.0, 0.0)),
    },
}
"""Narrower networks under the names of the full study."""


@dataclass(frozen=True)
class AdditionSetting(Setting):
    """How much is run."""

    seeds: int = 5

    def about(self) -> dict[str, Any]:
        """The size of the study and the seeds."""
        return {"small": self.small, "seeds": self.seeds}

    @property
    def recipes(self) -> Mapping[str, Mapping[str, Recipe]]:
        """By part and name."""
        return SMALL if self.small else RECIPES


def cells(setting: AdditionSetting) -> list[Cell]:
    """Networks, weight decays and seeds."""
    return [
        {"part": part, "network": name, "decay": decay, "seed": seed}
        for part, recipes in setting.recipes.items()
        for name, recipe in recipes.items()
        for decay in recipe.decays
        for seed in range(setting.seeds)
    ]


def run(cell: Cell, setting: AdditionSetting, *_: object) -> Iterator[Record]:
    """The records of one network."""
    recipe = setting.recipes[cell["part"]][cell["network"]]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if cell["part"] == "waves":
            yield from waves(recipe, cell["seed"])
        else:
            yield from grokking(recipe, cell["decay"], cell["seed"], ordered=cell["part"] == "ordered")
    finally:
        torch.set_num_threads(threads)


def waves(recipe: Recipe, seed: int) -> Iterator[Record]:
    """Train on all pairs; read the network when all are right, after a quarter of the steps, at the end."""
    pairs, network = Pairs(recipe.modulus), recipe.start(seed)
    before, predicted = network.copy(), winners_of(network)
    optimizer = adamw(network, recipe.lr) if recipe.optimizer == "adamw" else sgd(network, recipe.lr)
    named = {recipe.steps // 4: "quarter", recipe.steps: "end"}
    stops = {*range(0, recipe.steps, recipe.every), *named}
    is_solved = False
    for step in train(network, pairs, pairs.orderings, optimizer, recipe.steps, stops):
        if is_solved and step not in named:
            continue
        seen = mechanism(network, pairs)
        if not is_solved and seen["accuracy"] == 1:
            is_solved = True
            yield {"kind": "mechanism", "when": "solved", "step": step, **seen}
        if step in named:
            yield {"kind": "mechanism", "when": named[step], "step": step, **seen}
    yield {"kind": "lottery", **lottery(predicted, waves_of(network))}
    yield {"kind": "swapped", "accuracy": swapped(network, pairs)}
    if seed == 0:
        yield {"kind": "neurons", **neurons(network, before)}


def grokking(recipe: Recipe, decay: float, seed: int, *, ordered: bool) -> Iterator[Record]:
    """Train on three quarters of the pairs; read the stages and the curves."""
    pairs, network = Pairs(recipe.modulus), recipe.start(seed)
    trained = pairs.split(FRACTION, seed, ordered=ordered)
    stops = range(0, recipe.steps, recipe.every)
    marks = np.geomspace(recipe.every, recipe.steps, KEPT) / recipe.every
    kept = {0, *(recipe.every * marks.round().astype(int)).tolist()}
    levels = {"memorised": ("train", MEMORISED), "generalised": ("test", GENERALISED)}
    curves: dict[str, list[Any]] = {}
    peak = 0.0
    for step in train(network, pairs, trained, adamw(network, recipe.lr, decay), recipe.steps, stops):
        seen = progress(network, pairs, trained)
        peak = max(peak, network.norm)
        for moment, (series, level) in list(levels.items()):
            if (seen[series] or 0) >= level:
                del levels[moment]
                yield {"kind": "moment", "moment": moment, "step": step, **seen}
        if step in kept or step == recipe.steps:
            for name, value in {"steps": step, **seen}.items():
                curves.setdefault(name, []).append(value)
    yield {"kind": "moment", "moment": "end", "step": recipe.steps, "peak": round(peak, 3), **seen}
    yield {"kind": "curve", "curves": curves}


STUDY = Study(
    "modular-addition",
    cells,
    run,
    CLAIMS,
    figures,
    notes,
    full=AdditionSetting(),
    small=AdditionSetting(small=True, seeds=2),
)
