"""The study of diffGrad: a cell of each kind, and claims on records whose verdict is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from theodolite.core.files import write_whole
from theodolite_studies.diffgrad.study import FUNCTIONS, STUDY, cells, run
from theodolite_studies.framework.study import report

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
    made = {(c["task"], c["optimizer"], c["rate"], c["seed"]) for c in cells(False)}
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


def _records(gain: float = 0.0, best: float = 0.0) -> list[dict[str, Any]]:
    """diffGrad that is Adam at half the learning rate, less a part."""
    found = []
    for part, task in (("function", "F1"), ("network", "cnn")):
        for seed in range(3):
            for rate in range(-12, -7):
                loss = 1 + 0.1 * abs(rate + 9) + 1e-4 * seed
                own = {"part": part, "task": task, "seed": seed, "factor": 0.5}
                found.append({**own, "optimizer": "adam", "rate": rate, "loss": loss})
                if rate < -8:
                    lower = loss * (1 - gain) - best
                    found.append({**own, "optimizer": "diffgrad", "rate": rate + 1, "loss": lower})
    return found


def test_half_the_learning_rate_is_told_from_a_better_step() -> None:
    same = [claim.verdict for claim in STUDY.claims(_records())]
    assert same[4:] == ["fails", "holds", "holds"]
    better = [claim.verdict for claim in STUDY.claims(_records(gain=0.05))]
    assert better[1] == "holds"
    assert better[3:6] == ["holds", "holds", "fails"]


def test_the_report_draws_what_there_is(tmp_path: Path) -> None:
    lines = [{"study": "diffgrad"}, *_records()]
    write_whole(tmp_path / "diffgrad.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    said = report(STUDY, tmp_path / "diffgrad.jsonl")
    assert "Adam at lr/2" in said
    for name in ("functions", "networks"):
        assert (tmp_path / f"diffgrad-{name}.svg").read_text().startswith("<svg")
