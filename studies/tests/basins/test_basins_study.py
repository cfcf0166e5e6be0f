"""The study of basins: data, training and spectra by closed forms, and a tiny cell of each part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite_studies.basins.lines import PAIRS, lines, measured
from theodolite_studies.basins.shifts import SHIFTS, criteria, grid, shifted, shifts
from theodolite_studies.basins.spectra import above_wide_gap, largest_ratio, spectra
from theodolite_studies.basins.study import BasinsSetting, cells
from theodolite_studies.basins.training import EVERY, Sgd, mlp, points, train


def cross_entropy(model: nn.Module, weights: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(torch.func.functional_call(model, weights, batch[0]), batch[1])


def exact_eigenvalues(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """From torch's own Hessian over one vector of weights, from the largest down."""
    shapes = {name: value.shape for name, value in model.named_parameters()}
    point = torch.cat([value.detach().flatten() for value in model.parameters()])

    def loss(vector: Tensor) -> Tensor:
        pieces = vector.split([math.prod(shape) for shape in shapes.values()])
        named = zip(shapes.items(), pieces, strict=True)
        return cross_entropy(model, {name: piece.view(shape) for (name, shape), piece in named}, batch)

    return torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, point)).flip(0)


def test_a_tenth_of_the_labels_is_wrong() -> None:
    about = {"classes": 5, "dimensions": 6, "separation": 3.0, "seed": 1}
    inputs, right = points(200, **about)  # type: ignore[arg-type]
    same, labels = points(200, **about, wrong=0.1)  # type: ignore[arg-type]
    assert torch.equal(inputs, same)
    assert int((labels != right).sum()) == 20
    assert set(labels.tolist()) == set(range(5))


def test_a_step_of_all_examples_is_that_of_gradient_descent_with_decay() -> None:
    model, batch = mlp((3, 2), seed=0), (torch.randn(6, 3).double(), torch.arange(6) % 2)
    weight = model[0].weight
    before = weight.detach().clone()
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model(batch[0]), batch[1]), weight)[0]
    assert train(model, batch, Sgd(6, 0.5, decay=0.1), epochs=1, seed=0) == 1
    torch.testing.assert_close(weight.detach(), before - 0.5 * (gradient + 0.1 * before))


def test_training_ends_at_the_first_look_below_the_goal() -> None:
    batch, how = points(60, classes=2, dimensions=4, separation=3.0, seed=0), Sgd(60, 0.1)

    def loss_after(epochs: int) -> tuple[int, float]:
        model = mlp((4, 8, 2), seed=0)
        ended = train(model, batch, how, epochs=epochs, seed=0, goal=0.3)
        return ended, nn.functional.cross_entropy(model(batch[0]), batch[1]).item()

    ended, loss = loss_after(500)
    assert EVERY < ended < 500
    assert loss <= 0.3 < loss_after(ended - EVERY)[1]


def test_a_line_is_measured_as_the_weights_between_say() -> None:
    batch = points(64, classes=10, dimensions=32, separation=4.0, seed=0)
    one, other = mlp((32, 8, 10), seed=0), mlp((32, 8, 10), seed=1)
    train(one, batch, Sgd(16, 0.3), epochs=10, seed=0)
    train(other, batch, Sgd(16, 0.3), epochs=20, seed=0)
    found = measured(one, other, batch)
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    ends = [(name, a.detach(), b.detach()) for (name, a), b in pairs]
    for place, loss in zip(found["places"], found["losses"], strict=True):
        between = {name: torch.lerp(a, b, place) for name, a, b in ends}
        assert loss == pytest.approx(cross_entropy(one, between, batch).item(), rel=1e-4)
    assert found["distance"] == pytest.approx(
        math.sqrt(sum((a - b).square().sum().item() for _, a, b in ends)), rel=1e-4
    )
    assert "stored" not in found
    seen = th.probes.path(one, other, nn.functional.cross_entropy, batch)
    assert abs(seen.higher.value - seen.chord.value) > 0.01
    assert found["rise"] * max(found["ends"]) == pytest.approx(seen.higher.value, rel=1e-3)
    assert found["chord"] * max(found["ends"]) == pytest.approx(seen.chord.value, rel=1e-3)
    # A logistic regression is convex: no line has a barrier.
    flat = measured(mlp((32, 10), seed=0), mlp((32, 10), seed=1), batch)
    assert flat["rise"] == 0
    assert flat["chord"] <= 0


def test_stored_statistics_are_those_of_both_ends() -> None:
    batch = points(64, classes=10, dimensions=32, separation=4.0, seed=0)
    ends = [mlp((32, 8, 10), seed=seed, normed=True) for seed in range(2)]
    for model in ends:
        train(model, batch, Sgd(16, 0.3), epochs=10, seed=0)
    found = measured(*ends, batch)
    # The highest loss of networks whose buffers are interpolated too.
    losses = []
    for place in torch.linspace(0, 1, 101).tolist():
        pairs = zip(ends[0].state_dict().items(), ends[1].state_dict().values(), strict=True)
        mixed = {name: a if "num" in name else torch.lerp(a, b, place) for (name, a), b in pairs}
        losses.append(cross_entropy(ends[0].eval(), mixed, batch).item())
    stored = max(losses) / max(losses[0], losses[-1]) - 1
    assert found["stored"] == pytest.approx(stored, rel=0.1)  # each half of the examples chooses a place
    assert abs(found["rise"] / stored - 1) > 0.2


