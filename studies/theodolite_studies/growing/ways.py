"""The signal at insertion points, and ways to make a network deeper: by it, evenly, at random, …"""

# B batch, T tokens, D width

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from theodolite import data
from theodolite.core.building import evaluated
from theodolite.growing import certificate, clip_from
from theodolite.growing.line_search import Jump, jump, longest_step
from theodolite.probes.example_losses import losses_of
from theodolite.probes.signal.result import PointSignal, Signal
from theodolite.probes.signal.signal import signal
from theodolite.surgery import InsertionPoint, InsertionPoints, find_points, insert_block
from theodolite.workloads import next_token_loss
from theodolite_studies.framework.records import Record
from theodolite_studies.growing.training import (
    ADDED,
    GrowingSetting,
    Lesson,
    Pupil,
    PupilSteps,
    enrolled,
    flops_of,
    judged,
    rounded,
    wsd,
)

LOOK = 5 / 3
"""What a sequence costs the signal, in training steps of one: forward and back (1), a candidate beside every
block (1/3), and the products of gradients and features (less than 1/3)."""
FORWARD = 1 / 3


@dataclass(frozen=True)
class SignalLook:
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


def looked_at(pupil: Pupil, lesson: Lesson, order: int | str) -> SignalLook:
    """SignalLook at a network, on sequences of the training text."""
    units = lesson.setting.units
    estimate, judge = (lesson.batches(f"{name} {order}", units) for name in ("estimate", "judge"))
    inputs = estimate[0][0][:2]
    points = find_points(pupil.model, inputs)
    seen = signal(pupil.model, next_token_loss, estimate, judge, points=points)
    squares = stream_squares(pupil, estimate[0][0])
    return SignalLook(points, inputs, seen, squares, cost=2 * units * LOOK)


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


def tried(pupil: Pupil, lesson: Lesson, look: SignalLook, order: int | str, *, preconditioned: bool) -> Jumps:
    """Jump at each point by itself, and come back."""
    found = {}
    for one in look.signal.points:
        other = pupil.copied()
        inserted(other, look, one.point)
        found[one.point.index] = jumped(other, lesson, one, order, preconditioned=preconditioned)
    forwards = sum(1 + len(each.tried) for each in found.values())
    return Jumps(found, cost=forwards * lesson.setting.num * FORWARD)


def inserted(pupil: Pupil, look: SignalLook, point: InsertionPoint) -> None:
    """A closed copy of its neighbour, in a network that is up to there as it was looked at."""
    insert_block(pupil.model, look.inputs, point, optimizer=pupil.optimizer, points=look.points)


def jumped(pupil: Pupil, lesson: Lesson, one: PointSignal, order: int | str, *, preconditioned: bool) -> Jump:
    """Move a block that was inserted at a point along its signal, by what a batch of its own says."""
    batches = lesson.batches(f"choose {order}", lesson.setting.num)
    directions = one.preconditioned_directions if preconditioned else one.directions
    slope = one.preconditioned if preconditioned else one.gain
    cap = longest_step(pupil.model, next_token_loss, batches, one.point.name, directions)
    return jump(pupil.model, next_token_loss, batches, one.point.name, directions, slope=slope, cap=cap)


def grown_in_all_ways(setting: GrowingSetting, seed: int, added: int, device: str) -> Iterator[Record]:
    """A record for each way, of one seed: all go on from one trained network, and spend the same in all."""
    lesson = Lesson.of(setting, device)
    start = time.perf_counter()
    pupil = enrolled(setting, setting.width, setting.depth, seed, device)
    factors = wsd(setting.before, warmup=setting.warmup, decay=0)
    PupilSteps(pupil, lesson, order=seed, first=0, factors=factors).go(setting.before)
    before = judged(pupil.model, lesson)
    trained = time.perf_counter() - start
    known = Known.of(pupil, lesson, seed)
    yield {
        "way": "base",
        "loss": rounded(before),
        "gains": [rounded(one.gain, 9) for one in known.look.signal.points],
        "jumps": [rounded(one.gain) for _, one in sorted(known.jumps.by_point.items())],
        "steps": setting.before,
        "seconds": [round(trained, 2), round(time.perf_counter() - start - trained, 2)],
    }
    deeper = setting.depth + added
    spent = flops_of(setting, setting.width, setting.depth, steps=setting.before)
    budget = spent + flops_of(setting, setting.width, deeper, steps=setting.after)
    for way in ways_of(setting, added):
        start = time.perf_counter()
        other, places, told = pupil.copied(), list(way.places(known, added)), dict[str, Any]()
        account = Account(setting, lesson, seed, budget, spent)
        account.spent += flops_of(setting, setting.width, setting.depth, steps=way.cost(known) / setting.num)
        if way.name == "scratch":
            other = enrolled(setting, setting.width, deeper, seed, device)
            account.spent = 0.0
        elif way.name == "stack":
            stacked(other, added)
        elif way.name == "jump":
            told = _jumped(pupil, other, known, places)
        else:
            inserted_all(other, known.look, places)
        told |= {"places": places} if places else {}
        first = judged(other.model, lesson)
        last = account.used_up(other)
        yield {
            "way": way.name,
            **({"draw": way.draw} if way.name == "random" else {}),
            **told,
            "before": rounded(before),
            "first": rounded(first),
            "loss": rounded(last),
            "curve": account.curve,
            "steps": account.steps,
            "seconds": round(time.perf_counter() - start, 2),
        }


