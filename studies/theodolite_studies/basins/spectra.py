"""All eigenvalues of the Hessian of small networks, from the explicit matrix, and what the probes say."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import theodolite as th
from theodolite_studies.basins.training import Sgd, accuracy, loss_of, mlp, points, train
from theodolite_studies.framework.records import Record, short

DIMENSIONS, OUTPUTS = 10, 10
"""The readout has ten outputs whatever the number of classes is: data do not change the network."""
HOW = Sgd(250, 0.1, momentum=0.9)
GOAL = 0.05
"""The loss at which training ends, so that networks of all widths are compared at the same one."""
NEAR = 0.01
"""Eigenvalues below this share of the largest one in magnitude count as near zero."""
AMONG = 20
"""Where the largest ratio of neighbouring eigenvalues is looked for."""
COLUMNS = 128
"""Of the explicit matrix at a time."""


def spectra(
    width: int, classes: int, separation: float, seed: int, *, num: int = 1000, epochs: int = 100
) -> Iterator[Record]:
    """One record: counts of the exact spectrum of a trained network, and those of the probes."""
    batch = points(num, classes=classes, dimensions=DIMENSIONS, separation=separation, seed=seed)
    model = mlp((DIMENSIONS, width, width, OUTPUTS), seed)
    train(model, batch, HOW, epochs=epochs, seed=seed, goal=GOAL)
    operator = th.probes.hessian(model, nn.functional.cross_entropy, batch)
    values = torch.linalg.eigvalsh(explicit(operator)).flip(0)
    density = th.probes.density(operator, seed=seed)
    found = th.probes.outliers(operator, seed=seed)
    cut = NEAR * float(values[0])
    by_density = density.cumulative(torch.tensor([-cut, cut], dtype=torch.float64))
    yield {
        "size": len(values),
        "loss": short(loss_of(model, *batch)),
        "accuracy": short(accuracy(model, *batch)),
        "gradient": short(float(operator.gradient.norm())),
        "outliers": largest_ratio(values[:AMONG]),
        "sharp": short(float(values[: classes - 1].mean())),
        "near": int((values.abs() < cut).sum()),
        "near by density": short(float(by_density[1] - by_density[0])),
        "wide gaps": above_wide_gap(values),
        "wide gaps by probe": len(found.above),
        "r_e": short(abs(float(values[-1] / values[0]))),
        "r_e by density": short(density.r_e.value),
        "k_h1": short(-float(values[values < 0].sum() / values[values > 0].sum())),
        "k_h1 by density": short(density.k_hn(1).value),
        "top": [short(float(value), 4) for value in values[:AMONG]],
    }


def explicit(operator: th.probes.Operator) -> Tensor:
    """The matrix, from its products with all unit vectors."""
    units = torch.eye(operator.size, dtype=torch.float64)
    matrix = torch.cat([operator @ some for some in units.split(COLUMNS, dim=1)], dim=1)
    return (matrix + matrix.mT) / 2


def largest_ratio(values: Tensor) -> int:
    """How many positive values, sorted from the largest, are above the largest ratio of neighbours.

    >>> largest_ratio(torch.tensor([9.0, 8.0, 2.0, 1.5]))
    2
    """
    positive = values[values > 0]
    return int((positive[:-1] / positive[1:]).argmax()) + 1


def above_wide_gap(values: Tensor, *, window: int = 8, wide: float = 5.0, most: int = 20) -> int:
    """The rule of `th.probes.outliers`, on all eigenvalues: those above the last wide gap.

    A gap is wide if it is five times the mean of the eight gaps below it, in the logarithm of the distance
    from the median.

    >>> above_wide_gap(torch.tensor([100.0, 90.0, *(10 * 0.9**i for i in range(40))]))
    2
    """
    distances = (values - values.median())[: most + window + 1]
    steps = (distances[:-1] / distances[1:]).log().tolist()
    found = 0
    for place in range(len(steps) - window):
        usual = sum(steps[place + 1 : place + 1 + window]) / window
        if steps[place] >= wide * max(usual, 0.01):
            found = place + 1
    return found
