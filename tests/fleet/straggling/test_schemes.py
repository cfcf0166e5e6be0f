"""Schemes of gradient coding: their loads against the formulas of the paper, and what they refuse."""

from __future__ import annotations

from fractions import Fraction

import pytest

from theodolite import UseError
from theodolite.fleet import CodingScheme, GradientCoding, MultiplexedCoding, SelectiveReattempt

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
