"""The study of depth expansion: its images, its training, its readings, and claims whose verdict is known."""

from __future__ import annotations

import dataclasses
import itertools
import math
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats

from theodolite.core.errors import UseError
from theodolite.models import ResNet
from theodolite.probes.signal.signal import signal
from theodolite_studies.depth_expansion import claims as depth_expansion_claims
from theodolite_studies.depth_expansion import study as depth_expansion
from theodolite_studies.depth_expansion.candidates import candidates
from theodolite_studies.depth_expansion.claims import claims
from theodolite_studies.depth_expansion.figures import figures
from theodolite_studies.depth_expansion.images import PAD, images_of
from theodolite_studies.depth_expansion.reading import (
    Reader,
    alignment,
    block_gradients,
    correlations,
    moments,
    outcome,
)
from theodolite_studies.depth_expansion.study import FULL, SMALL, Regime, cells, trained
from theodolite_studies.depth_expansion.tables import notes
from theodolite_studies.depth_expansion.training import Recipe, itinerary, train
from theodolite_studies.depth_expansion.values import best_gain, grids, slopes
from theodolite_studies.framework.verdict import Case

READER = Reader(images=8, entries=6, sizes=(4, 16), draws=50, batch=3)


def test_cells_come_in_the_order_of_their_worth():
    order = [(cell["regime"], cell["depth"], cell["width"]) for cell in cells(False)]
    assert set(order[:24]) == set(itertools.product(FULL.regimes, (1, 3, 9), (4, 8, 16, 32)))
    assert len(order) == len(set(order)) == 48
    assert len(FULL.seeds) >= 3


# Images


def test_a_crop_is_a_window_of_the_image_on_black():
    images = images_of("templates", "train", num=3, side=8)
    rows, down, across, mirrored = torch.tensor([[2, 0], [0, 7], [5, 4], [1, 0]])
    found = images.cut(rows, down, across, mirrored)
    black = torch.nn.functional.pad(images.padded[:, PAD:-PAD, PAD:-PAD].permute(0, 3, 1, 2), (PAD,) * 4)
    first = black[2, :, 0:8, 5:13].flip(2)
    second = black[0, :, 7:15, 4:12]
    expected = (torch.stack([first, second]) / 255 - 0.5) / 0.2
    assert torch.allclose(found, expected)
    assert (found[0, :, :4] == -2.5).all()  # above the image it is black


def test_unknown_images_are_refused():
    with pytest.raises(UseError, match=r"'stripes'.*'cifar10' or 'templates'"):
        images_of("stripes", "train")


# Training


@pytest.mark.parametrize("augmented", [False, True])
def test_networks_are_trained_as_sgd_trains_each_alone(augmented):
    images = images_of("templates", "train", num=20, side=8, dtype=torch.float64)
    recipe = Recipe(epochs=2, batch=8, lr=0.2, augmented=augmented, decay=1e-2, warmup=0.5)
    models, alone = [[_network(seed) for seed in (0, 1)] for _ in range(2)]  # two of each, which begin alike
    losses = train(models, (0, 1), images, recipe)
    for place, model in enumerate(alone):
        sgd = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-2)
        way = itinerary(20, recipe, seed=place)
        for step, rate in enumerate((0.1, 0.2, 0.2, 0.1)):
            rows, down, across, mirrored = way[:, step]
            pixels = [
                images.padded[row, d : d + 8, a : a + 8].permute(2, 0, 1).flip(2 if m else ())
                for row, d, a, m in zip(rows, down, across, mirrored, strict=True)
            ]
            inputs = (torch.stack(pixels).double() / 255 - 0.5) / 0.2
            loss = F.cross_entropy(model(inputs), images.labels[rows])
            sgd.param_groups[0]["lr"] = rate
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            assert float(losses[step, place]) == pytest.approx(loss.item(), rel=1e-6)
        for name, tensor in model.state_dict().items():
            assert torch.allclose(models[place].state_dict()[name], tensor, rtol=1e-9, atol=1e-12), name
    assert not any(model.training for model in models)


