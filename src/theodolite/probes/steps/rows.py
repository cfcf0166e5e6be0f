"""The least radius over the rows of a batch, again and again: what a controller asks at every step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from theodolite.core.batches import Batch
from theodolite.core.calling import Loss
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.steps.ghosts import bounds
from theodolite.probes.steps.pushing import by_rows, push, require_cross_entropy


class RowBounds:
    """`min_n π/Δ_n` for one loss, which is tried out on the first batch only.

    >>> layer = torch.nn.Linear(1, 2, bias=False)
    >>> batch = torch.tensor([[torch.pi], [99.0]]), torch.tensor([0, -100])
    >>> rows = RowBounds(torch.nn.functional.cross_entropy)
    >>> objective = Objective(layer, rows.loss, batch)
    >>> rows.check(objective)
    >>> round(rows.least(objective, {"weight": torch.tensor([[1.0], [0.0]])}), 4)  # the second is ignored
    1.0
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self._dim: int | None = None

    def check(self, objective: Objective) -> None:
        """Refuse a loss that is no cross-entropy; asked once, as it takes a forward pass."""
        if self._dim is not None:
            return
        batch, _ = next(iter(objective.draw()))
        with objective.conditions(), torch.no_grad():
            logits = objective.forward(objective.stand_ins(grad=False), batch)
        self._dim = require_cross_entropy(objective.cross_entropy(logits, batch), self.loss).dim

    def least(self, objective: Objective, unit: Mapping[str, Tensor]) -> float:
        """Along a direction of length 1, over all rows whose targets are not ignored."""
        assert self._dim is not None
        found = []
        for batch, _ in objective.draw():
            logits, slopes = push(objective, batch, unit)
            rows = bounds(by_rows(slopes, self._dim))
            counted = _counted(objective.loss, logits, batch, self._dim)
            found.append(float(rows.masked_fill(~counted, math.inf).min()))
        return min(found)


def _counted(loss: Loss, logits: Tensor, batch: Batch, dim: int) -> Tensor:
    """Rows with a weight, (N,): the derivative is `w (p − q)`, and these p are no targets anybody has."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    ramp = torch.linspace(-1, 1, logits.shape[dim], device=logits.device, dtype=dtype)
    with torch.enable_grad():
        point = ramp.expand_as(logits.movedim(dim, -1)).movedim(-1, dim).contiguous().requires_grad_()
        (slope,) = torch.autograd.grad(loss(point, batch[1]), point)
    return by_rows(slope, dim).abs().amax(1) > 0
