"""Times of the study of stragglers: by closed forms, and against rounds that are played one by one."""

from __future__ import annotations

import numpy as np
import pytest

from theodolite.fleet import MultiplexedCoding
from theodolite_studies.stragglers import study
from theodolite_studies.stragglers.report import ANY, GC, MODELS, SLOPES, M
from theodolite_studies.stragglers.waiting import (
    BY_COUNT,
    GC_MODEL,
    M_MODEL,
    SETTINGS,
    Stragglers,
    counted,
    modelled,
)


def test_late_workers_come_and_go_as_often_as_said() -> None:
    some = Stragglers(workers=400, enter=0.05, leave=0.25, slower=4.0)
    late = some.times(2000, seed=0) > 2
    assert late.mean() == pytest.approx(0.05 / 0.3, rel=0.02)
    before, after = late[:-1], late[1:]
    assert (after & before).sum() / before.sum() == pytest.approx(0.75, rel=0.02)
    assert (after & ~before).sum() / (~before).sum() == pytest.approx(0.05, rel=0.02)
    # The slowest of 4 independent workers is late unless none is.
    slowest = late[:, :4].any(1).mean()
    assert slowest == pytest.approx(1 - (1 - 0.05 / 0.3) ** 4, rel=0.1)


def test_gradient_coding_by_its_model_waits_for_all_if_too_many_are_late() -> None:
    times = np.array([[1, 1, 1, 1.5], [1, 1, 9, 1], [1, 9, 8, 1], [2, 2, 2, 4.1]])
    # Nobody late; one late; two, where one is allowed; one after 2 × 2 s.
    assert counted(times, 1, 1.0).tolist() == [1.5, 2.0, 9.0, 4.0]


@pytest.mark.parametrize(("burst", "window"), [(1, 2), (1, 4), (2, 3), (2, 5), (3, 4)])
def test_m_sgc_by_its_model_ends_rounds_while_the_scheme_is_made_for_the_stragglers(
    burst: int, window: int
) -> None:
    times, lates, workers = Stragglers(5, 0.2, 0.5).times(120, seed=burst), [1, 2, 3, 5], 5
    found = modelled(times, burst, window, lates, 1.0)
    seen = set()
    for most, ends in zip(lates, found, strict=True):
        scheme, history = MultiplexedCoding(workers, burst, window, most), []
        for now, end in zip(times, ends, strict=True):
            late = {worker for worker in range(workers) if now[worker] > 2 * now.min()}
            allowed = bool(late) and scheme.allows([*history, late])
            seen.add(allowed)
            assert end == (2 * now.min() if allowed else now.max())
            history.append(late if allowed else set())
    assert seen == {True, False}


def test_one_late_worker_in_turn_by_hand() -> None:
    """In round t worker t mod 8 takes 10 s. Every time is known."""
    times = np.ones((64, 8))
    times[np.arange(64), np.arange(64) % 8] = 10.0
    rows = {(row["scheme"], row["models"]): row for row in study.compared(times)}
    slopes = np.array(SLOPES)
    for key in ((GC, 1), (BY_COUNT, 1)):  # s = 1
        np.testing.assert_allclose(rows[key]["chosen"], (1 + slopes) / 10, rtol=1e-3)
    np.testing.assert_allclose(rows[GC_MODEL, 1]["chosen"], 2 * (1 + slopes) / 10, rtol=1e-3)
    # No worker is late again within 8 rounds: no M-SGC waits. With 8 models, B = 1 and W = 8, all of 8
    # workers late in a window have load 8/7, which is the least.
    np.testing.assert_allclose(rows[M_MODEL, 8]["chosen"], 2 * (1 + slopes / 7) / 10, rtol=1e-3)
    # With 4 models, B = 1 and W = 4, four workers are late in a window. By the model this needs λ = 4: a
    # worker computes 5·4 of 8·(1 + 3·5) parts. The planner ends rounds as soon as the answers suffice, for
    # which λ = 1 is enough: 2·4 of 8·(1 + 3·2) parts. With a = 0, GC is as good.
    np.testing.assert_allclose(rows[M_MODEL, 4]["chosen"], 2 * (1 + slopes / 4) / 10, rtol=1e-3)
    np.testing.assert_allclose(rows[M, 4]["chosen"], (1 + slopes / 7) / 10, rtol=1e-3)
    assert set(rows[ANY, 4]["schemes"][1:]) == {M}
    for row in rows.values():
        np.testing.assert_allclose(row["chosen"], row["best"])
    assert {models for _, models in rows} == {1, *MODELS}


def test_parameters_of_the_first_half_are_judged_on_the_second() -> None:
    """One late worker of four in each round of the first half; in the second two, which are even later."""
    times = np.ones((40, 4))
    for turn in range(40):
        half = turn // 20
        times[turn, [turn % 4, (turn + 1) % 4][: 1 + half]] = 10.0 + 10 * half
    rows = {row["scheme"]: row for row in study.compared(times)}
    slopes = np.array(SLOPES)
    # With s = 1 no round of the first half waits for a late worker, and every one of the second does.
    np.testing.assert_allclose(rows[BY_COUNT]["chosen"], 1 + slopes, rtol=1e-3)
    # Best on the second half: s = 2, with three times the load.
    np.testing.assert_allclose(rows[BY_COUNT]["best"], (1 + 2 * slopes) / 20, rtol=1e-3)


def test_every_setting_has_its_own_seeds() -> None:
    times = [setting.times(3, seed) for setting in SETTINGS.values() for seed in (0, 1)]
    assert len({one.tobytes() for one in times}) == len(times)
