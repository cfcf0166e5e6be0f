"""Ledgers whose law is known: outcomes are written, nothing is trained."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from theodolite import Size, workload
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Outcome, Run
from theodolite.forecasting.runs import SizedRun

WORKLOAD = "mlp-mixture"
BATCH = 128
BEST = 2**-6
BASE = Size(8, 1)
WIDTHS, STEPS = (8, 16, 32, 64), (100, 400, 1600, 6400)
E, A, ALPHA, B, BETA = 1.5, 20.0, 0.4, 30.0, 0.35


@cache
def parameters(width, depth=1):
    return sum(one.numel() for one in workload(WORKLOAD).build(width, depth).parameters())


def surface(num, tokens):
    return E + A * num**-ALPHA + B * tokens**-BETA


def outcome(run, loss, noise=0.0, ended="finished"):
    """What a run of the known law comes to."""
    generator = np.random.default_rng(int(run.identity, 16))
    return Outcome(
        run,
        ended,
        run.steps,
        None if ended == "diverged" else float(loss * np.exp(noise * generator.standard_normal())),
        readings={
            "parameters": parameters(run.size.width, run.size.depth),
            "tokens": run.steps * BATCH,
        },
    )


def planned(width=8, steps=100, lr=BEST, seed=0, **fields):
    given = {"parameterization": "plan", "base": BASE, "steps": steps, "lr": lr, "seed": seed, **fields}
    return Run(WORKLOAD, Size(width, 1), **given)


def standard(width=8, steps=100, lr=BEST, seed=0):
    return planned(width, steps, lr, seed, parameterization="standard", base=None)


def off_best(rate, best=BEST):
    return 1 + 0.02 * math.log2(rate / best) ** 2


def write(path, outcomes, name="known"):
    """A ledger of these outcomes."""
    with Ledger.open(path, name=name, spec={}) as ledger:
        for one in outcomes:
            ledger.append(one)
    return path


def known_ledger(
    path,
    *,
    law=surface,
    widths=WIDTHS,
    steps=STEPS,
    rates=(2**-7, BEST, 2**-5),
    seeds=2,
    noise=0.002,
    with_standard=False,
):
    """Planned runs whose best rate is the same at every size; standard ones, whose loss falls more slowly."""
    made = []
    for width in widths:
        for length in steps:
            for rate in rates:
                for seed in range(seeds):
                    loss = law(parameters(width), length * BATCH) * off_best(rate)
                    made.append(outcome(planned(width, length, rate, seed), loss, noise))
                    if with_standard:
                        slower = 0.2 + law(parameters(width) ** 0.9, length * BATCH)
                        best = BEST * widths[0] / width
                        run = standard(width, length, rate, seed)
                        made.append(outcome(run, slower * off_best(rate, best), noise))
    return write(path, made)


def sized_runs(law, *, num=4, long=4, seeds=2, noise=0.004, seed=0):
    """Runs of known losses, without a ledger, and the generator of their noise."""
    generator, found = np.random.default_rng(seed), []
    for i, n in enumerate(np.logspace(4, 6, num)):
        for j, d in enumerate(np.logspace(6, 8, long)):
            for k in range(seeds):
                loss = law(n, d) * np.exp(noise * generator.standard_normal())
                found.append(SizedRun(f"{i}-{j}-{k}", i, 1, int(n), int(d), k, 6 * n * d, float(loss)))
    return tuple(sorted(found, key=lambda run: (run.flop, run.identity))), generator
