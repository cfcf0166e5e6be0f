"""Step times of Gilbert–Elliott stragglers, and two simpler ways to wait than the planner's.

The planner ends a round as soon as the answers suffice. The count: GC waits for any n − s answers, as codes
without groups need it. The model: GC and M-SGC wait until 1 + μ times the fastest worker's time; if those who
are still late then are within the bounds that the scheme is made for, the round ends, otherwise they wait for
all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from theodolite.fleet.straggling.simulation import Seconds, wait_for_all, without_slowest
from theodolite_studies.stragglers.decoding import multiplexed_load

BY_COUNT, GC_MODEL, M_MODEL = "GC, any n − s", "GC, μ = 1", "M-SGC, μ = 1"
MU = 1.0
JITTER = 0.03


@dataclass(frozen=True)
class Stragglers:
    """In each round a worker in time becomes late with probability `enter`, a late one in time by `leave`."""

    workers: int = 64
    enter: float = 0.02
    leave: float = 0.6
    slower: float = 4.0
    """How many times as long a late worker takes."""

    @property
    def share(self) -> float:
        """Of late workers, in the long run."""
        return self.enter / (self.enter + self.leave)

    def times(self, num_rounds: int, seed: int) -> Seconds:
        """Seconds, rounds × workers. A worker in time takes 1 s, up to a few per cent."""
        luck = np.random.default_rng(seed)
        late = luck.random(self.workers) < self.share
        found = np.empty((num_rounds, self.workers))
        for now in found:
            now[:] = np.where(late, self.slower, 1.0)
            change = luck.random(self.workers)
            late = np.where(late, change >= self.leave, change < self.enter)
        return found * np.exp(JITTER * luck.standard_normal(found.shape))


SETTINGS: Mapping[str, Stragglers] = {
    "64 workers": Stragglers(),
    "16 workers": Stragglers(workers=16),
    "256 workers": Stragglers(workers=256),
    "rare": Stragglers(enter=0.002),
    "short": Stragglers(leave=0.95),
    "long": Stragglers(leave=0.2),
    "mild": Stragglers(slower=1.5),
}
"""Of 64 workers, where nothing else is said."""


@dataclass(frozen=True)
class Waited:
    """Seconds of each round with the load that the times have; the load is in units of 1/n."""

    scheme: str
    setting: str
    models: int
    load: float
    seconds: Seconds


def waited(times: Seconds, pairs: Sequence[tuple[int, int]]) -> Iterator[Waited]:
    """By count and by model, for a grid of parameters; pairs of B and W are those of M-SGC."""
    workers = times.shape[1]
    for late in grid(workers - 1):
        seconds = without_slowest(times, late)
        yield Waited(BY_COUNT, f"s = {late}", 1, late + 1, seconds)
        yield Waited(GC_MODEL, f"s = {late}", 1, late + 1, counted(times, late, MU))
    for burst, window in pairs:
        lates = [*grid(workers - 1), workers]
        for late, seconds in zip(lates, modelled(times, burst, window, lates, MU), strict=True):
            load = float(workers * multiplexed_load(workers, burst, window, late))
            setting = f"B = {burst}, W = {window}, λ = {late}"
            yield Waited(M_MODEL, setting, window - 1 + burst, load, seconds)


def grid(most: int) -> list[int]:
    """Numbers of late workers to try, further apart as they grow.

    >>> grid(20)
    [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20]
    """
    found = {
        value for power in range(9) for value in range(2**power, 2 ** (power + 1), max(1, 2**power // 4))
    }
    return sorted(value for value in found if value <= most)


def counted(times: Seconds, late: int, mu: float) -> Seconds:
    """GC by its model: at most so many late workers in a round, or wait for all."""
    limit = (1 + mu) * times.min(1)
    num = (times > limit[:, None]).sum(1)
    found: Seconds = np.where((num > 0) & (num <= late), limit, wait_for_all(times))
    return found


def modelled(times: Seconds, burst: int, window: int, lates: Sequence[int], mu: float) -> Seconds:
    """M-SGC by its model, for several λ: (λ, rounds)."""
    most = np.array(lates)
    history = np.zeros((window - 1, len(most), times.shape[1]), dtype=bool)
    found = np.empty((len(most), len(times)))
    for turn, now in enumerate(times):
        limit = (1 + mu) * now.min()
        late = now > limit
        again = (history[: window - burst].any(0) & late).any(1)  # more than B rounds in a row, or two bursts
        too_many = (history.any(0) | late).sum(1) > most
        ends = ~again & ~too_many & late.any()
        found[:, turn] = np.where(ends, limit, now.max())
        history = np.concatenate([history[1:], (ends[:, None] & late)[None]])
    return found
