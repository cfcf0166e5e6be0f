"""r_e and K_Hn of many networks, on the data of training and on shifted data, beside their accuracy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import theodolite as th
from theodolite_studies.basins.training import Sgd, accuracy, loss_of, mlp, points, train
from theodolite_studies.framework.records import Record, short

CLASSES, DIMENSIONS, WIDTH, SEPARATION, WRONG = 6, 10, 16, 3.0, 0.1
SIZES, RATES, DECAYS = (10, 50, 250), (0.02, 0.1, 0.3), (0.0, 1e-3, 1e-2)
NUM, NUM_TEST, NUM_CURVATURE = 500, 4000, 500
"""Examples to train on, to take the accuracy of, and to take the Hessian of."""
EPOCHS = 60
PROBES, STEPS = 4, 64
CRITERIA = ("r_e", "K_H0.5", "K_H1")
SHIFTS: Mapping[str, float] = {"clean": 0.0, "noise 0.5": 0.5, "noise 1": 1.0, "moved 1": 1.0, "moved 2": 2.0}
"""New examples of the mixture: as in training; with noise added; with each centre moved at random."""
Batch = tuple[Tensor, Tensor]


def grid(*, small: bool) -> Sequence[Sgd]:
    """Batch sizes, learning rates and decays; with momentum unless batches are smallest."""
    kinds = (
        itertools.product(SIZES[1:], RATES[:2], DECAYS[:1])
        if small
        else itertools.product(SIZES, RATES, DECAYS)
    )
    return [Sgd(size, lr, 0.0 if size == SIZES[0] else 0.9, decay) for size, lr, decay in kinds]


def shifts(seed: int, hows: Sequence[Sgd], *, epochs: int = EPOCHS) -> Iterator[Record]:
    """A record for each way to train, of networks with one start and one set of data."""
    draw = partial(points, classes=CLASSES, dimensions=DIMENSIONS, separation=SEPARATION)
    batch = draw(NUM, seed=2 * seed, wrong=WRONG)
    clean = draw(NUM_TEST, seed=2 * seed + 1)
    tests = {name: shifted(name, clean, seed) for name in SHIFTS}
    for how in hows:
        model = mlp((DIMENSIONS, WIDTH, WIDTH, CLASSES), seed)
        train(model, batch, how, epochs=epochs, seed=seed)
        loss = loss_of(model, *batch)
        record: dict[str, object] = {"size": how.size, "lr": how.lr, "decay": how.decay, "loss": short(loss)}
        if math.isfinite(loss):
            record["train"] = [accuracy(model, *batch), *criteria(model, batch)]
            for name, (inputs, labels) in tests.items():
                few = inputs[:NUM_CURVATURE], labels[:NUM_CURVATURE]
                record[name] = [accuracy(model, inputs, labels), *criteria(model, few)]
        yield record


def shifted(name: str, batch: Batch, seed: int) -> Batch:
    """Examples with one of `SHIFTS`, which the seed draws."""
    inputs, labels = batch
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(len(inputs) + CLASSES, DIMENSIONS, generator=generator, dtype=inputs.dtype)
    if name.startswith("noise"):
        return inputs + SHIFTS[name] * draws[: len(inputs)], labels
    ways = draws[len(inputs) :]
    return inputs + SHIFTS[name] * (ways / ways.norm(dim=1, keepdim=True))[labels], labels


def criteria(model: nn.Module, batch: Batch) -> list[float | None]:
    """Those of `CRITERIA`, and the largest eigenvalue."""
    found = th.probes.density(model, nn.functional.cross_entropy, batch, probes=PROBES, steps=STEPS)
    return [
        short(one) for one in (found.r_e.value, found.k_hn(0.5).value, found.k_hn(1).value, found.largest)
    ]
