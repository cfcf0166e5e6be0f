"""Does the best learning rate of a small GPT stay the best at other widths and depths?

    python examples/learning_rate_transfer.py --out transfer --device cuda
    python examples/learning_rate_transfer.py --show docs/studies/transfer.jsonl

Trains a byte-level GPT on the built-in text: with a plan from 128 × 4, and with the standard parameterization
(the network's own initialisation, one learning rate for every tensor). Runs are kept as they end; the same
command again makes only those that are missing.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import theodolite as th
from theodolite.data import draw_text, state_of_the_union
from theodolite.fleet.progress import Shown
from theodolite.sweeping import analyse
from theodolite.sweeping.table import family_table
from theodolite.workloads import Batch, next_token_loss

BASE = th.Size(128, 4)


def batch(split: str, seed: int, step: int) -> Batch:
    return draw_text(state_of_the_union(split), num=32, length=256, seed=seed, step=step)


gpt = th.Workload(
    "gpt",
    partial(th.models.GPT, vocab=256, context=256),
    partial(batch, "train"),
    next_token_loss,
    size=BASE,
    held_out=partial(batch, "validation"),
)


def run(out: Path, device: str) -> th.Sweep:
    return th.sweep(
        gpt,
        widths=[128, 256, 512, 1024],
        depths=[2, 4, 8, 16, 32],
        base=BASE,
        lr=[2.0**exponent for exponent in range(-13, -4)],
        seeds=2,
        steps=500,
        options={"betas": (0.9, 0.95)},
        precision="bfloat16" if device == "cuda" else "float32",
        device=device,
        out=out,
        progress=Shown(),
    )


def rows(file: Path) -> list[dict[str, Any]]:
    """The records of an earlier version of this program, as a ledger would give them."""
    names = ("parameterization", "optimizer", "width", "depth", "exponent", "seed")
    found = []
    for line in file.read_text().splitlines():
        record = json.loads(line)
        row = dict(zip(names, record["cell"], strict=True))
        status = "diverged" if record["loss"] is None else "finished"
        found.append({**row, "lr": 2.0 ** row["exponent"], "held_out": record["loss"], "status": status})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("transfer"))
    parser.add_argument("--show", type=Path, help="print the tables of a file and stop")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    if chosen.show:
        print("\n\n".join(family_table(family) for family in analyse(rows(chosen.show), base=BASE)))
    else:
        print(run(chosen.out, chosen.device))


if __name__ == "__main__":
    main()
