"""A weight that is computed from parameters: each of them is a Part with the axes it has in the weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from theodolite.anatomy import Anatomy, dissect
from theodolite.core.size import Size

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    """A stream of vectors or of maps, and branches of two wrapped layers."""

    def __init__(self, width: int, depth: int, wrap: Wrap, conv: bool) -> None:
        super().__init__()

        def layer(before: int, after: int) -> nn.Module:
            return nn.Conv2d(before, after, 3, padding=1) if conv else nn.Linear(before, after)

        self.embed = layer(3, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList([wrap(layer(width, 2 * width)), wrap(layer(2 * width, width))])
            for _ in range(depth)
        )
        self.head = layer(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for first, second in self.blocks:
            x = x + second(F.relu(first(x)))
        return self.head(x)


def _look(wrap: Wrap, conv: bool) -> Anatomy:
    inputs = torch.zeros(2, 3, 4, 4) if conv else torch.zeros(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # torch's old forms of these say that there are new ones
        return dissect(lambda w, d: Net(w, d, wrap, conv), inputs, size=Size(16, 2))


def _check_branches(anatomy: Anatomy, *last: str) -> None:
    assert [(b.block, b.layers) for b in anatomy.branches] == [(0, 2), (1, 2)]
    assert set(anatomy.branches[1].ends) == {f"blocks.1.1.{name}" for name in last}


def _check_weight(anatomy: Anatomy, name: str, conv: bool) -> None:
    for layer in (0, 1):
        part = anatomy[f"blocks.0.{layer}.{name}"]
        kernel = (2, 3) if conv else ()
        assert (part.op, part.role) == ("conv" if conv else "linear", "hidden")
        assert (part.in_axes, part.out_axes) == ((1, *kernel), (0,))
        assert (part.width_in, part.width_out) == (True, True)
        assert part.fan_in == (16, 32)[layer] * (9 if conv else 1)


both_kinds = pytest.mark.parametrize("conv", [False, True], ids=["linear", "conv"])


@both_kinds
@pytest.mark.parametrize("new", [False, True], ids=["old", "new"])
def test_weight_norm_has_a_direction_and_a_gain(conv: bool, new: bool) -> None:
    wrap: Any = parametrizations.weight_norm if new else nn.utils.weight_norm
    names = [f"parametrizations.weight.original{n}" for n in (0, 1)] if new else ["weight_g", "weight_v"]
    anatomy = _look(wrap, conv)
    _check_weight(anatomy, names[1], conv)
    gain = anatomy[f"blocks.0.0.{names[0]}"]
    assert (gain.op, gain.role, gain.norm) == ("scale", "gain", None)
    assert (gain.in_axes, gain.out_axes, gain.width_out) == ((), (0,), True)
    assert "blocks.1.1.bias" in anatomy.branches[1].ends
    assert f"blocks.1.1.{names[0]}" in anatomy.branches[1].ends  # scaling it scales the branch


@both_kinds
@pytest.mark.parametrize("new", [False, True], ids=["old", "new"])
def test_spectral_norm_leaves_the_axes_alone(conv: bool, new: bool) -> None:
    wrap: Any = parametrizations.spectral_norm if new else nn.utils.spectral_norm
    name = "parametrizations.weight.original" if new else "weight_orig"
    anatomy = _look(wrap, conv)
    _check_weight(anatomy, name, conv)
    _check_branches(anatomy)  # divided by its own norm, it sets the size of nothing


class Standardised(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        w = w / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias, padding=1)


def test_a_standardised_weight_leaves_the_axes_alone() -> None:
    anatomy = _look(lambda conv: Standardised(conv.in_channels, conv.out_channels, 3), conv=True)
    _check_weight(anatomy, "weight", conv=True)
    _check_branches(anatomy)


class Merged(nn.Module):
    """A low-rank change of a weight, added to the weight and not to the output: (W + B A) x."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.a = nn.Parameter(torch.zeros(4, linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.b @ self.a)


def test_a_weight_with_a_low_rank_change() -> None:
    anatomy = _look(Merged, conv=False)
    _check_weight(anatomy, "weight", conv=False)
    _check_branches(anatomy, "weight", "a", "b")
    a, b = anatomy["blocks.0.0.a"], anatomy["blocks.0.0.b"]
    assert (a.role, a.in_axes, a.out_axes) == ("output", (1,), (0,))
    assert (b.role, b.in_axes, b.out_axes) == ("input", (1,), (0,))
