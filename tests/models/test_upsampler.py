"""The network from a coarse grid to a fine one: its size, its points, and how far it sees."""

from __future__ import annotations

import pytest
import torch

from theodolite.core.errors import UseError
from theodolite.models import Upsampler


def small(depth: int = 1, **options) -> Upsampler:
    torch.manual_seed(0)
    return Upsampler(4, depth, **options)


@pytest.mark.parametrize(("width", "depth"), [(4, 1), (6, 3)])
def test_the_number_of_parameters_is_that_of_its_convolutions(width: int, depth: int) -> None:
    enter, block = (9 * 3 + 1) * width, 2 * (9 * width + 1) * width
    readout = (9 * width + 1) * 2 * 64
    count = sum(tensor.numel() for tensor in Upsampler(width, depth).parameters())
    assert count == enter + depth * block + readout


def test_the_output_is_the_readout_of_the_stream_with_the_points_of_a_cell_in_rows() -> None:
    """By sums over shifted maps: `W_out(h + conv₂ silu conv₁ h)`, then every channel at its own point."""
    network = small(outputs=2, factor=3).double()
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)

    def convolved(layer: torch.nn.Conv2d, maps: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(maps, (1, 1, 1, 1))
        height, width = maps.shape[2:]
        sums = layer.bias[:, None, None] + torch.zeros(1, dtype=maps.dtype)
        for i in range(3):
            for j in range(3):
                shifted = padded[:, :, i : i + height, j : j + width]
                sums = sums + torch.einsum("oc,bchw->bohw", layer.weight[:, :, i, j], shifted)
        return sums

    h = convolved(network.enter, x)
    inner = convolved(network.blocks[0].conv_in, h)
    h = h + convolved(network.blocks[0].conv_out, inner / (1 + torch.exp(-inner)))
    channels = convolved(network.readout, h)
    expected = torch.empty(2, 2, 15, 12, dtype=torch.float64)
    for output in range(2):
        for i in range(3):
            for j in range(3):
                expected[:, output, i::3, j::3] = channels[:, 9 * output + 3 * i + j]
    torch.testing.assert_close(network(x), expected)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_point_depends_on_two_cells_for_each_block_and_two_more(depth: int) -> None:
    network, maps = small(depth, factor=2), torch.randn(1, 3, 1, 17)
    changed = maps.clone()
    changed[..., 8] += 1
    moved = (network(changed) != network(maps))[0].any(0).any(0).view(17, 2).any(1)
    reach = 2 * depth + 2
    assert moved.nonzero().flatten().tolist() == list(range(8 - reach, 9 + reach))


def test_the_first_outputs_are_of_order_one_at_every_size() -> None:
    """Initial weights `N(0, 1/fan_in)`: a stream of variance 1 has outputs of variance 1."""
    torch.manual_seed(0)
    x = torch.randn(64, 3, 8, 8)
    for width in (32, 128):
        network = Upsampler(width, 1)
        inside = network.enter(x)[..., 1:-1, 1:-1]
        assert inside.var().item() == pytest.approx(1, rel=0.25)
        stream = torch.randn(16, width, 8, 8)
        assert network.readout(stream)[..., 1:-1, 1:-1].var().item() == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize("name", ["channels", "outputs", "factor"])
def test_bad_options_are_named(name: str) -> None:
    with pytest.raises(UseError, match=f"{name} is 0"):
        small(**{name: 0})
    with pytest.raises(UseError, match="width is 0"):
        Upsampler(0, 1)
