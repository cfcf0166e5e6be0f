"""The study of extrapolation: its checks of a flow, mirrored flows, and tiny networks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from theodolite.data import CylinderFlows, TwoCylinders, cylinder_flows
from theodolite.data.two_cylinders import CORRECTION
from theodolite.workloads.two_cylinders import batch_of, fluid_loss
from theodolite_studies.extrapolation import closed_form, training
from theodolite_studies.extrapolation.closed_form import multipole_velocity
from theodolite_studies.extrapolation.setting import FULL
from theodolite_studies.extrapolation.study import cells, run
from theodolite_studies.extrapolation.training import (
    BINS,
    MIDDLES,
    Recipe,
    bins_of,
    errors_over_gaps,
    held_out_flows,
    mirrored,
    mirrored_at_random,
    plan_of,
    spread_of_members,
    trained,
)

TINY = Recipe(width=16, steps=3)
PLACES = -4 + (np.arange(64) + 0.5) / 8
EDGES = ((0.2, 0.5), (0.5, 1.0), (1.0, 2.0), (2.0, 2.5), (2.5, 3.0))
GRID = PLACES[None, :] + 1j * PLACES[:, None]


def on_grid(flow: TwoCylinders) -> torch.Tensor:
    """The velocity (1, 2, 64, 64), 0 inside the cylinders."""
    velocity = np.where(flow.is_fluid(GRID), flow.velocity(GRID), 0)
    return torch.from_numpy(np.stack([velocity.real, velocity.imag])[None])


@pytest.fixture
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "ON_SURFACE", 200)


@pytest.mark.parametrize("gap", [0.2, 3.0])
@pytest.mark.usefixtures("few_points")
def test_the_closed_form_passes_its_checks(gap: float) -> None:
    (found,) = run({"part": "flow", "gap": gap, "seed": 0}, FULL)
    assert found["order"] == pytest.approx(2, abs=0.01)
    assert found["through"] < 1e-13
    assert found["apart"] < 1e-11


@pytest.mark.parametrize(
    ("fault", "passed"), [("curl", ()), ("source", ("order",)), ("stream", ("order", "through"))]
)
@pytest.mark.usefixtures("few_points")
def test_each_check_sees_the_fault_that_it_is_for(
    monkeypatch: pytest.MonkeyPatch, fault: str, passed: tuple[str, ...]
) -> None:
    """Rotation, a source inside a cylinder, and another stream, which least squares alone see."""
    monkeypatch.setattr(closed_form, "multipole_velocity", partial(multipole_velocity, num=30))
    true = TwoCylinders.complex_velocity

    def wrong(self: TwoCylinders, points: np.ndarray) -> np.ndarray:
        if fault == "stream":
            return true(replace(self, stream=self.stream + 1e-3), points)
        off = points - self.centres[0]
        return true(self, points) + 1e-3 * (1j * off.conj() if fault == "curl" else 1 / off)

    monkeypatch.setattr(TwoCylinders, "complex_velocity", wrong)
    (found,) = closed_form.checks(1.0, 0)
    good = {
        "order": found["order"] > 1.99,
        "through": found["through"] < 1e-12,
        "apart": found["apart"] < 1e-9,
    }
    assert tuple(name for name, is_good in good.items() if is_good) == passed


def test_multipoles_of_one_cylinder_far_from_the_other_are_a_doublet() -> None:
    """w = 1 − 1/z²: the flow around a circle."""
    flow = TwoCylinders(1e4)
    points = np.array([1.5, 2j, -1.2 + 1j])
    found = multipole_velocity(flow, flow.centres[0] + points, num=3)
    assert np.abs(found.conj() - (1 - 1 / points**2)).max() < 1e-6


@pytest.mark.parametrize("axis", [0, 1])
def test_a_mirrored_flow_is_the_flow_of_the_mirrored_problem(axis: int) -> None:
    flow = TwoCylinders(0.6, stream=0.4, axis=1.1, centre=0.3 - 0.2j)
    turn = math.pi if axis == 0 else 0.0
    centre = complex(-0.3, -0.2) if axis == 0 else complex(0.3, 0.2)
    other = TwoCylinders(0.6, stream=turn - 0.4, axis=turn - 1.1, centre=centre)
    torch.testing.assert_close(mirrored(on_grid(flow), axis), on_grid(other))
    assert not torch.allclose(on_grid(flow), on_grid(other), atol=0.1)


def test_a_batch_is_mirrored_flow_by_flow_inputs_with_targets() -> None:
    flows = cylinder_flows(64, seed=3)
    batch = batch_of(flows, 0, 0, num=64)
    coarse, (correction, fluid) = batch
    images = [
        [image(maps) for maps in (coarse, correction, fluid)]
        for image in (
            lambda maps: maps,
            lambda maps: mirrored(maps, 0),
            lambda maps: mirrored(maps, 1),
            lambda maps: mirrored(mirrored(maps, 0), 1),
        )
    ]
    found = mirrored_at_random(batch, 0, 0)
    counts = [0] * 4
    for n in range(64):
        own = [torch.equal(found[0][n], image[0][n]) for image in images]
        assert own.count(True) == 1
        image = images[own.index(True)]
        counts[own.index(True)] += 1
        assert torch.equal(found[1][0][n], image[1][n])
        assert torch.equal(found[1][1][n], image[2][n])
    assert min(counts) >= 6  # 16 expected
    again = mirrored_at_random(batch, 0, 0)
    assert torch.equal(again[0], found[0])
    assert not torch.equal(mirrored_at_random(batch, 0, 1)[0], found[0])


def test_bins_divide_the_regions_and_test_flows_lie_in_them() -> None:
    regions = [bins_of(region) for region in ("narrower", "trained", "hole", "wider")]
    assert sorted(place for region in regions for place in region) == list(range(BINS))
    assert [len(region) for region in regions] == [3, 10, 10, 5]
    flows = held_out_flows(0, each=2).flows
    assert len(flows) == 2 * BINS
    for number, flow in enumerate(flows):
        assert abs(flow.gap - MIDDLES[number // 2]) <= 0.05 + 1e-9
    assert {flow.gap for flow in flows}.isdisjoint(flow.gap for flow in cylinder_flows(64).flows)


def test_training_is_adamw_with_a_cosine_schedule_on_the_batches_of_the_workload() -> None:
    """At base size the plan changes nothing."""
    flows = cylinder_flows(32, seed=5)
    plain = plan_of(16, -6.0).build(5)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1.0, weight_decay=0.0)
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 2**-6 * (1 + math.cos(math.pi * step / 3)) / 2
        coarse, targets = batch_of(flows, 5, step)
        optimizer.zero_grad()
        fluid_loss(plain(coarse), targets).backward()
        optimizer.step()
    found = trained(flows, TINY, 5)
    for name, tensor in found.named_parameters():
        torch.testing.assert_close(tensor, plain.get_parameter(name), rtol=1e-3, atol=1e-5)
    flipped = trained(flows, replace(TINY, flips=True), 5)
    assert not torch.allclose(flipped.enter.weight, found.enter.weight, atol=1e-3)


def test_a_cell_gives_the_errors_of_its_network_over_gaps() -> None:
    """By the closed form at the points of the grid, without the tensors of the workload's targets."""
    (record,) = errors_over_gaps(TINY, "trained", 32, seed=2, each=2)
    flows = cylinder_flows(56, "all", seed=1002)
    model = trained(cylinder_flows(32, seed=2), TINY, 2)
    for place in (0, 12, 27):
        wrong: dict[str, list[float]] = {"errors": [], "misses": []}
        for number in (2 * place, 2 * place + 1):
            flow, coarse = flows.flows[number], flows.coarse[number : number + 1]
            assert abs(flow.gap - MIDDLES[place]) < 0.051
            guess = F.interpolate(coarse[:, :2], scale_factor=8, mode="bicubic", align_corners=False)
            with torch.no_grad():
                guesses = {"errors": guess + CORRECTION * model(coarse), "misses": guess}
            inside = torch.from_numpy(flow.is_fluid(GRID))
            for name, values in guesses.items():
                off = ((values - on_grid(flow)) * inside).square().mean().item()
                wrong[name].append(off / CORRECTION**2)
        for name, squares in wrong.items():
            assert record[name][place] == pytest.approx(np.mean(squares), rel=1e-3)
    assert 0 < record["fit"] < 2