@pytest.mark.parametrize("network", ["plain", "normed"])
def test_a_cell_of_lines_has_the_ends_that_it_names(network: str) -> None:
    found = {row["pair"]: row for row in lines(network, "high rates", 3, num=96, goal=2.0, further=2)}
    assert tuple(found) == PAIRS
    assert found["continued"]["ends"][0] == found["same start"]["ends"][0]  # large batches
    assert found["same start"]["ends"][1] == found["two small"]["ends"][0]  # small ones
    assert found["two small"]["ends"][0] == found["different starts"]["ends"][0]
    for near in ("same start", "two small"):
        assert found["different starts"]["distance"] > 2 * found[near]["distance"]
    assert ("stored" in found["continued"]) == (network == "normed")
    with pytest.raises(th.UseError, match="the same weights"):  # it goes on from the large batches' end
        list(lines(network, "high rates", 3, num=96, goal=2.0, further=0))


def test_the_spectrum_of_a_cell_is_that_of_the_explicit_hessian() -> None:
    (found,) = spectra(3, 3, 3.0, seed=5, num=60, epochs=5)
    batch = points(60, classes=3, dimensions=10, separation=3.0, seed=5)
    model = mlp((10, 3, 3, 10), seed=5)
    train(model, batch, Sgd(250, 0.1, momentum=0.9), epochs=5, seed=5, goal=0.05)
    values = exact_eigenvalues(model, batch)
    assert found["size"] == len(values) == 33 + 12 + 40
    torch.testing.assert_close(torch.tensor(found["top"]).double(), values[:20], rtol=1e-3, atol=0)
    assert found["near"] == int((values.abs() < 0.01 * values[0]).sum())
    assert found["outliers"] == largest_ratio(values[:20])
    assert found["sharp"] == pytest.approx(values[:2].mean().item(), rel=1e-4)
    assert found["r_e"] == pytest.approx(-(values[-1] / values[0]).item(), rel=1e-3)
    below, above = values[values < 0].sum(), values[values > 0].sum()
    assert found["k_h1"] == pytest.approx(-(below / above).item(), rel=1e-3)
    assert found["wide gaps"] == above_wide_gap(values)


def test_outliers_are_above_the_largest_ratio_of_positive_eigenvalues() -> None:
    assert largest_ratio(torch.tensor([6.0, 5.0, 1.0, 0.9])) == 2
    assert largest_ratio(torch.tensor([6.0, 2.0, 1.0, 0.9])) == 1
    assert largest_ratio(torch.tensor([5.0, 4.0, 1.0, -0.001, -0.5])) == 2


@pytest.mark.parametrize("num", [0, 2, 5])
def test_the_rule_of_gaps_is_that_of_the_probe(num: int) -> None:
    values = torch.cat([9.0 - torch.arange(num), torch.linspace(1, -1, 80 - num)]).double()
    assert above_wide_gap(values) == num
    draws = torch.randn(80, 80, generator=torch.Generator().manual_seed(0)).double()
    basis = torch.linalg.qr(draws)[0]
    curvature = basis * values @ basis.mT
    model = nn.Linear(1, 80, bias=False).double()
    one = torch.ones(1, 1).double()
    seen = th.probes.outliers(
        model, lambda weights, _: 0.5 * (weights @ curvature @ weights.mT).sum(), (one, one)
    )
    assert len(seen.above) == num


def test_shifts_move_the_examples_as_they_say() -> None:
    batch = points(3000, classes=6, dimensions=10, separation=3.0, seed=0)
    assert torch.equal(shifted("clean", batch, 4)[0], batch[0])
    noise = shifted("noise 0.5", batch, 4)[0] - batch[0]
    assert noise.std().item() == pytest.approx(0.5, rel=0.03)
    moved, labels = shifted("moved 2", batch, 4)
    for label in range(6):
        own = (moved - batch[0])[labels == label]
        torch.testing.assert_close(own, own[:1].expand_as(own))
        assert own[0].norm().item() == pytest.approx(2.0)


def test_criteria_are_those_of_the_explicit_hessian() -> None:
    batch = points(80, classes=6, dimensions=10, separation=3.0, seed=0)
    model = mlp((10, 4, 6), seed=0)
    values = exact_eigenvalues(model, batch)
    r_e, _, k_h1, largest = (value or math.nan for value in criteria(model, batch))
    assert largest == pytest.approx(values[0].item(), rel=1e-4)
    assert r_e == pytest.approx(-(values[-1] / values[0]).item(), rel=1e-3)
    exact = -(values[values < 0].sum() / values[values > 0].sum()).item()
    assert 0.7 * exact < k_h1 < 2 * exact  # four random vectors


def test_a_cell_of_shifts_has_a_record_for_each_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("theodolite_studies.basins.shifts.PROBES", 1)
    monkeypatch.setattr("theodolite_studies.basins.shifts.STEPS", 4)
    hows = [Sgd(250, 0.1, 0.9), Sgd(500, 0.02, 0.9, 0.01)]
    found = list(shifts(3, hows, epochs=2))
    assert [(row["size"], row["decay"]) for row in found] == [(250, 0.0), (500, 0.01)]
    for row in found:
        assert all(len(row[name]) == 5 for name in ("train", *SHIFTS))
        assert row["noise 1"][0] < row["clean"][0] + 0.02


def test_cells_of_all_parts() -> None:
    full, small = cells(BasinsSetting()), cells(BasinsSetting(small=True, line_seeds=1, seeds=1))
    assert len(full) == 5 * 4 + 8 * 8 + 8
    assert len(small) == 1 + 7 + 1
    assert {cell["seed"] for cell in full}.isdisjoint(cell["seed"] for cell in small)
    kinds = {(how.size, how.lr, how.decay) for how in grid(small=False)}
    assert len(kinds) == 27
    assert (10, 0.3, 0.01) in kinds
