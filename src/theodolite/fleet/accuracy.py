"""How many targets a classifier gets right."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.core.batches import on_device
from theodolite.core.calling import call, described, logits
from theodolite.core.errors import UseError
from theodolite.fleet.run import Run
from theodolite.workloads import Workload

HELD_OUT, TRAINED_ON = "accuracy", "train accuracy"
"""The readings of the probe `accuracy`: over the held-out batches, and over the last batch trained on."""


def share_right(output: Tensor, targets: Any) -> Tensor:
    """The part of the targets whose logit is the largest.

    >>> share_right(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor(0.5000)
    """
    whole = isinstance(targets, Tensor) and not (targets.is_floating_point() or targets.is_complex())
    if not whole or targets.shape != output.shape[:-1]:
        raise UseError(
            f"accuracy is of whole numbers, one for each row of logits {tuple(output.shape)}, and the "
            f"workload's targets are {described(targets)}: leave out the probe 'accuracy'"
        )
    return (output.argmax(-1) == targets).float().mean()


@torch.no_grad()
def accuracies(model: nn.Module, workload: Workload, run: Run, device: str) -> dict[str, float]:
    """The readings of one trained network, in eval mode."""
    was_training = model.training
    model.eval()

    def right(batch: Any) -> float:
        inputs, targets = on_device(batch, device)
        return share_right(logits(call(model, inputs)), targets).item()

    found = {
        HELD_OUT: statistics.fmean(right(workload.draw_held_out(step)) for step in range(run.held_out)),
        TRAINED_ON: right(workload.draw(run.seed, run.steps - 1)),
    }
    model.train(was_training)
    return found
