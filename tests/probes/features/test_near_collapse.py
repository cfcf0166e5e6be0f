"""The near-collapse model against losses written out, derivatives of those, and a large tie's expansion."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from theodolite import UseError
from theodolite.probes.features.near_collapse import CentralPath, NearCollapse

LABELS = torch.arange(3).repeat_interleave(5)


def given(noise: float = 0.5, **changes: Any) -> NearCollapse:
    generator = torch.Generator().manual_seed(1)
    means = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    features = means[LABELS] + noise * torch.randn(15, 4, generator=generator, dtype=torch.float64)
    return NearCollapse(
        features, LABELS, **({"head_decay": 0.02, "feature_decay": 0.01, "tie": 0.3} | changes)
    )


def written_out(model: NearCollapse, head: Tensor, features: Tensor) -> Tensor:
    """L(W, H), sample by sample."""
    num = len(model.labels)
    total = model.head_decay / 2 * (head**2).sum()
    for row, start, label in zip(features, model.features, model.labels, strict=True):
        wanted = torch.eye(3, dtype=torch.float64)[label]
        total = total + ((head @ row - wanted) ** 2).sum() / (2 * num)
        total = total + model.feature_decay / (2 * num) * (row**2).sum()
        total = total + model.tie / (2 * num) * ((row - start) ** 2).sum()
    return total


def test_the_head_is_that_of_ridge_regression() -> None:
    model = given()
    features = model.features + 0.1
    rows = np.vstack([features.numpy() / math.sqrt(15), math.sqrt(model.head_decay) * np.eye(4)])
    wanted = np.vstack([np.eye(3)[LABELS.numpy()] / math.sqrt(15), np.zeros((4, 3))])
    head = np.linalg.lstsq(rows, wanted, rcond=None)[0].T
    np.testing.assert_allclose(model.head(features).numpy(), head, rtol=1e-10)
    assert model.loss(features) == pytest.approx(float(written_out(model, torch.from_numpy(head), features)))


def test_the_gradient_is_that_of_the_smallest_loss_over_heads() -> None:
    model = given()
    features = model.features + 0.1 * torch.randn(15, 4, dtype=torch.float64)

    def smallest(at: Tensor) -> float:
        with torch.no_grad():
            return float(written_out(model, model.head(at), at))

    wanted = torch.zeros_like(features)
    for place in np.ndindex(15, 4):
        step = torch.zeros_like(features)
        step[place] = 1e-5
        wanted[place] = (smallest(features + step) - smallest(features - step)) / 2e-5
    torch.testing.assert_close(model.gradient(features), wanted, rtol=1e-6, atol=1e-10)


def test_the_flow_is_the_limit_of_small_steps() -> None:
    """Heun's method with the gradient of the written-out loss: its error is a quarter at half the step."""
    model = given()

    def slope(features: Tensor) -> Tensor:
        at = features.requires_grad_()
        return -15 * torch.autograd.grad(written_out(model, model.head(features.detach()), at), at)[0]

    ends = []
    for steps in (20, 40):
        features, step = model.features.clone(), 2.0 / steps
        for _ in range(steps):
            first = slope(features)
            features = (features + step / 2 * (first + slope(features.detach() + step * first))).detach()
        ends.append(features)
    wanted = ends[1] + (ends[1] - ends[0]) / 3
    found = model.flow([0, 1, 2]).states[-1].features
    assert found is not None
    assert (found - wanted).norm() < 1e-4 * (wanted - model.features).norm()


def test_along_the_flow_the_loss_falls_and_classes_draw_together() -> None:
    path = given(tie=0.0, feature_decay=0.0).flow([0, 1, 10, 100])
    losses = [one.loss for one in path.states]
    assert losses == sorted(losses, reverse=True)
    assert path.falls
    assert path.quotients[-1] < path.quotients[0]
    rising = CentralPath((path.states[1], path.states[0]))
    assert not rising.falls


def test_a_minimum_has_no_gradient_and_a_strong_tie_moves_it_by_one_step() -> None:
    """H − H₀ = −N∇L₀(H₀)/β to first order, with L₀ the loss without the tie."""
    model = given(tie=1e4)
    found = model.minimum()
    assert found.features is not None
    assert found.time == math.inf
    moved = found.features - model.features
    pull = -15 * replace(model, tie=0.0).gradient(model.features) / 1e4
    assert (moved - pull).norm() < 1e-3 * pull.norm()
    weak = given(tie=0.01).minimum()
    assert weak.features is not None
    assert given(tie=0.01).gradient(weak.features).abs().max() < 1e-6


def test_the_weaker_the_tie_the_nearer_to_collapse() -> None:
    found = [given(tie=tie).minimum().geometry.quotient for tie in (10, 1, 0.1, 0.01)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.1 * found[0]


def test_a_path_comes_back_from_its_file_without_the_features(tmp_path: Path) -> None:
    path = given().flow([0, 0.5])
    path.save(tmp_path / "path.json")
    loaded = CentralPath.load(tmp_path / "path.json")
    assert loaded == path
    assert loaded.states[0].features is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_decay": 0.0}, "head_decay is 0"),
        ({"tie": -1.0}, "tie is -1"),
        ({"feature_decay": math.nan}, "feature_decay is nan"),
        ({"labels": torch.zeros(15, dtype=torch.long)}, r"samples by class are \[15\]: give two classes"),
        ({"labels": torch.tensor([0] * 14 + [1])}, r"samples by class are \[14, 1\]"),
        (
            {"labels": torch.zeros(0, dtype=torch.long), "features": torch.zeros(0, 4)},
            r"samples by class are \[\]",
        ),
        ({"labels": LABELS.float()}, "give an integer for each of the 15 rows"),
        ({"labels": LABELS - 1}, "numbered from 0"),
        ({"features": torch.zeros(15, 4, dtype=torch.long)}, "features is .*floating-point"),
        ({"features": torch.full((15, 4), math.nan)}, "not finite"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UseError, match=message):
        replace(given(), **changes)


@pytest.mark.parametrize("times", [[], [1.0, 1.0], [-1.0, 1.0], [2.0, 1.0]])
def test_times_must_increase(times: list[float]) -> None:
    with pytest.raises(UseError, match="times"):
        given().flow(times)


def test_times_are_a_list() -> None:
    with pytest.raises(UseError, match=r"times is the int 3: give a list of times"):
        given().flow(3)  # type: ignore[arg-type]
