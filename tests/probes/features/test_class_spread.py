"""Class geometry against S_W and S_B as explicit matrices, and cases in closed form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from theodolite.probes.features.class_spread import ClassMeans, ClassSpread

from .explicit import explicit, same


def spread_of(features: Tensor, labels: Tensor, chunk: int = 7) -> ClassSpread:
    """Both passes, a few rows at a time."""
    counts = torch.bincount(labels)
    means = ClassMeans(counts, features)
    for rows, classes in zip(features.split(chunk), labels.split(chunk), strict=True):
        means.add(rows, classes)
    found = ClassSpread(means.means, counts)
    for rows, classes in zip(features.split(chunk), labels.split(chunk), strict=True):
        found.add(rows, classes)
    return found


@pytest.mark.parametrize(("classes", "width"), [(2, 1), (3, 8), (5, 3), (10, 40)])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_it_is_that_of_explicit_matrices(classes: int, width: int, offset: float) -> None:
    """Classes of different sizes, more classes than features and the reverse, and far from zero."""
    generator = torch.Generator().manual_seed(classes)
    labels = torch.cat([torch.arange(classes), torch.arange(classes)])
    more = torch.randint(classes, (60,), generator=generator)
    labels = torch.cat([labels, more.minimum(torch.randint(classes, (60,), generator=generator))])
    means = torch.randn(classes, width, generator=generator, dtype=torch.float64)
    noise = torch.randn(len(labels), width, generator=generator, dtype=torch.float64)
    features = offset + means[labels] + 0.7 * noise
    same(spread_of(features, labels).geometry(), explicit(features, labels), rel=1e-7 if offset else 1e-9)


def test_rows_in_half_precision_are_summed_in_double() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(4).repeat(200)
    features = (10 + torch.randn(4, 6, generator=generator)[labels] + torch.randn(800, 6)).half()
    same(spread_of(features, labels).geometry(), explicit(features, labels))


def test_the_pseudo_inverse_does_not_see_spread_outside_of_the_means_and_the_quotient_does() -> None:
    """Means ±1 along one axis, and spread ±√½ along another."""
    features = torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1]]).double() * torch.tensor([1, 0.5**0.5])
    found = spread_of(features, torch.tensor([0, 0, 1, 1])).geometry()
    assert found.quotient == pytest.approx(0.5)
    assert found.pinv == pytest.approx(0, abs=1e-14)


def test_in_full_collapse_to_a_simplex_all_is_zero() -> None:
    corners = 3 * (torch.eye(5).double() - 0.2) + 7
    found = spread_of(corners.repeat_interleave(4, 0), torch.arange(5).repeat_interleave(4)).geometry()
    for name in ("quotient", "pinv", "cdnv", "nc2", "equinorm", "equiangle"):
        assert getattr(found, name) == pytest.approx(0, abs=1e-7), name
    assert found.nearest == 1


def test_equal_means_have_no_geometry() -> None:
    features = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    found = spread_of(features, torch.tensor([0, 0, 1, 1])).geometry()
    assert (found.quotient, found.pinv, found.cdnv) == (math.inf, math.inf, math.inf)
    assert math.isnan(found.nc2)
    assert math.isnan(found.equinorm)


class Largest(TorchDispatchMode):
    """The most entries of a tensor that was made."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.entries = max(self.entries, *made, 0)
        return result


def test_no_matrix_is_larger_than_classes_or_rows_by_features() -> None:
    labels, width = torch.arange(6).repeat(5), 400
    features = torch.randn(30, width)
    with Largest() as largest:
        spread_of(features, labels).geometry()
    assert largest.entries == 7 * width  # rows of a batch, and classes, times features
