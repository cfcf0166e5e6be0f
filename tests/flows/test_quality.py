"""Distances against closed forms, SciPy and brute force; feature distances on images that are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import linalg, stats
from torch import Tensor

from theodolite import UseError
from theodolite.data import Examples
from theodolite.flows.quality import (
    FeatureDistance,
    feature_distance,
    frechet_distance,
    map_error,
    sliced_wasserstein,
)
from theodolite.models import LeNet5

F64 = torch.float64


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_a", "num_b"), [(50, 50), (40, 70), (1, 9), (64, 96)])
def test_in_one_dimension_it_is_scipys_distance(num_a: int, num_b: int) -> None:
    a, b = _normal(num_a, 1), 0.5 * _normal(num_b, 1, seed=1).square() + 0.3
    expected = stats.wasserstein_distance(a[:, 0].numpy(), b[:, 0].numpy())
    assert sliced_wasserstein(a, b, order=1) == pytest.approx(expected)


def test_the_order_two_distance_of_sets_of_other_sizes_is_that_of_their_copies() -> None:
    a, b = _normal(4, 1), _normal(6, 1, seed=1)
    copies = (one.repeat_interleave(12 // len(one), 0).sort(0).values for one in (a, b))
    a_copies, b_copies = copies
    expected = (a_copies - b_copies).square().mean().sqrt().item()
    assert sliced_wasserstein(a, b) == pytest.approx(expected)


def test_of_gaussians_it_is_the_closed_form() -> None:
    """`SW² = |m|²/D + (s − r)²` for N(0, s² I) and N(m, r² I)."""
    shift = torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5], dtype=F64)
    a, b = 0.7 * _normal(4000, 5), 1.5 * _normal(6000, 5, seed=1) + shift
    expected = math.sqrt(shift.square().sum().item() / 5 + (1.5 - 0.7) ** 2)
    assert sliced_wasserstein(a, b, num_projections=500) == pytest.approx(expected, rel=0.03)


def test_projections_are_averaged_over_all_directions_and_flat_images() -> None:
    a = _normal(10, 1, 2, 3)
    shift = torch.zeros(1, 2, 3, dtype=F64)
    shift[0, 1, 2] = 3.0
    found = sliced_wasserstein(a, a + shift, num_projections=5000)
    assert found == pytest.approx(3.0 / math.sqrt(6), rel=0.03)
    few = [sliced_wasserstein(a, a + shift, num_projections=3, seed=seed) for seed in (0, 0, 1)]
    assert few[0] == few[1] != few[2]


def test_only_the_map_error_sees_that_samples_are_swapped() -> None:
    a = _normal(30, 2)
    assert sliced_wasserstein(a, a.flip(0)) < 1e-12
    expected = np.mean([math.dist(one, other) for one, other in zip(a, a.flip(0), strict=True)])
    assert map_error(a, a.flip(0)) == pytest.approx(expected)
    assert map_error(a.view(30, 1, 2), a.flip(0).view(30, 1, 2)) == pytest.approx(expected)


def test_frechet_of_independent_features_is_the_closed_form() -> None:
    """`|m|² + Σ (s_i − r_i)²`, of sets whose sample moments are exactly these."""
    raw = _normal(400, 4)
    raw = raw - raw.mean(0)
    values, vectors = torch.linalg.eigh(raw.T @ raw / 399)
    white = raw @ (vectors / values.sqrt())
    s, r = torch.tensor([1.0, 2.0, 0.0, 3.0], dtype=F64), torch.tensor([2.0, 2.0, 1.0, 0.5], dtype=F64)
    shift = torch.tensor([1.0, 0.0, -1.0, 2.0], dtype=F64)
    expected = 6.0 + (s - r).square().sum().item()
    assert frechet_distance(s * white, r * white + shift) == pytest.approx(expected)
    assert frechet_distance(s * white, s * white) == pytest.approx(0.0, abs=1e-6)


def test_frechet_is_that_of_scipys_matrix_root() -> None:
    a, b = _normal(200, 6) @ _normal(6, 6, seed=1), _normal(90, 6, seed=2) @ _normal(6, 6, seed=3) + 1
    moments = [(one.numpy().mean(0), np.cov(one.numpy().T)) for one in (a, b)]
    (mean_a, cov_a), (mean_b, cov_b) = moments
    root = linalg.sqrtm(cov_a @ cov_b).real
    expected = ((mean_a - mean_b) ** 2).sum() + np.trace(cov_a + cov_b - 2 * root)
    assert frechet_distance(a, b) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(b, a) == pytest.approx(expected, rel=1e-9)
    assert frechet_distance(a.float() + 1e3, b.float() + 1e3) == pytest.approx(expected, rel=1e-3)


CLASSES, SIDE = 4, 16


def _patterns(num: int, seed: int, pixels: bool = True, name: str = "patterns") -> Examples:
    """Images with one bright quadrant, which is the label, and noise."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % CLASSES
    images = 60 * torch.rand(num, 1, SIDE, SIDE, generator=chance)
    for label in range(CLASSES):
        row, column = (SIDE // 2 * place for place in divmod(label, 2))
        images[labels == label, :, row : row + SIDE // 2, column : column + SIDE // 2] += 120
    if not pixels:
        return Examples(name, images / 128 - 1, labels, CLASSES)
    return Examples(name, images.to(torch.uint8), labels, CLASSES, mean=(0.25,), std=(0.3,))


TRAIN, TEST = _patterns(1280, 0), _patterns(900, 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THEODOLITE_DATA", str(folder))
        yield folder / "classifiers"


def test_perfect_samples_have_the_floor_and_others_more(cache: Path) -> None:
    fresh = feature_distance(_patterns(900, 2).inputs(), (TRAIN, TEST))
    assert fresh.value == pytest.approx(fresh.floor, rel=0.5)
    assert fresh.accuracy > 0.95
    assert (fresh.samples, fresh.floor_samples, fresh.features) == (900, 900, 84)
    same = feature_distance(TEST.inputs(), (TRAIN, TEST))
    assert same.value == pytest.approx(same.floor, rel=1e-6)
    lost = feature_distance(TEST.inputs(TEST.labels != 0).repeat(2, 1, 1, 1), (TRAIN, TEST))
    assert lost.value > 10 * lost.floor
    assert lost.floor == fresh.floor  # all 900 test images
    few = feature_distance(TEST.inputs()[:850], (TRAIN, TEST))
    assert few.value == pytest.approx(few.floor, rel=1e-6)
    assert few.floor != fresh.floor


def test_it_is_the_frechet_distance_of_what_enters_the_readout(cache: Path) -> None:
    samples = _patterns(900, 3).inputs() + 0.1
    found = feature_distance(samples, (TRAIN, TEST))
    (file,) = cache.glob("patterns-*")
    held = {name: tensor.clone() for name, tensor in load_file(file).items()}
    model = LeNet5(6, 2, image=(1, SIDE, SIDE), outputs=CLASSES, variant="bias")
    model.load_state_dict({name.removeprefix("model."): held[name] for name in held if "model." in name})
    seen: list[Tensor] = []
    model.layers[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        model(samples.clamp((0 - 0.25) / 0.3, (1 - 0.25) / 0.3))
        model(TRAIN.inputs())
        right = (model(TEST.inputs()).argmax(1) == TEST.labels).double().mean().item()
    assert found.value == pytest.approx(frechet_distance(seen[0], seen[1]), rel=1e-4)
    assert found.floor == pytest.approx(frechet_distance(seen[2], seen[1]), rel=1e-4)
    assert found.accuracy == right


def test_the_classifier_is_trained_once_for_each_data_set(cache: Path) -> None:
    told: list[tuple[str, float]] = []

    def note(title: str, done: float) -> None:
        told.append((title, done))

    first = feature_distance(TEST.inputs(), (TRAIN, TEST))
    before = {file: file.stat().st_mtime_ns for file in cache.iterdir()}
    again = feature_distance(TEST.inputs(), (TRAIN, TEST), progress=note)
    assert again == first
    assert {file: file.stat().st_mtime_ns for file in cache.iterdir()} == before
    assert told == [("measuring", 1.0)]
    for seed in (0, 9):  # images of the same shape
        floats = tuple(_patterns(num, seed, pixels=False, name="c/d") for num in (1280, 900))
        other = feature_distance(floats[1].inputs(), floats, progress=note)  # type: ignore[arg-type]
    assert len(list(cache.glob("c_d-*.safetensors"))) == 2
    assert other.classifier != first.classifier
    assert told[1][0] == "training a classifier of c/d"
    once = [done for _, done in told[1 : len(told) // 2]]
    assert once == sorted(once)


def test_pixels_are_clipped_and_floats_are_not(cache: Path) -> None:
    inside = TEST.inputs()
    outside = torch.where(inside == inside.max(), inside + 5, inside)
    white = torch.where(inside == inside.max(), (1 - 0.25) / 0.3, inside)
    found = [feature_distance(one, (TRAIN, TEST)).value for one in (outside, white)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    floats = tuple(_patterns(num, 0, pixels=False, name="a/b") for num in (1280, 900))
    far = feature_distance(5 * floats[1].inputs(), floats)  # type: ignore[arg-type]
    assert far.value > 5 * feature_distance(floats[1].inputs().clamp(-1, 1), floats).value  # type: ignore[arg-type]


def test_the_callers_modes_and_random_numbers_do_not_matter(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = feature_distance(TEST.inputs(), (TRAIN, TEST))
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    before = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        inside = feature_distance(TEST.inputs(), (TRAIN, TEST))
    assert torch.equal(torch.get_rng_state(), before)
    assert inside == usual
    assert len(list((tmp_path / "classifiers").iterdir())) == 1


def test_the_result_prints_and_comes_back(tmp_path: Path) -> None:
    found = FeatureDistance("fashion-mnist", 2.5, 0.25, 1000, 1000, 84, 0.894, "12ab34cd")
    assert FeatureDistance.load(found.save(tmp_path / "distance.json")) == found
    assert "samples                        1000               2.5" in str(found)
    assert "84 features of classifier 12ab34cd, which is right on 89.4 % of the test images" in str(found)


def test_a_damaged_or_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    (tmp_path / "classifiers").write_text("a file")
    with pytest.raises(UseError, match="classifiers cannot be made or written to"):
        feature_distance(TEST.inputs(), (TRAIN, TEST))
    (tmp_path / "classifiers").unlink()
    feature_distance(TEST.inputs(), (TRAIN, TEST))
    (file,) = (tmp_path / "classifiers").iterdir()
    mean = load_file(file)["mean"].clone()
    for damage in (lambda: file.write_bytes(b"torn"), lambda: save_file({"mean": mean}, file)):
        damage()
        with pytest.raises(UseError, match=r"patterns-\w+.safetensors is damaged .*: delete it"):
            feature_distance(TEST.inputs(), (TRAIN, TEST))


BAD = torch.tensor([[1.0, torch.nan]])
SMALL = torch.ones(900, 1, 8, 8)
PAIR = TRAIN, TEST


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: sliced_wasserstein(torch.ones(3, 2), torch.ones(3, 1)),
            r"samples of \(2,\) and b of \(1,\)",
        ),
        (lambda: sliced_wasserstein(torch.ones(3), torch.ones(3)), r"a is torch.float32 \(3,\)"),
        (lambda: sliced_wasserstein(torch.ones(0, 2), torch.ones(3, 2)), r"a is torch.float32 \(0, 2\)"),
        (lambda: sliced_wasserstein(torch.ones(1, 2), BAD), "b has values that are not finite"),
        (lambda: sliced_wasserstein(BAD[:, :1], BAD[:, :1], num_projections=0), "num_projections is 0"),
        (lambda: sliced_wasserstein(BAD[:, :1], BAD[:, :1], order=3), "order is 3"),
        (lambda: map_error(torch.ones(3, 2), torch.ones(2, 2)), r"\(3, 2\) and exact \(2, 2\)"),
        (lambda: map_error(torch.ones(1, 2), BAD), "exact has values that are not finite"),
        (
            lambda: frechet_distance(torch.ones(1, 2), torch.ones(3, 2)),
            r"a has shape \(1, 2\): give two",
        ),
        (lambda: frechet_distance(torch.ones(3, 2), torch.ones(3, 4)), "a has 2 features and b has 4"),
        (lambda: frechet_distance(torch.ones(3, 2, 2), torch.ones(3, 2, 2)), r"a has shape \(3, 2, 2\)"),
        (lambda: feature_distance(TEST.inputs()[:839], PAIR), "839 samples: give 840 or more"),
        (lambda: feature_distance(TEST.inputs(), (TEST, _patterns(800, 1))), "800 test images: give 840"),
        (
            lambda: feature_distance(SMALL, PAIR),
            r"samples are of shape \(1, 8, 8\)",
        ),
        (
            lambda: feature_distance(TEST.inputs() / 0, PAIR),
            "samples has values that are not finite",
        ),
        (
            lambda: feature_distance(TEST.inputs(), "fashion"),
            "Did you mean 'fashion-mnist'",
        ),
        (lambda: feature_distance(TEST.inputs(), TRAIN), r"data is .*Examples.*: give fashion-mnist, mnist"),
        (
            lambda: feature_distance(TEST.inputs(), (TRAIN.inputs(), TEST.inputs())),
            r"the training and the test images with their labels, each a theodolite\.data\.Examples\(",
        ),
    ],
)
def test_bad_input_is_refused(call: Any, said: str) -> None:
    with pytest.raises(UseError, match=said):
        call()


def test_data_that_are_no_images_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    rows = Examples("rows", torch.ones(900, 5), torch.zeros(900).long(), 2)
    with pytest.raises(UseError, match=r"rows has examples of shape \(5,\): give images"):
        feature_distance(torch.ones(900, 5), (rows, rows))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_distances_are_those_of_the_cpu(cache: Path) -> None:
    a, b = _normal(40, 3), _normal(60, 3, seed=1)
    for distance in (sliced_wasserstein, frechet_distance):
        assert distance(a.cuda(), b) == pytest.approx(distance(a, b))
        assert distance(a, b.cuda()) == pytest.approx(distance(a, b))
    assert map_error(a.cuda(), b[:40]) == pytest.approx(map_error(a, b[:40]))
    here, there = (feature_distance(TEST.inputs().to(device), (TRAIN, TEST)) for device in ("cpu", "cuda"))
    assert here == there
