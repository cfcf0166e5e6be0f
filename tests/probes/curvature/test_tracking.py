"""Measuring during training: the right numbers at the right steps, and a training that does not notice."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.probes.curvature import tracking as module
from theodolite.probes.curvature.tracking import Tracking, track

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
CLASSES = torch.randint(3, (24,), generator=torch.Generator().manual_seed(2))
BATCH = X[:16], CLASSES[:16]


class Product(nn.Module):
    """`a·b·x`, whose Hessian is easily written down."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * self.b * x

    def sharpness(self) -> float:
        """Of `(ab − 2)²`."""
        a, b = self.a.item(), self.b.item()
        mixed = 4 * a * b - 4
        return float(torch.linalg.eigvalsh(torch.tensor([[2 * b * b, mixed], [mixed, 2 * a * a]]))[-1])


ONE = torch.ones(1, dtype=torch.float64), torch.full((1,), 2.0, dtype=torch.float64)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, loss: Any = F.cross_entropy) -> None:
    optimizer.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def noisy() -> nn.Sequential:
    """With everything that a careless measurement would disturb."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 3))


def trained(wrap: Callable[[Any, Any], Any], steps: int = 6) -> tuple[dict[str, Tensor], Any]:
    model = noisy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(0)
    with wrap(model, optimizer) as tracking:
        for index in range(steps):
            step(model, optimizer, (X[index : index + 12], CLASSES[index : index + 12]))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return state, tracking


class Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: Any) -> None:
        return None


def test_values_are_those_of_the_weights_after_each_kth_step() -> None:
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    expected = [model.sharpness()]
    with track(model, F.mse_loss, ONE, optimizer, every=3, measure=["sharpness", "loss"]) as tracking:
        for index in range(1, 8):
            step(model, optimizer, ONE, F.mse_loss)
            if index % 3 == 0:
                expected.append(model.sharpness())
    assert [row.step for row in tracking.rows] == [0, 3, 6]
    assert tracking.values("sharpness") == pytest.approx(expected, rel=1e-3)
    assert tracking.values("loss")[0] == pytest.approx((1.5 * 0.5 - 2) ** 2, rel=1e-9)
    assert len(set(expected)) == 3
    assert tracking.steps == 7


def test_each_name_measures_what_it_says() -> None:
    model = nn.Linear(6, 3).double()
    batch = X.double(), CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    names = ["loss", "gradient_norm", "sharpness", "trace", "excess", "t"]
    with track(model, F.cross_entropy, batch, optimizer, measure=names) as tracking:
        pass
    found = tracking.rows[0].values
    x = torch.cat([batch[0], torch.ones(24, 1).double()], 1)
    p = model(batch[0]).softmax(1).detach()
    # H = mean of (diag p − ppᵀ) ⊗ xxᵀ.
    curved = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    whole = torch.einsum("nij,nk,nl->ikjl", curved, x, x).reshape(21, 21) / len(x)
    gradient = (p - F.one_hot(CLASSES, 3)).T @ x / len(x)
    assert found["loss"] == pytest.approx(F.cross_entropy(model(batch[0]), CLASSES).item(), rel=1e-9)
    assert found["gradient_norm"] == pytest.approx(gradient.norm().item(), rel=1e-6)
    assert found["sharpness"] == pytest.approx(torch.linalg.eigvalsh(whole)[-1].item(), rel=1e-3)
    assert found["trace"] == pytest.approx(whole.trace().item(), rel=1e-6)  # exact for a linear map
    t = (whole.trace() / whole.norm()).item()
    assert abs(found["t"] - t) <= max(4 * tracking.rows[0].errors["t"], 1e-6)
    assert 0 < found["excess"] <= math.sqrt(50)


@pytest.mark.parametrize("measure", [["loss", "sharpness", "t"], "own"])
def test_training_does_not_notice(measure: Any) -> None:
    def own(model: nn.Module, loss: Any, batch: Any) -> float:
        """Leaves traces wherever it can."""
        model.train()(batch[0])  # moves the statistics
        model.eval()
        torch.rand(3)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return 1.0

    measures = {"own": own} if measure == "own" else measure
    plain, _ = trained(lambda model, optimizer: Nothing())
    tracked, tracking = trained(
        lambda model, optimizer: track(model, F.cross_entropy, BATCH, optimizer, every=2, measure=measures)
    )
    assert len(tracking.rows) == 4
    assert plain.keys() == tracked.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, tracked[name]), name


def test_a_function_is_called_without_gradients_and_may_return_an_estimate() -> None:
    @dataclass(frozen=True)
    class Found:
        value: Tensor
        error: float

    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def own(measured: nn.Module, loss: Any, batch: Any) -> Found:
        assert measured is model
        assert not torch.is_grad_enabled()
        return Found(loss(measured(batch[0]), batch[1]), 0.25)

    with track(model, F.mse_loss, ONE, optimizer, measure={"mine": own, "λ": "sharpness"}) as tracking:
        pass
    assert tracking.names == ("mine", "λ")
    assert tracking.rows[0].values["mine"] == pytest.approx(1.25**2)
    assert tracking.rows[0].errors["mine"] == 0.25
    assert tracking.values("λ")[0] == pytest.approx(model.sharpness(), rel=1e-3)


def test_the_hook_is_gone_afterwards_also_after_an_error() -> None:
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    kept: list[Tracking] = []

    def train() -> None:
        with track(model, F.mse_loss, ONE, optimizer, every=1) as tracking:
            kept.append(tracking)
            step(model, optimizer, ONE, F.mse_loss)
            raise RuntimeError("half-way")

    with pytest.raises(RuntimeError, match="half-way"):
        train()
    step(model, optimizer, ONE, F.mse_loss)
    assert [row.step for row in kept[0].rows] == [0, 1]
    assert not optimizer._optimizer_step_post_hooks


def test_a_measure_that_fails_raises_at_the_start_and_is_noted_later() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)  # diverges at once
    with track(model, F.cross_entropy, BATCH, optimizer, every=1) as tracking:
        for _ in range(2):
            step(model, optimizer, BATCH)
    assert math.isfinite(tracking.values("sharpness")[0])
    assert math.isnan(tracking.values("sharpness")[1])
    assert "the loss is nan" in tracking.rows[1].notes["sharpness"]
    assert "sharpness: UseError: the loss is nan" in str(tracking)

    def broken(*_: Any) -> float:
        raise KeyError("no such thing")

    with (
        pytest.raises(KeyError, match="no such thing"),
        track(nn.Linear(6, 3), F.cross_entropy, BATCH, optimizer, measure={"broken": broken}),
    ):
        pass
    assert not optimizer._optimizer_step_post_hooks


class Hours:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class TestCost:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Hours:
        clock = Hours()
        monkeypatch.setattr(module, "time", clock)
        return clock

    def run(self, clock: Hours, *, steps: int, of_step: float, **options: Any) -> Tracking:
        """Evaluating the loss takes 1 s, a measurement 5 s."""
        model = Product()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            clock.now += 1
            return F.mse_loss(logits, targets)

        def own(*_: Any) -> float:
            clock.now += 5
            return clock.now

        with track(model, loss, ONE, optimizer, measure={"own": own}, **options) as tracking:
            for _ in range(steps):
                clock.now += of_step
                optimizer.step()
        return tracking

    def test_it_is_said_in_gradients_and_as_a_share_of_time(self, clock: Hours) -> None:
        tracking = self.run(clock, steps=4, of_step=10, every=2)
        assert tracking.gradient_seconds == 1
        assert [row.seconds for row in tracking.rows] == [5, 5, 5]
        assert tracking.gradients == 5
        assert tracking.measuring == 20  # with five gradients, to time one
        assert tracking.seconds == 60
        assert tracking.share == pytest.approx(20 / 60)
        assert "20 s of 60 s (33.3 %), 5 gradients each" in tracking.cost

    @pytest.mark.parametrize("of_step", [0.5, 2.0, 40.0])
    def test_it_stays_within_its_share(self, clock: Hours, of_step: float) -> None:
        tracking = self.run(clock, steps=400, of_step=of_step, every=2, most_share=0.1)
        # After the first measurement, which cannot be put off.
        for row, before in zip(tracking.rows[1:], tracking.rows, strict=False):
            assert 5 + sum(one.seconds for one in tracking.rows if one.at <= row.at) <= 0.1 * row.at + 1e-9
            assert (row.step - before.step) % 2 == 0
        assert len(tracking.rows) + tracking.left_out == 201
        # And it uses it: a measurement each 50 s or each 2 steps, whichever is longer.
        assert len(tracking.rows) >= 0.8 * (min(200, 400 * of_step / 50) - 1)
        assert tracking.cost.endswith("skipped to stay within 10 %")
        if of_step == 40.0:
            assert tracking.left_out == 1  # the very first that is due: there was hardly any time yet


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_measured_as_it_was_written(in_place: bool) -> None:
    def run(*, compiled: bool) -> Tracking:
        torch.manual_seed(3)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        if compiled and in_place:
            model.compile(backend="aot_eager")
        elif compiled:
            model = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with track(model, F.cross_entropy, BATCH, optimizer, every=2) as tracking:
            for _ in range(4):
                step(model, optimizer, BATCH)
        return tracking

    plain, compiled = run(compiled=False), run(compiled=True)
    for name in plain.names:
        assert compiled.values(name) == pytest.approx(plain.values(name), rel=1e-4)


def test_a_planned_optimizer_tells_its_steps() -> None:
    workload = th.workload("mlp-mixture")
    size = th.Size(16, 1)
    plan = th.plan(
        workload.build, workload.batch(0, 0)[0], size=size, base=size, optimizer="muon-kimi", lr=0.01
    )
    model = plan.build(0)
    optimizer = plan.optimizer(model)
    with track(model, workload.loss, workload.batch(0, 0), optimizer, every=1, measure="loss") as tracking:
        for index in range(2):
            optimizer.zero_grad()
            workload.evaluate(model, workload.batch(0, index)).backward()
            optimizer.step()
    assert [row.step for row in tracking.rows] == [0, 1, 2]
    assert tracking.values("loss")[-1] < tracking.values("loss")[0]


class TestFiles:
    @pytest.fixture
    def tracking(self) -> Tracking:
        model = Product()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        numbers = iter([1.5, math.nan, 3.0])
        measures: Any = {"<own>": lambda *_: next(numbers), "loss": "loss"}
        with track(model, F.mse_loss, ONE, optimizer, every=1, measure=measures) as tracking:
            for _ in range(2):
                step(model, optimizer, ONE, F.mse_loss)
        return tracking

    def test_csv_holds_every_number_to_the_last_digit(self, tracking: Tracking, tmp_path: Path) -> None:
        with tracking.save(tmp_path / "track.csv").open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert [row["<own>"] for row in rows] == ["1.5", "", "3.0"]
        assert [float(row["loss"]) for row in rows] == list(tracking.values("loss"))
        assert [int(row["step"]) for row in rows] == [0, 1, 2]
        with pytest.raises(th.UseError, match="cannot be written"):
            tracking.save(tmp_path / "nowhere" / "track.csv")

    def test_a_page_has_a_panel_for_each_measure(self, tracking: Tracking, tmp_path: Path) -> None:
        path = tracking.save(tmp_path / "track.html")
        source = path.read_text(encoding="utf-8")
        assert source.count('class="plot"') == 2
        assert "&lt;own&gt;" in source
        assert tracking.cost in source

    def test_json_is_read_back(self, tracking: Tracking, tmp_path: Path) -> None:
        path = tracking.save(tmp_path / "track.json")
        rows = json.loads(path.read_text())["rows"]
        assert [row["values"]["<own>"] for row in rows] == [1.5, None, 3.0]
        again = Tracking.load(path)
        assert again.to_dict() == tracking.to_dict()
        assert str(again) == str(tracking)
        assert again.rows[0] == tracking.rows[0]

    def test_a_table_is_printed(self, tracking: Tracking) -> None:
        head, _, first, *_ = str(tracking).splitlines()
        assert head.split() == ["step", "<own>", "loss"]
        assert first.split() == ["0", "1.5", f"{1.25**2:.4g}"]
        with pytest.raises(th.UseError, match="'trace' was not measured"):
            tracking.values("trace")


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"every": 0}, "every is 0"),
        ({"every": 2.5}, r"every is 2\.5"),
        ({"most_share": 0.0}, r"most_share is 0\.0"),
        ({"most_share": 1.5}, r"most_share is 1\.5"),
        ({"measure": "sharpnes"}, "measure 'sharpnes' is 'sharpnes': give one of loss, gradient_norm"),
        ({"measure": []}, "measure is empty"),
        ({"measure": {"own": lambda *_: "much"}}, "measure 'own' returned a str"),
        ({"measure": {"own": lambda *_: torch.ones(2)}}, "measure 'own' returned a"),
        ({"optimizer": nn.Linear(1, 1)}, "optimizer is a Linear"),
    ],
)
def test_bad_input_is_named(wrong: dict[str, Any], said: str) -> None:
    model = Product()
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **wrong}
    with pytest.raises(th.UseError, match=said), track(model, F.mse_loss, ONE, **given):
        pass
