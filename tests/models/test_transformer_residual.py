"""Where norms stand, computed by hand in float64."""

import pytest
import torch
from torch import Tensor, nn

from theodolite.core.errors import UseError
from theodolite.models.transformer import Residual, make_norm


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def layer(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("kind, formula", [("rms", rms), ("layer", layer)])
def test_a_norm_is_its_formula_times_gain(kind, formula):
    norm = make_norm(kind, shift=False)(6).double()
    gain = torch.rand(6, dtype=torch.float64)
    norm.weight.data = gain
    x = torch.randn(4, 6, dtype=torch.float64)
    torch.testing.assert_close(norm(x), formula(x) * gain)


def test_only_a_layer_norm_with_shifts_has_shifts():
    def count(kind, shift):
        return sum(parameter.numel() for parameter in make_norm(kind, shift=shift)(6).parameters())

    assert [count("rms", False), count("rms", True), count("layer", False), count("layer", True)] == [
        6,
        6,
        6,
        12,
    ]


PLACEMENTS = {
    "pre": lambda x, f: x + f(rms(x)),
    "post": lambda x, f: rms(x + f(x)),
    "peri": lambda x, f: x + rms(f(rms(x))),
    "out": lambda x, f: x + rms(f(x)),
    "none": lambda x, f: x + f(x),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_placement_is_its_formula(placement):
    branch = nn.Linear(6, 6).double()
    residual = Residual(branch, 6, placement, make_norm("rms", shift=False)).double()
    x = 3 * torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(residual(x), PLACEMENTS[placement](x, branch))


def test_an_unknown_norm_is_refused_with_the_choices():
    with pytest.raises(UseError, match=r"norm is 'rsm'\. Did you mean 'rms'\? It is one of rms, layer"):
        make_norm("rsm", shift=False)
