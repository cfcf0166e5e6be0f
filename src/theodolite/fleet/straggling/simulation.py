"""How long rounds of measured step times would have taken with each scheme and its parameters.

Times are an array (rounds, workers) of seconds with 1/n of the batch on each worker. A worker with more work
takes longer by the same factor as every other, so that the factor of a scheme's load can be multiplied in
afterwards: nothing here depends on it.

The master ends a round as soon as the answers that it has are enough, but not before (1 + μ) times the
fastest worker's time, unless all have answered. What is enough, `CodedRounds.can_end` defines by looking
ahead; here it is a maximum over the workers and groups that must answer in this round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite.core.progress import Progress, part, silent
from theodolite.fleet.straggling.coding import GradientCoding, MultiplexedCoding, SelectiveReattempt

Seconds = NDArray[np.float64]
WAIT, LEAVE, BACKUP = "wait for all", "leave out", "backup workers"


@dataclass(frozen=True)
class TimedScheme:
    """A scheme with its parameters, and the seconds of each round with the load that the times have."""

    scheme: str
    setting: str
    models: int
    load: float
    """In multiples of 1/workers."""
    sends: int
    seconds: Seconds

    def factor(self, overhead: float | Seconds, sending: float) -> Any:
        """By how much a round is longer than with the load that the times have."""
        return overhead + sending * self.sends + (1 - overhead - sending) * self.load


def timed_schemes(
    times: Seconds,
    half: int,
    names: Sequence[str],
    models: int,
    patience: Sequence[float],
    progress: Progress = silent,
) -> Iterator[TimedScheme]:
    """Every scheme with every set of parameters that is tried. `half` is where the first half ends."""
    workers = times.shape[1]
    yield TimedScheme(WAIT, "", 1, 1.0, 1, wait_for_all(times))
    order = np.argsort(-times[:half].mean(0), kind="stable")
    for num in range(1, max(1, workers // 4) + 1):
        load = workers / (workers - num)
        out = ", ".join(names[place] for place in order[:num]) if num <= 3 else f"the {num} slowest"
        rest = wait_for_all(np.delete(times, order[:num], axis=1))
        yield TimedScheme(LEAVE, f"without {out}", 1, load, 1, rest)
        late = without_slowest(times, num)
        yield TimedScheme(BACKUP, f"{num} of {workers}", 1, load, 1, late)
    for late_ones in _stragglers(workers, range(1, workers)):
        code = GradientCoding(workers, late_ones)
        seconds = gradient_coding(times, code.groups)
        yield TimedScheme("GC", f"s = {late_ones}", 1, code.load * workers, 1, seconds)
    yield from _reattempts(times, models, patience)
    pairs = [(burst, count - burst + 1) for count in _spread(models, 2) for burst in _spread(count // 2, 1)]
    for place, pair in enumerate(pairs):
        inner = part(progress, place / len(pairs), (place + 1) / len(pairs))
        yield from _multiplexed(times, *pair, patience, inner)


def _reattempts(times: Seconds, models: int, patience: Sequence[float]) -> Iterator[TimedScheme]:
    """SR-SGC, with the shortest window that its delay allows; a longer one is the same scheme."""
    workers = times.shape[1]
    for burst in _spread(models - 1, 1):
        for late in _stragglers(workers, _spread(min(workers - 1, 8), 1)):
            code = SelectiveReattempt(workers, burst, burst + 1, min(2 * late, workers))
            seconds = selective_reattempt(times, code, patience)
            for mu, own in zip(patience, seconds, strict=True):
                setting = f"B = {burst}, W = {code.window}, λ = {code.stragglers}, μ = {mu:g}"
                yield TimedScheme("SR-SGC", setting, code.models, code.load * workers, 1, own)


def _multiplexed(
    times: Seconds, burst: int, window: int, patience: Sequence[float], progress: Progress
) -> Iterator[TimedScheme]:
    workers = times.shape[1]
    most = [*_stragglers(workers, _spread(workers - 1, 1)), workers]
    codes = [MultiplexedCoding(workers, burst, window, late) for late in most]
    found = multiplexed(times, codes[0], [code.groups for code in codes], patience, progress)
    for code, rows in zip(codes, found, strict=True):
        for mu, own in zip(patience, rows, strict=True):
            setting = f"B = {burst}, W = {window}, λ = {code.stragglers}, μ = {mu:g}"
            yield TimedScheme("M-SGC", setting, code.models, code.load * workers, code.minitasks, own)


def _stragglers(workers: int, wanted: Iterable[int]) -> list[int]:
    """Numbers of late workers that a code is made for: the largest with as many groups as those wanted.

    >>> _stragglers(12, range(1, 12))
    [1, 2, 3, 5, 11]
    """
    return sorted({workers // (workers // (late + 1)) - 1 for late in wanted})


def _spread(most: int, least: int) -> list[int]:
    """Whole numbers up to `most`, further apart as they grow.

    >>> _spread(20, 1)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    powers = {3 * 2**k for k in range(8)} | {2**k for k in range(9)} | {most}
    return [value for value in sorted(powers) if least <= value <= most]


