"""A plan leaves frozen and unused tensors alone, and so does all that trains by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.fleet.engine import Resources
from theodolite.fleet.run import Run
from theodolite.fleet.training import train
from theodolite.fleet.vectorised import vectorised
from theodolite.planning.init_reading import read_without_values
from theodolite.surveying.survey import survey

BASE, TARGET = th.Size(8, 2), th.Size(16, 4)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.shift = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x) + self.shift(time))))


class DiT(nn.Module):
    """A small diffusion transformer: a frozen table of sines and cosines, and a token that nothing reads."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        angles = torch.arange(5.0)[:, None] / 10 ** torch.linspace(0, 2, width // 2)
        self.patch, self.time = nn.Linear(4, width), nn.Linear(1, width)
        self.positions = nn.Parameter(torch.cat([angles.sin(), angles.cos()], 1), requires_grad=False)
        self.null = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        time = self.time(x.mean((1, 2))[:, None])[:, None]
        x = self.patch(x) + self.positions
        for block in self.blocks:
            x = block(x, time)
        return self.head(x)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(999 * seed + step))
    return drawn, drawn.flip(1)


INPUTS = batch(0, 0)[0]
WORKLOAD = th.Workload(name="dit", build=DiT, batch=batch, loss=F.mse_loss, size=TARGET)


@pytest.fixture(scope="module")
def made() -> th.Plan:
    return th.plan(DiT, INPUTS, size=TARGET, base=BASE, lr=0.01, weight_decay=0.1)


def test_their_values_are_those_of_the_build(made: th.Plan) -> None:
    model = made.build(3)
    assert torch.equal(model.positions, DiT(16, 4).positions)
    with torch.no_grad():
        model.positions.fill_(7.0)
        model.null.fill_(8.0)
    made.initialize(model, 4)
    assert (model.positions == 7).all()
    assert (model.null == 8).all()


def test_no_optimizer_has_them(made: th.Plan) -> None:
    model = made.build()
    trained = {name for group in made.param_groups(model) for name in group["param_names"]}
    assert trained == {name for name, _ in model.named_parameters()} - {"positions", "null"}
    made.optimizer(model)


def test_what_is_frozen_after_planning_is_refused(made: th.Plan) -> None:
    model = made.build()
    model.head.requires_grad_(False)
    with pytest.raises(UseError, match=r"head\.weight, head\.bias: frozen \(requires_grad is False\)"):
        made.optimizer(model)


def test_the_table_the_reasons_and_the_file_know_them(made: th.Plan, tmp_path: Path) -> None:
    said = " ".join(str(made).split())
    assert "positions frozen as built null unused as built" in said
    assert f"{len(made.rows) - 2} tensors in" in said
    assert (
        "1 tensor is frozen (positions), and 1 tensor is used by nothing in the forward pass (null): not "
        "trained, and left as built." in said
    )
    assert "it takes no gradient (requires_grad is False)" in " ".join(str(made.explain("positions")).split())
    assert "nothing in the forward pass" in str(made.explain("null"))
    read = th.Plan.load(made.save(tmp_path / "plan.json"), DiT)
    assert read == made
    assert str(made.diff(read)) == "the plans are the same"


def test_a_role_that_is_said_trains_or_freezes() -> None:
    told = th.plan(
        DiT, INPUTS, size=TARGET, base=BASE, lr=0.01, roles={"positions": "bias", "time.*": "frozen"}
    )
    assert told["positions"].trained
    assert not told["time.weight"].trained
    with pytest.raises(UseError, match="positions: frozen"):
        told.optimizer(told.build())


def test_a_std_for_what_is_left_alone_is_refused() -> None:
    with pytest.raises(UseError, match="no tensor that is trained has a name that matches 'positions'"):
        th.plan(DiT, INPUTS, size=TARGET, base=BASE, lr=0.01, init={"positions": 0.02})


def test_what_is_left_alone_needs_no_law() -> None:
    """The table is computed, which only values show; and nobody has filled the token."""

    def build(width: int, depth: int) -> nn.Module:
        model = DiT(width, depth)
        with torch.no_grad():
            model.null.fill_(torch.nan)
        return model

    among = {part.name for part in th.dissect(build, INPUTS, size=BASE).trained}
    assert read_without_values(build, BASE, among).keys() == among
    assert th.plan(build, INPUTS, size=BASE, base=BASE, lr=0.01)["null"].init.kind == "kept"


def test_branches_that_end_in_frozen_tensors_are_mentioned() -> None:
    def frozen(width: int, depth: int) -> nn.Module:
        model = DiT(width, depth)
        for block in model.blocks:
            block.down.requires_grad_(False)
        return model

    made = th.plan(frozen, INPUTS, size=TARGET, base=BASE, lr=0.01)
    assert any("4 of 4 residual branches end in tensors that are not trained" in note for note in made.notes)


def test_coordinates_and_find_lr_train_the_rest() -> None:
    sizes = [BASE, th.Size(16, 2)]
    found = th.probes.coordinates(WORKLOAD, sizes, base=BASE, lr=0.01, steps=1, seeds=[0])
    assert {track.size for track in found.tracks} == set(sizes)
    assert th.find_lr(WORKLOAD, size=BASE, seeds=1, steps=2, low=1e-3, high=1e-2).best > 0


def test_both_engines_train_the_rest_and_agree() -> None:
    runs = [Run("dit", TARGET, lr=0.01, base=BASE, steps=3, seed=seed, held_out=1) for seed in (0, 1)]
    alone = [train(run, WORKLOAD) for run in runs]
    together = list(vectorised(runs, Resources(workloads={"dit": WORKLOAD})))
    assert [one.error for one in together] == [None, None]
    assert [one.held_out for one in together] == pytest.approx([one.held_out for one in alone], rel=1e-5)
    assert {one.readings["parameters"] for one in together} == {one.readings["parameters"] for one in alone}


def test_the_spectral_condition_is_asked_of_the_rest(made: th.Plan) -> None:
    found = th.probes.spectral(WORKLOAD, TARGET, base=BASE, lr=0.01, weight_decay=0.1, steps=1)
    assert {row.name for row in found.rows} == {row.name for row in made.trained}


def test_a_survey_counts_them_and_judges_the_rest() -> None:
    found = survey(WORKLOAD, only=["anatomy", "growth", "plan"])
    said = {finding.code: finding for finding in found.findings}
    assert "1 tensor is frozen (positions)" in said["TH107"].sentence
    assert said["TH107"].level == said["TH204"].level == "ok"
    assert not any("positions" in str(row.get("tensor")) for row in said["TH204"].evidence.rows)
    assert "TH001" not in said
