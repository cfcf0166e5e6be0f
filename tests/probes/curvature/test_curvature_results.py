"""Results of all curvature probes: printed, shown, saved, and read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from theodolite import UseError, probes
from theodolite.present.result import Result

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
GIVEN = MODEL, F.cross_entropy, (torch.randn(8, 4).double(), torch.arange(8) % 3)
PATH = [
    {name: tensor + step * torch.randn_like(tensor) for name, tensor in MODEL.state_dict().items()}
    for step in range(3)
]
STEP = {name: torch.randn_like(tensor) for name, tensor in MODEL.named_parameters()}
RESULTS: dict[str, Result] = {
    "curvature": probes.curvature(*GIVEN, directions=5),
    "sharpness": probes.sharpness(*GIVEN),
    "trace": probes.trace(*GIVEN),
    "density": probes.density(*GIVEN, probes=2, steps=6),
    "outliers": probes.outliers(*GIVEN, most=3),
    "eigenvalues": probes.eigenvalues(*GIVEN, k=2),
    "landscape": probes.landscape(*GIVEN, num=3),
    "trajectory": probes.trajectory(MODEL, PATH),
    "radius": probes.radius(*GIVEN, STEP),
    "profile": probes.profile(*GIVEN, STEP, lengths=[0.1, 1.0, 10.0]),
    "drift": probes.drift(*GIVEN, lr=0.1, k=2),
}


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_prints_is_shown_and_saved(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    assert str(result).strip()
    assert "<p>" in result._repr_html_() or "<table" in result._repr_html_()
    content = json.loads(result.save(tmp_path / "result.json").read_text(encoding="utf-8"))
    assert content.pop("kind") == f"theodolite {result.kind}"
    assert content == result.to_dict()
    assert result.title in result.save(tmp_path / "result.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name, result in RESULTS.items() if result.loads])
def test_what_is_read_back_is_the_same(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    again = type(result).load(result.save(tmp_path / "result.json"))
    assert again.to_dict() == result.to_dict()
    assert str(again) == str(result)


@pytest.mark.parametrize("name", [name for name, result in RESULTS.items() if not result.loads])
def test_what_holds_weights_is_not_read_back(name: str, tmp_path: Path) -> None:
    with pytest.raises(UseError, match="cannot be loaded"):
        type(RESULTS[name]).load(tmp_path / "result.json")


@pytest.mark.parametrize("name", ["eigenvalues", "landscape", "trajectory", "profile"])
def test_tables_are_saved_as_csv(name: str, tmp_path: Path) -> None:
    result = RESULTS[name]
    table = result.table()
    assert table is not None
    head, *rows = result.save(tmp_path / "result.csv").read_text(encoding="utf-8").splitlines()
    assert head.split(",") == [column.name for column in table.columns]
    assert len(rows) == len(table.rows)
