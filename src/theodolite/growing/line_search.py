"""The jumpboard: a new block, moved along its signal as far as it helps on units that had no part in it.

A closed block has Z = 0 in what ends its branches. The loss falls at the rate `⟨D, M⟩` along `Z = −εD`. How
far it goes on falling is found by trying: from the step radius of the cross-entropy down, by halves, until a
shorter step is no better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import all_parameter_names, unwrap
from theodolite.core.batches import Batches
from theodolite.core.building import evaluated
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.examples import each_batch, take
from theodolite.core.exclusive import exclusive
from theodolite.probes.example_losses import losses_of
from theodolite.probes.steps.radius import radius

HALVINGS = 16
"""Steps that are tried at most."""
RADIUS_UNITS = 8
"""Units that the radius is measured on: it is the least over all rows, of which a sequence has many."""


@dataclass(frozen=True)
class Jump:
    """A step of a new block. Made by `jump`."""

    step: float
    """ε; 0 if no step lowered the loss."""
    length: float
    """‖εD‖, what the tensors moved by."""
    cap: float
    """The longest ‖εD‖ that was allowed; infinite where the loss has no radius."""
    before: float
    """The mean loss of the units before."""
    after: float
    predicted: float
    """What the loss falls by if it goes on as it begins, `ε⟨D, M⟩`."""
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

    def __str__(self) -> str:
        if not self.step:
            return f"no jump: none of {len(self.tried)} steps lowered the loss of {self.before:.4g}"
        end = ", the longest step allowed" if self.capped else ""
        return (
            f"jumped by {self.length:.3g}{end}: the loss fell from {self.before:.5g} by {self.gain:.3g}, "
            f"predicted to first order {self.predicted:.3g}"
        )


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
    """Move what ends a new block's branches along `−D`, in place, by the step that lowers the loss most.

    Args:
        model: the network with a closed block in it.
        loss: `loss(logits, targets) -> scalar`.
        batches: units that the directions were not estimated on.
        block: the name of the new block.
        directions: D by closer: `PointSignal.directions`, or the preconditioned ones.
        slope: `⟨D, M⟩`, how fast the loss falls: `PointSignal.gain`.
        cap: the longest ‖εD‖ that is tried, as of `longest_step`. Without one the first step is that with
            which the loss would be a half if it went on falling as it begins.

    The loss is lower afterwards, or the block is closed still.
    """
    if not cap > 0:
        raise UseError(f"cap is {cap}: it is the longest step that is tried, above 0")
    tensors, moving = _moving(model, block, directions)
    length = length_of(directions)
    before = float(losses_of(model, loss, batches).mean())
    if not length > 0 or not slope > 0:
        return Jump(0.0, 0.0, cap, before, before, 0.0, ())
    longest = cap if math.isfinite(cap) else 0.5 * max(abs(before), 1.0) * length / slope
    start = {name: tensors[name].detach().clone() for name in moving}
    tried: list[tuple[float, float]] = []
    value, best = before, 0.0
    try:
        for power in range(HALVINGS):
            step = longest / length / 2**power
            _move(tensors, start, moving, step)
            after = float(losses_of(model, loss, batches, finite=False).mean())
            tried.append((step, after))
            if after < value:
                value, best = after, step
            elif value < before:
                break
    except BaseException:
        _move(tensors, start, moving, 0.0)
        raise
    step = best
    _move(tensors, start, moving, step)
    return Jump(step, step * length, cap, before, value, step * slope, tuple(tried))


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
    """How long a step of a new block may be: `reach` times the radius of the cross-entropy along it.

    That is the least over the rows of the first units. The loss may well fall beyond it: then allow more.
    Infinite where the loss is no cross-entropy of the logits, or its slope along the step cannot be taken.
    """
    if not reach > 0:
        raise UseError(f"reach is {reach}: it is the longest step in units of the step radius, above 0")
    inner = unwrap(model)
    _, moving = _moving(model, block, directions)
    some = take(next(iter(each_batch(batches))), slice(0, RADIUS_UNITS))
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


def length_of(directions: Mapping[str, Tensor]) -> float:
    """‖D‖."""
    return math.hypot(*(float(one.double().norm()) for one in directions.values()))


def _moving(
    model: nn.Module, block: str, directions: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The block's tensors, and where they go, by name in the network."""
    tensors = {name: one for name, one in all_parameter_names(unwrap(model)) if name.startswith(f"{block}.")}
    moving = {f"{block}.{name}": one for name, one in directions.items()}
    missing = [name for name in moving if name not in tensors]
    if missing:
        raise UseError(f"the model has no tensor {missing[0]!r}: insert the block first")
    return tensors, moving


@torch.no_grad()
def _move(
    tensors: Mapping[str, Tensor], start: Mapping[str, Tensor], moving: Mapping[str, Tensor], step: float
) -> None:
    for name, direction in moving.items():
        tensors[name].copy_(start[name].double() - step * direction.double().to(start[name].device))
