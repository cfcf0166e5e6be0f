"""One more block: it helps where there is something to learn, and is judged by units of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.core.batches import Batch
from theodolite.core.calling import ModelLoss
from theodolite.core.size import Size
from theodolite.models import ResidualMLP
from theodolite.probes import signal
from theodolite.probes.signal.result import SILENT
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Finding
from theodolite.surveying.sections import depth as depth_section
from theodolite.surveying.sections.depth import (
    BrieflyTrained,
    SignalEffort,
    SignalMeasurement,
    draw_judges,
    measure,
    one_more,
    section,
    train_briefly,
)
from theodolite.surveying.trials import LR
from theodolite.workloads import Workload

examine = section.run


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer units than in a survey."""
    monkeypatch.setattr(depth_section, "QUICK", replace(depth_section.QUICK, targets=64, sample=256))


def findings(workload: Workload) -> list[Finding]:
    return list(examine(SurveyContext(workload, workload.size)))


def mlp(width: int, depth: int) -> ResidualMLP:
    return ResidualMLP(width, depth, inputs=8, outputs=2)


def silent(width: int, depth: int) -> ResidualMLP:
    """Its readout starts at zero."""
    model = mlp(width, depth)
    nn.init.zeros_(model.readout.weight)
    return model


def coin(seed: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    return torch.randn(64, 8, generator=generator), torch.randint(2, (64,), generator=generator)


def product(seed: int, step: int) -> Batch:
    """Labels that no linear map of the inputs tells."""
    inputs, _ = coin(seed, step)
    return inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()


def test_where_there_is_something_to_learn_a_block_helps(rows: Any) -> None:
    (found,) = findings(rows(mlp, batch=product, size=Size(32, 1)))
    assert (found.code, found.level) == ("TH601", "ok")
    assert found.evidence.numbers["points above noise"] == "2 of 2"
    assert "after 16 steps of AdamW (loss " in found.sentence
    assert "to first order, at 2 of 2 points, most at blocks." in found.sentence
    assert "theodolite grow" in found.remedy


@pytest.mark.parametrize("seed", range(2))
def test_of_labels_by_a_coin_a_network_that_knows_nothing_has_none_to_gain(rows: Any, seed: int) -> None:
    """With logits of about zero the gradient of a unit has the sign of its label, and no mean."""
    workload = rows(silent, batch=coin)
    (found,) = examine(SurveyContext(workload, workload.size, seed))
    assert (found.code, found.level) == ("TH602", "note")
    assert not any(row["above"] for row in found.evidence.rows)
    assert "at none of 3 points" in found.sentence


def test_no_gradient_is_no_gain() -> None:
    found = signal(silent(16, 2), nn.functional.cross_entropy, coin(0, 0))
    assert [one.significance for one in found.points] == [0, 0, 0]
    assert found.deepest


def test_without_any_gradient_the_reason_is_told_and_no_more_examples_are_advised() -> None:
    found = signal(silent(16, 2), nn.functional.cross_entropy, coin(0, 0))
    network = BrieflyTrained(nn.Identity(), Size(16, 2), LR, (2.0, 1.0), None, 32, frozenset())
    said = one_more(SignalMeasurement(replace(found, notes=("a note",)), network, "Here"))
    assert (said.code, said.level, said.title) == ("TH602", "note", "Undecided whether a block helps")
    assert said.sentence == (
        f"Here it is undecided whether a new block lowers the held-out loss: {SILENT}. (a note.)"
    )
    assert "--deep" not in said.remedy
    assert [row["gain"] for row in said.evidence.rows] == [0, 0, 0]


def looked(losses: tuple[float, ...] = (2.0, 1.0), **changes: dict[str, float]) -> SignalMeasurement:
    """The signal of three points, with the numbers given in place of their own."""
    found = signal(mlp(16, 2), nn.functional.cross_entropy, coin(0, 0))
    points = tuple(replace(one, **changes.get(one.name.replace(".", ""), {})) for one in found.points)
    network = BrieflyTrained(nn.Identity(), Size(16, 2), LR, losses, None, 32, frozenset())
    return SignalMeasurement(replace(found, points=points), network, "Here")


def test_the_point_that_is_named_is_above_noise() -> None:
    sure, unsure = (
        {"gain": 2.0, "error": 0.1, "shares": (0.5, 1.5), "unsure": False},
        {"gain": 5.0, "error": 4.0},
    )
    nothing = {"gain": 0.0, "error": 0.1}
    found = one_more(looked(blocks0=unsure, blocks1=sure, blocks2=nothing))
    assert found.code == "TH601"
    assert "at 1 of 3 points, most at blocks.1: by 2 ± 0.1" in found.sentence
    assert "(25% by branch 0 and 75% by branch 1)" in found.sentence
    assert [row["above"] for row in found.evidence.rows] == [False, True, False]
    found = one_more(looked(blocks0=unsure, blocks1=nothing, blocks2=nothing))
    assert found.code == "TH602"
    assert "The largest gain is 5 ± 4 per unit of step, at blocks.0" in found.sentence
    found = one_more(looked(blocks0=sure | {"unsure": True}, blocks1=unsure, blocks2=nothing))
    assert found.code == "TH602"
    assert found.evidence.rows[0]["above"] == "unsure"
    assert "it is undecided whether a new block lowers the held-out loss. At blocks.0" in found.sentence
    assert "2 ± 0.1 per unit of step, which seems to be above its noise, but" in found.sentence
    assert "at none" not in found.sentence
    assert found.title == "Undecided whether a block helps"


@pytest.mark.parametrize("end, level", [(1.0, "ok"), (2.1, "note"), (math.nan, "note")])
def test_what_did_not_learn_is_worth_a_note(end: float, level: str) -> None:
    sure = {"gain": 1.0, "error": 0.1, "unsure": False}
    assert one_more(looked((2.0, end), blocks0=sure)).level == level


class Watched:
    """The units that go into the signal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def watching(model: nn.Module, loss: Any, batches: Any, held_out: Any, **options: Any) -> Any:
            self.estimating, self.judging = (
                [tuple(row) for inputs, _ in some for row in inputs.tolist()] for some in (batches, held_out)
            )
            return signal(model, loss, batches, held_out, **options)

        monkeypatch.setattr(depth_section, "signal", watching)


def test_no_unit_counts_twice(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 units each batch has 40, one of them twice, whatever it is for."""
    every = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))

    def batch(seed: int, step: int) -> Batch:
        chosen = torch.randperm(400, generator=torch.Generator().manual_seed(1000 * (seed % 7) + step))[:40]
        chosen[1] = chosen[0]
        return every[chosen], (every[chosen].sum(1) > 0).long()

    effort = SignalEffort(steps=4, targets=40, sample=64, examples=(16, 64), batches=16, work=1e12)
    monkeypatch.setattr(depth_section, "QUICK", effort)
    watched = Watched(monkeypatch)
    findings(rows(mlp, batch=batch))
    trained = {tuple(row) for step in range(4) for row in batch(0, step)[0].tolist()}
    estimating, judging = set(watched.estimating), set(watched.judging)
    assert len(watched.judging) == len(judging) == 64
    assert len(watched.estimating) == len(estimating) == 32
    assert not judging & (estimating | trained)