@dataclass(frozen=True)
class Known:
    """What a way may look at before it chooses."""

    pupil: Pupil
    lesson: Lesson
    seed: int
    look: SignalLook
    jumps: Jumps
    """Along the preconditioned directions, at each point by itself."""

    @staticmethod
    def of(pupil: Pupil, lesson: Lesson, seed: int) -> Known:
        """SignalLook at the signal, and try a jump at every point."""
        look = looked_at(pupil, lesson, seed)
        return Known(pupil, lesson, seed, look, tried(pupil, lesson, look, seed, preconditioned=True))


@dataclass(frozen=True)
class Way:
    """One way, and how it chooses its places."""

    name: str
    places: Callable[[Known, int], Sequence[int]] = lambda known, added: ()
    """Where the blocks go, in the numbering of the network before."""
    cost: Callable[[Known], float] = lambda known: 0.0
    """Of the choice, in sequences that are trained on."""
    draw: int = 0


def ways_of(setting: GrowingSetting, added: int) -> list[Way]:
    """All ways; of a network that is doubled fewer, as there is little to choose."""
    chosen = [
        Way("none"),
        Way("scratch"),
        Way("signal", strongest, lambda known: known.look.cost),
        Way("even", lambda known, added: evenly(known.pupil.depth, added)),
        Way("stack"),
    ]
    if added != ADDED:
        return chosen
    return [
        *chosen,
        *(Way("random", _Random(draw), draw=draw) for draw in range(setting.draws)),
        Way("weakest", weakest, lambda known: known.look.cost),
        Way("tried", best_tried, lambda known: known.look.cost + known.jumps.cost),
        # It tries once more at its own places: two of seven or so.
        Way("jump", best_tried, lambda known: known.look.cost + 1.3 * known.jumps.cost),
    ]


def strongest(known: Known, added: int) -> list[int]:
    """The points of the largest gains."""
    return sorted(point.point.index for point in known.look.signal.ranked()[:added])


def weakest(known: Known, added: int) -> list[int]:
    """The points of the smallest."""
    return sorted(point.point.index for point in known.look.signal.ranked()[-added:])


def best_tried(known: Known, added: int) -> list[int]:
    """The points where a jump gains most."""
    return known.jumps.best(added)


def evenly(depth: int, added: int) -> list[int]:
    """One behind each of `added` groups of blocks, as LLaMA Pro does it.

    >>> evenly(6, 2), evenly(6, 6)
    ([3, 6], [1, 2, 3, 4, 5, 6])
    """
    return [round(depth * (group + 1) / added) for group in range(added)]


@dataclass(frozen=True)
class _Random:
    draw: int

    def __call__(self, known: Known, added: int) -> list[int]:
        generator = data.generator("growing", "places", known.seed, self.draw)
        return sorted(generator.choice(known.pupil.depth + 1, added, replace=False).tolist())


def stacked(pupil: Pupil, added: int) -> None:
    """Repeat the last blocks as they are, all of them if depth is doubled. It changes the function.

    References:
        Du et al., Stacking your transformers, 2024 (G_stack).
    """
    blocks = pupil.model.blocks
    for block in copy.deepcopy(list(blocks)[-added:]):
        blocks.append(block)
        pupil.optimizer.param_groups[0]["params"].extend(block.parameters())


def inserted_all(pupil: Pupil, look: SignalLook, places: Sequence[int]) -> None:
    """Closed copies of the neighbours, from the last place on: what is before it keeps its number."""
    for place in sorted(places, reverse=True):
        inserted(pupil, look, look.points.at(place))


def _jumped(before: Pupil, pupil: Pupil, known: Known, places: Sequence[int]) -> dict[str, Any]:
    """Insert and jump, from the last place on; and what a certificate says on sequences of their own."""
    signals = {one.point.index: one for one in known.look.signal.points}
    gains = []
    for place in sorted(places, reverse=True):
        inserted_all(pupil, known.look, [place])
        gains.append(jumped(pupil, known.lesson, signals[place], known.seed, preconditioned=True).gain)
    told = {"jumped": [rounded(gain) for gain in reversed(gains)]}
    if not any(gains):  # the network is as it was
        return {**told, "certified": False}
    choose = known.lesson.batches(f"choose {known.seed}", known.lesson.setting.num)
    certify = known.lesson.batches(f"certify {known.seed}", known.lesson.setting.certify, split="validation")
    bound = clip_from(*(losses_of(each.model, next_token_loss, choose) for each in (before, pupil)))
    ends = [losses_of(each.model, next_token_loss, certify) for each in (before, pupil)]
    found = certificate(*ends, bound=bound)
    bounds = {"mean": rounded(found.mean), "lower": rounded(found.lower)}
    return {**told, "certified": found.holds, **bounds}


@dataclass
class Account:
    """What a pupil may spend, what it has spent, and what it had learned by then."""

    setting: GrowingSetting
    lesson: Lesson
    seed: int
    budget: float
    spent: float
    curve: list[list[float | None]] = field(default_factory=list)
    steps: int = 0

    def used_up(self, pupil: Pupil) -> float:
        """Train until nothing is left; the loss at the end."""
        setting = self.setting
        each = flops_of(setting, setting.width, pupil.depth)
        self.steps = int((self.budget - self.spent) / each)
        factors = wsd(self.steps, warmup=setting.warmup, decay=setting.decay)
        first = setting.before if self.spent else 0
        course = PupilSteps(pupil, self.lesson, order=self.seed, first=first, factors=factors)
        for steps in parts(self.steps, setting.looks):
            course.go(steps)
            self.spent += steps * each
            loss = judged(pupil.model, self.lesson)
            self.curve.append([float(f"{self.spent:.5g}"), rounded(loss)])
        return loss


def parts(steps: int, count: int) -> list[int]:
    """So many steps in `count` parts that differ by one at most.

    >>> parts(10, 4)
    [2, 3, 2, 3]
    """
    ends = [steps * (part + 1) // count for part in range(count)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
