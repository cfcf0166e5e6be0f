"""Rounds of coded training as a master sees them: what is missing, who may be late, what is complete."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Self

from theodolite.core.arguments import whole
from theodolite.core.errors import UseError
from theodolite.fleet.straggling.schemes import CodingScheme, Minitask

Pattern = tuple[frozenset[int], ...]
"""By round, the workers that are late."""


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
        other.scheme, other.jobs, other.turn, other.lost = self.scheme, self.jobs, self.turn, ()
        other.missing = {job: set(parts) for job, parts in self.missing.items()}
        return other


def undecodable(scheme: CodingScheme, num_rounds: int) -> Pattern | None:
    """Stragglers that a scheme is made for, but with which a job is not complete in time; None if none exist.

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
