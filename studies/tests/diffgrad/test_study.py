"""The study of diffGrad: a cell of each kind, and claims on records whose verdict is known."""

from __future__ import annotations

import pytest
import torch

from theodolite_studies.diffgrad.study import FUNCTIONS, STUDY, cells, run

pytest.importorskip("pytorch_optimizer")


@pytest.mark.parametrize(
    ("name", "joints", "minimum"), [("F1", [], -0.3), ("F2", [-0.9], None), ("F3", [0.5], 0)]
)
def test_functions_have_the_kinks_and_minima_that_they_should(
    name: str, joints: list[float], minimum: float | None
) -> None:
    function = FUNCTIONS[name]
    x = torch.linspace(-1.5, 1.5, 30_001, dtype=torch.float64)
    values = function(x)
    if minimum is not None:
        assert x[values.argmin()].item() == pytest.approx(minimum, abs=1e-3)
    for joint in joints:
        sides = torch.tensor([joint - 1e-9, joint + 1e-9], dtype=torch.float64)
        low, high = function(sides).tolist()
        assert low == pytest.approx(high, abs=0.02)


def test_adam_has_the_control_of_every_learning_rate() -> None:
    made = {(c["task"], c["optimizer"], c["rate"], c["seed"]) for c in cells(STUDY.full)}
    for task, optimizer, rate, seed in made:
        if optimizer == "diffgrad":
            assert (task, "adam", rate, seed) in made
            assert (task, "adam", rate - 1, seed) in made


def test_a_cell_of_each_kind() -> None:
    cell = {"part": "function", "task": "F1", "optimizer": "diffgrad", "rate": -5, "seed": 0}
    (found,) = run(cell)
    assert found["end"] == pytest.approx(-0.3, abs=0.02)
    assert 0.5 <= found["factor"] < 0.52
    (network,) = run({**cell, "part": "network", "task": "cnn", "rate": -7})
    assert network["loss"] < 1.0  # from log 10
    assert 0.5 < network["factor"] < 0.55