def test_errors_of_members_are_that_of_their_average_and_their_spread() -> None:
    """The mean of squares about the truth is the square of the mean plus (n − 1)/n of the variance."""
    (record,) = spread_of_members(TINY, "trained", 32, seed=0, members=3, each=2)
    both = np.array(record["average"]) + 2 / 3 * np.array(record["spread"])
    np.testing.assert_allclose(record["errors"], both, rtol=1e-3)
    assert all(spread > 0 for spread in record["spread"])


def test_ranks_are_those_of_the_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two members whose difference grows along the flows, as their error does; the speed is drawn."""
    flows = held_out_flows(0, each=2)
    sizes = torch.linspace(1, 2, len(flows.flows))[:, None, None, None]
    signs = iter((1.0, -0.5))

    def made(*_: object) -> torch.Tensor:
        return flows.correction + next(signs) * sizes

    monkeypatch.setattr(training, "predict", made)
    (record,) = spread_of_members(replace(TINY, steps=1), "trained", 32, seed=0, members=2, each=2)
    solid = 1 - flows.fluid.mean((1, 2, 3))
    share = sizes.flatten() ** 2 * (1 - solid)
    order = share.argsort().argsort().double()
    assert record["ranks"]["spread"]["all"] == pytest.approx(1.0)
    speed = flows.coarse[:, :2].norm(dim=1).flatten(1).amax(1).argsort().argsort().double()
    expected = torch.corrcoef(torch.stack([order, speed]))[0, 1].item()
    assert record["ranks"]["speed"]["all"] == pytest.approx(expected, abs=1e-3)


def test_cells_of_a_seed_come_together_and_widths_share_their_flows() -> None:
    found = cells(FULL)
    own = [cell for cell in found if cell["part"] != "flow"]
    assert [cell["seed"] for cell in own] == sorted(cell["seed"] for cell in own)
    assert len({tuple(cell.items()) for cell in found}) == len(found)
    assert {cell["num"] for cell in own if cell["width"] != 32} == {256}
    assert len({cell["seed"] for cell in own}) >= 4


def test_a_cell_says_which_gaps_are_trained_and_how(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[float], Recipe]] = []

    def kept(flows: CylinderFlows, recipe: Recipe, *_: object) -> torch.nn.Module:
        seen.append(([flow.gap for flow in flows.flows], recipe))
        return plan_of(16, -6.0).build(0)

    monkeypatch.setattr(training, "trained", kept)
    for gaps in ("everywhere", "with a hole", "narrower alone"):
        cell = {"part": "train", "gaps": gaps, "width": 16, "num": 32, "flips": True, "octave": 0.5}
        list(run({**cell, "seed": 0}, replace(FULL, each=1)))
    assert {recipe for _, recipe in seen} == {Recipe(width=16, steps=FULL.steps, octave=0.5, flips=True)}
    counts = [[sum(low < gap < high for gap in gaps) for low, high in EDGES] for gaps, _ in seen]
    assert counts[1] == [0, 16, 0, 16, 0]  # of 32 flows, by the lengths of the ranges
    assert counts[2] == [32, 0, 0, 0, 0]
    assert min(counts[0]) >= 3


def test_another_learning_rate_is_octaves_from_that_of_the_study() -> None:
    flows = cylinder_flows(32, seed=5)
    start = plan_of(16, -6.0).build(5)
    moves = [
        trained(flows, replace(TINY, steps=1, octave=octave), 5).enter.weight - start.enter.weight
        for octave in (0.0, -1.0)
    ]
    torch.testing.assert_close(moves[1], moves[0] / 2, rtol=1e-2, atol=1e-5)  # Adam's first step: its rate
