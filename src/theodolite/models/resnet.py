"""The residual networks of He et al. for CIFAR, with three kinds of norms."""

# B batch, C channels, S side of a map, O outputs

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.core.arguments import one_of, whole
from theodolite.core.size import Size

MapNormKind = Literal["batch", "layer", "rms"]

EPS = 1e-5


class ResNet(nn.Module):
    """A convolutional residual network of `6·depth + 2` layers; ResNet-20 at `width=16, depth=3`.

    A 3×3 convolution, three stages of `depth` blocks with `width`, `2·width` and `4·width` channels,
    the second and third at half the side of the one before, then the mean over positions and a readout.
    Where the shape changes, the shortcut is a 1×1 convolution with a norm (not counted as a layer).

    Args:
        width: channels of the first stage.
        depth: blocks in each stage.
        channels: channels of an image.
        outputs: number of outputs.
        norm: `batch`, `layer` or `rms`, see `make_map_norm`.

    Initial values: convolutions `N(0, 2/fan_in)`, the readout `N(0, 1/fan_in)` with zero biases.

    He et al. count 0.27 million parameters for ResNet-20 without projections, which add 2560:

    >>> sum(parameter.numel() for parameter in ResNet().parameters() if parameter.dim() > 1)
    270896

    References:
        He et al., Deep residual learning for image recognition, 2015, section 4.2.
    """

    def __init__(
        self,
        width: int = 16,
        depth: int = 3,
        *,
        channels: int = 3,
        outputs: int = 10,
        norm: MapNormKind = "batch",
    ) -> None:
        super().__init__()
        Size(width, depth)
        whole("channels", channels, least=1)
        whole("outputs", outputs, least=1)
        self.stem = _convolution(channels, width, 3)
        self.stem_norm = make_map_norm(norm, width)
        self.blocks = nn.ModuleList()
        before = width
        for stage in range(3):
            for number in range(depth):
                after = 2**stage * width
                stride = 2 if stage > 0 and number == 0 else 1
                self.blocks.append(ConvolutionalBlock(before, after, stride=stride, norm=norm))
                before = after
        self.readout = nn.Linear(before, outputs)
        nn.init.normal_(self.readout.weight, std=before**-0.5)
        nn.init.zeros_(self.readout.bias)

    def forward(self, x_BCSS: Tensor) -> Tensor:
        """Outputs (B, O)."""
        x_BCSS = F.relu(self.stem_norm(self.stem(x_BCSS)))
        for block in self.blocks:
            x_BCSS = block(x_BCSS)
        return self.readout(x_BCSS.mean((2, 3)))


class ConvolutionalBlock(nn.Module):
    """`φ(shortcut(x) + N K_2 φ(N K_1 x))` with 3×3 convolutions K and ReLU φ.

    With a branch of zeros a map of nonnegative numbers passes unchanged:

    >>> block = ConvolutionalBlock(2, 2, stride=1, norm="rms")
    >>> _ = nn.init.zeros_(block.second.weight)
    >>> x_BCSS = torch.rand(1, 2, 4, 4)
    >>> bool((block(x_BCSS) == x_BCSS).all())
    True
    """

    def __init__(self, channels_in: int, channels_out: int, *, stride: int, norm: MapNormKind) -> None:
        super().__init__()
        self.first = _convolution(channels_in, channels_out, 3, stride)
        self.first_norm = make_map_norm(norm, channels_out)
        self.second = _convolution(channels_out, channels_out, 3)
        self.second_norm = make_map_norm(norm, channels_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut.append(_convolution(channels_in, channels_out, 1, stride))
            self.shortcut.append(make_map_norm(norm, channels_out))

    def forward(self, x_BCSS: Tensor) -> Tensor:
        """The map after the block."""
        branch_BCSS = F.relu(self.first_norm(self.first(x_BCSS)))
        branch_BCSS = self.second_norm(self.second(branch_BCSS))
        return F.relu(self.shortcut(x_BCSS) + branch_BCSS)


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    convolution = nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
    return convolution


def make_map_norm(kind: MapNormKind, channels: int) -> nn.Module:
    """A norm of maps (B, C, S, S) with a gain for each channel, and a shift except for `rms`.

    Statistics go over batch and positions for each channel (`batch`), or over channels and positions
    for each image (`layer`, `rms`).

    >>> make_map_norm("layer", 1)(torch.tensor([[[[1.0, 7.0]]]])).round(decimals=3)
    tensor([[[[-1.,  1.]]]], grad_fn=<...>)
    """
    one_of("norm", kind, get_args(MapNormKind))
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
