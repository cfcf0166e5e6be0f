"""Many runs at once against a plain loop: model-steps per second, and whole grids with everything counted.

    python benchmarks/fleet.py                   the CPU: the automatic choice against one run after the other
    python benchmarks/fleet.py --device cuda     a GPU: LeNets, GPTs, and a grid of sizes

A plain loop is the network and the optimizer of the plan, one model, one step after the other. On a GPU
`processes` are as many such loops at once, sharing the card (under MPS, if its daemon runs). Compilation and
everything else is counted for the grid, and not for the rates.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from functools import partial
from typing import Any

import torch
from torch import nn

import theodolite as th
from theodolite.core.batches import Batch, on_device
from theodolite.fleet.driver import conduct
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.program import Program
from theodolite.fleet.run import Grid, Run
from theodolite.fleet.stack import stack
from theodolite.fleet.training import arithmetic, planned, precision_of
from theodolite.workloads import next_token_loss

RATES = [2.0**-exponent for exponent in range(12, 4, -1)]
PROCESSES = 14
TARGETS = {"lenet": 90, "gpt": 12, "processes": 2, "grid": 2, "cpu": 1.8}


def text(num: int, length: int, seed: int, step: int) -> Batch:
    return th.data.draw_text(th.data.state_of_the_union(), num=num, length=length, seed=seed, step=step)


IMAGES = torch.randn(1000, 784, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(1000) % 10


def images(seed: int, step: int) -> Batch:
    return IMAGES, LABELS


build = partial(th.models.GPT, vocab=256, context=256)
GPT = th.Workload("gpt", build, partial(text, 32, 256), next_token_loss, th.Size(128, 4))
LENET = th.Workload("lenet", th.models.LeNet300, images, nn.functional.cross_entropy, th.Size(300, 2))
WORKLOADS = {each.name: each for each in (GPT, LENET)}


def runs_of(workload: str, size: th.Size, *, lr: Any, seeds: int, steps: int, **fields: Any) -> list[Run]:
    fixed = {"workload": workload, "size": size, "base": size, "steps": steps, "held_out": 1, **fields}
    return list(Grid({"lr": lr, "seed": range(seeds)}, fixed).runs)


def loop(run: Run, device: str, seconds: float, barrier: Any = None, out: Any = None) -> float:
    """Steps per second of one plain loop; with a barrier, all loops are timed over the same time."""
    with arithmetic(run, device):
        return _loop(run, device, seconds, barrier, out)


def _loop(run: Run, device: str, seconds: float, barrier: Any, out: Any) -> float:
    workload = WORKLOADS[run.workload]
    plan = planned(run, workload)
    model = plan.build(run.seed, device=device).train()
    optimizer = plan.optimizer(model)

    def advance(step: int) -> None:
        optimizer.zero_grad()
        with precision_of(run, device):
            loss = workload.evaluate(model, on_device(workload.draw(run.seed, step), device))
        loss.backward()
        optimizer.step()

    for step in range(10):
        advance(step)
    wait(device)
    if barrier is not None:
        barrier.wait()
    start, steps = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            advance(steps)
            steps += 1
        wait(device)
    rate = steps / (time.perf_counter() - start)
    if out is not None:
        out.put(rate)
    return rate


def processes(run: Run, device: str, count: int, seconds: float) -> float:
    """The same of many loops at once, in a process each."""
    context = multiprocessing.get_context("spawn")
    barrier, out = context.Barrier(count), context.Queue()
    workers = [context.Process(target=loop, args=(run, device, seconds, barrier, out)) for _ in range(count)]
    for worker in workers:
        worker.start()
    rate = sum(out.get() for _ in workers)
    for worker in workers:
        worker.join()
    return rate


def together(runs: list[Run], device: str, steps: int, *, compiled: bool) -> tuple[float, float, float]:
    """Model-steps per second in one program, the seconds until it runs at that rate, and GiB at its peak."""
    start = time.perf_counter()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    workload = WORKLOADS[runs[0].workload]
    with arithmetic(runs[0], device):
        program = Program(stack(runs, workload, device), workload, device, compiled=compiled)
        for _ in range(10):
            program.step()
        wait(device)
        ready = time.perf_counter()
        for _ in range(steps):
            program.step()
        wait(device)
    rate = steps * len(runs) / (time.perf_counter() - ready)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else float("nan")
    return rate, ready - start, peak


def whole(runs: list[Run], engine: str, device: str, jobs: int) -> float:
    """Seconds for a grid from nothing to a ledger that holds it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, Ledger.open(folder, name="benchmark", spec={}) as ledger:
        resources = Resources(workloads=WORKLOADS, device=device, jobs=jobs)
        report = conduct(runs, ledger, engine=engine, resources=resources)
        assert report.ok, report
    return time.perf_counter() - start


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def told(what: str, ratio: float, target: float) -> None:
    print(f"{what}: {ratio:.1f}×  (to reach: {target}×, {'reached' if ratio >= target else 'NOT REACHED'})")


