"""Barriers on the line between networks that were trained with large and with small batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import Tensor, nn

import theodolite as th
from theodolite_studies.basins.training import Sgd, mlp, points, train
from theodolite_studies.framework.records import Record, short

WIDTHS = (32, 64, 64, 10)
SEPARATION, WRONG = 4.0, 0.1
NETWORKS = ("plain", "normed")
RATES = {
    "low rates": (Sgd(1024, 0.1), Sgd(32, 0.02)),
    "high rates": (Sgd(1024, 0.1, momentum=0.9), Sgd(32, 0.05)),
}
"""How large and small batches are trained."""
MOST_EPOCHS = 4000
PAIRS = ("continued", "same start", "two small", "different starts")


def lines(
    network: str, rates: str, seed: int, *, num: int = 2048, goal: float = 0.02, further: int = 50
) -> Iterator[Record]:
    """A record for each of `PAIRS`.

    Args:
        network: `plain` or `normed`.
        rates: a key of `RATES`.
        seed: of the data, both starts and the order of the examples.
        num: examples.
        goal: the loss of all examples at which training ends.
        further: epochs of small batches after the large ones.
    """
    batch = points(num, classes=10, dimensions=32, separation=SEPARATION, seed=seed, wrong=WRONG)
    start, other = (mlp(WIDTHS, 1000 * seed + which, normed=network == "normed") for which in range(2))
    large, small = RATES[rates]

    def trained(model: nn.Module, how: Sgd, order: int) -> tuple[nn.Module, int]:
        model = copy.deepcopy(model)
        return model, train(model, batch, how, epochs=MOST_EPOCHS, seed=1000 * seed + order, goal=goal)

    first, first_epochs = trained(start, large, 10)
    continued = copy.deepcopy(first)
    train(continued, batch, small, epochs=further, seed=1000 * seed + 11)
    (one, epochs), (two, _), (away, _) = (
        trained(model, small, order) for model, order in ((start, 12), (start, 13), (other, 14))
    )
    ends = ((first, continued), (first, one), (one, two), (one, away))
    for pair, (a, b) in zip(PAIRS, ends, strict=True):
        found = measured(a, b, batch)
        yield {"pair": pair, "epochs": [first_epochs, epochs], **found}


def measured(first: nn.Module, second: nn.Module, batch: tuple[Tensor, Tensor]) -> Record:
    """Barriers over the loss at the higher end, with statistics of batch norms re-estimated and as stored."""
    loss = nn.functional.cross_entropy
    found = th.probes.path(first, second, loss, batch)
    higher = float(found.losses[[0, -1]].max())
    record = {
        "rise": short(found.higher.value / higher),
        "interval": [short(found.higher.low / higher), short(found.higher.high / higher)],
        "chord": short(found.chord.value / higher),
        "distance": short(found.distance),
        "norm": short(found.norms[0]),
        "ends": [short(float(value)) for value in found.losses[[0, -1]]],
        "places": found.places.tolist(),
        "losses": [short(float(value)) for value in found.losses],
    }
    if found.batch_norm is not None:
        stored = th.probes.path(first, second, loss, batch, batch_norm="frozen")
        record["stored"] = short(stored.higher.value / float(stored.losses[[0, -1]].max()))
    return record
