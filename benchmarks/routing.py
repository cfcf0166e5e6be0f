"""Is the plan right for cross-layer routing? Scores of its queries over size, learning rates over depth.

    python benchmarks/routing.py            about twenty minutes on one core of a CPU

Three tables, for docs/routing.md: the root mean square of the readout's scores q·k/D after six steps; the
same for what a condition adds to a query; and held-out losses of the routed and of the plain network against
the learning rate.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from functools import partial

import torch

import theodolite as th
from theodolite.fleet.engine import Resources
from theodolite.fleet.run import Run
from theodolite.fleet.vectorised import vectorised
from theodolite.models.routing import History, Route
from theodolite.workloads import Workload
from theodolite_studies.framework.networks import network

WIDE = [th.Size(width, 2) for width in (64, 128, 256, 512)]
DEEP = [th.Size(64, depth) for depth in (2, 4, 8, 16)]
BASE = th.Size(64, 2)
LR = 2**-7


def main() -> None:
    torch.set_num_threads(1)
    for sizes in (WIDE, DEEP):
        print("scores of the readout's query after six steps:", *sizes)
        for kind in ("plan", "standard"):
            means = (statistics.fmean(scores(size, kind, seed) for seed in range(3)) for size in sizes)
            print(f"{kind:10}", *(f"{mean:.3f}" for mean in means), flush=True)
    print("scores that the condition adds to the readout's query after six steps:", *WIDE)
    for kind in ("plan", "standard"):
        means = (statistics.fmean(conditioned_scores(size, kind, seed) for seed in range(3)) for size in WIDE)
        print(f"{kind:10}", *(f"{mean:.3f}" for mean in means), flush=True)
    for residual in ("routed", "add"):
        print(f"{residual}: held-out loss at learning rates 2^-8 to 2^-4, two seeds")
        for name, losses in rates(residual):
            print(f"{name:15}", *(f"{loss:.3f}" for loss in losses), flush=True)


def scores(size: th.Size, kind: str, seed: int) -> float:
    workload = text("routed", num=8)
    plan = th.plan(
        workload.build, workload.batch(0, 0)[0], size=size, base=BASE if kind == "plan" else size, lr=LR
    )
    model = plan.build(seed)
    optimizer = plan.optimizer(model)
    found = []
    model.route.register_forward_hook(
        lambda route, given, _: found.append(torch.stack(given[0].keys) @ route.query / size.width)
    )
    for step in range(6):
        optimizer.zero_grad()
        workload.evaluate(model, workload.batch(seed, step)).backward()
        optimizer.step()
    model(workload.batch(seed, 6)[0])
    return float(found[-1].detach().square().mean().sqrt())


def conditioned_scores(size: th.Size, kind: str, seed: int) -> float:
    build = partial(th.models.DiT, side=8, patch=2, modulation="random", residual="time-routed")
    batch = th.flows.noisy(patterns, classes=10)
    plan = th.plan(build, batch(0, 0)[0], size=size, base=BASE if kind == "plan" else size, lr=LR)
    model = plan.build(seed)
    optimizer = plan.optimizer(model)
    for step in range(6):
        inputs, velocity = batch(seed, step)
        optimizer.zero_grad()
        th.flows.velocity_loss(model(*inputs), velocity).backward()
        optimizer.step()
    found = []

    def look(route: Route, given: tuple[History, torch.Tensor], _: torch.Tensor) -> None:
        history, condition = given
        queries = condition @ route.shift.T
        found.append(torch.einsum("nbtd,bd->nbt", torch.stack(history.keys), queries) / size.width)

    model.route.register_forward_hook(look)
    with torch.no_grad():
        model(*batch(seed, 6)[0])
    return float(found[-1].square().mean().sqrt())


def patterns(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise around a pattern for each of ten classes."""
    every = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    labels = torch.randint(10, (32,), generator=generator)
    return every[labels] + 0.3 * torch.randn(32, 1, 8, 8, generator=generator), labels


def rates(residual: str) -> Iterator[tuple[str, list[float]]]:
    workload = text(residual, num=4)
    cases = ((BASE, "plan"), (th.Size(64, 12), "plan"), (th.Size(64, 12), "standard"))
    for size, kind in cases:
        runs = [
            Run(
                workload=workload.name,
                size=size,
                lr=2.0**exponent,
                parameterization=kind,
                base=BASE if kind == "plan" else None,
                seed=seed,
                steps=100,
                warmup=10,
                held_out=4,
                options={"betas": (0.9, 0.95)},
            )
            for exponent in range(-8, -3)
            for seed in (0, 1)
        ]
        losses: dict[float, list[float]] = {run.lr: [] for run in runs}
        for outcome in vectorised(runs, Resources(workloads={workload.name: workload}, chunk=5)):
            losses[outcome.run.lr].append(float("inf") if outcome.held_out is None else outcome.held_out)
        yield f"{size} {kind}", [statistics.fmean(each) for each in losses.values()]


def text(residual: str, *, num: int) -> Workload:
    build = partial(th.models.GPT, vocab=256, context=128, residual=residual)
    return dataclasses.replace(network("gpt-pre", num=num, length=64), name=residual, build=build)


if __name__ == "__main__":
    main()
