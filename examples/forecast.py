"""The loss of a run before it is made, with an interval, and the check afterwards.

    python examples/forecast.py

Writes the ledger `known`, 64 runs whose law is known (with 0.3 % of noise), forecasts a network of twice the
width on four times the tokens, writes `forecast.json`, then "runs" that network and checks the forecast. With
your own ledger, such as one of `theodolite sweep`, the first step is not needed. It takes some seconds.
"""

import math
from collections.abc import Iterator

import numpy as np

import theodolite as th
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Outcome, Run
from theodolite.forecasting import check

BATCH, BEST, BASE = 128, 2**-6, th.Size(16, 2)
mixture = th.workload("mlp-mixture")


def parameters(width: int) -> int:
    return sum(tensor.numel() for tensor in mixture.build(width, 2).parameters())


def loss(width: int, steps: int, lr: float) -> float:
    """The known law: 2^-6 is the best base learning rate at every size."""
    law = 1.5 + 20 * parameters(width) ** -0.4 + 30 * (steps * BATCH) ** -0.35
    return law * (1 + 0.02 * math.log2(lr / BEST) ** 2)


def outcomes(widths: list[int], lengths: list[int], seed: int) -> Iterator[Outcome]:
    """What the runs would have come to."""
    random = np.random.default_rng(seed)
    for width in widths:
        for steps in lengths:
            for lr in (2**-6, 2**-5):
                for seed in (0, 1):
                    run = Run(mixture.name, th.Size(width, 2), lr=lr, base=BASE, steps=steps, seed=seed)
                    value = loss(width, steps, lr) * math.exp(0.003 * random.standard_normal())
                    readings = {"parameters": parameters(width), "tokens": steps * BATCH}
                    yield Outcome(run, "finished", steps, value, readings=readings)


def write(folder: str, made: Iterator[Outcome]) -> None:
    with Ledger.open(folder, name=folder, spec={}) as ledger:
        for outcome in made:
            ledger.append(outcome)


if __name__ == "__main__":
    write("known", outcomes([16, 32, 64, 128], [100, 400, 1600, 6400], seed=1))
    forecast = th.forecast("known", th.Size(256, 2, tokens=25_600 * BATCH), tflops=0.01)
    forecast.save("forecast.json")
    print(forecast.verdict)

    write("target", outcomes([256], [25_600], seed=2))
    print(check("forecast.json", "target").verdict)
    print(f"in truth {loss(256, 25_600, BEST):.4g}")