def on_gpu(device: str, parts: list[str]) -> None:
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    if "lenet" in parts:
        size = th.Size(300, 2)
        fields = {"seeds": 4, "steps": 300, "optimizer": "sgd", "precision": "tf32"}
        alone = statistics.median(
            loop(runs_of("lenet", size, lr=[0.1], **fields)[0], device, 3) for _ in range(3)
        )
        print(f"LeNet-300-100, 1000 images, SGD, TF32: plain loop {alone:.0f} steps/s (median of 3)")
        for count in (64, 256, 1024):
            rates = [0.1 * 0.99**k for k in range(count // 4)]
            rate, ready, peak = together(
                runs_of("lenet", size, lr=rates, **fields), device, 100, compiled=True
            )
            print(f"  {count} models: {rate:.0f} model-steps/s, ready in {ready:.1f} s, {peak:.1f} GiB")
        told("  1024 models against the loop", rate / alone, TARGETS["lenet"])
    if "gpt" in parts:
        size = th.Size(128, 4)
        runs = runs_of("gpt", size, lr=RATES, seeds=3, steps=300, precision="bfloat16")
        alone = statistics.median(loop(runs[k], device, 3) for k in range(3))
        print(f"GPT {size}, 32 × 256 bytes, bfloat16, AdamW: plain loop {alone:.0f} steps/s (median of 3)")
        many = processes(runs[0], device, PROCESSES, 8)
        print(f"  {PROCESSES} processes: {many:.0f} model-steps/s")
        for compiled in (False, True):
            rate, ready, peak = together(runs, device, 150, compiled=compiled)
            how = "graph of compiled blocks" if compiled else "graph"
            print(f"  24 models, {how}: {rate:.0f} model-steps/s, ready in {ready:.1f} s, {peak:.1f} GiB")
        told("  24 models against the loop", rate / alone, TARGETS["gpt"])
        told(f"  24 models against {PROCESSES} processes", rate / many, TARGETS["processes"])
    if "grid" in parts:
        sizes = [th.Size(128, 4), th.Size(256, 4), th.Size(128, 16)]
        runs = [
            run
            for size in sizes
            for run in runs_of("gpt", size, lr=RATES, seeds=3, steps=500, precision="bfloat16")
        ]
        seconds = whole(runs, "vectorised", device, 1)
        print(f"A grid of {len(runs)} runs of 500 steps over {', '.join(map(str, sizes))}, all counted:")
        print(f"  vectorised {seconds:.0f} s", flush=True)
        slow = whole(runs, "processes", device, PROCESSES)
        print(f"  {PROCESSES} processes {slow:.0f} s")
        told("  against processes", slow / seconds, TARGETS["grid"])


def on_cpu() -> None:
    cores = multiprocessing.cpu_count()
    runs = runs_of("gpt", th.Size(64, 2), lr=RATES[:4], seeds=4, steps=30)
    serial = whole(runs, "serial", "cpu", 1)
    chosen = whole(runs, "auto", "cpu", cores)
    print(f"{len(runs)} GPTs 64 × 2, 32 × 256 bytes, 30 steps, {cores} cores, all counted:")
    print(f"  one run after the other {serial:.0f} s, the automatic choice {chosen:.0f} s")
    told("  the automatic choice against the loop", serial / chosen, TARGETS["cpu"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", default="lenet,gpt,grid", help="of the GPU's")
    chosen = parser.parse_args()
    if chosen.device == "cpu":
        on_cpu()
    else:
        on_gpu(chosen.device, chosen.parts.split(","))


if __name__ == "__main__":
    main()
