"""The loss between two networks against closed forms; what a barrier is, and how sure one can be of it."""

from __future__ import annotations

import copy
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import theodolite as th
from theodolite.probes import LossPath, path
from theodolite.workloads import ModelLoss, OutputLoss

PATH = import_module("theodolite.probes.curvature.path")
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(24, 5, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(24, 3, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(3, (24,), generator=GENERATOR)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def linear() -> nn.Linear:
    return nn.Linear(5, 3, bias=False).double()


class Place(nn.Module):
    """Returns its one weight for every example, so that a loss is any function of the place."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(len(x), 1)


ONES = torch.ones(8, 1, dtype=torch.float64)


def along(function: Any, low: float = 0.0, high: float = 1.0, batch: Any = None, **options: Any) -> LossPath:
    """From weight `low` to weight `high` under the loss `function(weights, targets).mean()`."""
    batch = batch or (ONES, ONES)
    return path(Place(low), Place(high), lambda w, targets: function(w, targets).mean(), batch, **options)


def test_the_loss_of_a_linear_model_is_the_quadratic_between_both() -> None:
    one, other = linear(), linear()
    found = path(one, other, F.mse_loss, (X, Y))
    for place, value in zip(found.places.tolist(), found.losses.tolist(), strict=True):
        weight = (1 - place) * one.weight + place * other.weight
        assert value == pytest.approx(((X @ weight.T - Y) ** 2).mean().item(), rel=1e-12)
    # A quadratic is convex, for every example: no point between is above the chord.
    assert (found.chord.value, found.chord.low, found.chord.high) == (0, 0, 0)
    assert found.higher.value == 0


def test_the_distance_is_that_of_the_weights() -> None:
    one, other = linear(), linear()
    found = path(one, other, F.mse_loss, (X, Y))
    a, b = one.weight.detach(), other.weight.detach()
    assert found.distance == pytest.approx(float((a - b).norm()), rel=1e-12)
    assert found.norms == pytest.approx((float(a.norm()), float(b.norm())), rel=1e-12)


def test_barriers_over_the_higher_end_and_over_the_chord() -> None:
    def wells(w: Tensor, _: Tensor) -> Tensor:
        return (w**2 - 1) ** 2 + 0.25 * w + 1  # minima near −1 and 1, the second one higher

    found = along(wells, -1.03, 0.97, num=11)
    w = torch.linspace(-1.03, 0.97, 200_001, dtype=torch.float64)
    values = wells(w, w)
    chord = torch.lerp(values[0], values[-1], torch.linspace(0, 1, 200_001, dtype=torch.float64))
    assert found.higher.value == pytest.approx(float(values.max() - values[-1]), rel=1e-3)
    assert found.chord.value == pytest.approx(float((values - chord).max()), rel=1e-3)
    assert found.higher.at == pytest.approx(float((w[values.argmax()] + 1.03) / 2), abs=0.02)
    assert found.chord.value > found.higher.value + 0.1
    assert found.verdict == "barrier"


def test_the_grid_is_finer_at_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(w: Tensor, _: Tensor) -> Tensor:
        return 1 - 3 * (w - 0.3125).abs()  # between two points of a grid of five

    fine = along(peak, num=5)
    monkeypatch.setattr(PATH, "ROUNDS", 0)
    coarse = along(peak, num=5)
    assert len(coarse.places) == 5 < len(fine.places) <= 5 + 2 * 2 * 4
    assert fine.higher.value == pytest.approx(1 - (1 - 3 * 0.3125), rel=1e-9)  # 0.3125 is hit in two rounds
    assert coarse.higher.value < fine.higher.value - 0.15


def test_ends_are_the_networks_bit_by_bit() -> None:
    one, other = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(2))
    inputs = X.float()
    found = path(one, other, F.cross_entropy, (inputs, CLASSES))
    for model, value in ((one, found.losses[0]), (other, found.losses[-1])):
        own = F.cross_entropy(model(inputs), CLASSES, reduction="none").detach().double().mean()
        assert float(value) == pytest.approx(float(own), rel=1e-6)


class TestInterval:
    """Each half of the examples judges the point that the other half chose."""

    def test_it_is_that_of_paired_differences(self) -> None:
        heights = torch.rand(30, 1, generator=GENERATOR, dtype=torch.float64) + 1
        level = 100 * torch.rand(30, 1, generator=GENERATOR, dtype=torch.float64)
        targets = torch.cat([heights, level], 1)

        def bump(w: Tensor, own: Tensor) -> Tensor:  # what varies most is common to all points
            return own[:, 1:] + own[:, :1] * 4 * w * (1 - w)

        found = along(bump, batch=(torch.ones(30, 1).double(), targets))
        even, odd = heights[::2, 0].numpy(), heights[1::2, 0].numpy()  # at the maximum, one half
        value = (even.mean() + odd.mean()) / 2
        error = math.hypot(stats.sem(even), stats.sem(odd)) / 2
        assert found.higher.value == pytest.approx(value, rel=1e-9)
        assert found.higher.low == pytest.approx(value - stats.t.ppf(0.975, 14) * error, rel=1e-9)
        upper = value + stats.t.ppf(0.975, 29) * stats.sem(heights[:, 0])
        assert found.higher.high == pytest.approx(upper, rel=1e-9)
        assert float(found.above_errors.max()) == pytest.approx(stats.sem(heights[:, 0]), rel=1e-9)
        assert float(found.errors[0]) == pytest.approx(stats.sem(level[:, 0]), rel=1e-9)

    @pytest.mark.parametrize("height", [0.0, 0.5])
    def test_it_is_right_where_every_example_has_a_rough_path_of_its_own(self, height: float) -> None:
        """The mean over all that there could be has the given barrier."""
        waves = torch.arange(1, 9, dtype=torch.float64)

        def rough(w: Tensor, own: Tensor) -> Tensor:
            mean = 1 + height * torch.sin(math.pi * w)
            return mean + (own[:, :8] * torch.sin(math.pi * waves * w)).sum(1, keepdim=True) + own[:, 8:] * w

        values, naive, covered = [], [], []
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            batch = torch.ones(40, 1).double(), torch.randn(40, 9, generator=generator, dtype=torch.float64)
            found = along(rough, batch=batch, num=11)
            values.append(found.chord.value)
            naive.append(float(found.above.max()))
            covered.append(found.chord.low <= height <= found.chord.high)
        assert stats.ttest_1samp(naive, height).statistic > 6  # too high
        assert stats.ttest_1samp(values, height).statistic < 2
        assert height or abs(np.mean(values)) < np.mean(naive) / 5
        assert np.mean(covered) > 0.9

    def test_it_is_right_where_the_examples_do_not_show_which_end_is_higher(self) -> None:
        def bump(w: Tensor, own: Tensor) -> Tensor:
            return 1 + 0.5 * torch.sin(math.pi * w) + (0.3 + 2 * own) * w

        w = torch.linspace(0, 1, 1001, dtype=torch.float64)
        barrier = float(bump(w, torch.zeros(())).max()) - 1.3
        covered = []
        for seed in range(40):
            generator = torch.Generator().manual_seed(seed)
            batch = torch.ones(40, 1).double(), torch.randn(40, 1, generator=generator, dtype=torch.float64)
            found = along(bump, batch=batch, num=11)
            covered.append((found.higher.low <= barrier, barrier <= found.higher.high))
        assert (np.mean(covered, axis=0) > 0.9).all()

    def test_what_one_example_shows_alone_is_unclear(self) -> None:
        targets = torch.zeros(40, 1, dtype=torch.float64)
        targets[7] = 40.0

        found = along(lambda w, own: 1 + own * 4 * w * (1 - w), batch=(torch.ones(40, 1).double(), targets))
        assert float(found.losses.max()) == pytest.approx(2, rel=1e-9)
        assert found.verdict == "unclear"

    def test_a_few_examples_have_none(self) -> None:
        found = along(lambda w, _: 1 + 4 * w * (1 - w), batch=(ONES[:3], ONES[:3]))
        assert found.higher.value == pytest.approx(1)
        assert math.isnan(found.higher.low)
        assert found.verdict == "barrier"
        assert "no interval from 3 examples: give at least 4" in str(found)

    @pytest.mark.parametrize("tolerance, verdict", [(0.4, "barrier"), (0.5, "unclear"), (0.6, "same basin")])
    def test_the_verdict_is_by_the_tolerance(self, tolerance: float, verdict: str) -> None:
        heights = torch.tensor([0.9, 1.0, 1.1], dtype=torch.float64).repeat(20)[:, None]
        found = along(
            lambda w, own: 2 + own * 4 * w * (1 - w),
            batch=(torch.ones(60, 1).double(), heights),
            tolerance=tolerance,
        )
        assert found.limit == 2 * tolerance
        assert found.verdict == verdict


class TestUnits:
    def test_batches_are_one_sample_of_examples(self) -> None:
        one, other = linear(), linear()
        whole = path(one, other, F.mse_loss, (X, Y))
        parts = path(one, other, F.mse_loss, [(X[:5], Y[:5]), (X[5:], Y[5:])])
        torch.testing.assert_close(parts.losses, whole.losses, rtol=1e-12, atol=0)
        torch.testing.assert_close(parts.errors, whole.errors, rtol=1e-12, atol=0)
        assert (parts.num_units, parts.unit) == (24, "example")

    @pytest.mark.parametrize(
        "loss",
        [
            OutputLoss(lambda output, targets: F.mse_loss(output, targets)),
            ModelLoss(lambda model, batch: F.mse_loss(model(batch[0]), batch[1])),
        ],
    )
    def test_a_loss_without_examples_is_taken_by_batches(self, loss: Any) -> None:
        one, other = linear(), linear()
        found = path(one, other, loss, [(X[:5], Y[:5]), (X[5:], Y[5:])])
        expected = path(one, other, F.mse_loss, (X, Y))
        torch.testing.assert_close(found.losses[[0, -1]], expected.losses[[0, -1]], rtol=1e-12, atol=0)
        assert (found.num_units, found.unit) == (2, "batch")
        assert "A loss for each example needs loss(logits, targets)" in str(found)

    def test_the_error_of_batches_of_different_sizes(self) -> None:
        sizes, levels = np.array([2, 3, 5, 6, 8]), np.array([1.0, 4.0, 2.0, 7.0, 3.0])
        batches = [
            (torch.ones(n, 1).double(), torch.full((n, 1), level).double())
            for n, level in zip(sizes.tolist(), levels.tolist(), strict=True)
        ]
        loss = OutputLoss(lambda output, targets: (targets * (1 + output)).mean())
        found = path(Place(0.0), Place(1.0), loss, batches)
        mean = np.average(levels, weights=sizes)
        # The error of a ratio estimator, from independent batches.
        error = math.sqrt(5 / 4 * ((sizes * (levels - mean)) ** 2).sum()) / sizes.sum()
        assert float(found.losses[0]) == pytest.approx(mean, rel=1e-12)
        assert float(found.errors[0]) == pytest.approx(error, rel=1e-12)

    def test_weights_of_classes_are_no_loss_of_an_example(self) -> None:
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 9.0]).double())
        one, other = linear(), linear()
        found = path(one, other, loss, [(X[i : i + 6], CLASSES[i : i + 6]) for i in range(0, 24, 6)])
        assert (found.num_units, found.unit) == (4, "batch")
        assert "divides by the weights of the batch" in str(found)

    def test_every_point_sees_the_same_random_numbers(self) -> None:
        def noisy(model: nn.Module, batch: Any) -> Tensor:
            return model(batch[0]).mean() * 0 + torch.rand(()) + 1

        batches = [(ONES, ONES)] * 4
        found = path(Place(0.0), Place(1.0), ModelLoss(noisy), batches)
        assert float(found.losses.std()) < 1e-12
        assert found.errors[0] > 0.01  # from batch to batch they differ


def test_a_loss_that_is_infinite_between_is_an_infinite_barrier() -> None:
    found = along(lambda w, _: 1 + 1 / (w - 0.5).abs(), batch_norm="frozen")
    assert (found.higher.value, found.higher.at, found.verdict) == (math.inf, 0.5, "barrier")
    assert "A barrier lies between them: infinite" in found.title
    nothing = along(lambda w, _: 1 + (w - 0.5) / (w - 0.5))  # 0/0
    assert (nothing.chord.value, nothing.verdict) == (math.inf, "barrier")


@pytest.mark.parametrize("low, high, name", [(-1.0, 1.0, "model_a"), (1.0, -1.0, "model_b")])
def test_an_end_has_to_be_finite(low: float, high: float, name: str) -> None:
    with pytest.raises(th.UseError, match=f"the loss of {name} is nan"):
        along(lambda w, _: w.log(), low, high)


def test_dropout_is_off() -> None:
    one, other = (nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double() for _ in range(2))
    trained = path(one.train(), other, F.cross_entropy, (X, CLASSES))
    value = F.cross_entropy(one.eval()(X), CLASSES).item()
    assert float(trained.losses[0]) == pytest.approx(value, rel=1e-12)


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[float] = []
    batches = [(X[:12], Y[:12]), (X[12:], Y[12:])]
    path(linear(), linear(), F.mse_loss, batches, num=3, progress=lambda title, done: told.append(done))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1.0)
    assert len(told) == 3 * 2


def test_it_is_saved_and_read_back(tmp_path: Path) -> None:
    found = along(lambda w, _: 1 + 4 * w * (1 - w), num=5)
    read = LossPath.load(found.save(tmp_path / "path.json"))
    assert str(read) == str(found)
    head, *rows = found.save(tmp_path / "path.csv").read_text(encoding="utf-8").splitlines()
    assert head == "place,loss,error,above the chord,error of that"
    assert [float(row.split(",")[1]) for row in rows] == found.losses.tolist()
    source = found.save(tmp_path / "path.html").read_text(encoding="utf-8")
    assert "Above the chord" in source
    broken = along(lambda w, _: 1 / (w - 0.5).abs(), num=5)
    saved = json.loads(broken.save(tmp_path / "broken.json").read_text())
    assert saved["losses"][saved["places"].index(0.5)] is None
    assert LossPath.load(tmp_path / "broken.json").verdict == "barrier"
    broken.save(tmp_path / "broken.html")


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"num": 2}, "num is 2: give an integer, at least 3"),
        ({"tolerance": 0.0}, r"tolerance is 0\.0"),
        ({"batch_norm": "train"}, "batch_norm is 'train'.*reestimated, batch, frozen"),
        ({"batches": []}, "the batches are empty"),
        ({"batches": iter([(X, Y)])}, "can be iterated more than once"),
        ({"model_b": 3}, "model_b is the int 3: give a torch.nn.Module or a state dict"),
        (
            {"model_b": {"model": linear().state_dict(), "epoch": 3}},
            r"model_b is a dict with the keys .*no tensor has the name .*of a checkpoint, the entry",
        ),
        ({"model_a": {}}, r"model_a is a dict .* not a torch\.nn\.Module"),
    ],
)
def test_bad_input_is_named(wrong: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"model_a": linear(), "model_b": linear(), "loss": F.mse_loss, "batches": (X, Y)}
    with pytest.raises(th.UseError, match=said):
        path(**{**given, **wrong})


def test_the_same_weights_are_no_line() -> None:
    model = linear()
    for other in (model, model.state_dict(), copy.deepcopy(model)):
        with pytest.raises(th.UseError, match=r"both networks have the same weights.*deepcopy"):
            path(model, other, F.mse_loss, (X, Y))
