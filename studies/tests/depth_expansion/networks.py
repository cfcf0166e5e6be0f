"""A small network, and how much of it is read."""

import torch

from theodolite.models import ResNet
from theodolite_studies.depth_expansion.reading import ReadingSize

READER = ReadingSize(images=8, entries=6, sizes=(4, 16), draws=50, batch=3)


def network(seed, width=2):
    torch.manual_seed(seed)
    return ResNet(width, 1, outputs=10).double()
