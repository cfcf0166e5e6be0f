"""What the signal costs: all points of a 12-layer GPT against a training pass over the same sample.

    python benchmarks/growth.py                   a small one on one thread of the CPU
    python benchmarks/growth.py --device cuda     768 × 12, context 1024, in float32, bfloat16 and autocast

A training pass is forward and backward of the mean loss over all batches, and nothing else: no optimizer. The
signal takes the same batches, half of their examples to estimate directions and half to judge them, and finds
the points itself. Both take turns in one process, and medians are compared. Wanted: at most 3 times.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.workloads import next_token_loss

DEPTH, WANTED = 12, 3.0
WIDTH = {"cuda": 768, "cpu": 128}
CONTEXT = {"cuda": 1024, "cpu": 128}
BATCH = {"cuda": 16, "cpu": 8}
BATCHES = {"cuda": 8, "cpu": 6}
ROUNDS = {"cuda": 3, "cpu": 3}
KINDS = {"cuda": ("float32", "autocast", "bfloat16"), "cpu": ("float32",)}

Pair = tuple[Tensor, Tensor]


def compare(kind: str, device: str) -> None:
    """Time both in one precision."""
    torch.manual_seed(0)
    width, context = WIDTH[device], CONTEXT[device]
    model = th.models.GPT(width, DEPTH, context=context, head_dim=64 if device == "cuda" else 32).to(device)
    if kind == "bfloat16":
        model = model.bfloat16()
    tokens = torch.randint(256, (BATCHES[device], BATCH[device], context + 1), device=device)
    batches = [(one[:, :-1], one[:, 1:]) for one in tokens]
    half = BATCHES[device] // 2
    works: dict[str, Callable[[], Any]] = {
        "training pass": lambda: train(model, batches, kind),
        "signal": lambda: measure(model, batches[:half], batches[half:], kind),
    }
    found = turns(works, device)
    print(f"{width} × {DEPTH}, {kind}, {len(batches)} batches of {BATCH[device]} × {context} on {device}")
    ratio = found["signal"] / found["training pass"]
    verdict = "yes" if ratio <= WANTED else "NO"
    print(
        f"    training pass {found['training pass']:.0f} ms, signal {found['signal']:.0f} ms: {ratio:.2f}× "
        f"(wanted {WANTED:g}×: {verdict})"
    )
    if device == "cuda":
        parameters = sum(one.numel() * one.element_size() for one in model.parameters()) / 2**20
        memory = ", ".join(f"{name} {extra(work):.0f} MiB" for name, work in works.items())
        print(f"    parameters {parameters:.0f} MiB; at its peak above what it began with: {memory}")


def train(model: nn.Module, batches: list[Pair], kind: str) -> None:
    """Forward and backward over all batches."""
    model.train()
    for inputs, targets in batches:
        with precision(kind):
            logits = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    model.zero_grad(set_to_none=True)


def measure(model: nn.Module, batches: list[Pair], held_out: list[Pair], kind: str) -> th.probes.Signal:
    """The signal at all points."""
    with precision(kind):
        return th.probes.signal(model, next_token_loss, batches, held_out)


def precision(kind: str) -> contextlib.AbstractContextManager[Any]:
    """Autocast, where that is the kind."""
    return torch.autocast("cuda", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext()


def turns(works: dict[str, Callable[[], Any]], device: str) -> dict[str, float]:
    """Median milliseconds of each, of the CPU's own time there; the first round does not count."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS[device] + 1):
        for name, work in works.items():
            wait(device)
            start = clock()
            work()
            wait(device)
            taken[name].append(1e3 * (clock() - start))
    return {name: statistics.median(each[1:]) for name, each in taken.items()}


def extra(work: Callable[[], Any]) -> float:
    """MiB at the peak, above what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return float(torch.cuda.max_memory_allocated() - before) / 2**20


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for each in KINDS[given.device]:
        compare(each, given.device)
