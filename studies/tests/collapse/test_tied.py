"""Flows and minima against closed forms, and against small steps along gradients of a loss written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from theodolite.probes.features.near_collapse import NearCollapse
from theodolite_studies.collapse import tied

CLASSES = 3


def orthogonal(length: float, spread: float, **changes: float) -> NearCollapse:
    """Class means along axes, and two samples each, apart along an axis of their own."""
    rows = length * torch.eye(CLASSES, CLASSES + 1, dtype=torch.float64).repeat_interleave(2, 0)
    rows[:, -1] = spread * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(CLASSES)
    given = {"head_decay": 0.01, "feature_decay": 0.02, "tie": 0.03} | changes
    return NearCollapse(rows, torch.arange(CLASSES).repeat_interleave(2), **given)


@pytest.mark.parametrize("changes", [{}, {"tie": 0.3}, {"feature_decay": 0.2}, {"head_decay": 0.05}])
def test_minimum_and_expansion_are_those_of_orthogonal_means(changes: dict[str, float]) -> None:
    """The means are a·e_k, the head w·e_k, by two equations; the spread shrinks by β/(β + λ_H)."""
    model = orthogonal(1.0, 0.1, **changes)
    tie, feature_decay = model.tie, model.feature_decay

    def pull(length: float) -> float:
        head = length / (length**2 + CLASSES * model.head_decay)
        return (head * length - 1) * head + feature_decay * length + tie * (length - 1)

    length = brentq(pull, 0.2, 3.0)
    assert pull(0.9 * length) < 0 < pull(1.1 * length)  # a minimum
    wanted = (0.1 * tie / (tie + feature_decay)) ** 2 / (length**2 * (1 - 1 / CLASSES))
    assert model.minimum().geometry.quotient == pytest.approx(wanted, rel=1e-4)
    assert tied.first_order(model) == pytest.approx(wanted, rel=1e-4)


def test_the_error_of_the_expansion_is_of_second_order() -> None:
    errors = []
    for noise in (0.2, 0.1, 0.05):
        features, labels = tied.drawn(noise, 3)
        model = NearCollapse(features, labels, 0.005, 0.005, 0.1)
        errors.append(abs(tied.first_order(model) / model.minimum().geometry.quotient - 1))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_the_records_of_minima_have_both_effects_from_explicit_scatters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tied, "NUM", 6)
    monkeypatch.setattr(tied, "WIDTH", 6)
    (row,) = tied.minima(0.1, 0, "Kλ_W = λ_H", (0.01,))
    features, labels = tied.drawn(0.1, 0)

    def explicit(head_decay: float, feature_decay: float) -> float:
        found = NearCollapse(features, labels, head_decay, feature_decay, 0.01).minimum().features
        assert found is not None
        return nc1(found, labels)

    usual = explicit(0.00125, 0.005)
    assert row["nc1"] == pytest.approx(usual, rel=1e-3)
    assert row["feature effect"] == pytest.approx(usual / explicit(0.00125, 0.05), rel=1e-3)
    assert row["head effect"] == pytest.approx(usual / explicit(0.0125, 0.005), rel=1e-3)
    assert row["ratio"] == pytest.approx(row["feature effect"] / row["head effect"], rel=1e-3)


def test_the_joint_flow_is_the_limit_of_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heun's method with gradients of the loss, of which each sample's is multiplied by their number."""
    for name, value in {"NUM": 4, "WIDTH": 5, "END": 2.0, "CHECKS": 40}.items():
        monkeypatch.setattr(tied, name, value)
    (row,) = tied.joint(0.3, 0, 0.01, 1.0)
    features, labels = tied.drawn(0.3, 0, 1.0)
    generator = torch.Generator().manual_seed(1_000)
    head = torch.randn(4, 5, generator=generator, dtype=torch.float64) / math.sqrt(5)
    targets = torch.eye(4, dtype=torch.float64)[labels]

    def slopes(head: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        both = head.detach().requires_grad_(), features.detach().requires_grad_()
        loss = (both[1] @ both[0].T - targets).square().sum() / 32 + 0.005 / 2 * both[0].square().sum()
        loss = loss + 0.01 / 32 * both[1].square().sum()
        of_head, of_features = torch.autograd.grad(loss, both)
        return -of_head, -16 * of_features

    assert row["quotients"][0] == pytest.approx(nc1(features, labels), rel=1e-3)
    step = 2.0 / 200
    for _ in range(200):
        first = slopes(head, features)
        second = slopes(head + step * first[0], features + step * first[1])
        head, features = (
            (at + step / 2 * (one + other)).detach()
            for at, one, other in zip((head, features), first, second, strict=True)
        )
    assert row["end"] == pytest.approx(nc1(features, labels), rel=1e-3)


def test_along_the_central_path_checks_are_compared_with_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"NUM": 4, "WIDTH": 5, "END": 5.0, "CHECKS": 40}.items():
        monkeypatch.setattr(tied, name, value)
    (row,) = tied.central(1.0, 0, 0.005, 0.0)
    path = NearCollapse(*tied.drawn(1.0, 0), 0.005, 0.005).flow([0.0, *np.geomspace(0.01, 5.0, 40)])
    assert row["rising"] == 0
    assert path.falls
    assert row["quotients"] == pytest.approx(path.quotients, rel=1e-4)
    seen = tied._seen([4.0, 2.0, 3.0, 1.0], *[path.states[0].geometry] * 2)
    assert (seen["rising"], seen["largest"], seen["peak"], seen["end"]) == (1, 0.5, 1.0, 1.0)


def test_an_offset_moves_all_features_alike() -> None:
    plain, labels = tied.drawn(0.3, 5)
    moved, _ = tied.drawn(0.3, 5, 3.0)
    assert (moved - plain)[0].norm() == pytest.approx(3.0)
    torch.testing.assert_close(moved - plain, (moved - plain)[:1].expand_as(plain))
    assert tied.geometry_of(moved, labels).quotient == pytest.approx(nc1(plain, labels))


def nc1(features: Tensor, labels: Tensor) -> float:
    """Tr S_W/Tr S_B with both matrices."""
    rows, classes = features.numpy(), labels.numpy()
    means = np.stack([rows[classes == label].mean(0) for label in np.unique(classes)])
    away, centred = rows - means[classes], means - means.mean(0)
    return float(np.trace(away.T @ away / len(rows)) / np.trace(centred.T @ centred / len(means)))
