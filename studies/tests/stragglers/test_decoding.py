"""Patterns of late workers, by counting them by hand; jobs that are lost; and random cyclic codes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from math import comb

import numpy as np
import pytest

from theodolite.fleet import GradientCoding, MultiplexedCoding, SelectiveReattempt
from theodolite_studies.stragglers.cyclic_codes import cyclic_code, decoded, rounding
from theodolite_studies.stragglers.decoding import (
    DRAWN,
    drawn,
    enumerated,
    load_errors,
    multiplexed_load,
    num_lost,
    random_patterns,
)


def test_all_patterns_are_enumerated() -> None:
    # GC(5, 1): none or one of five, in each of 4 rounds.
    assert len(list(enumerated(GradientCoding(5, 1), 4))) == 6**4
    # B = 1, W = 2, λ = n: any workers that were not late the round before. By worker, the numbers of words
    # of 5 letters without two late ones in a row: Fibonacci's 13.
    assert len(list(enumerated(MultiplexedCoding(3, 1, 2, 3), 5))) == 13**3
    # The same with λ = 1: nobody, or one, but after a late one only nobody. a' = a + b, b' = 4a.
    nobody, one = 1, 4
    for _ in range(4):
        nobody, one = nobody + one, 4 * nobody
    assert len(list(enumerated(MultiplexedCoding(4, 1, 2, 1), 5))) == nobody + one


@pytest.mark.parametrize("scheme", DRAWN.values(), ids=list(DRAWN))
def test_random_patterns_are_those_that_a_scheme_is_made_for_and_reach_its_bounds(scheme) -> None:
    luck = random.Random(0)
    patterns = [drawn(scheme, 12, luck) for _ in range(20)]
    assert all(scheme.allows(late) for late in patterns)
    most = max(len(now) for late in patterns for now in late)
    assert most == scheme.stragglers


@dataclass(frozen=True)
class BiggerGroups(GradientCoding):
    """Claims to stand one late worker more than it does."""

    @property
    def groups(self) -> int:
        return self.workers // self.stragglers


@dataclass(frozen=True)
class NoAttempt(MultiplexedCoding):
    """Never computes again what was late."""

    def _slot(self, worker, job, slot, missing):
        fresh = {job: range(self.parts)} if job in missing else {}
        return super()._slot(worker, job, slot, fresh) if slot < self.window - 1 else None


def test_jobs_are_lost_where_a_scheme_does_not_stand_its_stragglers() -> None:
    assert num_lost(BiggerGroups(4, 2), [frozenset({0, 2})]) == 1
    assert num_lost(GradientCoding(4, 1), [frozenset({0, 1}), frozenset({0, 2})]) == 1
    assert num_lost(SelectiveReattempt(4, 1, 2, 2), [frozenset({0, 2}), frozenset({0, 2})]) == 1
    assert random_patterns(NoAttempt(6, 1, 2, 2), 0, 3)[0] > 0


def test_loads() -> None:
    assert multiplexed_load(4, 1, 2, 2) == Fraction(3, 8)  # 0.375, as published with the code
    assert multiplexed_load(4, 1, 2, 4) == Fraction(1, 2)
    assert all(wrong == 0 and tried > 100 for wrong, tried in load_errors().values())


@pytest.mark.parametrize(("n", "s"), [(6, 2), (20, 4)])
def test_a_cyclic_code_decodes_any_late_workers(n: int, s: int) -> None:
    luck = np.random.default_rng(0)
    B = cyclic_code(n, s, luck)
    assert (np.count_nonzero(B, axis=1) == s + 1).all()
    assert np.linalg.matrix_rank(B) == n - s
    for _ in range(min(20, comb(n, s))):
        answered = luck.permutation(n)[s:]
        np.testing.assert_allclose(decoded(B, answered) @ B[answered], np.ones(n), atol=1e-9)


def test_rounding_errors_grow_with_the_coefficients_and_not_with_groups() -> None:
    found = rounding(20, 4, seed=0, patterns=10)
    assert found["median double"] < 1e-10 < found["repetition"] < 1e-6 * 2
    assert found["largest single"] > found["median single"] > found["repetition"]
    assert found["median amplification"] > 10
    assert found["largest single"] < 1e-7 * found["largest amplification"]
