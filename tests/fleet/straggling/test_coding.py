"""Schemes of gradient coding: loads by the paper's formulas, and rounds in which no job is lost."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from fractions import Fraction

import pytest

from theodolite import UseError
from theodolite.fleet import (
    CodedRounds,
    CodingScheme,
    GradientCoding,
    MultiplexedCoding,
    SelectiveReattempt,
    undecodable,
)

LOADS = [
    # GC(n, s): (s + 1)/n
    (GradientCoding(256, 15), Fraction(16, 256), 0),
    (GradientCoding(12, 3), Fraction(4, 12), 0),
    # SR-SGC(n, B, W, λ): (s + 1)/n with s = ⌈Bλ/(W − 1 + B)⌉
    (SelectiveReattempt(4, burst=1, window=2, stragglers=2), Fraction(2, 4), 1),
    (SelectiveReattempt(256, burst=2, window=3, stragglers=30), Fraction(16, 256), 2),
    (SelectiveReattempt(60, burst=2, window=5, stragglers=7), Fraction(4, 60), 2),
    # M-SGC: (λ + 1)(W − 1 + B)/(n(B + (W − 1)(λ + 1)))
    (MultiplexedCoding(256, burst=1, window=2, stragglers=31), Fraction(32 * 2, 256 * 33), 1),
    (MultiplexedCoding(4, burst=1, window=2, stragglers=1), Fraction(2 * 2, 4 * 3), 1),
    (MultiplexedCoding(60, burst=3, window=5, stragglers=4), Fraction(5 * 7, 60 * 23), 6),
    # M-SGC with λ = n: (W − 1 + B)/(n(W − 1))
    (MultiplexedCoding(256, burst=2, window=4, stragglers=256), Fraction(5, 256 * 3), 4),
]


@pytest.mark.parametrize("scheme, load, delay", LOADS, ids=str)
def test_load_and_delay_are_those_of_the_paper(scheme: CodingScheme, load: Fraction, delay: int) -> None:
    assert Fraction(scheme.minitasks, scheme.parts) == load
    assert scheme.load == pytest.approx(float(load), rel=1e-15)
    assert (scheme.delay, scheme.models) == (delay, delay + 1)


@pytest.mark.parametrize(
    "scheme, load",
    [
        (GradientCoding(10, 2), Fraction(3, 10)),
        (SelectiveReattempt(256, burst=2, window=3, stragglers=23), Fraction(13, 256)),
        (MultiplexedCoding(256, burst=1, window=2, stragglers=27), Fraction(28 * 2, 256 * 29)),
    ],
    ids=str,
)
def test_the_load_is_above_that_of_the_paper_where_workers_cannot_be_grouped_evenly(
    scheme: CodingScheme, load: Fraction
) -> None:
    sizes = [len(range(first, scheme.workers, scheme.groups)) for first in range(scheme.groups)]
    assert float(load) < scheme.load < 1.2 * float(load)
    assert max(sizes) - min(sizes) == 1


def test_late_workers_within_the_bounds_are_allowed_and_others_are_not() -> None:
    scheme = MultiplexedCoding(4, burst=1, window=3, stragglers=2)
    assert not scheme.allows([{0, 1}, set(), {2}])  # three late workers in a window of three rounds
    assert scheme.allows([{0, 1}, set(), set(), {2}])
    assert not scheme.allows([{0}, set(), {0}])  # one of them twice in it
    assert scheme.allows([{0}, set(), set(), {0}])
    assert GradientCoding(4, 2).allows([{0, 1}, {2, 3}])
    assert not GradientCoding(4, 2).allows([{0, 1, 2}])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: GradientCoding(4, 4), "stragglers is 4: give an integer, at least 0, at most 3"),
        (lambda: GradientCoding(0, 0), "workers is 0: give an integer, at least 1"),
        (lambda: MultiplexedCoding(4, 2, 2, 1), "window is 2: give an integer above burst, which is 2"),
        (lambda: MultiplexedCoding(4, 1, 2, 5), "stragglers is 5: give an integer, at least 0, at most 4"),
        (lambda: SelectiveReattempt(4, 2, 4, 1), "window is 4: give a multiple of burst, which is 2, plus 1"),
        (lambda: SelectiveReattempt(1, 1, 2, 1), "workers is 1: give an integer, at least 2"),
        (lambda: MultiplexedCoding(4, True, 2, 1), "burst is True: give an integer, at least 1"),
    ],
)
def test_parameters_that_make_no_scheme_are_refused(make, said: str) -> None:
    with pytest.raises(UseError) as error:
        make()
    assert str(error.value) == said


ENUMERATED = [
    *[(GradientCoding(n, s), 2) for n in (2, 3, 4, 5) for s in range(n)],
    *[
        (scheme(n, burst, window, late), rounds)
        for n, rounds in ((2, 8), (3, 5))
        for burst, window in ((1, 2), (1, 3), (2, 3), (2, 4), (1, 4))
        for late in range(n + 1)
        for scheme in (SelectiveReattempt, MultiplexedCoding)
        if scheme is MultiplexedCoding or (window - 1) % burst == 0
    ],
    *[(scheme(4, 1, 2, late), 4) for late in range(5) for scheme in (SelectiveReattempt, MultiplexedCoding)],
]
MANY = [
    GradientCoding(6, 2),
    SelectiveReattempt(6, 1, 3, 4),
    SelectiveReattempt(7, 2, 3, 3),
    MultiplexedCoding(6, 1, 2, 2),
    MultiplexedCoding(7, 2, 3, 3),
    MultiplexedCoding(6, 3, 5, 6),
]


@pytest.mark.parametrize("scheme, num_rounds", ENUMERATED, ids=str)
def test_every_job_is_complete_with_all_stragglers_that_a_scheme_is_made_for(
    scheme: CodingScheme, num_rounds: int
) -> None:
    assert undecodable(scheme, num_rounds) is None


@dataclass(frozen=True)
class TolerantCode(GradientCoding):
    """Says that any workers may be late."""

    def allows(self, late):
        return True


@dataclass(frozen=True)
class TolerantDiagonal(MultiplexedCoding):
    """The same of M-SGC."""

    def allows(self, late):
        return True


def test_enumeration_finds_stragglers_that_a_scheme_does_not_stand() -> None:
    late = undecodable(TolerantCode(4, stragglers=1), 2)
    assert late == (frozenset(), frozenset({0, 2}))  # the whole of a group
    # One round later all three repeat what they failed to send, and the coded part is missing.
    assert undecodable(TolerantDiagonal(3, burst=1, window=2, stragglers=1), 1) == (frozenset({0, 1, 2}),)


def test_a_job_is_complete_when_all_of_its_parts_have_been_sent() -> None:
    draws = random.Random(0)
    for scheme in MANY:
        rounds, sent = CodedRounds(scheme, jobs=40), {job: set() for job in range(40)}
        complete, turns = [], itertools.count()
        while not rounds.is_over:
            tasks, order = rounds.assignments(), draws.sample(range(scheme.workers), scheme.workers)
            assert max(map(len, tasks)) <= scheme.minitasks
            enough = next(count for count in range(len(order) + 1) if rounds.can_end(order[:count]))
            for worker in order[:enough]:
                for job, part in tasks[worker]:
                    sent[job].add(part)
            ended, now = rounds.end(order[:enough]), next(turns)
            complete += ended
            assert all(len(sent[job]) == scheme.parts and now - scheme.delay <= job <= now for job in ended)
        assert rounds.lost == ()
        assert sorted(complete) == list(range(40))


@pytest.mark.parametrize("scheme", MANY, ids=str)
def test_a_round_cannot_end_with_answers_after_which_a_job_would_be_lost(scheme: CodingScheme) -> None:
    """Against playing on: with nobody late any more, a job is lost only if the round could not end."""
    draws, verdicts = random.Random(1), set()
    for _ in range(60):
        rounds = CodedRounds(scheme)
        for _ in range(8):
            answered = [worker for worker in range(scheme.workers) if draws.random() < 0.6]
            verdict = rounds.can_end(answered)
            verdicts.add(verdict)
            began, before = rounds.turn, len(rounds.lost)
            rounds.end(answered)
            if not verdict:
                break
        for _ in range(scheme.delay):
            rounds.end(range(scheme.workers))
        assert verdict == (not any(job <= began for job in rounds.lost[before:]))
    assert verdicts == {True, False}


def test_without_stragglers_every_job_is_complete_after_its_own_rounds() -> None:
    # M-SGC: W − 1 rounds of parts without a code, and B coded ones. The others: one round.
    for scheme, rounds_each in ((GradientCoding(4, 1), 1), (MultiplexedCoding(4, 2, 3, 1), 4)):
        rounds, ended = CodedRounds(scheme, jobs=5), {}
        for turn in range(5 + scheme.delay):
            ended |= dict.fromkeys(rounds.end(range(4)), turn)
        assert ended == {job: job + rounds_each - 1 for job in range(5)}
        assert rounds.is_over


def test_answers_of_workers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UseError, match="answered has worker 4: workers are 0 to 3"):
        CodedRounds(GradientCoding(4, 1)).end([0, 4])
    with pytest.raises(UseError, match="jobs is 0"):
        CodedRounds(GradientCoding(4, 1), jobs=0)
