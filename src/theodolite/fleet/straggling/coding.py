"""Schemes of gradient coding, and the rounds of a training with one of them.

A scheme says which worker computes which part of which job in each round. `CodedRounds` keeps the books of a
training: what is missing, who may be late, what is complete.

A job is one gradient, a sum over a batch. Its examples are split into equal parts. In each round every worker
has a few minitasks, each the gradient of one part for one job, and sends what it has if it is not late. The
code is fractional repetition: a group of workers computes the same part, so that one of them is enough, and a
job's gradient is the sum of its parts. Job t begins in round t and is to be complete by round t + delay.

References:
    Tandon et al., Gradient coding: avoiding stragglers in distributed learning, 2017. Krishnan et al.,
    Sequential gradient coding for straggler mitigation, 2023.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from theodolite.core.arguments import whole
from theodolite.core.errors import UseError

Minitask = tuple[int, int]
"""A job and one of its parts."""
Pattern = tuple[frozenset[int], ...]
"""By round, the workers that are late."""


@dataclass(frozen=True)
class CodingScheme(ABC):
    """Base class of the schemes of gradient coding."""

    workers: int

    @property
    @abstractmethod
    def delay(self) -> int:
        """Rounds after its first in which a job may still be completed."""

    @property
    @abstractmethod
    def groups(self) -> int:
        """Groups of workers that compute the same part; worker i is in group `i % groups`. 0 for no code."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Equal parts of the examples of a job."""

    @property
    @abstractmethod
    def minitasks(self) -> int:
        """Parts that a worker computes in a round, each for another job."""

    @abstractmethod
    def assign(self, turn: int, missing: Mapping[int, Collection[int]]) -> list[list[Minitask]]:
        """The minitasks of each worker in a round.

        Args:
            turn: number of the round, from 0.
            missing: of the jobs that have begun, this round's included: the parts that nobody has sent yet.
        """

    @abstractmethod
    def allows(self, late: Sequence[Collection[int]]) -> bool:
        """Is it made for these stragglers? By round, the workers that are late."""

    @property
    def models(self) -> int:
        """Models that have to be trained in turn: the next step of one needs its last gradient."""
        return self.delay + 1

    @property
    def load(self) -> float:
        """Share of a job's examples that a worker computes in a round; 1/workers without a code."""
        return self.minitasks / self.parts


@dataclass(frozen=True)
class GradientCoding(CodingScheme):
    """GC(n, s): any s workers may be late in a round. `stragglers` is s.

    Where s + 1 does not divide n, groups have s + 1 workers or more, and the load is above (s + 1)/n.

    >>> GradientCoding(256, stragglers=15).load, GradientCoding(10, stragglers=2).load
    (0.0625, 0.3333333333333333)
    """

    stragglers: int

    def __post_init__(self) -> None:
        whole("workers", self.workers, least=1)
        whole("stragglers", self.stragglers, least=0, most=self.workers - 1)

    @property
    def delay(self) -> int:
        """None: a job is complete at the end of its round."""
        return 0

    @property
    def groups(self) -> int:
        """As many as have s + 1 workers each."""
        return self.workers // (self.stragglers + 1)

    @property
    def parts(self) -> int:
        """One for each group."""
        return self.groups

    @property
    def minitasks(self) -> int:
        """The part of its group."""
        return 1

    def assign(self, turn: int, missing: Mapping[int, Collection[int]]) -> list[list[Minitask]]:
        """The part of its group."""
        return [[(turn, worker % self.groups)] if turn in missing else [] for worker in range(self.workers)]

    def allows(self, late: Sequence[Collection[int]]) -> bool:
        """At most s in each round?"""
        return all(len(set(workers)) <= self.stragglers for workers in late)


@dataclass(frozen=True)
class BurstCoding(CodingScheme):
    """A scheme for bursts: what is late is computed again `burst` rounds later, or in the rounds after.

    In every window of W rounds at most λ workers are late, each of them only within B rounds in a row.
    `burst` is B, `window` W, and `stragglers` λ.
    """

    burst: int
    window: int
    stragglers: int

    def __post_init__(self) -> None:
        whole("workers", self.workers, least=1)
        whole("burst", self.burst, least=1)
        whole(
            "window",
            self.window,
            least=self.burst + 1,
            wanted=f"give an integer above burst, which is {self.burst}",
        )
        whole("stragglers", self.stragglers, least=0, most=self.workers)

    def allows(self, late: Sequence[Collection[int]]) -> bool:
        """Does every window of W rounds have at most λ late workers, each late within B rounds in a row?"""
        for end in range(1, len(late) + 1):
            rounds: dict[int, list[int]] = {}
            for turn in range(max(0, end - self.window), end):
                for worker in late[turn]:
                    rounds.setdefault(worker, []).append(turn)
            if len(rounds) > self.stragglers or any(
                own[-1] - own[0] >= self.burst for own in rounds.values()
            ):
                return False
        return True


