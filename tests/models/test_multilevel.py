"""The network over several grids: its size, its sums, how far it sees, and the roles of its tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import theodolite as th
from theodolite import UseError
from theodolite.models import MultilevelNet


def small(**options) -> MultilevelNet:
    torch.manual_seed(0)
    return MultilevelNet(4, 1, **options)


@pytest.mark.parametrize(("width", "depth", "levels"), [(4, 1, 1), (6, 3, 4)])
def test_the_number_of_parameters_is_that_of_its_convolutions(width: int, depth: int, levels: int) -> None:
    convolution = (9 * width + 1) * width
    grids = levels * 10 * width + (levels - 1) * convolution + levels * depth * 2 * convolution
    count = sum(tensor.numel() for tensor in MultilevelNet(width, depth, levels=levels).parameters())
    assert count == grids + 9 * width + 1


def test_two_grids_by_explicit_averages_and_interpolation() -> None:
    """Pooling and bilinear interpolation as matrices along each side: weights 1/2, and 3/4 and 1/4."""
    network, x = small(levels=2).double(), torch.randn(2, 1, 8, 8, dtype=torch.float64)
    for tensor in network.parameters():
        torch.nn.init.normal_(tensor)
    average = torch.eye(4, dtype=torch.float64).repeat_interleave(2, 1) / 2
    spread = torch.zeros(8, 4, dtype=torch.float64)
    for point in range(8):
        near, far = point // 2, point // 2 + (1 if point % 2 else -1)
        spread[point, near] += 0.75
        spread[point, min(max(far, 0), 3)] += 0.25

    def block(level: int, h: torch.Tensor) -> torch.Tensor:
        one = network.blocks[level][0]
        inner = F.conv2d(h, one.conv_in.weight, one.conv_in.bias, padding=1).clamp_min(0)
        return h + F.conv2d(inner, one.conv_out.weight, one.conv_out.bias, padding=1)

    def convolved(layer: torch.nn.Conv2d, h: torch.Tensor) -> torch.Tensor:
        return F.conv2d(h, layer.weight, layer.bias, padding=1)

    coarse = block(1, convolved(network.enter[1], 2 * average @ x @ average.T))
    fine = convolved(network.enter[0], x) + convolved(network.grow[0], spread @ coarse @ spread.T)
    torch.testing.assert_close(network(x), convolved(network.readout, block(0, fine)))


@pytest.mark.parametrize(("levels", "reaches"), [(1, False), (4, True)])
def test_only_with_coarser_grids_does_a_corner_see_the_opposite_one(levels: int, reaches: bool) -> None:
    network, x = small(levels=levels), torch.zeros(1, 1, 32, 32, requires_grad=True)
    torch.nn.init.ones_(network.blocks[-1][0].conv_in.bias)
    network(x)[0, 0, 0, 0].backward()
    assert bool(x.grad[0, 0, -1, -1] != 0) == reaches


def test_a_side_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(UseError, match="12 × 12 points: with levels=4 give sides that are multiples of 8"):
        small()(torch.zeros(1, 1, 12, 12))


def test_its_roles_are_those_of_its_place_in_the_network() -> None:
    """What reads the residual is input, between maps hidden; blocks on all grids are branches."""
    anatomy = th.dissect(MultilevelNet, torch.randn(2, 1, 16, 16), size=th.Size(8, 1))
    roles = {name: part.role for name, part in anatomy.items()}
    assert {roles[f"enter.{level}.weight"] for level in range(4)} == {"input"}
    assert {roles[f"grow.{level}.weight"] for level in range(3)} == {"hidden"}
    assert {role for name, role in roles.items() if "conv" in name and "weight" in name} == {"hidden"}
    assert roles["readout.weight"] == "output"
    ends = {name for name in roles if ".conv_out." in name}
    assert {name for name, part in anatomy.items() if part.ends_branch} == ends