def test_seeds_see_their_own_crops_and_every_image_once_in_an_epoch():
    recipe = Recipe(epochs=3, batch=5, lr=0.1, augmented=True)
    first, second = (itinerary(10, recipe, seed=seed) for seed in (0, 1))
    assert not torch.equal(first, second)
    assert first[0].reshape(3, 10).sort().values.tolist() == [list(range(10))] * 3
    assert set(first[1:3].unique().tolist()) == set(range(2 * PAD + 1))
    assert set(first[3].unique().tolist()) == {0, 1}


def test_a_batch_larger_than_the_images_is_refused():
    with pytest.raises(UseError, match="4 images are too few for a batch of 8"):
        Recipe(epochs=1, batch=8, lr=0.1, augmented=False).steps(4)


# Reading


def test_the_gradient_before_the_readout_is_autograds():
    model, images = _network(0).eval(), images_of("templates", "test", num=7, side=8, dtype=torch.float64)
    found = outcome(model, images, 3)
    seen = []
    handle = model.readout.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    losses = F.cross_entropy(model(images.plain(torch.arange(7))), images.labels, reduction="none")
    handle.remove()
    (gradients,) = torch.autograd.grad(losses.sum(), seen[0], retain_graph=True)
    (bias,) = torch.autograd.grad(losses.mean(), model.readout.bias)
    assert torch.allclose(found.gradients, gradients, rtol=1e-10)
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-12)
    assert found.bias == pytest.approx(bias.norm().item(), rel=1e-10)
    assert torch.allclose(gradients.mean(0), bias @ model.readout.weight, rtol=1e-10, atol=1e-14)


def test_ten_classes_leave_nine_directions_before_the_readout():
    """`Wᵀ(p − y)`, and p − y adds up to zero: `trΣ ≤ 9λ`, so C ≥ d/9 however wide the network is."""
    model, images = _network(0, width=8).eval(), images_of("templates", "test", num=64, side=8)
    found = moments(outcome(model.float(), images, 64).gradients)
    assert found.dims == 32
    assert found.spread >= 32 / 9


def test_the_gradient_at_a_block_is_that_of_a_shift_of_its_channels():
    model, images = _network(0).eval(), images_of("templates", "test", num=8, side=8, dtype=torch.float64)
    shifts, entries = block_gradients(model, images, READER)
    for place, block in enumerate(model.blocks):
        shift = torch.zeros(8, shifts[place].shape[1], 1, 1, dtype=torch.float64, requires_grad=True)
        handle = block.register_forward_hook(lambda module, inputs, output, shift=shift: output + shift)
        loss = F.cross_entropy(model(images.plain(torch.arange(8))), images.labels, reduction="sum")
        (expected,) = torch.autograd.grad(loss, shift)
        handle.remove()
        assert expected.abs().max() > 0
        assert torch.allclose(shifts[place], expected[:, :, 0, 0], rtol=1e-9, atol=1e-14)
        assert entries[place].shape == (8, 6)
    # Behind the last block is a mean over positions: a shift of its channels is one of what is read out.
    assert torch.allclose(shifts[-1], outcome(model, images, 8).gradients, rtol=1e-9)


def test_reading_leaves_no_trace():
    model, images = _network(0).eval(), images_of("templates", "test", num=8, side=8, dtype=torch.float64)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    depth_expansion.read(model, images, images, READER, whole=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(block._forward_hooks for block in model.blocks)


def test_moments_are_numpys():
    values = np.random.default_rng(0).standard_normal((50, 4)) @ np.diag([1, 2, 3, 4]) + 1
    covariance = np.cov(values.T, bias=True)
    found = moments(torch.from_numpy(values))
    assert found.norm == pytest.approx(np.linalg.norm(values.mean(0)), rel=1e-4)
    assert found.trace == pytest.approx(np.trace(covariance), rel=1e-4)
    assert found.top == pytest.approx(np.linalg.eigvalsh(covariance)[-1], rel=1e-4)
    assert found.spread == pytest.approx(4 * found.top / found.trace, rel=1e-4)


def test_correlations_are_numpys_and_what_does_not_vary_is_left_out():
    values = np.random.default_rng(0).standard_normal((400, 5))
    values[:, 1] = values[:, 0] + 0.01 * values[:, 1]
    values[:, 4] = 7
    matrix = np.corrcoef(values[:, :4].T)
    pairs = np.abs(matrix[np.triu_indices(4, 1)])
    found = correlations(torch.from_numpy(values), whole=True)
    assert found["alive"] == 4
    assert np.allclose(found["matrix"], matrix, atol=1e-3)
    assert found["near"] == pytest.approx((pairs <= 0.1).mean(), rel=1e-4)
    assert found["quantiles"] == pytest.approx(np.quantile(pairs, [0.5, 0.9, 0.99]), rel=1e-3)
    assert found["counts"][-1] == 1  # the one pair that is nearly the same
    assert sum(found["counts"]) == 6


def test_of_uncorrelated_coordinates_one_pair_in_twenty_is_beyond_the_noise():
    values = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0))
    found = correlations(values, whole=False)
    assert found["beyond"] == pytest.approx(0.0455, abs=0.01)
    assert found["near"] > 0.99
    assert found["top"] == pytest.approx(found["edge"], rel=0.1)
    assert "matrix" not in found


