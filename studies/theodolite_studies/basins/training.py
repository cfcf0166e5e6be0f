"""The mixtures, the networks and the plain training loop of all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from theodolite import data

EVERY = 5
"""Epochs between two looks at the loss of all examples."""


@dataclass(frozen=True)
class Sgd:
    """How to train: examples in a batch, learning rate, momentum and weight decay."""

    size: int
    lr: float
    momentum: float = 0.0
    decay: float = 0.0


def points(
    num: int, *, classes: int, dimensions: int, separation: float, seed: int, wrong: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Examples of a mixture of Gaussians in float64; a share `wrong` of them has one of the other labels."""
    found = data.mixture(num, classes=classes, dimensions=dimensions, separation=separation, seed=seed)
    labels = found.labels.clone()
    count = round(wrong * num)  # the examples are in random order
    generator = torch.Generator().manual_seed(seed)
    labels[:count] = (labels[:count] + torch.randint(1, classes, (count,), generator=generator)) % classes
    return found.values.double(), labels


def mlp(widths: Sequence[int], seed: int, *, normed: bool = False) -> nn.Sequential:
    """Linear maps with ReLUs between them, and a batch norm before each ReLU if asked for."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, width in pairwise(widths[:-1]):
        layers += [nn.Linear(fan_in, width), *([nn.BatchNorm1d(width)] if normed else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1])).double()


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """The mean cross-entropy, in eval mode."""
    model.eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs), labels))


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """The share of examples whose largest logit is that of their label, in eval mode."""
    model.eval()
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).double().mean())


def train(
    model: nn.Module, batch: tuple[Tensor, Tensor], how: Sgd, *, epochs: int, seed: int, goal: float = 0.0
) -> int:
    """Train in place, in a new order in each epoch, up to a loss of all examples; returns the epochs."""
    inputs, labels = batch
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(
        model.parameters(), how.lr, momentum=how.momentum, weight_decay=how.decay, foreach=True
    )
    for epoch in range(1, epochs + 1):
        model.train()
        for chosen in torch.randperm(len(inputs), generator=order).split(how.size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
        if goal and epoch % EVERY == 0 and loss_of(model, inputs, labels) <= goal:
            return epoch
    return epochs
