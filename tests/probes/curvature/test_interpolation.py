"""The networks between two networks: their tensors, the statistics of their batch norms, and bad input."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.probes import path
from theodolite.probes.curvature.interpolation import Interpolation, norms_with_statistics

GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(24, 5, generator=GENERATOR, dtype=torch.float64)
CLASSES = torch.randint(3, (24,), generator=GENERATOR)
PARTS = [(X[:14], CLASSES[:14]), (X[14:], CLASSES[14:])]
HALF = 10
"""The index of the place 0.5 on a line of 21 points without refinement."""


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(import_module("theodolite.probes.curvature.path"), "ROUNDS", 0)


def normed() -> Any:
    """Linear, batch norm, linear, with stored statistics that are those of no batch here."""
    model: Any = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    nn.init.uniform_(model[1].weight)
    for _ in range(5):
        model(3 * torch.randn(9, 5).double() + 1)
    return model.eval()


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def middle(one: nn.Module, other: nn.Module) -> dict[str, Tensor]:
    pairs = zip(one.state_dict().items(), other.state_dict().values(), strict=True)
    return {name: (a + b) / 2 for (name, a), b in pairs}


class TestBatchNorm:
    def losses(self, batches: Any, mean: Tensor, variance: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """Of the network half-way with given statistics, written out, over all examples."""
        every, classes = (torch.cat(column) for column in zip(*batches, strict=True))
        hidden = every @ weights["0.weight"].T + weights["0.bias"]
        scaled = (hidden - mean) / (variance + 1e-5).sqrt() * weights["1.weight"] + weights["1.bias"]
        return F.cross_entropy(scaled @ weights["2.weight"].T + weights["2.bias"], classes)

    def test_re_estimated_statistics_are_those_of_the_network_in_between(self) -> None:
        one, other = normed(), normed()
        weights = middle(one, other)
        found = path(one, other, F.cross_entropy, PARTS)
        hidden = [x @ weights["0.weight"].T + weights["0.bias"] for x, _ in PARTS]
        mean = torch.cat(hidden).mean(0)
        variance = sum(len(part) / 24 * part.var(0) for part in hidden)
        expected = self.losses(PARTS, mean, torch.as_tensor(variance), weights)
        assert float(found.losses[HALF]) == pytest.approx(expected.item(), rel=1e-10)
        assert (found.num_units, found.unit) == (24, "example")
        assert "batch norm: statistics re-estimated on the batches, at every point" in str(found)

    def test_stored_statistics_are_interpolated(self) -> None:
        one, other = normed(), normed()
        weights = middle(one, other)
        found = path(one, other, F.cross_entropy, PARTS, batch_norm="frozen")
        expected = self.losses(PARTS, weights["1.running_mean"], weights["1.running_var"], weights)
        assert float(found.losses[HALF]) == pytest.approx(expected.item(), rel=1e-10)

    def test_with_those_of_the_batch_a_batch_is_one_number(self) -> None:
        one, other = normed(), normed()
        weights = middle(one, other)
        found = path(one, other, F.cross_entropy, PARTS, batch_norm="batch")
        parts = []
        for part in PARTS:
            hidden = part[0] @ weights["0.weight"].T + weights["0.bias"]
            parts.append(self.losses([part], hidden.mean(0), hidden.var(0, unbiased=False), weights))
        expected = (14 * parts[0] + 10 * parts[1]) / 24
        assert float(found.losses[HALF]) == pytest.approx(expected.item(), rel=1e-10)
        assert (found.num_units, found.unit) == (2, "batch")
        assert "the examples of a batch share its statistics" in str(found)

    def test_deeper_norms_see_what_shallower_ones_let_through(self) -> None:
        def build() -> Any:
            return nn.Sequential(normed(), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 3)).double()

        one, other = build(), build()
        found = path(one, other, F.cross_entropy, (X, CLASSES))
        between = copy.deepcopy(one)
        between.load_state_dict(middle(one, other))
        for norm in (between[0][1], between[2]):
            norm.momentum = 1.0
        between.train()(X)
        expected = F.cross_entropy(between.eval()(X), CLASSES)
        assert float(found.losses[HALF]) == pytest.approx(expected.item(), rel=1e-10)

    def test_a_line_along_which_the_function_is_the_same_is_flat_only_with_own_statistics(self) -> None:
        one = normed()
        other = copy.deepcopy(one)
        with torch.no_grad():
            other[0].weight.mul_(4)
            other[0].bias.mul_(4)
        norms_with_statistics(one)["1"].eps = 1e-12
        flat = path(one, other, F.cross_entropy, (X, CLASSES))
        assert float(flat.losses.max() - flat.losses.min()) < 1e-9
        assert flat.verdict == "same basin"
        stored = path(one, other, F.cross_entropy, (X, CLASSES), batch_norm="frozen")
        assert float(stored.losses.max() - stored.losses.min()) > 0.1

    def test_none_is_said_where_there_is_none(self) -> None:
        one, other = nn.Linear(5, 3).double(), nn.Linear(5, 3).double()
        found = path(one, other, F.cross_entropy, (X, CLASSES))
        assert found.batch_norm is None
        assert "batch norm" not in str(found)

    def test_a_batch_of_one_has_no_statistics(self) -> None:
        with pytest.raises(th.UseError, match=r"cannot take statistics of batch 0.*larger batches"):
            path(normed(), normed(), F.cross_entropy, (X[:1], CLASSES[:1]))

    def test_weights_alone_have_none_to_interpolate(self) -> None:
        state = {name: one for name, one in normed().state_dict().items() if "running" not in name}
        with pytest.raises(th.UseError, match=r"model_b has no 1\.running_mean.*reestimated"):
            path(normed(), state, F.cross_entropy, PARTS, batch_norm="frozen")
        assert path(normed(), state, F.cross_entropy, PARTS).verdict in ("same basin", "barrier", "unclear")


class TestTrace:
    def state(self, model: nn.Module) -> dict[str, Any]:
        return {
            "bits": {name: tensor.clone() for name, tensor in model.state_dict().items()},
            "grads": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
            "requires": [p.requires_grad for p in model.parameters()],
            "modes": [module.training for module in model.modules()],
            "norms": [(n.momentum, n.track_running_stats) for n in norms_with_statistics(model).values()],
            "versions": [p._version for p in model.parameters()],
            "random": torch.get_rng_state(),
        }

    @pytest.mark.parametrize("how", ["reestimated", "batch", "frozen"])
    @pytest.mark.parametrize("fails_at", [None, 1, 5, 30])
    def test_none_is_left(self, how: Any, fails_at: int | None) -> None:
        one, other = models = [normed().train(), normed()]
        one[1].eval()
        for model in models:
            F.cross_entropy(model(X), CLASSES).backward()
            model[2].bias.requires_grad_(False)
        calls = 0

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == fails_at:
                raise KeyboardInterrupt
            torch.rand(1)
            return F.cross_entropy(logits, targets)

        before = [self.state(model) for model in models]
        if fails_at is None:
            path(one, other, loss, PARTS, num=5, batch_norm=how)
        else:
            with pytest.raises(KeyboardInterrupt):
                path(one, other, loss, PARTS * 4, num=9, batch_norm=how)
        torch.testing.assert_close([self.state(model) for model in models], before, rtol=0, atol=0)


class Masked(nn.Linear):
    """A linear map with a mask, a table of integers, and a buffer that is not saved."""

    mask: Tensor
    table: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__(5, 5, bias=False)
        self.register_buffer("mask", torch.full((5, 5), -math.inf).triu(1).double())
        self.register_buffer("table", torch.randperm(5))
        self.register_buffer("scale", torch.rand(5), persistent=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, self.table] * self.scale) @ (self.weight + self.mask).softmax(1).T


class TestTensors:
    def test_ends_are_bit_by_bit_those_given(self) -> None:
        one, other = normed().bfloat16(), normed().bfloat16()
        line = Interpolation(one, other)
        for place, model in ((0.0, one), (1.0, other)):
            torch.testing.assert_close(line.at(place), dict(model.state_dict()), rtol=0, atol=0)

    def test_halves_are_mixed_in_float32(self) -> None:
        one, other = nn.Linear(64, 64).bfloat16(), nn.Linear(64, 64).bfloat16()
        weight = Interpolation(one, other).at(0.3)["weight"]
        exact = 0.7 * one.weight.double() + 0.3 * other.weight.double()
        assert weight.dtype == torch.bfloat16
        # One rounding to the 8 bits of a bfloat16.
        assert bool(((weight - exact).abs() <= 2**-8 * exact.abs() + 1e-7).all())

    def test_infinities_of_a_mask_stay_and_integers_are_of_the_nearer_end(self) -> None:
        one, other = Masked(), Masked()
        line = Interpolation(one, other)
        torch.testing.assert_close(line.at(0.5)["mask"], one.mask, rtol=0, atol=0)
        assert torch.equal(line.at(0.49)["table"], one.table)
        assert torch.equal(line.at(0.51)["table"], other.table)
        assert "scale" not in line.at(0.5)
        found = path(one, other, F.cross_entropy, (X, CLASSES))
        assert "not interpolated, as they hold integers: table" in str(found)
        assert bool(found.losses.isfinite().all())

    def test_a_tied_tensor_is_one(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
                self.second.weight = self.first.weight
                self.double()

            def forward(self, x: Tensor) -> Tensor:
                return self.second(self.first(x).tanh())

        one, other = Tied(), Tied()
        found = path(one, other, F.cross_entropy, (X, CLASSES))
        weight = (one.first.weight + other.first.weight) / 2
        expected = F.cross_entropy((X @ weight.T).tanh() @ weight.T, CLASSES)
        assert float(found.losses[HALF]) == pytest.approx(expected.item(), rel=1e-10)
        assert found.distance == pytest.approx(float((one.first.weight - other.first.weight).detach().norm()))
        untied = copy.deepcopy(other)
        untied.second.weight = nn.Parameter(other.first.weight + 1)
        with pytest.raises(th.UseError, match=r"are one tensor in model_a and two different ones in model_b"):
            path(one, untied, F.cross_entropy, (X, CLASSES))

    @pytest.mark.parametrize(
        "given",
        [
            lambda model: nn.DataParallel(model),
            lambda model: compiled(model),
            lambda model: nn.DataParallel(model).state_dict(),
            lambda model: compiled(model).state_dict(),
            lambda model: model.state_dict(),
            lambda model: model.float().double(),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_it_is_the_same_wrapped_or_as_a_state_dict(
        self, given: Callable[[nn.Module], Any], wrapped: bool
    ) -> None:
        one, other = normed(), normed().float().double()
        expected = path(one, copy.deepcopy(other), F.cross_entropy, PARTS, num=3)
        first = compiled(one) if wrapped else one
        found = path(first, given(other), F.cross_entropy, PARTS, num=3)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-12, atol=0)
        assert found.distance == pytest.approx(expected.distance, rel=1e-12)


def changed(change: Callable[[Any], Any]) -> Any:
    model = normed()
    change(model)
    return model


@pytest.mark.parametrize(
    "other, said",
    [
        (nn.Linear(5, 3), r"is a Sequential in model_a and a Linear in model_b"),
        (nn.Sequential(*normed()[:2]), r"model_b has no 2\.weight, which model_a has"),
        (nn.Sequential(*normed(), nn.Linear(3, 3)), r"model_b has a 3\.weight, which model_a does not have"),
        (changed(lambda m: m.insert(1, nn.Tanh())), r"1 is a BatchNorm1d in model_a and a Tanh in model_b"),
        (
            nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)),
            r"2\.weight has the shape \(3, 6\) in model_a and \(4, 6\) in model_b",
        ),
        (changed(lambda m: m[2].bias.data.fill_(math.nan)), r"2\.bias of model_b holds nan or infinity"),
        ({"weight": torch.zeros(3)}, r"model_b is a dict .* no tensor has the name of one of model_a"),
        ({"0.weight": torch.zeros(6, 5)}, r"model_b has no 0\.bias"),
    ],
)
def test_networks_that_are_not_the_same_are_refused(other: Any, said: str) -> None:
    with pytest.raises(th.UseError, match=said):
        path(normed(), other, F.cross_entropy, PARTS)


@pytest.mark.parametrize("broken", [0, 1])
def test_stored_statistics_that_are_not_finite_are_those_of_their_own_network(broken: int) -> None:
    ends = [normed(), normed()]
    ends[broken][1].running_mean[0] = math.nan
    with pytest.raises(th.UseError, match=f"the loss of model_{'ab'[broken]} is nan"):
        path(*ends, F.cross_entropy, PARTS, batch_norm="frozen")
    assert math.isfinite(path(*ends, F.cross_entropy, PARTS).higher.value)  # re-estimated
