"""The Goldilocks study on networks and images that take no time."""

from __future__ import annotations

from functools import partial

import torch

from theodolite import Size, data, models
from theodolite_studies.goldilocks.setting import Network

WIDE = 6


def images(split: str = "train") -> data.Examples:
    """Three classes of blobs, 8 numbers each."""
    generator = torch.Generator().manual_seed(len(split))
    labels = torch.arange(90) % 3
    middles = 2 * torch.randn(3, 8, generator=torch.Generator().manual_seed(9))
    return data.Examples("blobs", middles[labels] + torch.randn(90, 8, generator=generator), labels, 3)


LENET = Network(
    "lenet", partial(models.LeNet300, inputs=8, outputs=3), Size(WIDE, 2), 3, 0, ("A", "B", "D"), images
)
RESNET = Network(
    "resnet",
    partial(models.ResNet4, inputs=8, outputs=3),
    Size(WIDE, 1),
    4,
    2,
    ("A", "B", "C", "D", "E"),
    images,
)