def leaking(share: int) -> Callable[[int, int], Batch]:
    """Of 64 held-out units so many are trained on."""

    def held_out(seed: int, step: int) -> Batch:
        theirs, own = product(0, step), product(77, step)
        return tuple(torch.cat([one[:share], other[share:]]) for one, other in zip(theirs, own, strict=True))

    return held_out


@pytest.mark.parametrize(
    "share, expected",
    [(64, ["TH603 warn"]), (8, ["TH603 warn", "TH601 ok"]), (0, ["TH601 ok"])],
)
def test_held_out_units_that_are_trained_on_are_a_warning(rows: Any, share: int, expected: list[str]) -> None:
    found = findings(rows(mlp, batch=product, held_out=leaking(share), size=Size(32, 1)))
    assert [f"{one.code} {one.level}" for one in found] == expected
    if share == 8:
        assert found[0].evidence.numbers["trained on"] == 8 * 5  # four batches give 224, so there is a fifth
        assert found[1].evidence.numbers["examples that judge them"] == 256


def test_a_batch_that_never_changes_leaves_too_few_units(rows: Any) -> None:
    (found,) = findings(rows(mlp, batch=lambda seed, step: coin(0, 0)))
    assert (found.code, found.level, found.title) == ("TH603", "note", "Too few independent examples")
    assert "of 64 held-out examples only 0 differ" in found.sentence


