"""Norms of convolutional maps."""

# B batch, C channels, S side of a map

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from theodolite.models.options import require_one_of

MapNormKind = Literal["batch", "layer", "rms"]

EPS = 1e-5


def make_map_norm(kind: MapNormKind, channels: int) -> nn.Module:
    """A norm of maps (B, C, S, S) with a gain for each channel, and a shift except for `rms`.

    Statistics go over batch and positions for each channel (`batch`), or over channels and positions
    for each image (`layer`, `rms`).

    >>> make_map_norm("layer", 1)(torch.tensor([[[[1.0, 7.0]]]])).round(decimals=3)
    tensor([[[[-1.,  1.]]]], grad_fn=<...>)
    """
    require_one_of("norm", kind, get_args(MapNormKind))
    if kind == "batch":
        return nn.BatchNorm2d(channels, eps=EPS)
    if kind == "layer":
        return nn.GroupNorm(1, channels, eps=EPS)
    return MapRMSNorm(channels)


class MapRMSNorm(nn.Module):
    """`γ_c x_cst / √(mean_cst x² + ε)`, the mean over all channels and positions of one image.

    >>> MapRMSNorm(1)(torch.tensor([[[[1.0, 7.0]]]]))
    tensor([[[[0.2000, 1.4000]]]], grad_fn=<...>)
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x_BCSS: Tensor) -> Tensor:
        """The map, normalised."""
        square_B111 = x_BCSS.square().mean((1, 2, 3), keepdim=True)
        return x_BCSS * (square_B111 + EPS).rsqrt() * self.weight[:, None, None]
