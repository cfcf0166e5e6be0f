"""Progress says how far the runs are and how long the rest takes, and does not fill a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from theodolite.fleet.driver import ProgressListener
from theodolite.fleet.run import Outcome
from theodolite.present.bar import Bar

from . import tiny


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def over(run, seconds: float, status: str = "finished", step: int | None = None) -> Outcome:
    return Outcome(run, status, run.steps if step is None else step, None, seconds=seconds)


def counting(runs, clock) -> ProgressListener:
    listener = ProgressListener(lambda title, done: None, clock)
    listener.opened(runs, before=0)
    return listener


def test_time_left_goes_by_the_work_that_is_left_not_by_the_number_of_runs() -> None:
    # Nine runs of 10 steps and one of 910: after the long one, 9 % of the work is left, not 90 %.
    clock = Clock()
    runs = [tiny.run(steps=910), *(tiny.run(seed=seed, steps=10) for seed in range(1, 10))]
    tally = counting(runs, clock)
    assert tally.seconds_left() is None
    tally.begun(runs[0])
    clock.now = 910.0
    tally.ended(over(runs[0], 910.0))
    assert tally.seconds_left() == pytest.approx(90.0)
    tally.begun(runs[1])
    clock.now += 4.0
    assert tally.seconds_left() == pytest.approx(86.0)
    assert tally.line() == "1 of 10 runs done, 1 running, about 1 min left"


def test_workers_share_the_time_and_models_in_one_program_do_not_count_twice() -> None:
    clock = Clock()
    runs = [tiny.run(seed=seed, steps=10) for seed in range(12)]
    for workers, left in ((4, 20.0), (1, 80.0)):
        clock.now = 0.0
        tally = counting(runs, clock)
        tally.working("processes", workers)
        for run in runs[:4]:
            tally.begun(run)
        clock.now = 10.0 if workers == 4 else 40.0  # four at once, each in 10 s; or all of them in 40 s
        for run in runs[:4]:
            tally.ended(over(run, 10.0))
        assert tally.seconds_left() == pytest.approx(left)
        for run in runs[4:8]:
            tally.begun(run)
        clock.now += 5.0
        assert tally.seconds_left() == pytest.approx(left - 5.0)


def test_a_run_that_diverged_early_is_no_measure_of_the_others() -> None:
    runs = [tiny.run(seed=seed, steps=100) for seed in range(2)]
    tally = counting(runs, Clock())
    tally.ended(over(runs[0], 1.0, "diverged", step=10))
    assert tally.seconds_left() == pytest.approx(10.0)
    tally.ended(over(runs[1], 1.0, "failed", step=0))
    assert tally.line(is_over=True) == "2 of 2 runs done, 1 diverged, 1 failed, 0.0 s taken"


def test_a_log_has_a_line_at_most_every_thirty_seconds_and_one_at_the_end() -> None:
    clock, file = Clock(), io.StringIO()
    shown = ProgressListener(Bar(Console(file=file, width=60), clock), clock)
    runs = [tiny.run(seed=seed) for seed in range(100)]
    shown.opened(runs, before=20)
    for run in runs:
        shown.begun(run)
        clock.now += 1.0
        shown.ended(over(run, 1.0))
    shown.said("a worker was lost [in brackets]")
    shown.closed()
    lines = file.getvalue().splitlines()
    assert [line.split(" runs")[0] for line in lines] == [
        "30% 50 of 120",
        "60% 80 of 120",
        "90% 110 of 120",
        "a worker was lost [in brackets]",
        "120 of 120",
    ]
    assert lines[0].endswith("about 1 min left")
    assert lines[-1].endswith("2 min taken")
    assert "\x1b" not in file.getvalue()


def test_a_failure_is_told_at_once() -> None:
    file = io.StringIO()
    shown = ProgressListener(Bar(Console(file=file, width=200), Clock()), Clock())
    run = tiny.run()
    shown.opened([run], before=0)
    shown.ended(Outcome(run, "failed", 0, None, error="Traceback\n  a line\nValueError: no\n"))
    assert file.getvalue() == f"failed: {run}: ValueError: no\n"


def test_a_terminal_has_one_line_that_is_drawn_again() -> None:
    file = io.StringIO()
    bar = Bar(Console(file=file, width=100, force_terminal=True, legacy_windows=False), Clock())
    shown = ProgressListener(bar, Clock())
    runs = [tiny.run(seed=seed) for seed in range(2)]
    shown.opened(runs, before=0)
    shown.begun(runs[0])
    shown.ended(over(runs[0], 1.0))
    bar._live.refresh()
    drawn = file.getvalue()
    shown.closed()
    assert "\x1b[?25l" in drawn  # the cursor is hidden
    assert "1 of 2 runs done" in drawn
    assert "━" in drawn
    assert drawn.count("\n") == 0
    assert file.getvalue().rstrip().endswith("1 of 2 runs done, 0.0 s taken")


def test_any_function_can_be_told() -> None:
    told: list[tuple[str, float]] = []
    listener = ProgressListener(lambda title, done: told.append((title, done)), Clock())
    runs = [tiny.run(seed=seed) for seed in range(2)]
    listener.opened(runs, before=0)
    for run in runs:
        listener.begun(run)
        listener.ended(over(run, 1.0))
    listener.said("this is not for everybody")
    listener.closed()
    assert [done for _, done in told] == [0.0, 0.5, 0.5, 1.0]
    assert told[0][0] == "0 of 2 runs done, 1 running"
