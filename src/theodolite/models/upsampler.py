"""`Upsampler`, a convolutional network from a coarse grid to a fine one."""

# B batch, C channels, O outputs, D width, h and w cells of the coarse grid, H and W points of the fine one

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import whole
from theodolite.core.size import Size
from theodolite.models.conditioning import initialise


class Upsampler(nn.Module):
    """Maps (B, C, h, w) to maps (B, O, factor·h, factor·w); all layers are on the coarse grid.

    A 3×3 convolution into `width` channels, `depth` blocks `h ← h + conv₂ silu conv₁ h` of 3×3 convolutions
    without norms, and a 3×3 convolution whose `O·factor²` channels are the points in each cell. A point
    depends on cells at most `2·depth + 2` rows or columns away.

    Args:
        width: channels D of the stream and inside the blocks.
        depth: number of blocks.
        channels: of the coarse map.
        outputs: channels O of the fine map.
        factor: fine points along each side of a coarse cell.

    Initial values: convolutions `N(0, 1/fan_in)`, biases 0.

    >>> import torch
    >>> Upsampler(16, 2)(torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 2, 64, 64])

    References:
        Shi et al., Real-time single image and video super-resolution using an efficient sub-pixel
        convolutional neural network, 2016. Lim et al., Enhanced deep residual networks for single image
        super-resolution, 2017.
    """

    def __init__(
        self, width: int, depth: int, *, channels: int = 3, outputs: int = 2, factor: int = 8
    ) -> None:
        super().__init__()
        Size(width, depth)
        for name, value in {"channels": channels, "outputs": outputs, "factor": factor}.items():
            whole(name, value, least=1)
        self.factor = factor
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(MapBlock(width) for _ in range(depth))
        self.readout = nn.Conv2d(width, outputs * factor**2, 3, padding=1)
        initialise(self)

    def forward(self, x_BChw: Tensor) -> Tensor:
        """The fine map (B, O, H, W)."""
        h_BDhw = self.enter(x_BChw)
        for block in self.blocks:
            h_BDhw = block(h_BDhw)
        return F.pixel_shuffle(self.readout(h_BDhw), self.factor)


class MapBlock(nn.Module):
    """`h + conv₂ silu conv₁ h`.

    With a branch that ends in zeros a map passes unchanged:

    >>> import torch
    >>> block = MapBlock(4)
    >>> for parameter in block.conv_out.parameters():
    ...     _ = nn.init.zeros_(parameter)
    >>> maps = torch.randn(1, 4, 8, 8)
    >>> bool((block(maps) == maps).all())
    True
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(width, width, 3, padding=1)
        self.conv_out = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h_BDhw: Tensor) -> Tensor:
        """The map after the branch was added."""
        return h_BDhw + self.conv_out(F.silu(self.conv_in(h_BDhw)))
