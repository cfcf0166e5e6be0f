"""Line search for a new block: how far to move it along its signal (the paper's jumpboard).

A closed block has Z = 0 in the tensors that end its branches. Along `Z = −εD` the loss falls at the rate
`⟨D, M⟩` at first. How far it falls is found by trying, on examples that the signal was not estimated on: from
the longest step down, halving, until a shorter step is no better. The longest step is the step radius of the
cross-entropy; another loss has none, and starts at the step along which it would fall by twice its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import all_parameter_names, unwrap
from theodolite.core.batches import Batches
from theodolite.core.building import evaluated
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.examples import each_batch, take
from theodolite.core.exclusive import exclusive
from theodolite.present.result import Block, Result
from theodolite.present.text import Table
from theodolite.probes.example_losses import losses_of
from theodolite.probes.steps.radius import radius

HALVINGS = 16
"""Most steps that are tried."""
RADIUS_EXAMPLES = 8
"""Examples that the radius is measured on: it is the least over all rows, of which a sequence has many."""


@dataclass(frozen=True)
class Jump(Result):
    """A step of a new block. Made by `jump`."""

    kind: ClassVar[str] = "jump"

    step: float
    """ε; 0 if no step lowered the loss."""
    length: float
    """‖εD‖, by which the tensors moved."""
    cap: float
    """The longest allowed ‖εD‖; infinite if the loss has no radius."""
    before: float
    """The mean loss before."""
    after: float
    predicted: float
    """The first-order fall of the loss, `ε⟨D, M⟩`."""
    tried: tuple[tuple[float, float], ...]
    """Steps and losses, in the order they were tried."""

    @property
    def gain(self) -> float:
        """By how much the loss is lower."""
        return self.before - self.after

    @property
    def capped(self) -> bool:
        """Was the longest step the best?"""
        return bool(self.tried) and self.step == self.tried[0][0]

    @property
    def sentence(self) -> str:
        """What it did, in one sentence."""
        if not self.step:
            return f"no jump: none of {len(self.tried)} steps lowered the loss of {self.before:.4g}"
        end = ", the longest allowed step" if self.capped else ""
        return (
            f"jumped by {self.length:.3g}{end}: the loss fell from {self.before:.5g} by {self.gain:.3g}, "
            f"predicted to first order {self.predicted:.3g}"
        )

    def blocks(self) -> Iterator[Block]:
        """The sentence, and the steps that were tried."""
        yield self.sentence
        yield self.table()

    def table(self) -> Table:
        """The steps that were tried, and the losses after them."""
        return Table(("step", "loss"), self.tried)


@exclusive()
def jump(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    block: str,
    directions: Mapping[str, Tensor],
    *,
    slope: float,
    cap: float = math.inf,
) -> Jump:
    """Move the output tensors of a new block along `−D`, in place, by the step that lowers the loss most.

    Args:
        model: the network with a closed block in it.
        loss: `loss(logits, targets) -> scalar`.
        batches: examples that the directions were not estimated on.
        block: the name of the new block.
        directions: D by output tensor: `PointSignal.directions`, or the preconditioned ones.
        slope: `⟨D, M⟩`, how fast the loss falls: `PointSignal.gain`.
        cap: the longest ‖εD‖ to try, from `longest_step`. By default the first step is the one that to first
            order would lower the loss by twice its mean absolute value.

    Afterwards the loss is lower, or the block is still closed.
    """
    if not cap > 0:
        raise UseError(f"cap is {cap}: give the longest step to try, above 0")
    tensors, moving = moving_tensors(model, block, directions)
    length = length_of(directions)
    losses = losses_of(model, loss, batches)
    before = float(losses.mean())
    if not length > 0 or not slope > 0:
        return Jump(0.0, 0.0, cap, before, before, 0.0, ())
    longest = cap if math.isfinite(cap) else 2 * _size(losses) * length / slope
    start = {name: tensors[name].detach().clone() for name in moving}
    tried: list[tuple[float, float]] = []
    value, best = before, 0.0
    try:
        for power in range(HALVINGS):
            step = longest / length / 2**power
            move(tensors, start, moving, step)
            after = float(losses_of(model, loss, batches, finite=False).mean())
            tried.append((step, after))
            if after < value:
                value, best = after, step
            elif value < before:
                break
    except BaseException:
        move(tensors, start, moving, 0.0)
        raise
    move(tensors, start, moving, best)
    return Jump(best, best * length, cap, before, value, best * slope, tuple(tried))


@exclusive()
def longest_step(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    block: str,
    directions: Mapping[str, Tensor],
    *,
    reach: float = 1.0,
) -> float:
    """The longest step of a new block: `reach` times the radius of the cross-entropy along it.

    The radius is the least over the rows of the first examples. The loss may fall beyond it: then allow more.
    Infinite if the loss is not a cross-entropy of the logits, or has no slope along the step.
    """
    if not reach > 0:
        raise UseError(f"reach is {reach}: give the longest step in units of the step radius, above 0")
    inner = unwrap(model)
    _, moving = moving_tensors(model, block, directions)
    some = take(next(iter(each_batch(batches))), slice(0, RADIUS_EXAMPLES))
    try:
        with evaluated(inner):
            found = radius(
                inner, loss, some, {name: -one for name, one in moving.items()}, parameters=list(moving)
            )
    except torch.OutOfMemoryError:
        raise
    except (UseError, RuntimeError, NotImplementedError):
        return math.inf
    return reach * found.value


def _size(losses: Tensor) -> float:
    """The mean absolute loss, so that losses of either sign do not cancel; 1 if all of them are 0.

    A parabola that starts at L, falls with slope s and stays above 0 has its minimum at 2L/s at the latest.
    """
    return float(losses.abs().mean()) or 1.0


def length_of(directions: Mapping[str, Tensor]) -> float:
    """‖D‖."""
    return math.hypot(*(float(one.double().norm()) for one in directions.values()))


def moving_tensors(
    model: nn.Module, block: str, directions: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The block's tensors and their directions, by name in the network."""
    tensors = {name: one for name, one in all_parameter_names(unwrap(model)) if name.startswith(f"{block}.")}
    moving = {f"{block}.{name}": one for name, one in directions.items()}
    missing = [name for name in moving if name not in tensors]
    if missing:
        raise UseError(f"the model has no tensor {missing[0]!r}: insert the block first")
    return tensors, moving


@torch.no_grad()
def move(
    tensors: Mapping[str, Tensor], start: Mapping[str, Tensor], moving: Mapping[str, Tensor], step: float
) -> None:
    """Put tensors a step away from where they start, against their directions."""
    for name, direction in moving.items():
        tensors[name].copy_(start[name].double() - step * direction.double().to(start[name].device))
