"""What a controlled step costs beside the gradient and the step that are there anyway.

    python benchmarks/safe_step.py

GPTs of two sizes on one thread of the CPU, or on the GPU where there is one. Times are medians, as ratios to
a gradient and a plain AdamW step.
"""

from __future__ import annotations

import statistics
import time

import torch

import theodolite as th
from theodolite.controllers import SafeStep
from theodolite.workloads import next_token_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(256, 4, 8, 64), (1024, 12, 8, 512)] if DEVICE == "cuda" else [(64, 2, 8, 32), (256, 4, 8, 64)]
"""Width, depth, sequences and their length."""
ROUNDS = 9


def main() -> None:
    torch.set_num_threads(1)
    print(f"{DEVICE}; AdamW, medians of {ROUNDS}")
    for width, depth, num, length in SIZES:
        model = th.models.GPT(width, depth, vocab=256, context=length).to(DEVICE)
        tokens = torch.randint(256, (num, length + 1), device=DEVICE)
        batch = tokens[:, :-1], tokens[:, 1:]
        plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
        always = SafeStep(torch.optim.AdamW(model.parameters(), lr=1e-3), model, next_token_loss)
        seldom = SafeStep(torch.optim.AdamW(model.parameters(), lr=1e-3), model, next_token_loss, every=10)

        def gradient(
            model: torch.nn.Module = model, batch: tuple[torch.Tensor, torch.Tensor] = batch
        ) -> None:
            model.zero_grad()
            next_token_loss(model(batch[0]), batch[1]).backward()

        gradient()
        base = seconds(gradient) + seconds(plain.step)
        ratios = []
        for safe in (always, seldom):
            safe.step(batch)
            found = [seconds(lambda safe=safe, batch=batch: safe.step(batch), rounds=1) for _ in range(10)]
            ratios.append((statistics.mean(found) - seconds(plain.step)) / base)
        print(
            f"width {width}, depth {depth}, {num} × {length} tokens: gradient and step {1e3 * base:.1f} ms; "
            f"the controller adds {ratios[0]:.2f} of that, every tenth step {ratios[1]:.2f}"
        )


def seconds(function, rounds: int = ROUNDS) -> float:  # type: ignore[no-untyped-def]
    """The median of some calls."""
    times = []
    for _ in range(rounds):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