@dataclass(frozen=True)
class SelectiveReattempt(BurstCoding):
    """SR-SGC(n, B, W, λ): GC with fewer stragglers, and groups without any answer try again B rounds later.

    The first worker of such a group then leaves the new job to the others. B divides W − 1.

    >>> SelectiveReattempt(256, burst=2, window=3, stragglers=22).coded
    11
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("workers", self.workers, least=2)
        if (self.window - 1) % self.burst:
            raise UseError(
                f"window is {self.window}: give a multiple of burst, which is {self.burst}, plus 1"
            )

    @property
    def coded(self) -> int:
        """The s of its code: ⌈Bλ/(W − 1 + B)⌉."""
        return min(math.ceil(self.burst * self.stragglers / (self.window - 1 + self.burst)), self.workers - 1)

    @property
    def delay(self) -> int:
        """B rounds."""
        return self.burst

    @property
    def groups(self) -> int:
        """As many as have s + 1 workers each."""
        return self.workers // (self.coded + 1)

    @property
    def parts(self) -> int:
        """One for each group."""
        return self.groups

    @property
    def minitasks(self) -> int:
        """The part of its group, for the new job or for an old one."""
        return 1

    def assign(self, turn: int, missing: Mapping[int, Collection[int]]) -> list[list[Minitask]]:
        """The part of its group for the new job; for the one of B rounds ago where that lacks it."""
        old, groups = turn - self.burst, self.groups
        again = missing.get(old, ())
        return [
            [(old, worker)]
            if worker < groups and worker in again  # the first worker of group i is worker i
            else [(turn, worker % groups)]
            if turn in missing
            else []
            for worker in range(self.workers)
        ]


@dataclass(frozen=True)
class MultiplexedCoding(BurstCoding):
    """M-SGC(n, B, W, λ): small parts without a code, computed again if late, and B coded ones at the end.

    A worker has W − 1 parts of a job to itself, one for each of the job's first W − 1 rounds. In the B rounds
    after these it computes again what was late, or else a part of its group. With λ = n there is no code.

    >>> MultiplexedCoding(256, burst=1, window=2, stragglers=31).load * 256
    1.9393939393939394
    """

    @property
    def delay(self) -> int:
        """W − 2 + B rounds."""
        return self.window - 2 + self.burst

    @property
    def groups(self) -> int:
        """As many as have λ + 1 workers each; 0 for λ = n."""
        return self.workers // (self.stragglers + 1)

    @property
    def parts(self) -> int:
        """W − 1 for each worker, then B for each group."""
        return self.workers * (self.window - 1) + self.burst * self.groups

    @property
    def minitasks(self) -> int:
        """One for each of W − 1 + B jobs."""
        return self.window - 1 + self.burst

    def assign(self, turn: int, missing: Mapping[int, Collection[int]]) -> list[list[Minitask]]:
        """Along the diagonal: the newest job's first part, the next one's second, …"""
        return [
            [
                task
                for slot in range(self.minitasks)
                if (task := self._slot(worker, turn - slot, slot, missing))
            ]
            for worker in range(self.workers)
        ]

    def _slot(
        self, worker: int, job: int, slot: int, missing: Mapping[int, Collection[int]]
    ) -> Minitask | None:
        """What a worker does for a job that began `slot` rounds ago."""
        own, coded = self.window - 1, slot - (self.window - 1)
        if job not in missing:
            return None
        if coded < 0:
            return job, worker * own + slot
        late = [part for part in range(worker * own, (worker + 1) * own) if part in missing[job]]
        if late:
            return job, late[0]
        if not self.groups:
            return None
        return job, self.workers * own + coded * self.groups + worker % self.groups


class CodedRounds:
    """The rounds of a scheme, one after the other.

    Send each worker its `assignments`, collect answers until the workers that have answered may `end` the
    round, and call `end` with them. A round may end while a worker is late if every job can still be
    complete in time, provided that nobody is late in the rounds that follow.

    >>> from theodolite.fleet import CodedRounds, GradientCoding
    >>> rounds = CodedRounds(GradientCoding(4, stragglers=1), jobs=2)
    >>> rounds.assignments()
    [[(0, 0)], [(0, 1)], [(0, 0)], [(0, 1)]]
    >>> rounds.can_end([0, 2]), rounds.can_end([0, 1])
    (False, True)
    >>> rounds.end([0, 1])
    (0,)
    """

    def __init__(self, scheme: CodingScheme, jobs: int | None = None) -> None:
        self.scheme = scheme
        self.jobs = None if jobs is None else whole("jobs", jobs, least=1)
        """How many there are; without an end if None."""
        self.turn = 0
        """Number of the round."""
        self.missing: dict[int, set[int]] = {}
        """Of the jobs that have begun and are not complete: the parts that nobody has sent."""
        self.lost: tuple[int, ...] = ()
        """Jobs that were not complete in time."""
        self._begin()

    @property
    def is_over(self) -> bool:
        """Are all jobs complete, or lost?"""
        return self.jobs is not None and self.turn >= self.jobs and not self.missing

    def assignments(self) -> list[list[Minitask]]:
        """The minitasks of each worker in this round: pairs of job and part."""
        return self.scheme.assign(self.turn, self.missing)

    def can_end(self, answered: Collection[int]) -> bool:
        """Would every job be complete in time if the round ended with these answers?"""
        future = self._copy()
        future.end(answered)
        newest, everybody = self.turn, range(self.scheme.workers)
        for _ in range(self.scheme.delay):
            if future.lost:
                return False
            future.end(everybody)
        return not any(job <= newest for job in future.lost)

    def end(self, answered: Collection[int]) -> tuple[int, ...]:
        """End the round with the answers of these workers; gives the jobs that are complete now."""
        if strange := set(answered) - set(range(self.scheme.workers)):
            raise UseError(f"answered has worker {min(strange)}: workers are 0 to {self.scheme.workers - 1}")
        tasks = self.assignments()
        for worker in answered:
            for job, part in tasks[worker]:
                self.missing[job].discard(part)
        complete = tuple(job for job, parts in self.missing.items() if not parts)
        overdue = [
            job for job in self.missing if job <= self.turn - self.scheme.delay and job not in complete
        ]
        self.lost += tuple(overdue)
        for job in (*complete, *overdue):
            del self.missing[job]
        self.turn += 1
        self._begin()
        return complete

    def _begin(self) -> None:
        if self.jobs is None or self.turn < self.jobs:
            self.missing[self.turn] = set(range(self.scheme.parts))

    def _copy(self) -> Self:
        other = object.__new__(type(self))
        other.scheme, other.jobs, other.turn, other.lost = (self.scheme, self.jobs, self.turn, ())
        other.missing = {job: set(parts) for job, parts in self.missing.items()}
        return other


def undecodable(scheme: CodingScheme, num_rounds: int) -> Pattern | None:
    """A pattern of stragglers that a scheme should tolerate but with which it loses a job; None without one.

    Goes through all patterns of late workers that `scheme.allows` over this many rounds; then everybody
    answers until the last job is due. There are up to 2^(workers × rounds) patterns: small numbers only.

    >>> from theodolite.fleet import MultiplexedCoding
    >>> undecodable(MultiplexedCoding(3, burst=1, window=2, stragglers=1), 5) is None
    True
    """
    whole("num_rounds", num_rounds, least=1)
    subsets = [
        frozenset(late)
        for size in range(scheme.workers + 1)
        for late in itertools.combinations(range(scheme.workers), size)
    ]
    found = _failures(scheme, CodedRounds(scheme, jobs=num_rounds), (), num_rounds, subsets)
    return next(found, None)


def _failures(
    scheme: CodingScheme, state: CodedRounds, late: Pattern, left: int, subsets: list[frozenset[int]]
) -> Iterator[Pattern]:
    """Depth first, so that patterns that begin alike share the rounds at their beginning."""
    everybody = set(range(scheme.workers))
    if not left:
        for _ in range(scheme.delay):
            state.end(everybody)
        if state.lost:
            yield late
        return
    for some in subsets:
        longer = (*late, some)
        if not scheme.allows(longer):
            continue
        after = state._copy()
        after.end(everybody - some)
        if after.lost:
            yield longer
        else:
            yield from _failures(scheme, after, longer, left - 1, subsets)
