"""The better of two on the training data: the model after the jump, or after training on from there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.probes.example_losses import losses_of


@dataclass(frozen=True)
class Kept:
    """What the fallback rule keeps. Made by `fallback`."""

    model: nn.Module = field(repr=False)
    which: Literal["jumped", "trained"]
    margin: float
    """Δ_opt: how much lower its training loss is than that of the jumped model; 0 if that is kept."""
    jumped_loss: float
    trained_loss: float

    def __str__(self) -> str:
        if self.which == "trained":
            return f"kept after training: its training loss is lower by {self.margin:.4g} than after the jump"
        return (
            f"kept after the jump: training made the training loss {self.trained_loss:.4g} of "
            f"{self.jumped_loss:.4g}"
        )


@exclusive()
def fallback(loss: Loss, batches: Batches, jumped: nn.Module, trained: nn.Module) -> Kept:
    """Keep the trained model if its training loss is lower than the jumped model's, else the jumped one.

    It is Condition 2 on depth expansion: with it, training can only help on the training data, so that a
    claim about the jumped model's training loss is one about the kept model's. Training that ended in losses
    that are not finite counts as no help.

    Args:
        loss: `loss(logits, targets) -> scalar`.
        batches: of the training data, the same units for both.
        jumped: the model after the jump.
        trained: the model that training made of it.

    >>> import torch
    >>> worse, better = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> for model, weight in ((worse, 0.5), (better, 0.75)):
    ...     _ = nn.init.constant_(model.weight, weight), nn.init.zeros_(model.bias)
    >>> kept = fallback(nn.functional.mse_loss, (torch.ones(4, 1), torch.ones(4, 1)), worse, better)
    >>> kept.which, kept.margin
    ('trained', 0.1875)
    """
    before = float(losses_of(jumped, loss, batches, finite=False).mean())
    after = float(losses_of(trained, loss, batches, finite=False).mean())
    if math.isfinite(after) and not after >= before:
        return Kept(trained, "trained", before - after, before, after)
    if not math.isfinite(before):
        raise UseError(
            f"the training loss is {before} after the jump and {after} after training: neither can be kept"
        )
    return Kept(jumped, "jumped", 0.0, before, after)