class Apart(nn.Module):
    """Residual blocks, each under a name of its own."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)
        for index in range(depth):
            setattr(self, f"block{index}", nn.Linear(width, width))
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in range(self.depth):
            x = x + torch.tanh(getattr(self, f"block{index}")(x))
        return self.last(x)


class Adding(Apart):
    """Its list holds branches, which the network adds."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, 0)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(torch.tanh(x))
        return self.last(x)


@pytest.mark.parametrize(
    "build, reason",
    [(Apart, "not in an nn.ModuleList"), (Adding, "none of 3 places works, the first is blocks.0 (")],
)
def test_without_a_place_there_is_a_reason(rows: Any, build: Any, reason: str) -> None:
    (found,) = findings(rows(build))
    assert (found.code, found.level, found.title) == ("TH603", "note", "No place for a block")
    assert reason in found.sentence


def test_a_network_without_branches_is_passed_by(rows: Any) -> None:
    plain = rows(lambda width, depth: nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)))
    (found,) = findings(plain)
    assert (found.code, found.level) == ("TH603", "ok")


def test_a_batch_that_cannot_be_drawn_is_named(rows: Any) -> None:
    def batch(seed: int, step: int) -> Batch:
        if step == 5:
            raise OSError("the disk is gone")
        return coin(seed, step)

    (found,) = findings(rows(mlp, batch=batch))
    assert (found.code, found.level) == ("TH603", "note")
    assert "batch(0, 5) failed: OSError: the disk is gone" in found.sentence


class Steep(ResidualMLP):
    """A step of AdamW at 2⁻⁸ moves its logits by 2⁻⁸ · 10⁵, where 1 is as far as is good for them."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(width, depth, inputs=8, outputs=2)
        self.shift = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e5 * self.shift


def test_a_learning_rate_that_is_too_high_is_lowered(rows: Any) -> None:
    workload = rows(Steep, batch=product)
    network = train_briefly(SurveyContext(workload, workload.size))
    assert network.rate < LR


class Scaled(nn.Module):
    """A branch that ends in a scale of its own, whose gradient autograd tells for a batch only."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.map, self.gamma = nn.Linear(width, width), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma * self.map(x).relu()


def scaled(width: int, depth: int) -> nn.Module:
    blocks = (Scaled(width) for _ in range(depth))
    return nn.Sequential(nn.Linear(8, width), nn.Sequential(*blocks), nn.Linear(width, 2))


def test_units_that_are_run_one_by_one_are_as_many_as_there_is_work_for(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depth_section, "QUICK", replace(depth_section.QUICK, examples=(4, 256), work=1e9))
    sites = [SurveyContext(rows(build, batch=product), Size(32, 2)) for build in (mlp, scaled)]
    together, alone = map(train_briefly, sites)
    assert together.examples == 256
    each = depth_section._work_of_one(sites[1], sites[1].build()).total
    assert alone.examples == int(1e9 / (5 * 1.5 * each)) < 256


def test_a_loss_that_takes_the_whole_batch_is_refused_before_the_batch_is_cut(rows: Any) -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        assert len(batch[0]) == 64, "give a whole batch"
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    (found,) = findings(rows(mlp, batch=product, loss=ModelLoss(loss)))
    assert (found.code, found.level) == ("TH603", "note")
    assert "needs loss(logits, targets), but this loss takes the model and the batch" in found.sentence


def test_a_costly_network_is_looked_at_in_small(rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = rows(mlp, batch=product, size=Size(256, 8))
    site = SurveyContext(workload, workload.size)
    monkeypatch.setattr(depth_section, "ENTRY", 0)  # matrix products alone are counted by hand
    monkeypatch.setattr(depth_section, "QUICK", replace(depth_section.QUICK, work=1e8))
    network = train_briefly(site)
    assert network.size == Size(64, 8)  # of the surveyed one 16 targets a step and 16 units are 10⁹
    each = 2 * 8 * 64**2 + 10 * 64
    assert network.examples == int(256 * 1e8 / (each * (3 * 16 * 64 + 5 * 1.5 * 256)))
    found = one_more(measure(site, network, draw_judges(site, network)))
    assert found.sentence.startswith("At 64 × 8, a smaller network of the trials, after 16 steps")
    monkeypatch.setattr(depth_section, "QUICK", replace(depth_section.QUICK, work=1e3))
    (found,) = examine(site)
    assert "at 64 × 2 it takes " in found.sentence
    assert "times the work that is allowed" in found.sentence
    assert "--deep" in found.remedy
