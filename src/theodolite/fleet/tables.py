"""The tables of a ledger: their definitions in SQL, and how attempts are written to and read from them."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from theodolite.core.errors import UseError
from theodolite.core.files import frozen, plain, plain_text
from theodolite.fleet.provenance import Environment, digest_of, environment

if TYPE_CHECKING:  # a run needs torch, a ledger does not
    from theodolite.fleet.run import Outcome

Series = dict[str, list[tuple[int, float]]]
"""By name of a metric, (step, value) in order of steps."""

APPLICATION = 0x54484C47
"""`THLG` in the file's header: this is a ledger, not just any SQLite file."""
VERSION = 2
"""Of the definitions below. Change it with any of them, except comments: a ledger whose definitions are not
those of its version counts as damaged."""
FREE_PAGES = 8
"""The least number of unused pages at the end of the file when it has grown."""
READINGS = "SELECT name, value FROM readings WHERE attempt = ? ORDER BY name"
METRICS = "SELECT name, step, value FROM metrics WHERE attempt = ? ORDER BY name, step"
METRICS_DIFFER = "its metrics do not match their digest"
RUN_COLUMNS = (
    *("workload", "width", "depth", "base_width", "base_depth", "optimizer", "parameterization"),
    *("lr", "weight_decay", "seed", "steps"),
)
ATTEMPT_COLUMNS = ("status", "step", "held_out", "seconds", "device", "engine", "error", "ended")

TABLES = """
-- What the study is. One row.
CREATE TABLE study (
    name TEXT NOT NULL,
    spec TEXT NOT NULL,  -- JSON
    digest TEXT NOT NULL  -- SHA-256 of name and spec
);

-- Every run that was tried: its value, whose hash is its identity, and the common fields of it.
CREATE TABLE runs (
    identity TEXT NOT NULL PRIMARY KEY,
    spec TEXT NOT NULL,  -- JSON
    workload TEXT, width INTEGER, depth INTEGER, base_width INTEGER, base_depth INTEGER,
    optimizer TEXT, parameterization TEXT, lr REAL, weight_decay REAL, seed INTEGER, steps INTEGER
);

-- With what attempts were made.
CREATE TABLE environments (
    identity TEXT NOT NULL PRIMARY KEY,
    theodolite TEXT,
    source TEXT,  -- hash of the package's files
    workload_source TEXT,  -- hash of the workload's file and modules beside it
    python TEXT, torch TEXT, numpy TEXT, platform TEXT
);

-- Every attempt at a run, in the order in which they ended. A run may fail often, and settles once.
CREATE TABLE attempts (
    id INTEGER NOT NULL PRIMARY KEY,
    run TEXT NOT NULL REFERENCES runs (identity),
    environment TEXT NOT NULL REFERENCES environments (identity),
    status TEXT NOT NULL CHECK (status IN ('finished', 'diverged', 'failed')),
    step INTEGER NOT NULL,
    held_out REAL,
    seconds REAL NOT NULL,
    device TEXT NOT NULL,
    engine TEXT NOT NULL,
    error TEXT,
    ended TEXT NOT NULL  -- UTC
);
CREATE UNIQUE INDEX settles_once ON attempts (run) WHERE status <> 'failed';

-- What was recorded by step. NULL is not a number (NaN); infinity is infinity.
CREATE TABLE metrics (
    attempt INTEGER NOT NULL REFERENCES attempts (id),
    name TEXT NOT NULL,
    step INTEGER NOT NULL,
    value REAL,
    PRIMARY KEY (attempt, name, step)
) WITHOUT ROWID;

-- What was measured once.
CREATE TABLE readings (
    attempt INTEGER NOT NULL REFERENCES attempts (id),
    name TEXT NOT NULL,
    value TEXT NOT NULL,  -- JSON; infinity is 1e999
    PRIMARY KEY (attempt, name)
) WITHOUT ROWID;

-- SHA-256 digests of every attempt. A table of its own, so that an attempt that is gone is missed.
CREATE TABLE digests (
    attempt INTEGER NOT NULL PRIMARY KEY REFERENCES attempts (id),
    run TEXT NOT NULL,
    content TEXT NOT NULL,  -- of run, environment, values, readings and the digest of the metrics
    metrics TEXT NOT NULL
);

-- Always empty. Its pages lie free at the end of the file, where a file that is cut short is cut.
CREATE TABLE slack (filler BLOB);

-- Of every run the attempt that counts: the one that settled it, else the last.
CREATE VIEW results AS
SELECT runs.*, attempts.id AS attempt, attempts.status, attempts.step, attempts.held_out, attempts.seconds,
    attempts.device, attempts.engine, attempts.error, attempts.ended, latest.attempts, attempts.environment
FROM runs
JOIN (
    SELECT run, COUNT(*) AS attempts,
        COALESCE(MAX(CASE WHEN status <> 'failed' THEN id END), MAX(id)) AS id
    FROM attempts GROUP BY run
) AS latest ON latest.run = runs.identity
JOIN attempts ON attempts.id = latest.id
"""

