"""Does the best learning rate of a small GPT stay the best at other widths and depths?

    python examples/learning_rate_transfer.py --out transfer.jsonl --jobs 14 --device cuda
    python examples/learning_rate_transfer.py --show docs/studies/transfer.jsonl

Each cell trains a byte-level GPT on the built-in text: with a plan from 128 × 4, and with the standard
parameterization (the network's own initialisation, one learning rate for every tensor). Cells are written as
they end; the same command again runs only those that are missing.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch

import theodolite as th

BASE = th.Size(128, 4)
WIDTHS = [th.Size(width, 4) for width in (128, 256, 512, 1024)]
DEPTHS = [th.Size(128, depth) for depth in (2, 4, 8, 16, 32)]
EXPONENTS = {"plan": range(-11, -4), "standard": range(-13, -4)}
BATCH, CONTEXT, WARMUP = 32, 256, 50

Cell = tuple[str, str, int, int, int, int]
"""Parameterization, optimizer, width, depth, exponent of the base learning rate, seed."""

build = partial(th.models.GPT, vocab=256, context=CONTEXT)


def train(cell: Cell, steps: int, device: str) -> dict[str, object]:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    way, optimizer_name, width, depth, exponent, seed = cell
    size, lr = th.Size(width, depth), 2.0**exponent
    tokens = torch.zeros(1, 8, dtype=torch.long)
    # Standard: every size is its own base, so nothing is scaled.
    plan = th.plan(
        build,
        tokens,
        size=size,
        base=BASE if way == "plan" else size,
        optimizer=optimizer_name,
        lr=lr,
        options={"betas": (0.9, 0.95)} if optimizer_name == "adamw" else {},
    )
    model = plan.build(seed, device=device)
    optimizer = plan.optimizer(model)
    schedule = plan.schedule(optimizer, "linear", steps=steps, warmup=WARMUP)
    text, held_out = th.data.state_of_the_union(), th.data.state_of_the_union("validation")
    start = time.perf_counter()
    for step in range(steps):
        value = loss(model, text, seed, step, device)
        if step % 50 == 0 and not math.isfinite(value.item()):
            break
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        losses = [loss(model, held_out, 1_000_000, step, device).item() for step in range(16)]
    final = statistics.fmean(losses)
    return {
        "cell": list(cell),
        "loss": final if math.isfinite(final) else None,
        "seconds": round(time.perf_counter() - start, 1),
    }


def loss(model: torch.nn.Module, text: th.data.Text, seed: int, step: int, device: str) -> torch.Tensor:
    inputs, targets = th.data.draw_text(text, num=BATCH, length=CONTEXT, seed=seed, step=step)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits = model(inputs.to(device))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())


def cells(optimizer_name: str, seeds: int) -> list[Cell]:
    sizes = sorted({*WIDTHS, *DEPTHS}, key=lambda size: -(size.width**2) * size.depth)
    return [
        (way, optimizer_name, size.width, size.depth, exponent, seed)
        for seed in range(seeds)
        for size in sizes
        for way, exponents in EXPONENTS.items()
        for exponent in exponents
    ]


def read(path: Path) -> dict[Cell, float]:
    """Losses by cell; a diverged one is infinite, a line cut short is run again."""
    found: dict[Cell, float] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[tuple(record["cell"])] = math.inf if record["loss"] is None else record["loss"]
    return found


def show(path: Path) -> None:
    losses: dict[tuple[str, str, th.Size, int], list[float]] = defaultdict(list)
    for (way, name, width, depth, exponent, _), value in read(path).items():
        losses[way, name, th.Size(width, depth), exponent].append(value)
    for name in sorted({key[1] for key in losses}):
        for way, exponents in EXPONENTS.items():
            print(f"\n{name}, {way}: validation loss (nats per byte) against log2 of the base learning rate")
            print("size".ljust(10) + "".join(f"{e:>8}" for e in exponents) + "    best  seeds")
            for size in dict.fromkeys([*WIDTHS, *DEPTHS]):
                row = {
                    e: statistics.fmean(losses[way, name, size, e])
                    for e in exponents
                    if losses[way, name, size, e]
                }
                if row:
                    best = min(row, key=lambda e: row[e])
                    seeds = max(len(losses[way, name, size, e]) for e in row)
                    cells = "".join(f"{row.get(e, math.nan):8.3f}" for e in exponents)
                    print(f"{size!s:<10}{cells}    2^{best}  {seeds}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("transfer.jsonl"))
    parser.add_argument("--show", type=Path, help="print the tables of a file and stop")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.show:
        show(chosen.show)
        return
    done = read(chosen.out)
    left = [cell for cell in cells(chosen.optimizer, chosen.seeds) if cell not in done]
    context = multiprocessing.get_context("spawn")
    with context.Pool(chosen.jobs) as pool, chosen.out.open("a") as file:
        job = partial(train, steps=chosen.steps, device=chosen.device)
        for count, record in enumerate(pool.imap_unordered(job, left), 1):
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(f"\r{count}/{len(left)} cells", end="", file=sys.stderr)
    show(chosen.out)


if __name__ == "__main__":
    main()
