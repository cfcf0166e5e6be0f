"""`FlowMLP`, a residual network that predicts the velocity of points."""

# B batch, I dimensions of a point, D width

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import whole
from theodolite.core.size import Size
from theodolite.models.conditioning import Conditioning, initialise
from theodolite.models.transformer import EPS


class FlowMLP(nn.Module):
    """`h = W_in x + c(t, label)`, then `depth` blocks `h ← h + W₂ silu(W₁ N h)`, then `v = W_out N h`.

    Args:
        width: features D of the stream.
        depth: number of residual blocks.
        dimensions: of a point.
        classes: number of labels; the label `classes` stands for none. 0: no labels.
        times: 1 for a velocity `v_t(x)`, 2 for a flow map `v_{s,t}(x)`.

    Weights are initialised as `N(0, 1/fan_in)`, and biases 0.

    >>> import torch
    >>> FlowMLP(16, 2)(torch.randn(5, 2), torch.rand(5)).shape
    torch.Size([5, 2])
    """

    def __init__(
        self, width: int, depth: int, *, dimensions: int = 2, classes: int = 0, times: int = 1
    ) -> None:
        super().__init__()
        Size(width, depth)
        whole("dimensions", dimensions, least=1)
        self.enter = nn.Linear(dimensions, width)
        self.condition = Conditioning(width, classes=classes, times=times)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.readout = nn.Linear(width, dimensions)
        initialise(self)

    def forward(self, x_BI: Tensor, t: Tensor, label_B: Tensor | None = None) -> Tensor:
        """The velocity (B, I) of the points at their times."""
        h_BD = self.enter(x_BI) + self.condition(t, label_B)
        for block in self.blocks:
            h_BD = block(h_BD)
        return self.readout(self.norm(h_BD))


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, h_BD: Tensor) -> Tensor:
        return h_BD + self.down(F.silu(self.up(self.norm(h_BD))))