KEPT = ("study", "runs", "environments", "attempts", "metrics", "readings", "digests")


def create(connection: sqlite3.Connection, name: str, spec: Mapping[str, Any]) -> None:
    """Make the tables in an empty file, inside the caller's transaction."""
    for statement in TABLES.split(";\n"):
        connection.execute(statement)
    for table in KEPT:
        for change in ("UPDATE", "DELETE"):
            connection.execute(
                f"CREATE TRIGGER {table}_{change.lower()} BEFORE {change} ON {table} "
                "BEGIN SELECT RAISE(ABORT, 'a ledger is only ever added to'); END"
            )
    study = plain_text(name), json.dumps(spec)
    connection.execute("INSERT INTO study VALUES (?, ?, ?)", (*study, digest_of(study)))
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def study_of(connection: sqlite3.Connection) -> tuple[str, dict[str, Any]]:
    """Name and spec of the study."""
    try:
        name, spec, digest = connection.execute("SELECT name, spec, digest FROM study").fetchone()
        if digest_of((name, spec)) == digest:
            return name, json.loads(spec)
    except (TypeError, ValueError):  # no line, or no text in it
        pass
    raise damage("the name and the spec of its study are not as they were written")


def is_empty(connection: sqlite3.Connection) -> bool:
    """Has nothing been written yet, as when the driver was killed at once?"""
    tables = _integer(connection, "SELECT COUNT(*) FROM sqlite_master")
    return tables == 0 and _integer(connection, "PRAGMA application_id") == 0


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a file that is not a ledger, or is one of another version."""
    if _integer(connection, "PRAGMA application_id") != APPLICATION:
        raise UseError(f"{path} is a SQLite file of another program, not a ledger. Give another path")
    if (version := _integer(connection, "PRAGMA user_version")) != VERSION:
        raise UseError(
            f"{path} has tables of version {version}, and this Theodolite knows version {VERSION}. "
            "Read it with the Theodolite that wrote it, or give another path and make its runs again"
        )
    if missing := _definitions_as_created() - _definitions(connection):
        raise damage(f"{min(missing)[1]} is not defined as it was")


def check_pages(connection: sqlite3.Connection) -> None:
    """Ask SQLite whether its pages and indexes are consistent."""
    (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if found != "ok":
        raise damage(" ".join(found.split()))


def damage(found: str) -> sqlite3.DatabaseError:
    """The error that SQLite raises for a damaged file."""
    error = sqlite3.DatabaseError(found)
    error.sqlite_errorname = "SQLITE_CORRUPT"
    return error


def keep_the_end_free(connection: sqlite3.Connection, before: tuple[int, int]) -> None:
    """Leave the last pages of the file unused, so that cutting them off loses nothing.

    A blob that takes all free pages and at least one new one, put in and taken out, leaves the new ones free
    at the end. A transaction that took no page, by `pages` from before it, has left the end as it was. One
    that took some found them among the free ones, so the file does not grow by this.
    """
    if (now := pages(connection)) != before:
        size = max(now[1] + 1, FREE_PAGES) * _integer(connection, "PRAGMA page_size")
        connection.execute("INSERT INTO slack VALUES (zeroblob(?))", (size,))
        connection.execute("DELETE FROM slack")


def pages(connection: sqlite3.Connection) -> tuple[int, int]:
    """How many pages the file has, and how many of them are free."""
    return _integer(connection, "PRAGMA page_count"), _integer(connection, "PRAGMA freelist_count")


def _integer(connection: sqlite3.Connection, query: str) -> int:
    (value,) = connection.execute(query).fetchone()
    return int(value)


@functools.cache
def _definitions_as_created() -> frozenset[tuple[str, str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        create(connection, "", {})
        return _definitions(connection)


def _definitions(connection: sqlite3.Connection) -> frozenset[tuple[str, str, str]]:
    """Of tables, indexes, triggers and the view, without comments and line breaks."""
    rows = connection.execute("SELECT type, name, COALESCE(sql, '') FROM sqlite_master").fetchall()
    return frozenset((kind, name, " ".join(re.sub("--.*", "", str(sql)).split())) for kind, name, sql in rows)


@dataclass(frozen=True)
class Attempt:
    """What a ledger keeps of one attempt; it is read back bit by bit."""

    run: str
    """The identity of the run."""
    spec: Mapping[str, Any]
    environment: Environment
    values: Mapping[str, Any]
    """By name in `ATTEMPT_COLUMNS`."""
    metrics: Series
    readings: Mapping[str, Any]

    @staticmethod
    def of(outcome: Outcome) -> Attempt:
        """The attempt that ended now with this outcome. Texts go through `plain_text`, so all are valid."""
        return Attempt(
            run=outcome.run.identity,
            spec=outcome.run.to_dict(),
            environment={
                name: value and plain_text(value) for name, value in environment(outcome.run.workload).items()
            },
            values={
                "status": outcome.status,
                "step": int(outcome.step),
                "held_out": None if outcome.held_out is None else _real(outcome.held_out),
                "seconds": _real(outcome.seconds),
                "device": plain_text(outcome.device),
                "engine": plain_text(outcome.engine),
                "error": plain_text(outcome.error) if outcome.error else None,
                "ended": datetime.now(UTC).isoformat(timespec="milliseconds"),
            },
            metrics={
                plain_text(name): sorted((int(step), _real(value)) for step, value in series)
                for name, series in outcome.metrics.items()
                if series
            },
            readings={plain_text(name): _reading(item) for name, item in outcome.readings.items()},
        )

    @functools.cached_property
    def metrics_digest(self) -> str:
        """Of all series."""
        return digest_of(self.metrics)

    def digest(self, metrics_digest: str) -> str:
        """Of everything, with the metrics' digest for the metrics."""
        content = (self.run, self.spec, self.environment, self.values, self.readings)
        return digest_of((*content, metrics_digest))


