"""Ways to make a network deeper: where the signal is, evenly, at random, by stacking, from scratch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from theodolite import data
from theodolite.probes.signal import Signal, signal
from theodolite.studies.growing_setting import ADDED, Setting
from theodolite.studies.growing_training import (
    Course,
    Lesson,
    Pupil,
    enrolled,
    flops_of,
    judged,
    wsd,
)
from theodolite.studies.records import Record
from theodolite.surgery import insert_block
from theodolite.workloads import next_token_loss

FORWARD_AND_BACK = 5 / 3
"""What a sequence costs the signal, in training steps of one: forward and back (1), a candidate beside every
block (1/3), and the products of gradients and features (less than 1/3)."""


def grown_in_all_ways(setting: Setting, seed: int, added: int, device: str) -> Iterator[Record]:
    """A record for each way, of one seed: all go on from one trained network, and spend the same in all."""
    lesson = Lesson.of(setting, device)
    pupil = enrolled(setting, setting.width, setting.depth, seed, device)
    start = time.perf_counter()
    factors = wsd(setting.before, warmup=setting.warmup, decay=0)
    course = Course(pupil, lesson, order=seed, first=0, factors=factors)
    course.go(setting.before)
    del course
    before = judged(pupil.model, lesson)
    seen = looked_for(pupil, lesson, seed)
    shared = {"before": rounded(before), "gains": [rounded(one.gain, 9) for one in seen.points]}
    yield {"way": "base", **shared, "seconds": round(time.perf_counter() - start, 2)}
    deeper = setting.depth + added
    spent = flops_of(setting, setting.width, setting.depth, steps=setting.before)
    budget = spent + flops_of(setting, setting.width, deeper, steps=setting.after)
    looking = flops_of(setting, setting.width, setting.depth, steps=2 * setting.units / setting.num)
    for way in ways_of(setting, added):
        start = time.perf_counter()
        other, told = pupil.copied(), dict[str, Any]()
        account = Account(setting, lesson, seed, budget, spent)
        account.spent += FORWARD_AND_BACK * looking if way.looks else 0.0
        if way.name == "scratch":
            other = enrolled(setting, setting.width, deeper, seed, device)
            account = Account(setting, lesson, seed, budget, 0.0)
        elif way.name == "stack":
            stacked(other, added)
        elif way.name != "none":
            where = way.places(seen, setting.depth, added, seed)
            told = {"places": list(where)}
            _insert(other, lesson, where)
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
class Way:
    """One way, and how it chooses its places."""

    name: str
    places: Callable[[Signal, int, int, int], Sequence[int]] = lambda *_: ()
    """Of the signal, the depth, the blocks to add and the seed: where they go, in the old numbering."""
    looks: bool = False
    """Does it pay for the signal?"""
    draw: int = 0


def ways_of(setting: Setting, added: int) -> list[Way]:
    """All ways; of a network that is doubled fewer, as there is little to choose."""
    chosen = [
        Way("none"),
        Way("scratch"),
        Way("signal", strongest, looks=True),
        Way("even", lambda _, depth, added, seed: evenly(depth, added)),
        Way("stack"),
    ]
    if added != ADDED:
        return chosen
    return [
        *chosen,
        *(Way("random", _Random(draw), draw=draw) for draw in range(setting.draws)),
        Way("weakest", weakest, looks=True),
    ]


def looked_for(pupil: Pupil, lesson: Lesson, order: int | str) -> Signal:
    """The signal at all points of a network, on sequences of the training text."""
    estimate, measure = (lesson.batches(f"signal {k} {order}", lesson.setting.units) for k in range(2))
    return signal(pupil.model, next_token_loss, estimate, measure)


def strongest(seen: Signal, depth: int, added: int, seed: int) -> list[int]:
    """The points of the largest gains."""
    return sorted(point.point.index for point in seen.ranked()[:added])


def weakest(seen: Signal, depth: int, added: int, seed: int) -> list[int]:
    """The points of the smallest."""
    return sorted(point.point.index for point in seen.ranked()[-added:])


def evenly(depth: int, added: int) -> list[int]:
    """One behind each of `added` groups of blocks, as LLaMA Pro does it.

    >>> evenly(6, 2), evenly(6, 6)
    ([3, 6], [1, 2, 3, 4, 5, 6])
    """
    return [round(depth * (group + 1) / added) for group in range(added)]


@dataclass(frozen=True)
class _Random:
    draw: int

    def __call__(self, seen: Signal, depth: int, added: int, seed: int) -> list[int]:
        generator = data.generator("growing", "places", seed, self.draw)
        return sorted(generator.choice(depth + 1, added, replace=False).tolist())


def stacked(pupil: Pupil, added: int) -> None:
    """Repeat the last blocks as they are, all of them if depth is doubled. It changes the function.

    References:
        Du et al., Stacking your transformers, 2024 (G_stack).
    """
    blocks = pupil.model.blocks
    for block in copy.deepcopy(list(blocks)[-added:]):
        blocks.append(block)
        pupil.optimizer.param_groups[0]["params"].extend(block.parameters())


def _insert(pupil: Pupil, lesson: Lesson, where: Sequence[int]) -> None:
    """Closed copies of the neighbours, from the last on: what is before a place keeps its number."""
    inputs = lesson.batches("proof", 2)[0][0]
    for place in sorted(where, reverse=True):
        _, proof = insert_block(pupil.model, inputs, place, optimizer=pupil.optimizer)
        if not proof.holds:
            raise RuntimeError(f"a block at {place} changed the function: {proof}")


@dataclass
class Account:
    """What a pupil may spend, what it has spent, and what it had learned by then."""

    setting: Setting
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
        course = Course(pupil, self.lesson, order=self.seed, first=first, factors=factors)
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


def rounded(value: float, digits: int = 6) -> float | None:
    """For JSON, which knows no nan."""
    return round(value, digits) if abs(value) < float("inf") else None
