"""Curvature before training and during it, and how logits follow the weights, under α and T."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from theodolite.core.batches import Batch, on_device
from theodolite.fleet.evaluation import share_right
from theodolite.fleet.training import arithmetic
from theodolite.probes.curvature.curvature import Curvature, Projection, curvature, measure
from theodolite.probes.curvature.directions import draw
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.rescaling import along_temperature, scaled
from theodolite_studies.framework.records import short
from theodolite_studies.goldilocks.setting import NORMED, RESIDUAL, Column, GoldilocksSetting, Network
from theodolite_studies.goldilocks.training import MapCell

ROWS = ("temperature", "alpha", "joint", "identity")
"""T; α; both, so that T takes back what α does to the logits; both, for what α does to an identity path."""


def scale_rows(column: Column) -> tuple[str, ...]:
    """The curves along α that a variant has in figure 1."""
    return ROWS[1:] if column in RESIDUAL else ROWS[1:3]


def power(row: str, network: Network, column: Column) -> int:
    """p in `T = α^p` along a row; in the joint ones the power of α by which the logits grow.

    >>> from theodolite_studies.goldilocks.setting import RESNET
    >>> power("joint", RESNET, "C"), power("identity", RESNET, "C"), power("joint", RESNET, "E")
    (4, 2, 1)
    """
    if row == "alpha":
        return 0
    if row == "identity":
        return network.layers - network.branched
    return 1 if column in NORMED else network.layers


@dataclass(frozen=True)
class NetworkStart:
    """A network before training, and the batch it is measured on, in float64 on their device."""

    network: Network
    column: Column
    seed: int
    model: nn.Module
    batch: Batch

    @staticmethod
    def made(network: Network, column: Column, seed: int, *, num: int, device: str) -> NetworkStart:
        """Drawn by the seed, with `num` images."""
        model = network.start(column, seed).to(device, torch.float64)
        return NetworkStart(network, column, seed, model, measured_on(network, seed, num, device))


def measured_on(network: Network, seed: int, num: int, device: str) -> Batch:
    """The images that a seed is measured on."""
    images, labels = on_device(network.batch(seed, num), device)
    return images.double(), labels


def temperature_curve(start: NetworkStart, setting: GoldilocksSetting) -> dict[str, Any]:
    """The curve of figure 1 along T: exponents of T, and by name what was measured there."""
    exponents = setting.temperatures(start.network)
    found = along_temperature(
        start.model,
        cross_entropy,
        start.batch,
        [10.0**each for each in exponents],
        directions=setting.directions,
        seed=start.seed,
    )
    return {"at": list(exponents), **numbers(found)}


def scale_curves(start: NetworkStart, setting: GoldilocksSetting) -> dict[str, dict[str, Any]]:
    """The curves along α by row: at each α one pass for the temperatures of all of them."""
    rows = scale_rows(start.column)
    found: dict[str, list[Curvature]] = {row: [] for row in rows}
    objective = Objective(start.model, cross_entropy, start.batch)
    directions = draw(
        objective.shapes,
        setting.directions,
        seed=start.seed,
        dtype=objective.dtype,
        device=objective.device,
    )
    for exponent in setting.alphas():
        temperatures = [10.0 ** (power(row, start.network, start.column) * exponent) for row in rows]
        with scaled(start.model, 10.0**exponent):
            measured = measure(objective, directions, temperatures)
        for row, one in zip(rows, measured, strict=True):
            found[row].append(one)
    return {row: {"at": list(setting.alphas()), **numbers(some)} for row, some in found.items()}


def numbers(found: Sequence[Curvature]) -> dict[str, list[float | None]]:
    """What records keep of curvatures, by name; G is the Gauss–Newton part, S the rest.

    The trace of S is that of its projection, with its spread, also where the probe knows that it is 0.
    """
    seen = [_seen_trace(one.residual, one.size) for one in found]
    return {
        "excess": rounded(one.hessian.excess for one in found),
        "t": rounded(one.hessian.t.value for one in found),
        "t error": rounded(one.hessian.t.error for one in found),
        "trace": rounded(one.hessian.trace.value for one in found),
        "frobenius": rounded(one.hessian.frobenius.value for one in found),
        "excess of G": rounded(one.gauss_newton.excess for one in found),
        "excess of S": rounded(one.residual.excess for one in found),
        "trace of G": rounded(one.gauss_newton.trace.value for one in found),
        "trace of S": rounded(trace for trace, _ in seen),
        "trace of S error": rounded(error for _, error in seen),
        "frobenius of G": rounded(one.gauss_newton.frobenius.value for one in found),
        "frobenius of S": rounded(one.residual.frobenius.value for one in found),
        "loss": rounded(one.loss for one in found),
    }


def _seen_trace(part: Projection, size: int) -> tuple[float, float]:
    """The trace by the d directions alone, `P/d·Σ r_iᵀSr_i`, and its standard error."""
    diagonal = part.matrix.diagonal()
    each = size / len(diagonal)
    return float(diagonal.sum()) * each, float(diagonal.std()) * math.sqrt(len(diagonal)) * each


def rounded(values: Iterable[float]) -> list[float | None]:
    """Short numbers for a file; None for what is no number.

    >>> rounded([1.23456789, math.nan])
    [1.2346, None]
    """
    return [short(value) for value in values]


@torch.no_grad()
def logit_curve(start: NetworkStart, setting: GoldilocksSetting) -> dict[str, Any]:
    """One curve of figure 3: how far the logits of αθ are from α times those of θ.

    `kl` is the mean of KL(softmax(αf_θ) ‖ softmax(f_αθ)) over the images. `error` is the difference relative
    to αf_θ, both without what softmax does not see.
    """
    images, _ = start.batch
    plain = start.model(images)
    divergences, errors = [], []
    for exponent in setting.alphas():
        alpha = 10.0**exponent
        with scaled(start.model, alpha):
            found = start.model(images)
        divergences.append(_divergence(alpha * plain, found).item())
        difference, expected = _centred(found - alpha * plain), _centred(alpha * plain)
        errors.append((difference.norm() / expected.norm()).item())
    return {"at": list(setting.alphas()), "kl": rounded(divergences), "error": rounded(errors)}


def _divergence(expected: Tensor, found: Tensor) -> Tensor:
    log_p, log_q = log_softmax(expected, -1), log_softmax(found, -1)
    # Rounding may leave a little less than nothing.
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().clamp(min=0)


def _centred(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


RATE = -2.0
"""log10 of η₀, at which all five variants train at T = 1."""


def course(
    network: Network, column: Column, at: float, seed: int, setting: GoldilocksSetting, device: str
) -> dict[str, Any]:
    """Train by gradient descent at a temperature, and measure the excess every so many epochs.

    The curvature is that of the loss that is trained, at its temperature, on the batch of the start and along
    the same directions, in float64. A run that diverges ends there.
    """
    run = MapCell("temperature", network, column, "temperature", at, RATE, seed).run(setting)
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


def epochs_of_looks(setting: GoldilocksSetting) -> tuple[int, ...]:
    """When the curvature is measured: at the start, and then ever more seldom, the last time at the end.

    >>> epochs_of_looks(GoldilocksSetting(epochs=1000, looks=6))
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
