"""What is read of a network that adds modulo p, as values that JSON knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from theodolite.probes import fourier, fourier_winners
from theodolite.probes.features.fourier import ORDERS, Fourier
from theodolite.probes.features.fourier_winners import RULES, FourierWinners
from theodolite_studies.framework.records import short
from theodolite_studies.modular_addition.training import ACTIVATIONS, Adder, Pairs

TEST_TIME = ("|x|", "x²", "x⁴", "log(1 + e²ˣ)", "eˣ", "relu", "gelu", "x", "x³")
"""Activations that replace that of training."""
SHOWN = 256
"""Most neurons of a network that are kept one by one."""


def waves_of(network: Adder) -> Fourier:
    """The neurons as waves."""
    return fourier(network.w_in, network.w_out, axis=0, out_axis=1)


def winners_of(network: Adder) -> FourierWinners:
    """The frequencies that will win, from the initial weights."""
    return fourier_winners(network.w_in, network.w_out, axis=0, out_axis=1)


@torch.no_grad()
def mechanism(network: Adder, pairs: Pairs) -> dict[str, Any]:
    """How far the neurons are single waves, aligned, spread over frequencies and phases; and the ghosts."""
    found = waves_of(network)
    logits = network.logits(pairs.inputs).double()
    single = found.concentrated
    counts = found.counts.double()
    ratios = {f"symmetry {order}": short(found.symmetry(order)) for order in ORDERS}
    return {
        "accuracy": accuracy(logits, pairs, pairs.orderings),
        "loss": short(loss(logits, pairs, pairs.orderings)),
        "single": short(single.double().mean().item()),
        "concentration": short(found.concentration.mean().item()),
        "alignment": short(found.alignment),
        "same": short((found.same.sum() / single.sum()).item()),
        "unused": int((counts == 0).sum()),
        "dispersion": short((counts.var() / counts.mean()).item()),
        **ratios,
        "ghosts": short(ghosts(logits, pairs)),
    }


def ghosts(logits: Tensor, pairs: Pairs) -> float:
    """The height of the logits at 2x and 2y over that at x + y, above the mean of all others, where x ≠ y."""
    apart = pairs.xy[0] != pairs.xy[1]
    logits, peak, ghost = (
        logits[apart],
        pairs.labels[apart][:, None],
        2 * pairs.xy.T[apart] % pairs.modulus,
    )
    named = logits.gather(1, peak).sum(1) + logits.gather(1, ghost).sum(1)
    others = (logits.sum(1) - named) / (pairs.modulus - 3)
    heights = [(logits.gather(1, places).mean(1) - others).mean() for places in (ghost, peak)]
    return (heights[0] / heights[1]).item()


def lottery(before: FourierWinners, after: Fourier) -> dict[str, Any]:
    """How often each rule predicted the frequency of a neuron, of all neurons and of those with one only.

    Also by quarters of the neurons, from the smallest lead of the predicted winner to the largest.
    """
    frequency = after.frequency
    single = torch.where(after.concentrated, frequency, 0)
    quarters = before.lead.argsort().tensor_split(4)
    right = (before.frequency == frequency).double()
    return {
        "all": {rule: short(value) for rule, value in before.right(frequency).items()},
        "won": {rule: short(value) for rule, value in before.right(single).items()},
        "by lead": [short(right[own].mean().item()) for own in quarters],
        "leads": [short(before.lead[own].median().item()) for own in quarters],
        "rules": list(RULES),
    }


@torch.no_grad()
def swapped(network: Adder, pairs: Pairs) -> dict[str, float]:
    """The accuracy on all pairs with other activations at test time."""
    hidden = pairs.inputs.double() @ network.w_in.double()
    found = {}
    for name in TEST_TIME:
        logits = ACTIVATIONS[name](hidden) @ network.w_out.double()
        found[name] = accuracy(logits, pairs, pairs.orderings)
    return found


def neurons(network: Adder, before: Adder) -> dict[str, Any]:
    """Phases of the first neurons that have one frequency, and the concentrations of all, sorted."""
    found = waves_of(network)
    assert found.output is not None
    chosen = found.same.nonzero().flatten()[:SHOWN]
    return {
        "doubled": _digits(torch.remainder(2 * found.phase[chosen], 2 * torch.pi)),
        "psi": _digits(torch.remainder(found.output.phase[chosen], 2 * torch.pi)),
        "concentrations": _quantiles(found.concentration),
        "at the start": _quantiles(waves_of(before).concentration),
    }


@torch.no_grad()
def progress(network: Adder, pairs: Pairs, trained: Tensor) -> dict[str, float | None]:
    """Accuracies and losses of the pairs trained on and of the others, concentration and norm.

    `mirrored` are the held-out ordered pairs (x, y) with (y, x) trained on, `new` are all others. None where
    there are no such pairs.
    """
    logits = network.logits(pairs.inputs).double()
    held_out = pairs.orderings - trained
    parts = {
        "train": trained,
        "test": held_out,
        "mirrored": held_out * (trained > 0),
        "new": held_out * (trained == 0),
    }
    found: dict[str, float | None] = {
        name: accuracy(logits, pairs, counts) if counts.sum() else None for name, counts in parts.items()
    }
    features = waves_of(network)
    return found | {
        "train loss": short(loss(logits, pairs, trained)),
        "test loss": short(loss(logits, pairs, held_out)),
        "concentration": short(features.concentration.mean().item()),
        "alignment": short(features.alignment),
        "norm": short(network.norm),
    }


def accuracy(logits: Tensor, pairs: Pairs, counts: Tensor) -> float:
    """Of the ordered pairs that are counted."""
    right = logits.argmax(1) == pairs.labels
    return round(((right * counts).sum() / counts.sum()).item(), 5)


def loss(logits: Tensor, pairs: Pairs, counts: Tensor) -> float:
    """The mean cross-entropy of the ordered pairs that are counted."""
    losses = functional.cross_entropy(logits, pairs.labels, reduction="none")
    return ((losses * counts).sum() / counts.sum()).item()


def _digits(values: Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]


def _quantiles(values: Tensor) -> list[float]:
    return _digits(torch.quantile(values.double(), torch.linspace(0, 1, 41, dtype=torch.float64)))
