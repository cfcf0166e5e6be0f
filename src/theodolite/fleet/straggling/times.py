"""Step times of workers: from a CSV, an array or a data frame to an array (rounds, workers)."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from theodolite.core.arguments import number, positive
from theodolite.core.errors import UseError
from theodolite.core.files import read_text
from theodolite.present.text import counted

LONG = ("round", "worker", "seconds")
"""The columns of a table with one row for each time."""
INDEX = ("", "round", "step")
"""Names of a first column that numbers the rounds."""
LEAST_ROUNDS, LEAST_WORKERS = 4, 2
SURELY_COUNTED = 10
"""Rounds from which on numbers at equal distances are no times of a worker."""
MOST_TIMES = 10_000_000
"""Rounds times workers."""
LARGEST_FILE = 100_000_000
"""Bytes."""
BRIEFEST, LONGEST = 1e-12, 1e12
"""Seconds: times outside of these limits are surely errors, and inside sums and ratios are finite."""
HOLES = ("", "nan", "na", "null", "none", "inf", "-inf")
"""What tables write where there is no time."""


def read_times(source: Any, missing: float | None = None) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """The times, and the names of the workers.

    A file is a CSV: a row for each round and a column for each worker, with or without names in the first
    line; or the three columns `round,worker,seconds`. A first column that counts the rounds is left out.
    `missing` stands for times that are not there.

    >>> read_times([[1, 2], [1, 3], [1, 2], [2, 1]])[1]
    ('0', '1')
    """
    if missing is not None:
        positive("missing", missing, wanted="give the seconds after which a worker counts as lost")
        number("missing", missing, most=LONGEST)
    where = "times"
    if isinstance(source, Tensor):
        source = source.detach().double().cpu().numpy()
    _refuse_more(getattr(source, "size", 0), where)
    if isinstance(source, str | Path):
        where = str(source)
        names, rounds, rows = _file(Path(source).expanduser())
    elif hasattr(source, "columns") and hasattr(source, "to_numpy"):  # a data frame
        names, rows = [str(name) for name in source.columns], source.to_numpy().tolist()
        rounds = [str(label) for label in getattr(source, "index", range(len(rows)))]
        names, rounds, rows = _as_wide(names, rounds, rows, where)
    else:
        names, rounds, rows = _array(source)
    if len(rounds) < LEAST_ROUNDS or len(names) < LEAST_WORKERS:
        raise UseError(
            f"{where}: {counted(len(rounds), 'round')} of {counted(len(names), 'worker')}. Give a row for "
            f"each round and a column for each worker, at least {LEAST_ROUNDS} rounds and {LEAST_WORKERS} "
            "workers; in a file, columns are separated by commas, semicolons or tabs"
        )
    _refuse_more(len(rounds) * len(names), where)
    times = np.array(
        [
            [
                _time(value, missing, f"{where}: round {label}, worker {name}")
                for name, value in zip(names, row, strict=True)
            ]
            for label, row in zip(rounds, rows, strict=True)
        ]
    )
    return _filled(times, missing, rounds, names, where), tuple(names)


def overhead_share(times: Any, heavier: Any, load: float = 2.0, *, missing: float | None = None) -> float:
    """The share of a step that does not grow with the work, from times with more work on each worker.

    Step times are taken as `overhead + work`. `heavier` was measured with `load` times as many examples on
    each worker. The medians are compared, which stragglers hardly move. `missing` is as in `stragglers`.

    >>> overhead_share([[1.0, 1.0]] * 4, [[1.5, 1.5]] * 4, load=2)
    0.5
    """
    number("load", load, least=1.0)
    if load == 1:
        raise UseError("load is 1: give times with more examples on each worker, such as 2 times as many")
    usual, more = (float(np.median(read_times(source, missing)[0])) for source in (times, heavier))
    return min(max((load - more / usual) / (load - 1), 0.0), 1.0)


def _refuse_more(num_times: int, where: str) -> None:
    if num_times > MOST_TIMES:
        raise UseError(
            f"{where}: {num_times:,} times are more than {MOST_TIMES:,}. Give fewer rounds: some thousand "
            "are enough"
        )


def _time(value: Any, missing: float | None, where: str) -> float:
    """A positive number; nan for a hole that may be filled."""
    is_hole = value is None or str(value).strip().lower() in HOLES
    if is_hole and missing is not None:
        return math.nan
    if is_hole:
        said = "empty" if value is None or not str(value).strip() else str(value).strip()
        raise UseError(
            f"{where}: the time is {said}. Fill it in, or say after how many seconds a worker that did not "
            "answer counts as lost: --missing 60, or missing=60"
        )
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        point = ", with a decimal point" if "," in str(value) else ""
        raise UseError(f"{where}: the time is {value!r}. Give seconds{point}") from None
    if math.isnan(seconds) or seconds <= 0:
        raise UseError(f"{where}: the time is {value}. Give seconds, above 0")
    if not BRIEFEST <= seconds <= LONGEST:
        raise UseError(f"{where}: the time is {value}. Give seconds, from {BRIEFEST:g} to {LONGEST:g}")
    return seconds


def _filled(
    times: NDArray[np.float64],
    missing: float | None,
    rounds: Sequence[str],
    names: Sequence[str],
    where: str,
) -> NDArray[np.float64]:
    """With `missing` in place of holes."""
    holes = np.isnan(times)
    if missing is None or not holes.any():
        return times
    for kind, labels, empty in (("round", rounds, holes.all(1)), ("worker", names, holes.all(0))):
        if empty.any():
            raise UseError(f"{where}: {kind} {labels[int(empty.argmax())]} has no time at all: leave it out")
    if missing < np.nanmax(times):
        raise UseError(
            f"missing is {missing:g} s, but {where} has a time of {np.nanmax(times):g} s: give at least as "
            "much as the slowest answer took"
        )
    return np.where(holes, missing, times)


Wide = tuple[list[str], list[str], Sequence[Sequence[Any]]]
"""Names of the workers, labels of the rounds, and rows of values."""


def _file(path: Path) -> Wide:
    if path.is_file() and path.stat().st_size > LARGEST_FILE:
        raise UseError(
            f"{path} has {path.stat().st_size:,} bytes, more than {LARGEST_FILE:,}. Give fewer rounds: some "
            "thousand are enough"
        )
    text = read_text(path).removeprefix("\ufeff")
    first = text.partition("\n")[0]
    delimiter = next((mark for mark in "\t;" if mark in first), ",")  # commas may be decimal ones
    try:
        rows = [row for row in csv.reader(io.StringIO(text), delimiter=delimiter, strict=True) if row]
    except csv.Error as error:
        raise UseError(f"{path} cannot be read as CSV: {error}") from error
    if not rows:
        raise UseError(f"{path} is empty: give a row for each round and a column for each worker")
    counting = [str(place) for place in range(len(rows[0]))]
    # What pandas writes for workers without names, with and without its index.
    has_numbers = rows[0] in (counting, ["", *counting[:-1]])
    has_names = has_numbers or any(
        cell.strip().lower() not in HOLES and not _is_number(cell) for cell in rows[0]
    )
    names = [cell.strip() for cell in rows[0]] if has_names else [str(int(name) + 1) for name in counting]
    rows = rows[has_names:]
    rounds = [str(place) for place in range(1, len(rows) + 1)]
    for label, row in zip(rounds, rows, strict=True):
        if len(row) != len(names):
            raise UseError(
                f"{path}: round {label} has {len(row)} values where {len(names)} columns are. Give each "
                "round a value for every worker, or nothing between two commas"
            )
    return _as_wide(names, rounds, rows, str(path))


def _as_wide(names: list[str], rounds: list[str], rows: Sequence[Sequence[Any]], where: str) -> Wide:
    """Without a column of numbers of rounds; a table of single times as one row for each round."""
    if sorted(name.lower() for name in names) == sorted(LONG):
        return _pivoted([name.lower() for name in names], rows, where)
    if names[0].lower() in INDEX or _counts([row[0] for row in rows]):
        names, rounds, rows = names[1:], [str(row[0]) for row in rows], [row[1:] for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UseError(f"{where}: two columns are called {twice[0]!r}. Give every worker a name of its own")
    return names, rounds, rows


def _counts(values: Sequence[Any]) -> bool:
    """Are these the numbers of rounds, such as 0, 1, 2, … or 10, 20, 30, …, rather than times?"""
    if len(values) < SURELY_COUNTED or not all(_is_number(str(value)) for value in values):
        return False
    numbers = [float(value) for value in values]
    steps = {later - now for now, later in itertools.pairwise(numbers)}
    return len(steps) == 1 and min(steps) > 0


def _pivoted(names: list[str], rows: Sequence[Sequence[Any]], where: str) -> Wide:
    places = [names.index(name) for name in LONG]
    found: dict[tuple[str, str], Any] = {}
    for row in rows:
        turn, worker, seconds = (row[place] for place in places)
        key = str(turn).strip(), str(worker).strip()
        if key in found:
            raise UseError(
                f"{where}: round {key[0]}, worker {key[1]} is there twice. Leave one of the two out"
            )
        found[key] = seconds
    rounds = sorted(dict.fromkeys(turn for turn, _ in found), key=_in_order)
    workers = sorted(dict.fromkeys(worker for _, worker in found), key=_in_order)
    return workers, rounds, [[found.get((turn, worker)) for worker in workers] for turn in rounds]


def _array(source: Any) -> Wide:
    rows = source if isinstance(source, list | tuple) else ()
    lengths = [len(row) if hasattr(row, "__len__") else 0 for row in rows]
    for place, length in enumerate(lengths):
        if length != lengths[0]:
            raise UseError(
                f"times: round {place} has {length} values where round 0 has {lengths[0]}. Give each round a "
                "value for every worker, or nan"
            )
    try:
        values = np.array(source, dtype=np.float64)
        if isinstance(source, np.ma.MaskedArray):  # the array holds the numbers under the mask
            values[np.ma.getmaskarray(source)] = math.nan
    except (TypeError, ValueError) as error:
        raise UseError(f"times is no table of numbers: {error}. Give rounds × workers, in seconds") from error
    if values.ndim != 2:
        raise UseError(f"times has {values.ndim} dimensions: give two, rounds × workers")
    rounds, workers = values.shape
    return [str(place) for place in range(workers)], [str(place) for place in range(rounds)], values.tolist()


def _is_number(text: str) -> bool:
    """A finite number?"""
    return not math.isinf(_in_order(text)[0])


def _in_order(text: str) -> tuple[float, str]:
    """Numbers by their value, before all other names."""
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    return (value if math.isfinite(value) else math.inf), text
