"""The best learning rate of Muon beside that of AdamW, at several widths: is equal RMS the right translation?

    python benchmarks/muon_rates.py                                            8 minutes on two cores
    python benchmarks/muon_rates.py --widths 64,128,256,512 --seeds 4 --workers 8 --device cuda

The built-in GPT of two blocks on built-in text: 200 steps, a linear decay of the rate to zero, no weight
decay, rates a factor of two apart. Only the rate of the hidden weights varies; AdamW trains the rest at
0.004 beside both. The best rate of a seed is the lowest point of a parabola through the best loss and its
neighbours in the logarithm of the rate. Prints losses, and for each width the best rates, their ratio with
one standard error over seeds to both sides, the ratio that equal ‖·‖_R gives, and the RMS and the stable
rank of AdamW's updates at the rate nearest to its best, over all hidden weights at four times of training.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

import theodolite as th

STEPS, DEPTH, VECTOR_LR = 200, 2, 0.004
RATES = {
    "adamw": [2.0**-power for power in range(12, 5, -1)],
    "muon-kimi": [2.0**-power for power in range(9, 2, -1)],
}
LOOKED_AT = (20, 60, 100, 150)
"""Steps whose updates are measured."""


@dataclass(frozen=True)
class Trained:
    """What one training gives."""

    width: int
    optimizer: str
    lr: float
    seed: int
    loss: float
    """The mean of the last 20 steps."""
    rms: float
    """Of the updates of hidden weights, in units of their learning rate."""
    stable_rank: float


def train(width: int, optimizer: str, lr: float, seed: int, device: str) -> Trained:
    """200 steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    workload = th.workload("gpt-sotu")
    model = workload.build(width, DEPTH).to(device)
    inputs, _ = workload.batch(seed, 0)
    groups = th.groups(model, inputs.to(device), optimizer="muon-kimi", lr=lr, vector_lr=VECTOR_LR)
    made = groups.optimizer() if optimizer == "muon-kimi" else torch.optim.AdamW(groups.param_groups())
    hidden = [model.get_parameter(row.name) for row in groups.trained if row.role == "hidden"]
    losses, rms, ranks = [], [], []
    for step in range(STEPS):
        inputs, targets = (one.to(device) for one in workload.batch(seed, step))
        loss = workload.loss(model(inputs), targets)
        made.zero_grad()
        loss.backward()
        before = [weight.detach().clone() for weight in hidden] if step in LOOKED_AT else []
        made.step()
        rate = lr * (1 - step / STEPS)
        for weight, old in zip(hidden, before, strict=False):
            update = (old - weight.detach()) / rate
            rms.append(update.square().mean().sqrt().item())
            ranks.append((update.square().sum() / torch.linalg.matrix_norm(update, 2) ** 2).item())
        losses.append(loss.detach())
        for group in made.param_groups:
            group["lr"] = group["planned_lr"] * (1 - (step + 1) / STEPS)
    loss = torch.stack(losses[-20:]).mean().item()
    return Trained(width, optimizer, lr, seed, loss, float(np.mean(rms)), float(np.median(ranks)))


def best(rates: Sequence[float], losses: Sequence[float]) -> float:
    """The lowest point of a parabola through the best rate and its neighbours; nan if it is at an end."""
    at = int(np.argmin(losses))
    if at in (0, len(rates) - 1):
        return math.nan
    logs = [math.log2(rate) for rate in rates[at - 1 : at + 2]]
    square, slope, _ = np.polyfit(logs, losses[at - 1 : at + 2], 2)
    return float(2 ** (-slope / (2 * square)))


def report(width: int, runs: Sequence[Trained]) -> None:
    """The lines of one width."""
    found: dict[str, list[float]] = {}
    for optimizer, rates in RATES.items():
        loss = {(run.seed, run.lr): run.loss for run in runs if run.optimizer == optimizer}
        losses = np.array([[loss[seed, lr] for lr in rates] for seed in sorted({seed for seed, _ in loss})])
        found[optimizer] = [best(rates, one) for one in losses]
        means = losses.mean(0)
        print(
            width,
            optimizer,
            *(f"2^{math.log2(lr):g}: {loss:.3f}" for lr, loss in zip(rates, means, strict=True)),
        )
    adamw, kimi = (np.log2(found[optimizer]) for optimizer in RATES)
    octaves = kimi - adamw
    error = octaves.std(ddof=1) / math.sqrt(len(octaves)) if len(octaves) > 1 else math.nan
    low, middle, high = (2 ** (octaves.mean() + sigmas * error) for sigmas in (-1, 0, 1))
    nearest = min(RATES["adamw"], key=lambda lr: abs(math.log2(lr) - adamw.mean()))
    at_best = [run for run in runs if run.optimizer == "adamw" and run.lr == nearest]
    rms, rank = np.mean([(run.rms, run.stable_rank) for run in at_best], axis=0)
    print(
        f"width {width}: best adamw {2 ** adamw.mean():.4f}, muon-kimi {2 ** kimi.mean():.4f}, "
        f"ratio {middle:.1f} ({low:.1f} to {high:.1f}); "
        f"equal RMS says 1, equal ‖·‖_R at stable rank 4 {math.sqrt(width / 4):.1f}; "
        f"AdamW's updates have RMS {rms:.2f} and stable rank {rank:.1f}",
        flush=True,
    )


def main() -> None:
    """Print a line for each optimizer and for each width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", default="64,128")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        for width in map(int, given.widths.split(",")):
            runs = [
                pool.submit(train, width, optimizer, lr, seed, given.device)
                for optimizer, rates in RATES.items()
                for lr in rates
                for seed in range(given.seeds)
            ]
            report(width, [run.result() for run in runs])


if __name__ == "__main__":
    main()
