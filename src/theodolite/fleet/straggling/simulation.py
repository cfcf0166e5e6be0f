"""How long rounds of measured step times would have taken with each scheme, in closed form.

Times are an array (rounds, workers) of seconds with 1/n of the batch on each worker. A worker with more work
takes longer by the same factor as every other, so that the factor of a scheme's load can be multiplied in
afterwards: nothing here depends on it.

The master ends a round as soon as the answers that it has are enough, but not before (1 + μ) times the
fastest worker's time, unless all have answered. What is enough, `CodedRounds.can_end` defines by looking
ahead; here it is a maximum over the workers and groups that must answer in this round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from theodolite.core.progress import Progress, silent
from theodolite.fleet.straggling.schemes import MultiplexedCoding, SelectiveReattempt

Seconds = NDArray[np.float64]


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
