"""Computed data sets have the properties that were computed for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from theodolite import UseError, data


@pytest.mark.parametrize(("classes", "separation"), [(2, 1.0), (2, 3.0), (5, 2.0), (10, 4.0)])
def test_the_best_classifier_of_the_mixture_is_as_good_as_its_formula(
    classes: int, separation: float
) -> None:
    """Centres are estimated from one half, and the other half is classified by the nearest."""
    num = 100_000
    examples = data.mixture(num, classes=classes, dimensions=12, separation=separation)
    known, asked = slice(None, num // 2), slice(num // 2, None)
    values, labels = examples.values, examples.labels
    centres = torch.stack([values[known][labels[known] == k].mean(0) for k in range(classes)])
    right = (torch.cdist(values[asked], centres).argmin(1) == labels[asked]).double().mean().item()
    formula = data.mixture_accuracy(classes, separation)
    assert abs(right - formula) < 4 * math.sqrt(formula * (1 - formula) / (num // 2)) + 1e-3


def test_the_formula_agrees_with_simulation() -> None:
    noise = np.random.default_rng(0).standard_normal((400_000, 6))
    noise[:, 0] += 1.5
    simulated = (noise.argmax(1) == 0).mean()
    assert abs(data.mixture_accuracy(6, 1.5) - simulated) < 4 * math.sqrt(0.25 / 400_000)


def test_centres_are_orthogonal_and_noise_is_isotropic() -> None:
    examples = data.mixture(200_000, classes=4, dimensions=6, separation=4.0)
    centres = torch.stack([examples.values[examples.labels == k].mean(0) for k in range(4)])
    assert torch.allclose(centres @ centres.T, 16 * torch.eye(4), atol=0.2)
    noise = examples.values - centres[examples.labels]
    assert torch.allclose(noise.T @ noise / len(noise), torch.eye(6), atol=0.02)


def test_another_seed_is_the_same_problem_with_other_examples() -> None:
    first, second = (data.mixture(50_000, classes=3, dimensions=5, seed=seed) for seed in (0, 1))
    assert not torch.equal(first.values, second.values)
    for k in range(3):
        assert torch.allclose(
            first.values[first.labels == k].mean(0), second.values[second.labels == k].mean(0), atol=0.06
        )


def test_more_classes_than_dimensions_are_refused() -> None:
    with pytest.raises(UseError, match="classes is 5 and dimensions 4"):
        data.mixture(10, classes=5, dimensions=4)


def test_modular_addition_is_the_whole_table() -> None:
    examples = data.modular_addition(7)
    table = {}
    for row, label in zip(examples.values, examples.labels.tolist(), strict=True):
        hot = row.nonzero().flatten().tolist()
        x, y = hot if len(hot) == 2 else hot * 2
        assert row.sum() == 2
        table.setdefault((x, y), []).append(label)
    assert table == {(x, y): [(x + y) % 7] * (1 if x == y else 2) for x in range(7) for y in range(x, 7)}


@pytest.mark.parametrize("modulus", [11, 12])
def test_the_held_out_part_is_the_rest_and_holds_no_pair_that_was_trained_in_the_other_order(
    modulus: int,
) -> None:
    parts = [
        data.modular_addition(modulus, fraction=0.3, held_out=held_out, seed=5) for held_out in (False, True)
    ]

    def pairs(examples: data.Examples) -> list[tuple[float, ...]]:
        return sorted(tuple(row) for row in examples.values.tolist())

    trained, unseen = (set(pairs(part)) for part in parts)
    assert not trained & unseen
    assert [len(trained), len(unseen)] == {11: [20, 46], 12: [23, 55]}[modulus]  # of P(P + 1)/2
    assert sorted(pairs(parts[0]) + pairs(parts[1])) == pairs(data.modular_addition(modulus))


def test_another_seed_holds_out_other_pairs() -> None:
    first, second = (data.modular_addition(11, fraction=0.5, seed=seed).values for seed in (0, 1))
    assert {tuple(row) for row in first.tolist()} != {tuple(row) for row in second.tolist()}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"modulus": 1}, "modulus is 1: give an integer, at least 2"),
        ({"modulus": 7.0}, "modulus is 7.0: give an integer"),
        ({"fraction": 0.0}, "fraction is 0.0: give a number above 0, at most 1"),
        ({"fraction": 1.5}, "fraction is 1.5"),
        ({"fraction": float("nan")}, "fraction is nan"),
        ({"modulus": 3, "fraction": 0.01}, "none of the 6 unordered pairs is trained on. Give a larger"),
        ({"held_out": True}, "none of the 1770 unordered pairs is held out. Give a smaller fraction"),
    ],
)
def test_impossible_tables_are_refused(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(UseError, match=said):
        data.modular_addition(**wrong)
