"""What is known of an insertion point before anything is trained there."""

# B batch, T tokens, D width

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from theodolite.core.building import evaluated
from theodolite.growing.line_search import Jump, jump, longest_step
from theodolite.probes.signal.result import PointSignal, Signal
from theodolite.probes.signal.signal import signal
from theodolite.surgery import InsertionPoint, InsertionPoints, find_points, insert_block
from theodolite.workloads import next_token_loss
from theodolite_studies.growing.training import Lesson, Pupil

LOOK = 5 / 3
"""What a sequence costs the signal, in training steps of one: forward and back (1), a candidate beside every
block (1/3), and the products of gradients and features (less than 1/3)."""
FORWARD = 1 / 3


@dataclass(frozen=True)
class Look:
    """The signal at all points of a network, and the stream there."""

    points: InsertionPoints
    inputs: Tensor
    """For proofs."""
    signal: Signal
    squares: tuple[float, ...]
    """E[h²] of the stream at each point."""
    cost: float
    """In sequences that are trained on."""

    def relative(self, one: PointSignal) -> float:
        """gain·E[h²].

        Whoever doubles the stream of a pre-norm network and all that is written to it changes nothing but the
        gains, which fall to a quarter. This product stays.
        """
        return one.gain * self.squares[one.point.index]


def looked_at(pupil: Pupil, lesson: Lesson, order: int | str) -> Look:
    """Look at a network, on sequences of the training text."""
    units = lesson.setting.units
    estimate, judge = (lesson.batches(f"{name} {order}", units) for name in ("estimate", "judge"))
    inputs = estimate[0][0][:2]
    points = find_points(pupil.model, inputs)
    seen = signal(pupil.model, next_token_loss, estimate, judge, points=points)
    squares = stream_squares(pupil, estimate[0][0])
    return Look(points, inputs, seen, squares, cost=2 * units * LOOK)


@torch.no_grad()
def stream_squares(pupil: Pupil, tokens_BT: Tensor) -> tuple[float, ...]:
    """E[h²] before each block and after the last."""
    streams: list[Tensor] = []

    def before(block: Any, given: tuple[Any, ...]) -> None:
        streams.append(given[0])

    def after(block: Any, given: Any, x_BTD: Tensor) -> None:
        streams.append(x_BTD)

    hooks = [block.register_forward_pre_hook(before) for block in pupil.model.blocks]
    hooks.append(pupil.model.blocks[-1].register_forward_hook(after))
    try:
        with evaluated(pupil.model):
            pupil.model(tokens_BT)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(float(stream.square().mean()) for stream in streams)


@dataclass(frozen=True)
class Jumps:
    """What jumps would do, by point."""

    by_point: Mapping[int, Jump]
    cost: float = field(compare=False)
    """In sequences that are trained on."""

    def best(self, count: int) -> list[int]:
        """The points where they lower the loss most."""
        return sorted(sorted(self.by_point, key=lambda index: -self.by_point[index].gain)[:count])


def tried(pupil: Pupil, lesson: Lesson, look: Look, order: int | str, *, preconditioned: bool) -> Jumps:
    """Jump at each point by itself, and come back."""
    found = {}
    for one in look.signal.points:
        other = pupil.copied()
        inserted(other, look, one.point)
        found[one.point.index] = jumped(other, lesson, one, order, preconditioned=preconditioned)
    forwards = sum(1 + len(each.tried) for each in found.values())
    return Jumps(found, cost=forwards * lesson.setting.num * FORWARD)


def inserted(pupil: Pupil, look: Look, point: InsertionPoint) -> None:
    """A closed copy of its neighbour, in a network that is up to there as it was looked at."""
    insert_block(pupil.model, look.inputs, point, optimizer=pupil.optimizer, points=look.points)


def jumped(pupil: Pupil, lesson: Lesson, one: PointSignal, order: int | str, *, preconditioned: bool) -> Jump:
    """Move a block that was inserted at a point along its signal, by what a batch of its own says."""
    batches = lesson.batches(f"choose {order}", lesson.setting.num)
    directions = one.preconditioned_directions if preconditioned else one.directions
    slope = one.preconditioned if preconditioned else one.gain
    cap = longest_step(pupil.model, next_token_loss, batches, one.point.name, directions)
    return jump(pupil.model, next_token_loss, batches, one.point.name, directions, slope=slope, cap=cap)