def group_min(times: Seconds, groups: int) -> Seconds:
    """The fastest worker of each group along the last axis; worker i is in group `i % groups`.

    >>> group_min(np.array([5.0, 2.0, 3.0, 4.0, 1.0]), 2)
    array([1., 2.])
    """
    *others, workers = times.shape
    size = -(-workers // groups)
    padded = np.full((*others, size * groups), np.inf)
    padded[..., :workers] = times
    found: Seconds = padded.reshape(*others, size, groups).min(-2)
    return found


def wait_for_all(times: Seconds) -> Seconds:
    """The slowest worker of each round."""
    found: Seconds = times.max(-1)
    return found


def without_slowest(times: Seconds, num: int) -> Seconds:
    """The slowest of the workers that answer first, if those that answer last are not waited for."""
    place = times.shape[-1] - 1 - num
    found: Seconds = np.partition(times, place, axis=-1)[..., place]
    return found


def gradient_coding(times: Seconds, groups: int) -> Seconds:
    """GC: the slowest group, each as fast as its fastest worker."""
    found: Seconds = group_min(times, groups).max(-1)
    return found


def selective_reattempt(times: Seconds, scheme: SelectiveReattempt, patience: Sequence[float]) -> Seconds:
    """SR-SGC: an array (patience, rounds), for each μ."""
    groups, burst = scheme.groups, scheme.burst
    mu, workers = np.asarray(patience, dtype=float), np.arange(scheme.workers)
    lacking = [np.zeros((len(mu), groups), dtype=bool) for _ in range(burst)]
    ends = np.empty((len(mu), len(times)))
    for turn, now in enumerate(times):
        again = lacking.pop(0)  # by the first worker of each group, workers 0 to groups − 1
        due = np.where(again, now[:groups], 0).max(-1)
        ends[:, turn] = np.maximum(_earliest(now, mu), due)
        answers = now <= ends[:, turn, None]
        answers[:, :groups] &= ~again
        got = np.zeros_like(again)
        for start in range(0, len(workers), groups):
            some = answers[:, start : start + groups]
            got[:, : some.shape[1]] |= some
        lacking.append(~got)
    return ends


def multiplexed(
    times: Seconds,
    scheme: MultiplexedCoding,
    groups: Sequence[int],
    patience: Sequence[float],
    progress: Progress = silent,
) -> Seconds:
    """M-SGC for several numbers of groups, 0 for no code, at once: (groups, patience, rounds).

    `late[j]` counts, for the job that began j rounds ago, the parts that each worker has tried and not sent.
    """
    burst, slots, num = scheme.burst, scheme.minitasks, times.shape[1]
    mu = np.asarray(patience, dtype=float)
    first = np.arange(slots) < scheme.window - 1  # slots of first attempts; the others are for late parts
    left = np.where(first, burst, slots - 1 - np.arange(slots))[:, None, None, None]
    late = np.zeros((slots, len(groups), len(mu), num), dtype=np.int16)
    ends = np.empty((len(groups), len(mu), len(times)))
    for turn, now in enumerate(times):
        late[0] = 0
        open_ = min(turn + 1, slots)  # before the first round there was no job
        own, begun = late[:open_], first[:open_, None, None, None]
        # One more failure of these workers could not be made up for in the rounds that are left.
        must = (own + begun > left[:open_]) & (begun | (own > 0))
        due = np.where(must.any(0), now, 0).max(-1)
        ready = np.where(own == 0, now, np.inf)  # workers that are free for the group's part
        for place, count in enumerate(groups):
            if count:
                slowest = group_min(ready[:, place], count).max((0, -1))
                due[place] = np.maximum(due[place], slowest)
        ends[..., turn] = np.maximum(_earliest(now, mu), due)
        answers = now <= ends[..., turn, None]
        own += np.where(begun, ~answers, -((own > 0) & answers).astype(np.int16))
        late[1:] = late[:-1].copy()
        if turn % 50 == 0:
            progress("simulating", turn / len(times))
    return ends


def _earliest(now: Seconds, mu: Seconds) -> Seconds:
    """When a round may end: nobody late by less than μ times the fastest is a straggler."""
    found: Seconds = np.minimum((1 + mu) * now.min(), now.max())
    return found
