"""`UNet`, a convolutional network that predicts the velocity, or the noise, of an image."""

# B batch, C channels of the image, F channels of a level, H height, W width in pixels

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import multiple, whole
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.models.conditioning import Conditioning, initialise
from theodolite.models.transformer import EPS, Attention

GROUPS = 8
"""Of every group norm, at every width."""


class UNet(nn.Module):
    """`levels` resolutions down and up again, with `depth` residual blocks at each, and shortcuts between.

    Level i has `width·2^i` channels and half the side of the one before. On the way up, the result of the
    same level on the way down is concatenated, and a 1×1 convolution merges both. Between the ways there are
    a block, attention over all positions, and a block.

        h ← h + conv₂ silu N(conv₁ silu N h + W c(t, label))

    Args:
        width: channels of the first level, a multiple of 8, as group norms have 8 groups.
        depth: residual blocks of each level, on each way.
        channels: of the image.
        levels: resolutions; the side of an image must be a multiple of `2^(levels − 1)`.
        classes: number of labels; the label `classes` stands for none. 0: no labels.
        head_dim: dimension of each head of the attention.
        times: 1 for a velocity `v_t(x)`, 2 for a flow map `v_{s,t}(x)` (see `theodolite.flows`).

    Weights are initialised as `N(0, 1/fan_in)`, labels `N(0, 1)`, biases 0 and gains 1.

    >>> UNet(16, 1)(torch.randn(2, 1, 8, 8), torch.rand(2), torch.tensor([0, 10])).shape
    torch.Size([2, 1, 8, 8])

    References:
        Ronneberger, Fischer, Brox, U-Net, 2015. Ho, Jain, Abbeel, Denoising diffusion probabilistic models,
        2020.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        *,
        channels: int = 1,
        levels: int = 2,
        classes: int = 10,
        head_dim: int = 32,
        times: int = 1,
    ) -> None:
        super().__init__()
        Size(width, depth)
        whole("channels", channels, least=1)
        whole("levels", levels, least=1)
        multiple("width", width, GROUPS, f"group norms have {GROUPS} groups")
        self.shrinks = 2 ** (levels - 1)
        sizes = [width * 2**level for level in range(levels)]
        self.condition = Conditioning(width, classes=classes, times=times)
        self.enter = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.ModuleList(_blocks(size, width, depth) for size in sizes)
        self.shrink = nn.ModuleList(nn.Conv2d(size, 2 * size, 3, stride=2, padding=1) for size in sizes[:-1])
        self.middle = _blocks(sizes[-1], width, 2)
        self.attention = MapAttention(sizes[-1], head_dim)
        self.merge = nn.ModuleList(nn.Conv2d(2 * size, size, 1) for size in sizes)
        self.up = nn.ModuleList(_blocks(size, width, depth) for size in sizes)
        self.grow = nn.ModuleList(nn.Conv2d(2 * size, size, 3, padding=1) for size in sizes[:-1])
        self.norm = _norm(width)
        self.readout = nn.Conv2d(width, channels, 3, padding=1)
        initialise(self)

    def forward(self, x_BCHW: Tensor, t: Tensor, label_B: Tensor | None = None) -> Tensor:
        """The velocity of the image; `t` has one time for each example, or two for a flow map."""
        if any(side % self.shrinks for side in x_BCHW.shape[-2:]):
            raise UseError(
                f"an image has {x_BCHW.shape[-2]} × {x_BCHW.shape[-1]} pixels: with levels={len(self.down)} "
                f"give sides that are multiples of {self.shrinks}"
            )
        condition_BD = F.silu(self.condition(t, label_B))
        h_BFHW = self.enter(x_BCHW)
        kept = []
        for level, blocks in enumerate(self.down):
            h_BFHW = self.shrink[level - 1](h_BFHW) if level else h_BFHW
            h_BFHW = _through(blocks, h_BFHW, condition_BD)
            kept.append(h_BFHW)
        before, after = self.middle
        h_BFHW = after(self.attention(before(h_BFHW, condition_BD)), condition_BD)
        for level in reversed(range(len(self.up))):
            h_BFHW = self.merge[level](torch.cat((h_BFHW, kept[level]), 1))
            h_BFHW = _through(self.up[level], h_BFHW, condition_BD)
            if level:
                h_BFHW = self.grow[level - 1](F.interpolate(h_BFHW, scale_factor=2.0, mode="nearest"))
        return self.readout(F.silu(self.norm(h_BFHW)))


class ConditionedBlock(nn.Module):
    """`h + conv₂ silu N(conv₁ silu N h + W c)`.

    Args:
        size: channels F.
        condition: features of c.
    """

    def __init__(self, size: int, condition: int) -> None:
        super().__init__()
        self.norm_in, self.conv_in = _norm(size), nn.Conv2d(size, size, 3, padding=1)
        self.condition = nn.Linear(condition, size)
        self.norm_out, self.conv_out = _norm(size), nn.Conv2d(size, size, 3, padding=1)

    def forward(self, h_BFHW: Tensor, condition_BD: Tensor) -> Tensor:
        """The map after the branch was added."""
        inner_BFHW = self.conv_in(F.silu(self.norm_in(h_BFHW)))
        inner_BFHW = inner_BFHW + self.condition(condition_BD)[:, :, None, None]
        return h_BFHW + self.conv_out(F.silu(self.norm_out(inner_BFHW)))


class MapAttention(nn.Module):
    """`h + attention(N h)` over all positions of a map."""

    def __init__(self, size: int, head_dim: int) -> None:
        super().__init__()
        self.norm = _norm(size)
        self.attention = Attention(size, head_dim=head_dim, causal=False)

    def forward(self, h_BFHW: Tensor) -> Tensor:
        """The map after the branch was added."""
        rows_BTF = self.norm(h_BFHW).flatten(2).transpose(1, 2)
        return h_BFHW + self.attention(rows_BTF).transpose(1, 2).unflatten(2, h_BFHW.shape[-2:])


def _blocks(size: int, condition: int, depth: int) -> nn.ModuleList:
    return nn.ModuleList(ConditionedBlock(size, condition) for _ in range(depth))


def _through(blocks: nn.Module, h_BFHW: Tensor, condition_BD: Tensor) -> Tensor:
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        h_BFHW = block(h_BFHW, condition_BD)
    return h_BFHW


def _norm(size: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, size, eps=EPS)
