"""Reference networks, each built as `Network(width, depth, **options)`.

Where a network is known by one size, that size is the default: `LeNet300()` is LeNet-300-100.
"""

from __future__ import annotations

from theodolite.models.dit import DiT
from theodolite.models.flow_mlp import FlowMLP
from theodolite.models.gpt import GPT
from theodolite.models.inhomogeneous import LeNet5, LeNet300, ResNet4
from theodolite.models.multilevel import MultilevelNet
from theodolite.models.residual_mlp import ResidualMLP
from theodolite.models.resnet import ResNet
from theodolite.models.unet import UNet
from theodolite.models.upsampler import Upsampler

__all__ = [
    "DiT",
    "FlowMLP",
    "GPT",
    "LeNet5",
    "LeNet300",
    "MultilevelNet",
    "ResNet",
    "ResNet4",
    "ResidualMLP",
    "UNet",
    "Upsampler",
]
