"""`MultilevelNet`, a convolutional network from functions on a square grid to functions on the same grid."""

# B batch, D width, H = W points along each side of the grid, h = w of a coarser one

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import whole
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.models.conditioning import initialise


class MultilevelNet(nn.Module):
    """Maps (B, 1, H, W) to (B, 1, H, W), from the coarsest of several grids to the finest.

    Each grid has half the points of the next along each side. The input is averaged down to every grid and
    enters there by a 3×3 convolution; the result of the coarser grid, interpolated and convolved, is added,
    and `depth` blocks `h ← h + conv₂ relu conv₁ h` follow. So each output depends on inputs far away, as the
    solution of an elliptic equation does. All grids have `width` channels and there are no norms: with biases
    of zero, as at the start, an input that is c > 0 times as large gives an output c times as large.

    Args:
        width: channels D.
        depth: residual blocks on each grid.
        levels: number of grids; the side of the input must be a multiple of `2^(levels − 1)`.

    Initial values: convolutions `N(0, 1/fan_in)`, biases 0.

    >>> import torch
    >>> model, x = MultilevelNet(8, 1), torch.randn(2, 1, 16, 16)
    >>> bool(torch.allclose(model(2 * x), 2 * model(x), atol=1e-5))
    True
    """

    def __init__(self, width: int, depth: int, *, levels: int = 4) -> None:
        super().__init__()
        Size(width, depth)
        whole("levels", levels, least=1)
        self.shrinks = 2 ** (levels - 1)
        self.enter = nn.ModuleList(nn.Conv2d(1, width, 3, padding=1) for _ in range(levels))
        self.grow = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(levels - 1))
        self.blocks = nn.ModuleList(
            nn.Sequential(*(GridBlock(width) for _ in range(depth))) for _ in range(levels)
        )
        self.readout = nn.Conv2d(width, 1, 3, padding=1)
        initialise(self)

    def forward(self, x_B1HW: Tensor) -> Tensor:
        """A function on the grid of the input."""
        if any(side % self.shrinks for side in x_B1HW.shape[-2:]):
            raise UseError(
                f"a grid has {x_B1HW.shape[-2]} × {x_B1HW.shape[-1]} points: with levels={len(self.enter)} "
                f"give sides that are multiples of {self.shrinks}"
            )
        inputs = [x_B1HW]
        for _ in self.grow:
            inputs.append(2 * F.avg_pool2d(inputs[-1], 2))  # white noise keeps its size
        *finer, coarsest = range(len(inputs))
        h_BDhw = self.blocks[coarsest](self.enter[coarsest](inputs[coarsest]))
        for level in reversed(finer):
            h_BDhw = F.interpolate(h_BDhw, scale_factor=2.0, mode="bilinear", align_corners=False)
            h_BDhw = self.blocks[level](self.enter[level](inputs[level]) + self.grow[level](h_BDhw))
        return self.readout(h_BDhw)


class GridBlock(nn.Module):
    """`h + conv₂ relu conv₁ h`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(width, width, 3, padding=1)
        self.conv_out = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h_BDhw: Tensor) -> Tensor:
        """The map after the branch was added."""
        return h_BDhw + self.conv_out(F.relu(self.conv_in(h_BDhw)))