@dataclass(frozen=True)
class Entry:
    """An attempt from the tables, without its metrics; it matches its digest."""

    number: int
    attempt: Attempt
    metrics_digest: str

    @property
    def settles(self) -> bool:
        """Is there nothing to be run again?"""
        return bool(self.attempt.values["status"] != "failed")


def flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The value of a run as columns: sizes as width and depth (batch, planned tokens), options with a dot.

    >>> flat({"size": [64, 2], "base": None, "lr": 0.1, "options": {"betas": [0.9, 0.95]}})
    {'width': 64, 'depth': 2, 'base_width': None, 'base_depth': None, 'lr': 0.1, 'options.betas': (0.9, 0.95)}
    """
    values: dict[str, Any] = {}
    for name, value in spec.items():
        if name in ("size", "base"):
            before = "" if name == "size" else "base_"
            columns = (f"{before}{column}" for column in ("width", "depth", "batch", "planned_tokens"))
            values |= dict(zip(columns, value or (None, None), strict=False))
        else:
            values |= leaves(name, value)
    return values


def leaves(name: str, value: Any) -> dict[str, Any]:
    """A JSON value as columns: mappings are flattened, lists become tuples.

    >>> leaves("sizes", {"stream": 1.5, "branches": [1, 2]})
    {'sizes.stream': 1.5, 'sizes.branches': (1, 2)}
    """
    if isinstance(value, Mapping):
        return {
            key: cell for part, item in value.items() for key, cell in leaves(f"{name}.{part}", item).items()
        }
    return {name: frozen(value)}


def reading_text(value: Any) -> str:
    """A reading as JSON. Infinity is written as a number that no float can hold, as parsers read it so."""
    text = {math.inf: "1e999", -math.inf: "-1e999"}.get(value) if isinstance(value, float) else None
    return text or json.dumps(value, allow_nan=False)


def run_columns(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run that have a column; integers of more than 64 bits are None."""
    fields = flat(spec)
    found = {name: fields.get(name) for name in RUN_COLUMNS}
    for name, value in found.items():
        if isinstance(value, str):
            found[name] = plain_text(value)
        elif isinstance(value, int) and abs(value) >= 2**63:
            found[name] = None
    return found


def write(connection: sqlite3.Connection, attempt: Attempt) -> None:
    """Put an attempt into the tables, inside the caller's transaction."""
    run = {"identity": attempt.run, "spec": json.dumps(attempt.spec), **run_columns(attempt.spec)}
    _insert(connection, "INSERT OR IGNORE INTO runs", run)
    made_with = digest_of(attempt.environment)[:16]
    _insert(connection, "INSERT OR IGNORE INTO environments", {"identity": made_with, **attempt.environment})
    values = {"run": attempt.run, "environment": made_with, **attempt.values}
    number = _insert(connection, "INSERT INTO attempts", values)
    connection.executemany(
        "INSERT INTO metrics VALUES (?, ?, ?, ?)",
        [(number, name, step, value) for name, series in attempt.metrics.items() for step, value in series],
    )
    connection.executemany(
        "INSERT INTO readings VALUES (?, ?, ?)",
        [(number, name, reading_text(value)) for name, value in attempt.readings.items()],
    )
    digests = {"attempt": number, "run": attempt.run, "content": attempt.digest(attempt.metrics_digest)}
    _insert(connection, "INSERT INTO digests", digests | {"metrics": attempt.metrics_digest})


