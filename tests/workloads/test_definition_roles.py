"""Roles of a workload: everything that looks into its network reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import theodolite as th
from theodolite import Size, UseError
from theodolite.cli import main
from theodolite.probes import assumptions

FILE = Path(__file__)


class Floored(nn.Module):
    """An operation that does not tell the role of its tensor."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.rise, self.out = nn.Linear(8, width), nn.Linear(width, 2)
        self.floor = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.out(torch.maximum(self.rise(x), self.floor))


def batch(seed: int, step: int):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1_000_003 * seed + step))
    return x, (x.sum(1) > 0).long()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def make(roles: dict[str, str]) -> th.Workload:
    loss = nn.functional.cross_entropy
    return th.Workload("floored", Floored, batch, loss, Size(16, 1), optimizer=adamw, roles=roles)


workload = make({"fl*": "bias"})
SIZES = [Size(16, 1), Size(32, 1)]
READERS = {
    "survey": lambda given, out: th.survey(given, only=["anatomy"]).ranked,
    "coordinates": lambda given, out: th.probes.coordinates(given, SIZES, base=SIZES[0], lr=0.01, seeds=1),
    "own coordinates": lambda given, out: th.probes.coordinates(
        given, SIZES, parameterization="own", seeds=1
    ),
    "spectral": lambda given, out: th.probes.spectral(given, SIZES[1], base=SIZES[0], lr=0.01),
    "assumptions": lambda given, out: assumptions(
        given, th.plan(Floored, batch(0, 0)[0], base=SIZES[0], size=SIZES[0], lr=0.01, roles=workload.roles)
    ),
    "audit": lambda given, out: th.audit(given, train=False),
    "find_lr": lambda given, out: th.find_lr(given, steps=3, seeds=1),
    "own find_lr": lambda given, out: th.find_lr(given, optimizer="own", steps=3, seeds=1),
    "sweep": lambda given, out: th.sweep(
        given,
        widths=[16, 32],
        depths=[1],
        lr=[2**-7, 2**-5],
        steps=3,
        seeds=1,
        out=out,
        engine="serial",
        parameterization=["plan", "own"],
    ),
}


@pytest.mark.parametrize("name", READERS)
def test_what_looks_into_the_network_reads_them(name: str, tmp_path: Path) -> None:
    assert READERS[name](workload, tmp_path / "with")


@pytest.mark.parametrize("name", [name for name in READERS if name != "survey"])
def test_without_them_the_tensor_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(UseError, match=r"floor has shape .* does not tell its role"):
        READERS[name](make({}), tmp_path / "without")


def test_a_survey_without_them_fails_and_says_where_to_write_them() -> None:
    (finding,) = th.survey(make({}), only=["anatomy"]).at("fail")
    assert finding.code == "TH107"
    assert "Workload(…, roles={pattern: role})" in (finding.remedy or "")


@pytest.mark.parametrize(
    "command", [["plan", "--width", "32", "--lr", "0.01"], ["groups", "--lr", "0.02"], ["dissect"]]
)
def test_commands_read_them(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command[0], f"{FILE}:workload", *command[1:]])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("floor"))
    assert "bias" in line


def test_those_of_a_call_win_where_the_pattern_is_the_same() -> None:
    given = make({"floor": "bias", "rise.weight": "input"})
    assert given.roles_with({"floor": "gain"}) == {"floor": "gain", "rise.weight": "input"}


@pytest.mark.parametrize("roles", [["floor"], "bias"])
def test_what_is_no_mapping_is_refused(roles) -> None:
    with pytest.raises(UseError, match=r"roles is .* Give roles by pattern"):
        make(roles)
