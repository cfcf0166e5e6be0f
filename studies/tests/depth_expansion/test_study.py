"""The study of depth expansion: its images, its training, its readings, and claims whose verdict is known."""

import dataclasses
import itertools
import math

import torch

from theodolite_studies.depth_expansion import study as depth_expansion
from theodolite_studies.depth_expansion.grid import best_gain
from theodolite_studies.depth_expansion.study import FULL, SMALL, STUDY, Regime, cells, trained
from theodolite_studies.depth_expansion.training import Recipe

from .networks import READER


def test_cells_come_in_the_order_of_their_worth():
    order = [(cell["regime"], cell["depth"], cell["width"]) for cell in cells(FULL)]
    assert set(order[:24]) == set(itertools.product(FULL.regimes, (1, 3, 9), (4, 8, 16, 32)))
    assert len(order) == len(set(order)) == 48
    assert len(FULL.seeds) >= 3


TINY = dataclasses.replace(
    SMALL,
    test=32,
    regimes={"fitted": Regime(32, Recipe(epochs=2, batch=16, lr=0.1, augmented=False))},
    reader=dataclasses.replace(READER, images=32),
    candidates=8,
)


def test_a_cell_has_a_record_for_each_seed():
    first, second = trained(TINY, "fitted", 1, 2)
    assert (first["seed"], second["seed"]) == (0, 1)
    assert len(first["course"]) == 2
    assert len(first["blocks"]["train"]["norm"]) == 3
    assert first["points"]["pool"]["train"]["dims"] == 8
    assert "matrix" in first["points"]["pool"]["pairs"]
    assert "matrix" not in second["points"]["pool"]["pairs"]
    assert first["candidates"]["points"] == ["blocks.0", "blocks.1"]
    assert math.isfinite(best_gain(first))
    assert first["train_loss"] != second["train_loss"]


def test_a_seed_is_a_start_of_its_own():
    first, again, second = (depth_expansion._built(2, 1, seed, "cpu").stem.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, second)


def test_what_went_wrong_beside_the_training_is_noted(monkeypatch):
    def failing(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(depth_expansion, "candidates", failing)
    first, _ = trained(TINY, "fitted", 1, 2)
    assert "no room" in first["candidates"]["failed"]
    assert math.isnan(best_gain(first))


def test_a_network_that_diverges_is_left_out():
    recipe = Recipe(epochs=2, batch=16, lr=1e30, augmented=False)
    setting = dataclasses.replace(TINY, regimes={"fitted": Regime(32, recipe)})
    records = trained(setting, "fitted", 1, 2)
    assert [one["diverged"] for one in records] == [True, True]
    assert STUDY.decide([{"regime": "fitted", "depth": 1, "width": 2, **one} for one in records]) == []


DEPTHS, WIDTHS, SEEDS = (1, 2, 4, 8), (4, 8, 16), (0, 1, 2)