def fault_of(attempt: Attempt, metrics_digest: str, digest: object) -> str | None:
    """What is wrong with an attempt that was read, by its digests; None if it is as it was written."""
    if digest_of(attempt.spec)[:16] != attempt.run:
        return "its run's value does not match its run's identity"
    return None if attempt.digest(metrics_digest) == digest else "its values do not match their digest"


def entries(connection: sqlite3.Connection, *, after: int = 0) -> list[Entry]:
    """The attempts with higher numbers, in their order, without their metrics.

    Damage is raised as an error of SQLite. A lost attempt is noticed, as its digest lies elsewhere in the
    file and numbers have no gaps. What an index finds is compared.
    """
    found, sealed = (
        [number for (number,) in connection.execute(f"{query} > ? ORDER BY 1", (after,))]
        for query in ("SELECT id FROM attempts WHERE id", "SELECT attempt FROM digests WHERE attempt")
    )
    numbers = range(after + 1, after + 1 + len(sealed))
    if missing := sorted({*numbers, *sealed} ^ {*found}):
        raise damage(f"attempt {missing[0]} is not whole")
    return [entry(connection, number) for number in numbers]


def entry(connection: sqlite3.Connection, number: int) -> Entry:
    """The attempt with that number."""
    with _damage_in(number):
        values = _row(connection, "SELECT * FROM attempts WHERE id = ?", number)
        run = _row(connection, "SELECT * FROM runs WHERE identity = ?", values["run"])
        made_with = _row(connection, "SELECT * FROM environments WHERE identity = ?", values["environment"])
        digests = _row(connection, "SELECT * FROM digests WHERE attempt = ?", number)
        attempt = Attempt(
            run=values["run"],
            spec=json.loads(run.pop("spec")),
            environment={name: value for name, value in made_with.items() if name != "identity"},
            values={name: values[name] for name in ATTEMPT_COLUMNS},
            metrics={},
            readings={name: json.loads(value) for name, value in connection.execute(READINGS, (number,))},
        )
        fault = fault_of(attempt, digests["metrics"], digests["content"])
        if fault is None and run != {"identity": attempt.run, **run_columns(attempt.spec)}:
            fault = "its run's columns do not match its run's value"
        if fault is not None:
            raise damage(f"attempt {number} of run {digests['run']} is not as it was written: {fault}")
    return Entry(number, attempt, digests["metrics"])


def with_metrics(connection: sqlite3.Connection, found: Entry) -> Attempt:
    """An attempt with its metrics."""
    return replace(found.attempt, metrics=metrics(connection, found))


def metrics(connection: sqlite3.Connection, found: Entry) -> Series:
    """The series of an attempt. SQLite has no NaN: it is NULL there."""
    series: Series = {}
    with _damage_in(found.number):
        for name, step, value in connection.execute(METRICS, (found.number,)):
            series.setdefault(name, []).append((step, math.nan if value is None else value))
        if digest_of(series) != found.metrics_digest:
            run = found.attempt.run
            raise damage(f"attempt {found.number} of run {run} is not as it was written: {METRICS_DIFFER}")
    return series


@contextlib.contextmanager
def _damage_in(number: int) -> Iterator[None]:
    """Text that is no JSON, a missing column or a text for a number can only be damage."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise damage(f"attempt {number} is not whole") from error


def _insert(connection: sqlite3.Connection, start: str, values: Mapping[str, Any]) -> int:
    marks = ", ".join("?" * len(values))
    cursor = connection.execute(f"{start} ({', '.join(values)}) VALUES ({marks})", tuple(values.values()))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def _row(connection: sqlite3.Connection, query: str, key: object) -> dict[str, Any]:
    cursor = connection.execute(query, (key,))
    row = cursor.fetchone()
    if row is None:
        raise LookupError(key)
    return dict(zip((column[0] for column in cursor.description), row, strict=True))


def _reading(value: Any) -> Any:
    return value if isinstance(value, float) and math.isinf(value) else plain(value)


def _real(value: Any) -> float:
    """A float as SQLite returns it, which has no negative zero."""
    return float(value) + 0.0
