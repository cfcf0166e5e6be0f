"""Normalised weights start as planned: the effective weight, not only the tensors it is made of."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import utils
from torch.nn.utils import parametrizations, parametrize

from theodolite import Size, plan

pytestmark = pytest.mark.usefixtures("one_dissection")
SIGNALS = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(0))
BASE = Size(16, 1)
Wrap = Callable[[nn.Module], nn.Module]


def stack(wrap: Wrap, wrap_last: Wrap, width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv1d(4, width, 3),
        nn.ReLU(),
        wrap(nn.Conv1d(width, width, 3)),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        wrap_last(nn.Linear(width, 3)),
    )


class Normalised(nn.Module):
    """Weight normalisation by hand: rows of unit length times one magnitude."""

    def __init__(self, layer: nn.Conv1d | nn.Linear) -> None:
        super().__init__()
        self.direction = nn.Parameter(layer.weight.detach())
        self.length = nn.Parameter(torch.ones(()) / 3**0.5)

    @property
    def weight(self) -> Tensor:
        return self.length * F.normalize(self.direction.flatten(1), dim=1).view_as(self.direction)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.weight.ndim == 2 else F.conv1d(x, self.weight)


def old(make: Callable, **options: int | None) -> Wrap:
    """What torch calls deprecated."""

    def wrap(module: nn.Module) -> nn.Module:
        with warnings.catch_warnings(action="ignore"):
            return make(module, **options)

    return wrap


def plain(module: nn.Module) -> nn.Module:
    return module


@pytest.mark.parametrize(
    ("wrap", "wrap_last"),
    [
        *((partial(parametrizations.weight_norm, dim=dim),) * 2 for dim in (0, 1, None)),
        (partial(parametrizations.weight_norm, dim=2), plain),
        (old(utils.weight_norm, dim=0),) * 2,
        (old(utils.weight_norm, dim=2), old(utils.weight_norm, dim=None)),
        (Normalised, Normalised),
    ],
    ids=["rows", "columns", "all", "positions", "old-rows", "old-positions", "by-hand"],
)
def test_the_effective_weight_has_the_planned_std(wrap: Wrap, wrap_last: Wrap) -> None:
    """A hidden one as 1/√width, an output as 1/width, whatever the norm is taken over."""
    build = partial(stack, wrap, wrap_last)
    found = []
    for width in (16, 64, 256):
        model = plan(build, SIGNALS, size=Size(width, 1), base=BASE, lr=1e-3).build(seed=0)
        model(SIGNALS)  # the old way computes its weight in a hook
        found.append([model[at].weight.std().item() for at in (2, 5)])
    (hidden, last), *others = found
    for ratio, (wider, wider_last) in zip((4, 16), others, strict=True):
        assert wider * ratio**0.5 == pytest.approx(hidden, rel=0.05)
        assert wider_last * ratio == pytest.approx(last, rel=0.2)  # 48 values at base size


def test_a_magnitude_learns_in_proportion_to_its_size() -> None:
    build = partial(stack, partial(parametrizations.weight_norm, dim=2), plain)
    made = plan(build, SIGNALS, size=Size(256, 1), base=BASE, lr=1e-3)
    name = "2.parametrizations.weight.original0"
    own = plan(build, SIGNALS, size=BASE, base=BASE, lr=1e-3)[name]
    assert made[name].lr == pytest.approx(4 * own.lr)  # √(16·16) more entries under one norm, each 1/√16
    assert made[name].init.mean == pytest.approx(4 * own.init.mean)


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, old(utils.spectral_norm)], ids=["", "old"])
def test_a_spectral_normalisation_knows_the_weight_that_was_drawn(wrap: Wrap) -> None:
    build = partial(stack, wrap, wrap)
    made = plan(build, SIGNALS, size=Size(64, 1), base=BASE, lr=1e-3)
    model = build(64, 1)
    torch.manual_seed(5)
    made.initialize(model, seed=3)
    built = made.build(seed=3)
    for one in (model, built):
        one.eval()(SIGNALS)
        for at in (2, 5):
            largest = torch.linalg.matrix_norm(one[at].weight.flatten(1), 2).item()
            assert largest == pytest.approx(1, abs=0.02)
    for ours, theirs in zip(model.buffers(), built.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_spectral_normalisation_behind_another_parametrization_reads_what_that_makes() -> None:
    class Shifted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight + 3 * torch.eye(*weight.shape)

    def build(width: int, depth: int) -> nn.Sequential:
        hidden = nn.Linear(width, width)
        parametrize.register_parametrization(hidden, "weight", Shifted())
        return nn.Sequential(nn.Linear(9, width), parametrizations.spectral_norm(hidden), nn.Linear(width, 3))

    model = plan(build, SIGNALS, size=Size(32, 1), base=BASE, lr=1e-3).build(seed=0).eval()
    assert torch.linalg.matrix_norm(model[1].weight, 2).item() == pytest.approx(1, abs=0.02)