def test_two_samples_of_numbers_fail_to_align_as_often_as_their_signs_differ():
    """Means of n Gaussians have the wrong sign with q = Φ(−√n μ/σ); one of two, with 2q(1 − q)."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, 1, generator=random, dtype=torch.float64)
    values = (values - values.mean()) / values.std() + 0.3
    reader = dataclasses.replace(READER, sizes=(4, 16, 256), draws=4000)
    found = alignment(-values, values, reader)
    for place, size in enumerate(reader.sizes):
        q = stats.norm.cdf(-math.sqrt(size) * 0.3)
        assert found["fresh"][place] == pytest.approx(2 * q * (1 - q), abs=0.025)
        assert found["crossed"][place] == pytest.approx(1 - 2 * q * (1 - q), abs=0.025)
        noise = 1 / (size * 0.3**2)
        assert found["bound"][place] == pytest.approx(min(1, 8 * noise + 4 * noise**2), rel=1e-3)


# Cells

TINY = dataclasses.replace(
    SMALL,
    test=32,
    regimes={"fitted": Regime(32, Recipe(epochs=2, batch=16, lr=0.1, augmented=False))},
    reader=dataclasses.replace(READER, images=32),
    candidates=8,
)


def test_a_cell_has_a_record_for_each_seed():
    first, second = trained(TINY, "fitted", 1, 2)
    assert (first["seed"], second["seed"]) == (0, 1)
    assert len(first["course"]) == 2
    assert len(first["blocks"]["train"]["norm"]) == 3
    assert first["points"]["pool"]["train"]["dims"] == 8
    assert "matrix" in first["points"]["pool"]["pairs"]
    assert "matrix" not in second["points"]["pool"]["pairs"]
    assert first["candidates"]["points"] == ["blocks.0", "blocks.1"]
    assert math.isfinite(best_gain(first))
    assert first["train_loss"] != second["train_loss"]


def test_candidates_are_estimated_on_train_images_and_judged_by_test_images():
    model = _network(0).eval()
    images = [
        images_of("templates", split, num=6, side=8, dtype=torch.float64) for split in ("train", "test")
    ]
    batches = [(each.plain(torch.arange(5)), each.labels[:5]) for each in images]
    expected = signal(model, F.cross_entropy, batches[0], batches[1])
    found = candidates(model, *images, 5)
    assert found["gain"] == pytest.approx([one.gain for one in expected.points], rel=1e-4)
    assert found["preconditioned_error"] == pytest.approx(
        [one.preconditioned_error for one in expected.points], rel=1e-4
    )
    assert found["squared"] == pytest.approx([one.norm**2 for one in expected.points], rel=1e-4)


def test_a_seed_is_a_start_of_its_own():
    first, again, second = (depth_expansion._built(2, 1, seed, "cpu").stem.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, second)


def test_what_went_wrong_beside_the_training_is_noted(monkeypatch):
    def failing(*_):
        raise RuntimeError("no room")

    monkeypatch.setattr(depth_expansion, "candidates", failing)
    first, _ = trained(TINY, "fitted", 1, 2)
    assert "no room" in first["candidates"]["failed"]
    assert math.isnan(best_gain(first))


def test_a_network_that_diverges_is_left_out():
    recipe = Recipe(epochs=2, batch=16, lr=1e30, augmented=False)
    setting = dataclasses.replace(TINY, regimes={"fitted": Regime(32, recipe)})
    records = trained(setting, "fitted", 1, 2)
    assert [one["diverged"] for one in records] == [True, True]
    assert claims([{"regime": "fitted", "depth": 1, "width": 2, **one} for one in records]) == []


# Claims

DEPTHS, WIDTHS, SEEDS = (1, 2, 4, 8), (4, 8, 16), (0, 1, 2)
PAIRS = {"alive": 4, "near": 0.95, "beyond": 0.06, "quantiles": [0.02, 0.05, 0.2], "edge": 1.1}


def _records(**values):
    """Records of a world in which every claim holds, but for what is given, as functions of n, width."""
    world = {
        "train": lambda n, w: w * (0.2 + 0.8 * math.exp(2 - 2 * n)),
        "test": lambda n, w: 0.2 * w / n,
        "loss": lambda n, w: 1.0,
        "risk": lambda n, w: 0.5 + 8 / w**2 + 0.1 * abs(math.log2(n) - 0.1 - 0.45 * math.log2(w)),
        "top": lambda n, w: 1.0 / w,
        "trace": lambda n, w: 1.0,
        "near": lambda n, w: 0.95,
        "beyond": lambda n, w: 0.06,
        "failing": lambda n, w, size: 0.4 / size / w,
        "bound": lambda n, w, size: 0.5 / size,
        "gain": lambda n, w: 1 / n,
    } | values
    return [_record(world, n, w, seed) for n in DEPTHS for w in WIDTHS for seed in SEEDS]


def _record(world, n, w, seed):
    wobble = 1 + 0.002 * seed
    pairs = {**PAIRS, "near": world["near"](n, w), "beyond": world["beyond"](n, w), "counts": [1] * 40}
    point = {
        split: {
            "norm": wobble * world[split](n, w),
            "trace": world["trace"](n, w),
            "top": world["top"](n, w),
            "dims": w,
            "num": 100,
        }
        for split in ("train", "test")
    }
    failing = [world["failing"](n, w, size) for size in (16, 64, 256)]
    point["alignment"] = {
        "sizes": [16, 64, 256],
        "fresh": failing,
        "crossed": failing,
        "bound": [world["bound"](n, w, size) for size in (16, 64, 256)],
        "draws": 2000,
    }
    return {
        "regime": "augmented",
        "depth": n,
        "width": w,
        "seed": seed,
        "train_loss": world["loss"](n, w),
        "train_bias": 0.1,
        "test_loss": wobble * world["risk"](n, w),
        "test_right": 0.5,
        "points": {name: {**point, "pairs": pairs} for name in ("stage1", "stage2", "pool")},
        "entries": [pairs] * 3,
        "candidates": {"preconditioned": [wobble * world["gain"](n, w), 0.0]},
    }


def _verdicts(records):
    return {claim.claim.removeprefix("augmented: "): claim.verdict for claim in claims(records)}


def test_every_claim_holds_in_a_world_as_the_paper_has_it():
    found = _verdicts(_records())
    assert len(found) == 21
    assert {name: verdict for name, verdict in found.items() if verdict != "holds"} == {}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("channels' gradients are nearly uncorrelated", {"near": lambda n, w: 0.5}),
        ("so are those of single entries of maps", {"near": lambda n, w: 0.5}),
        ("what correlation there is is noise", {"beyond": lambda n, w: 0.5}),
        ("C does not depend on width", {"top": lambda n, w: 0.2}),
        ("the train gradient's norm falls with depth", {"train": lambda n, w: 0.1 * w}),
        ("the test gradient's norm falls with depth", {"test": lambda n, w: 0.1 * w}),
        ("most of the train gradient's fall comes early", {"train": lambda n, w: w * math.exp(-n)}),
        ("wider networks keep a larger train gradient", {"train": lambda n, w: 0.1 / w / n}),
        (
            "at equal train loss the train gradient still falls with depth",
            {"loss": lambda n, w: 1 + 9 / n / w, "train": lambda n, w: (1 + 9 / n / w) ** 4 * n**0.3},
        ),
        (
            "in units of one image's spread the test gradient falls with depth",
            {"trace": lambda n, w: n**-2.0},
        ),
        ("one more block would gain less in a deeper network", {"gain": lambda n, w: n}),
        ("the test loss falls with width at every depth", {"risk": lambda n, w: 0.01 * w + 1 / n}),
        ("and flattens", {"risk": lambda n, w: 1 - 0.02 * w}),
        ("the test loss falls with depth at first", {"risk": lambda n, w: 0.1 * n + 1 / w}),
        ("and rebounds", {"risk": lambda n, w: 0.1 / n + 1 / w}),
        (
            "the best depth grows with width",
            {"risk": lambda n, w: 0.5 + 1 / w + 0.1 * abs(math.log2(n / 2))},
        ),
        ("two test samples align as often as the bound has it", {"bound": lambda n, w, size: 0.01 / size}),
        ("so do a train and a test sample", {"bound": lambda n, w, size: 0.01 / size}),
        (
            "train and test samples fail to align less often the larger they are",
            {"failing": lambda n, w, size: 1e-4 * size / w},
        ),
        ("and the wider the network", {"failing": lambda n, w, size: 1e-2 * w / size}),
        ("‖μ‖²/λ_max, on which the bound rests, grows with width", {"test": lambda n, w: 0.2 / w / n}),
    ],
)
def test_a_claim_fails_where_it_is_not_so(name, change):
    assert _verdicts(_records(**change))[name] == "fails"


def test_a_claim_at_its_threshold_errs_as_often_as_it_may():
    """Three seeds: Student's t, and all cases together, where two standard errors fail in two of three."""
    random = np.random.default_rng(0)
    (grid,) = grids(_records())

    def verdicts(mean, cases):
        return [
            depth_expansion_claims._settled(
                grid,
                "",
                "",
                "",
                [Case("", values) for values in random.normal(mean, size=(cases, 3))],
                limit=0,
                below=True,
            ).verdict
            for _ in range(300)
        ]

    assert verdicts(0.0, 1).count("holds") < 25
    assert verdicts(0.0, 12).count("fails") < 25
    assert verdicts(-20.0, 12).count("holds") > 290
    assert verdicts(20.0, 12).count("fails") > 290


