"""Times of rounds in closed form, against the rounds played one answer after the other."""

from __future__ import annotations

import numpy as np
import pytest

from theodolite.fleet import CodedRounds, CodingScheme, GradientCoding, MultiplexedCoding, SelectiveReattempt
from theodolite.fleet.straggling import simulation

PATIENCE = (0.0, 0.2, 1.0)


def played(times: np.ndarray, scheme: CodingScheme, mu: float) -> list[float]:
    """The master waits for one answer after the other until the round may end."""
    rounds, ends = CodedRounds(scheme), []
    for now in times:
        earliest = min((1 + mu) * now.min(), now.max())
        for end in sorted({earliest, *now[now >= earliest]}):
            answered = [worker for worker, seconds in enumerate(now) if seconds <= end]
            if rounds.can_end(answered):
                break
        rounds.end(answered)
        ends.append(end)
    assert rounds.lost == ()
    return ends


def drawn(workers: int, seed: int, rounds: int = 25) -> np.ndarray:
    random = np.random.default_rng(seed)
    slow = np.where(random.random((rounds, workers)) < 0.3, 4.0, 1.0)
    return slow * np.exp(0.1 * random.standard_normal((rounds, workers)))


@pytest.mark.parametrize("workers", [2, 3, 5, 7])
def test_gradient_coding_takes_as_long_as_the_rounds_played(workers: int) -> None:
    times = drawn(workers, workers)
    for late in range(workers):
        code = GradientCoding(workers, late)
        assert simulation.gradient_coding(times, code.groups).tolist() == played(times, code, 0.0)


@pytest.mark.parametrize("burst, window", [(1, 2), (2, 3), (1, 4), (3, 4)])
@pytest.mark.parametrize("workers, late", [(2, 1), (5, 2), (6, 6), (7, 4)])
def test_sr_sgc_takes_as_long_as_the_rounds_played(burst: int, window: int, workers: int, late: int) -> None:
    times, code = drawn(workers, late), SelectiveReattempt(workers, burst, window, late)
    for mu, ends in zip(PATIENCE, simulation.selective_reattempt(times, code, PATIENCE), strict=True):
        assert ends.tolist() == played(times, code, mu)


@pytest.mark.parametrize("burst, window", [(1, 2), (2, 3), (1, 4), (3, 5)])
@pytest.mark.parametrize("workers", [2, 5, 6])
def test_m_sgc_takes_as_long_as_the_rounds_played(burst: int, window: int, workers: int) -> None:
    times = drawn(workers, burst)
    codes = [MultiplexedCoding(workers, burst, window, late) for late in (0, 1, workers - 1, workers)]
    found = simulation.multiplexed(times, codes[0], [code.groups for code in codes], PATIENCE)
    for code, rows in zip(codes, found, strict=True):
        for mu, ends in zip(PATIENCE, rows, strict=True):
            assert ends.tolist() == played(times, code, mu)


def test_backup_workers_wait_for_all_but_the_slowest() -> None:
    times = drawn(6, 0)
    ordered = np.sort(times, axis=1)
    assert simulation.without_slowest(times, 2).tolist() == ordered[:, 3].tolist()
    assert simulation.wait_for_all(times).tolist() == ordered[:, 5].tolist()
