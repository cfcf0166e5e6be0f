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
from theodolite.building import evaluated, in_one_line
from theodolite.errors import UseError
from theodolite.probes.second_order.score import Loss
from theodolite.probes.steps.radius import radius
from theodolite.probes.units import Batches, each, losses_of, take

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
    note: str = ""

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


def jump(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    block: str,
    directions: Mapping[str, Tensor],
    *,
    slope: float,
    reach: float = 1.0,
) -> Jump:
    """Move what ends a new block's branches along `−D`, in place, by the step that lowers the loss most.

    Args:
        model: the network with a closed block in it.
        loss: `loss(logits, targets) -> scalar`.
        batches: units that the directions were not estimated on.
        block: the name of the new block.
        directions: D by closer: `PointSignal.directions`, or the preconditioned ones.
        slope: `⟨D, M⟩`, how fast the loss falls: `PointSignal.gain`.
        reach: the longest step in units of the radius of the cross-entropy along it, the least over the
            first units. The loss may well fall beyond it: then allow more.

    The loss is lower afterwards, or the block is closed still.
    """
    if not reach > 0:
        raise UseError(f"reach is {reach}: it is the longest step in units of the step radius, above 0")
    inner = unwrap(model)
    tensors = {name: one for name, one in all_parameter_names(inner) if name.startswith(f"{block}.")}
    moving = {f"{block}.{name}": one for name, one in directions.items()}
    missing = [name for name in moving if name not in tensors]
    if missing:
        raise UseError(f"the model has no tensor {missing[0]!r}: insert the block first")
    length = math.hypot(*(float(one.double().norm()) for one in moving.values()))
    before = float(losses_of(model, loss, batches).mean())
    if not length > 0 or not slope > 0:
        return Jump(0.0, 0.0, math.nan, before, before, 0.0, (), "the signal points nowhere")
    cap, note = _cap(inner, loss, batches, moving, reach)
    # Where there is no radius: as if the loss fell on as it begins, by a half.
    longest = cap if math.isfinite(cap) else 0.5 * before * length / slope
    start = {name: tensors[name].detach().clone() for name in moving}
    tried: list[tuple[float, float]] = []
    for power in range(HALVINGS):
        step = longest / length / 2**power
        _move(tensors, start, moving, step)
        after = float(losses_of(model, loss, batches, finite=False).mean())
        tried.append((step, after))
        best = min((one for one in tried if math.isfinite(one[1])), key=lambda one: one[1], default=None)
        if best is not None and best[1] < before and after > best[1]:
            break
    lower = [(value, step) for step, value in tried if value < before]
    value, step = min(lower, default=(before, 0.0))
    _move(tensors, start, moving, step)
    return Jump(step, step * length, cap, before, value, step * slope, tuple(tried), note)


def _cap(
    model: nn.Module, loss: Loss, batches: Batches, moving: Mapping[str, Tensor], reach: float
) -> tuple[float, str]:
    """The longest step, and why there is no limit to it if there is none."""
    some = take(next(iter(each(batches))), slice(0, RADIUS_UNITS))
    try:
        with evaluated(model):
            found = radius(
                model, loss, some, {name: -one for name, one in moving.items()}, parameters=list(moving)
            )
    except (UseError, RuntimeError, NotImplementedError) as error:
        return math.inf, f"no step radius: {in_one_line(error)}"
    return reach * found.value, ""


@torch.no_grad()
def _move(
    tensors: Mapping[str, Tensor], start: Mapping[str, Tensor], moving: Mapping[str, Tensor], step: float
) -> None:
    for name, direction in moving.items():
        tensors[name].copy_(start[name].double() - step * direction.double().to(start[name].device))
