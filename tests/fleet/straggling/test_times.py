"""Step times from files, arrays and data frames, and what is wrong with those that cannot be used."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from theodolite import UseError
from theodolite.fleet import overhead_share, stragglers
from theodolite.fleet.straggling import times as reading
from theodolite.fleet.straggling.times import read_times

TIMES = [[1.0, 2.0, 1.5], [1.25, 1.0, 3.0], [1.0, 1.0, 1.0], [5.0, 1.0, 1.0]]
ROWS = "1,2,1.5\n1.25,1,3\n1,1,1\n5,1,1\n"
LONG = "round,worker,seconds\n" + "".join(
    f"{turn},{worker},{TIMES[turn][worker]}\n" for worker in (2, 0, 1) for turn in (3, 1, 0, 2)
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "times.csv"


@pytest.mark.parametrize(
    "text, names",
    [
        (ROWS, ("1", "2", "3")),
        ("a,b,c\n" + ROWS, ("a", "b", "c")),
        ("\ufeffa;b;c\n" + ROWS.replace(",", ";"), ("a", "b", "c")),
        ("0,1,2\n" + ROWS, ("0", "1", "2")),
        (
            "step,a,b,c\n" + "".join(f"{9 + i},{row}\n" for i, row in enumerate(ROWS.split())),
            ("a", "b", "c"),
        ),
        (",0,1,2\n" + "".join(f"{i},{row}\n" for i, row in enumerate(ROWS.split())), ("0", "1", "2")),
        (LONG, ("0", "1", "2")),
        (ROWS.replace(",", "\t"), ("1", "2", "3")),
        (ROWS.replace("\n", "\r\n"), ("1", "2", "3")),
        (ROWS.replace("\n", "\n\n"), ("1", "2", "3")),
    ],
    ids=[
        "plain",
        "names",
        "semicolons",
        "pandas without index",
        "steps",
        "pandas",
        "one row a time",
        "tabs",
        "other ends of lines",
        "empty lines",
    ],
)
def test_the_same_times_from_every_form_of_file(file: Path, text: str, names: tuple[str, ...]) -> None:
    file.write_text(text, encoding="utf-8")
    times, found = read_times(file)
    assert times.tolist() == TIMES
    assert found == names


@pytest.mark.parametrize("first", ["", "iteration,a,b,c\n"], ids=["no names", "names"])
@pytest.mark.parametrize("step", [1, 10])
def test_a_first_column_that_counts_the_rounds_is_no_worker(file: Path, first: str, step: int) -> None:
    rows = ROWS.split() * 3
    text = first + "".join(f"{100 + step * place},{row}\n" for place, row in enumerate(rows))
    file.write_text(text, encoding="utf-8")
    times, names = read_times(file)
    assert times.tolist() == TIMES * 3
    assert names == (("a", "b", "c") if first else ("2", "3", "4"))
    file.write_text(text.replace("100,1,2", "99,1,2"), encoding="utf-8")  # no longer at equal distances
    assert len(read_times(file)[1]) == 4


def test_the_same_times_from_arrays_tensors_and_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    tensor = torch.tensor(TIMES, requires_grad=True)
    for source in (TIMES, np.array(TIMES), tensor, pandas.DataFrame(TIMES)):
        assert read_times(source)[0].tolist() == TIMES
    frame = pandas.DataFrame(TIMES, columns=["a", "b", "c"])
    assert read_times(frame)[1] == ("a", "b", "c")


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "is empty: give a row for each round and a column for each worker"),
        ("1,2\n1,2\n1,2\n", "3 rounds of 2 workers. Give a row for each round"),
        ("1\n1\n1\n1\n1\n", "5 rounds of 1 worker. Give a row for each round"),
        ("a,b\n1,2\n1,2\n1\n1,2\n", "round 3 has 1 values where 2 columns are"),
        (
            "a,b\n1,2\n1,\n1,2\n1,2\n",
            "round 2, worker b: the time is empty. Fill it in, or say after how many",
        ),
        ("a,b\n1,2\n1,NaN\n1,2\n1,2\n", "round 2, worker b: the time is NaN. Fill it in"),
        ("a,b\n1,2\n1,-3\n1,2\n1,2\n", "round 2, worker b: the time is -3. Give seconds, above 0"),
        ("a,b\n1,2\n1,0\n1,2\n1,2\n", "round 2, worker b: the time is 0. Give seconds, above 0"),
        ("a,b\n1,2\n1,fast\n1,2\n1,2\n", "round 2, worker b: the time is 'fast'. Give seconds"),
        ("a,a\n1,2\n1,2\n1,2\n1,2\n", "two columns are called 'a'. Give every worker a name of its own"),
        ("a;b\n1,5;2\n1;2\n1;2\n1;2\n", "round 1, worker a: the time is '1,5'. Give seconds, with a decimal"),
        ("1 2\n1 2\n1 2\n1 2\n1 2\n", "in a file, columns are separated by commas, semicolons or tabs"),
        ("a,b\n1,2\n1,1e400\n1,2\n1,2\n", "the time is 1e400. Give seconds, from 1e-12 to 1e+12"),
        ("a,b\n1,2\n1,1e300\n1,2\n1,2\n", "the time is 1e300. Give seconds, from 1e-12 to 1e+12"),
        ("a,b\n1,2\n1,1e-320\n1,2\n1,2\n", "the time is 1e-320. Give seconds, from 1e-12 to 1e+12"),
        (LONG + "3,1,2\n", "round 3, worker 1 is there twice. Leave one of the two out"),
        (LONG.replace("3,1,1.0\n", ""), "round 3, worker 1: the time is empty"),
    ],
)
def test_a_file_that_cannot_be_used_says_where_and_why(file: Path, text: str, said: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UseError) as error:
        read_times(file)
    assert str(error.value).startswith(str(file))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "source, said",
    [
        ([1.0, 2.0], "times has 1 dimensions: give two, rounds × workers"),
        ([[1.0, 2.0], [1.0, 2.0], [1.0]], "times: round 2 has 1 values where round 0 has 2. Give each round"),
        ([["a", "b"]] * 4, "times is no table of numbers"),
        ([[1.0, 2.0]] * 3 + [[1.0, math.inf]], "times: round 3, worker 1: the time is inf. Fill it in"),
        (
            [[1.0, 2.0]] * 3 + [[1.0, -1.0]],
            "times: round 3, worker 1: the time is -1.0. Give seconds, above 0",
        ),
        ([[1.0, 2.0]] * 3 + [[1.0, None]], "times: round 3, worker 1: the time is nan. Fill it in"),
    ],
)
def test_an_array_that_cannot_be_used_says_where_and_why(source: object, said: str) -> None:
    with pytest.raises(UseError) as error:
        read_times(source)
    assert str(error.value).startswith(said)


def test_more_times_than_can_be_worked_on_are_refused_at_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UseError, match=r"times: 10,000,002 times are more than 10,000,000. Give fewer"):
        read_times(np.broadcast_to(1.0, (5_000_001, 2)))
    with file.open("wb") as huge:
        huge.truncate(100_000_001)  # a file without content, of this length
    with pytest.raises(UseError, match=r"has 100,000,001 bytes, more than 100,000,000. Give fewer"):
        read_times(file)
    monkeypatch.setattr(reading, "MOST_TIMES", 11)
    file.write_text(ROWS)
    with pytest.raises(UseError, match=r"times.csv: 12 times are more than 11. Give fewer rounds"):
        read_times(file)


def test_holes_are_as_slow_as_the_time_after_which_a_worker_is_lost() -> None:
    times = [[1.0, math.nan], [1.0, 2.0], [1.0, 2.0], [None, 2.0]]
    assert read_times(times, missing=60)[0].tolist() == [[1, 60], [1, 2], [1, 2], [60, 2]]
    report = stragglers([[1.0, math.nan]] * 2 + [[1.0, 2.0]] * 4, missing=4.0)
    assert report.waiting == pytest.approx((2 * 4 + 4 * 2) / (2 * 2.5 + 4 * 1.5))


@pytest.mark.parametrize(
    "times, missing, said",
    [
        (
            [[1, 2], [1, math.nan], [1, 7], [1, 2]],
            5,
            "missing is 5 s, but times has a time of 7 s: give at least",
        ),
        ([[1, 2], [math.nan] * 2, [1, 7], [1, 2]], 9, "times: round 1 has no time at all: leave it out"),
        ([[1, math.nan]] * 4, 9, "times: worker 1 has no time at all: leave it out"),
        ([[1, 2]] * 4, 0, "missing is 0: give the seconds after which a worker counts as lost"),
        ([[1, 2]] * 4, 1e300, "missing is 1e+300: give a finite number, at most 1e+12"),
        ([[1, 2]] * 4, math.nan, "missing is nan: give the seconds after which a worker counts as lost"),
    ],
)
def test_holes_that_cannot_be_filled_are_refused(times: object, missing: float, said: str) -> None:
    with pytest.raises(UseError) as error:
        read_times(times, missing)
    assert str(error.value).startswith(said)


def test_a_masked_time_is_a_hole() -> None:
    times = np.ma.masked_greater(TIMES, 4)
    assert read_times(times, 6.0)[0].tolist() == [*TIMES[:3], [6.0, 1.0, 1.0]]
    with pytest.raises(UseError, match=r"^times: round 3, worker 0: the time is nan"):
        read_times(times)


def test_the_fixed_share_of_a_step_follows_from_two_measurements() -> None:
    # 0.3 + 0.7·k seconds with k times the examples, and a straggler now and then
    times, heavier = np.full((20, 8), 1.0), np.full((20, 8), 0.3 + 0.7 * 3)
    times[::5, 2], heavier[::4, 1] = 9.0, 20.0
    assert overhead_share(times, heavier, load=3) == pytest.approx(0.3)
    assert overhead_share(times, times) == 1.0
    assert overhead_share(times, 3 * times) == 0.0  # more than in proportion
    with pytest.raises(UseError, match="load is 1: give times with more examples"):
        overhead_share(times, heavier, load=1)
