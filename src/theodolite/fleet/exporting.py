"""A ledger as tables that other tools read, and back; and what can still be read of a damaged one.

`transfer.parquet` or `transfer.csv` has a line for every attempt, `transfer.metrics.parquet` or
`transfer.metrics.csv` beside it one for every value that was recorded. Each attempt has the digests that the
ledger keeps of it, and each line says how many attempts there are, so that no change of a file goes unseen.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.files import replacing
from theodolite.core.optional import needed
from theodolite.fleet import opening, tables
from theodolite.fleet.provenance import digest_of
from theodolite.fleet.tables import ATTEMPT_COLUMNS, RUN_COLUMNS, Attempt, Series, run_columns

Line = Mapping[str, Any]

_WHOLE = ("width", "depth", "base_width", "base_depth", "seed", "steps", "step", "attempt", "attempts")
_REAL = ("lr", "weight_decay", "held_out", "seconds", "value")
LINES = (
    *("attempt", "attempts", "identity", *RUN_COLUMNS, *ATTEMPT_COLUMNS, "run", "readings", "environment"),
    *("metrics_digest", "digest", "study", "study_spec", "study_digest"),
)
"""Of the first file. `run`, `readings`, `environment` and `study_spec` are JSON."""
VALUES = ("attempt", "identity", "name", "step", "value")
"""Of the second."""
_EMPTY = (*_WHOLE, *_REAL, *RUN_COLUMNS, "error")
"""Columns in which an empty cell of a CSV is None, not an empty text."""
EXPORT_AGAIN = "Was the file changed? Export it again"
BATCH = 100_000
"""Lines that are in memory at a time while a file is written."""


def export(path: Path, name: str, spec: Mapping[str, Any], attempts: Iterable[Attempt]) -> tuple[Path, Path]:
    """Write both files; each is whole or not there."""
    write, _ = _format(path)
    numbered = list(enumerate(attempts, 1))
    if not numbered:
        raise UseError(f"the study {name!r} has no runs yet: there is nothing to export")
    study = {"study": name, "study_spec": json.dumps(spec)}
    common = {"attempts": len(numbered), **study, "study_digest": digest_of(list(study.values()))}
    values = _beside(path)
    try:
        with replacing(values) as file:
            write(file, VALUES, _values(numbered))
        with replacing(path) as file:
            write(file, LINES, ({**_line(number, attempt), **common} for number, attempt in numbered))
    except OSError as error:
        raise UseError(f"{path} cannot be written: {error.strerror or error}") from error
    return path, values


def read_exported(path: Path) -> tuple[str, dict[str, Any], Iterator[Attempt]]:
    """Name and spec of the study, and its attempts."""
    _, read = _format(path)
    values = _beside(path)
    for file in (path, values):
        if not file.is_file():
            raise UseError(f"{file} is not there: an export is two files, {path.name} and {values.name}")
    lines = list(read(path, LINES))
    if not lines:
        raise UseError(f"{path} has no lines: there is nothing to import")
    if [line["attempt"] for line in lines] != list(range(1, (lines[0]["attempts"] or 0) + 1)):
        raise UseError(
            f"{path} has {len(lines)} attempts, and {lines[0]['attempts']} were exported, numbered from 1. "
            f"{EXPORT_AGAIN}"
        )
    name, spec, digest = (lines[0][column] for column in ("study", "study_spec", "study_digest"))
    if digest_of([name, spec]) != digest or any(
        (line["study"], line["study_spec"], line["attempts"]) != (name, spec, len(lines)) for line in lines
    ):
        raise UseError(f"{path}: the study is not as it was exported. {EXPORT_AGAIN}")
    series: dict[int, Series] = {line["attempt"]: {} for line in lines}
    for value in read(values, VALUES):
        number = value["attempt"]
        if number not in series:
            raise UseError(f"{values} has values of attempt {number}, which {path.name} has not")
        if value["identity"] != lines[number - 1]["identity"]:
            raise UseError(f"{values}: attempt {number} is of another run. {EXPORT_AGAIN}")
        series[number].setdefault(value["name"], []).append((value["step"], value["value"]))
    attempts = [_attempt(path, line, series.pop(line["attempt"])) for line in lines]
    return name, json.loads(spec), iter(attempts)


def _beside(path: Path) -> Path:
    return path.with_suffix(f".metrics{path.suffix}")


def _line(number: int, attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": number,
        "identity": attempt.run,
        **run_columns(attempt.spec),
        **attempt.values,
        "run": json.dumps(attempt.spec),
        "readings": _object(attempt.readings),
        "environment": json.dumps(attempt.environment),
        "metrics_digest": attempt.metrics_digest,
        "digest": attempt.digest(attempt.metrics_digest),
    }


def _object(readings: Mapping[str, Any]) -> str:
    """Readings as one JSON object."""
    pairs = (f"{json.dumps(name)}: {tables.reading_text(value)}" for name, value in readings.items())
    return f"{{{', '.join(pairs)}}}"


def _values(numbered: Iterable[tuple[int, Attempt]]) -> Iterator[Line]:
    for number, attempt in numbered:
        for name, series in attempt.metrics.items():
            for step, value in series:
                yield dict(zip(VALUES, (number, attempt.run, name, step, value), strict=True))


def _attempt(path: Path, line: Line, metrics: Series) -> Attempt:
    """The inverse of `_line`; changes of the file are refused."""
    where = f"{path}: attempt {line['attempt']} of run {line['identity']} is not as it was exported"
    try:
        attempt = Attempt(
            run=line["identity"],
            spec=json.loads(line["run"]),
            environment=json.loads(line["environment"]),
            values={name: line[name] for name in ATTEMPT_COLUMNS},
            metrics={name: sorted(series) for name, series in metrics.items()},
            readings=json.loads(line["readings"]),
        )
        fault = tables.fault_of(attempt, attempt.metrics_digest, line["digest"])
        if attempt.metrics_digest != line["metrics_digest"]:
            fault = tables.METRICS_DIFFER
        columns = run_columns(attempt.spec)
    except (AttributeError, TypeError, ValueError) as error:
        raise UseError(f"{where}: {error}") from error
    for name, value in columns.items():
        if line[name] != value:
            fault = fault or f"{name} is {line[name]!r}, but by the rest of the export it is {value!r}"
    if fault is not None:
        raise UseError(f"{where}: {fault}. {EXPORT_AGAIN}")
    return attempt


def _write_csv(file: Path, columns: tuple[str, ...], lines: Iterable[Line]) -> None:
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)  # numbers as repr writes them, so to the last digit; None as nothing


def _read_csv(file: Path, columns: tuple[str, ...]) -> Iterator[Line]:
    limit = csv.field_size_limit(2**31 - 1)  # a traceback or a spec may be long
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            reader = csv.DictReader(stream)
            _check_columns(file, columns, reader.fieldnames or ())
            for line in reader:
                try:
                    yield {name: _parsed(name, line[name]) for name in columns}
                except (TypeError, ValueError) as error:
                    raise UseError(f"{file}, line {reader.line_num}: {error}") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise UseError(f"{file} is not CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _parsed(name: str, text: str) -> str | int | float | None:
    if text == "" and name in _EMPTY:
        return None
    return int(text) if name in _WHOLE else float(text) if name in _REAL else text


def _write_parquet(file: Path, columns: tuple[str, ...], lines: Iterable[Line]) -> None:
    arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
    kinds = {
        name: arrow.int64() if name in _WHOLE else arrow.float64() if name in _REAL else arrow.string()
        for name in columns
    }
    schema = arrow.schema(list(kinds.items()))
    lines = iter(lines)
    with parquet.ParquetWriter(file, schema) as writer:
        while batch := list(itertools.islice(lines, BATCH)):
            writer.write_table(arrow.Table.from_pylist(batch, schema))


def _read_parquet(file: Path, columns: tuple[str, ...]) -> Iterator[Line]:
    arrow, parquet = needed("pyarrow"), needed("pyarrow.parquet")
    try:
        with parquet.ParquetFile(file) as opened:
            _check_columns(file, columns, opened.schema_arrow.names)
            for batch in opened.iter_batches(BATCH, columns=list(columns)):
                yield from batch.to_pylist()
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # OSError: a page of no known codec
        raise UseError(f"{file} is not Parquet: {error}") from error


def _check_columns(file: Path, wanted: Iterable[str], found: Iterable[str]) -> None:
    if missing := [name for name in wanted if name not in set(found)]:
        raise UseError(f"{file} is not an export of a ledger: it has no column {', '.join(missing)}")


Write = Callable[[Path, tuple[str, ...], Iterable[Line]], None]
Read = Callable[[Path, tuple[str, ...]], Iterator[Line]]


def _format(path: Path) -> tuple[Write, Read]:
    if path.suffix.lower() == ".csv":
        return _write_csv, _read_csv
    if path.suffix.lower() == ".parquet":
        return _write_parquet, _read_parquet
    raise UseError(f"{path} ends in {path.suffix or 'nothing'}: an export is a .parquet or a .csv")


def salvaged(path: Path, said: Callable[[str], None]) -> tuple[str, dict[str, Any], Iterator[Attempt]]:
    """Name and spec of the study, and all attempts that are as they were written, of a damaged ledger.

    It works on a copy. Attempts are read one by one; one that does not match its digest is left out and
    named: its run can be made again.
    """
    if not path.is_file():
        raise UseError(f"there is no ledger at {path}: give the folder or the file of one")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        for ending in ("", "-wal", "-spare"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{ending}", f"{copy}{ending}")
        opening.restore_log(copy)
        opening.repair(copy)
        with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            try:
                connection.execute("PRAGMA writable_schema = ON")  # go on if a definition cannot be read
                name, spec = tables.study_of(connection)
                numbers = _numbers(connection)
            except sqlite3.DatabaseError as error:
                raise opening.LedgerError(
                    f"{path} cannot be salvaged: its study, or all of its attempts, cannot be read ({error})"
                ) from error
            found = list(_whole_ones(connection, numbers, said))
    return name, spec, iter(found)


def _whole_ones(
    connection: sqlite3.Connection, numbers: set[int], said: Callable[[str], None]
) -> Iterator[Attempt]:
    settled: set[str] = set()
    for number in sorted(numbers):
        try:
            attempt = tables.with_metrics(connection, tables.entry(connection, number))
        except sqlite3.DatabaseError as error:
            reason = " ".join(str(error).split())
            said(f"left out: {'' if reason.startswith('attempt') else f'attempt {number}: '}{reason}")
            continue
        if attempt.run not in settled:
            yield attempt
        if attempt.values["status"] != "failed":
            settled.add(attempt.run)


def _numbers(connection: sqlite3.Connection) -> set[int]:
    """The numbers of the attempts, read from both ends of both tables; they have no gaps."""
    found: set[int] = set()
    unread: sqlite3.DatabaseError | None = None
    for query in ("SELECT id FROM attempts", "SELECT attempt FROM digests"):
        for order in ("ASC", "DESC"):
            try:
                found.update(number for (number,) in connection.execute(f"{query} ORDER BY 1 {order}"))
            except sqlite3.DatabaseError as error:
                unread = error
    if unread is not None and not found:
        raise unread
    return found | set(range(1, len(found) + 1))