def test_a_best_depth_at_the_edge_is_not_known():
    found = _verdicts(_records(risk=lambda n, w: 0.5 + 1 / w + 0.1 / n))
    assert found["the best depth grows with width"] == "unclear"


def test_slopes_are_those_the_records_are_made_of():
    """And a norm that follows the loss alone has no slope in depth when the loss is held."""

    def norm(one):
        return one["points"]["pool"]["train"]["norm"]

    def loss(one):
        return one["train_loss"]

    records = _records(
        train=lambda n, w: 3 * n**-0.5 * w**0.25 * (1 + 1 / (n * w)) ** 2, loss=lambda n, w: 1 + 1 / (n * w)
    )
    (grid,) = grids(records)
    found = slopes(grid, norm, loss)
    assert found["depth"] == pytest.approx([-0.5] * 3)
    assert found["width"] == pytest.approx([0.25] * 3)
    assert found["given 0"] == pytest.approx([2.0] * 3)
    assert found["explained"] == pytest.approx([1.0] * 3)


def test_a_depth_without_all_widths_is_left_out():
    records = [one for one in _records() if (one["depth"], one["width"]) not in ((2, 8), (4, 8))]
    (grid,) = grids(records)
    assert grid.depths == [1, 8]
    assert len(claims(records)) == 20  # nothing can come early between two depths


def test_figures_and_tables_are_drawn():
    records = _records()
    for _, svg in figures(records):
        ElementTree.fromstring(svg)
    assert [name for name, _ in figures(records)] == [
        "signal",
        "matched",
        "losses",
        "correlations",
        "alignment",
    ]
    assert "width 16 n 8" in notes(records)


def _network(seed, width=2):
    torch.manual_seed(seed)
    return ResNet(width, 1, outputs=10).double()
