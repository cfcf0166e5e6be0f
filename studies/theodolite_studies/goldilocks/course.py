"""Beyond the paper: the curvature during training, with G and S apart."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from theodolite.core.batches import on_device
from theodolite.fleet.training import arithmetic, share_right
from theodolite.probes.curvature.curvature import curvature
from theodolite_studies.goldilocks.networks import Column, Network
from theodolite_studies.goldilocks.setting import Setting
from theodolite_studies.goldilocks.training import Cell
from theodolite_studies.goldilocks.zone import measured_on, numbers, rounded

TEMPERATURES = (-4.0, -2.0, 0.0, 2.0, 4.0)
"""log10 of T: in the middle of the zone, at its edges and outside."""
RATE = -2.0
"""log10 of η₀, at which all five variants train at T = 1."""


def course(
    network: Network, column: Column, at: float, seed: int, setting: Setting, device: str
) -> dict[str, Any]:
    """Train by gradient descent at a temperature, and measure the excess every so many epochs.

    The curvature is that of the loss that is trained, at its temperature, on the batch of the start and along
    the same directions, in float64. A run that diverges ends there.
    """
    run = Cell("temperature", network, column, "temperature", at, RATE, seed).run(setting)
    batch = measured_on(network, seed, setting.batch, device)
    looks = epochs_of_looks(setting)
    found, losses, accuracies, epochs = [], [], [], []
    with arithmetic(run, device):
        workload = network.workload(column, images=setting.images, tested=setting.tested)
        images, labels = on_device(workload.draw(seed, 0), device)
        model = network.start(column, seed).to(device)
        for epoch in range(setting.epochs + 1):
            if epoch in looks:
                with torch.no_grad():
                    output = model(images)
                    loss = cross_entropy(output / run.temperature, labels).item()
                if not math.isfinite(loss):
                    break
                losses.append(loss)
                accuracies.append(share_right(output, labels).item())
                found.append(
                    curvature(
                        copy.deepcopy(model).double(),
                        cross_entropy,
                        batch,
                        directions=setting.directions,
                        temperature=run.temperature,
                        seed=seed,
                    )
                )
                epochs.append(epoch)
            _descend(model, cross_entropy(model(images) / run.temperature, labels), run.lr)
    return {"at": epochs, **numbers(found), "train loss": rounded(losses), "train": rounded(accuracies)}


def epochs_of_looks(setting: Setting) -> tuple[int, ...]:
    """When the curvature is measured: at the start, and then ever more seldom, the last time at the end.

    >>> epochs_of_looks(Setting(epochs=1000, looks=6))
    (0, 1, 4, 16, 63, 251, 1000)
    """
    last = max(setting.looks - 1, 1)
    return tuple(sorted({0, *(round(setting.epochs ** (place / last)) for place in range(setting.looks))}))


def _descend(model: nn.Module, loss: torch.Tensor, lr: float) -> None:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=lr)
