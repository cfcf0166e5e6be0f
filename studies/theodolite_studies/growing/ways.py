"""Ways to make a network deeper: where the signal is, evenly, at random, by stacking, from scratch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from theodolite import data
from theodolite.growing import certificate, clip_from
from theodolite.probes.example_losses import losses_of
from theodolite.workloads import next_token_loss
from theodolite_studies.framework.records import Record
from theodolite_studies.growing.setting import ADDED, Setting
from theodolite_studies.growing.signals import Jumps, Look, inserted, jumped, looked_at, tried
from theodolite_studies.growing.training import (
    Course,
    Lesson,
    Pupil,
    enrolled,
    flops_of,
    judged,
    rounded,
    wsd,
)


def grown_in_all_ways(setting: Setting, seed: int, added: int, device: str) -> Iterator[Record]:
    """A record for each way, of one seed: all go on from one trained network, and spend the same in all."""
    lesson = Lesson.of(setting, device)
    start = time.perf_counter()
    pupil = enrolled(setting, setting.width, setting.depth, seed, device)
    factors = wsd(setting.before, warmup=setting.warmup, decay=0)
    Course(pupil, lesson, order=seed, first=0, factors=factors).go(setting.before)
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
    look: Look
    jumps: Jumps
    """Along the preconditioned directions, at each point by itself."""

    @staticmethod
    def of(pupil: Pupil, lesson: Lesson, seed: int) -> Known:
        """Look at the signal, and try a jump at every point."""
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


def ways_of(setting: Setting, added: int) -> list[Way]:
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


def inserted_all(pupil: Pupil, look: Look, places: Sequence[int]) -> None:
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
