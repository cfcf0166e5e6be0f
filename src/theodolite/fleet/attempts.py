"""One attempt at a run as plain values: to the tables and back."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from theodolite.core.files import plain_text
from theodolite.fleet.digest import digest_of
from theodolite.fleet.environment import Environment, environment
from theodolite.fleet.schema import damage

if TYPE_CHECKING:  # a run needs torch, a ledger does not
    from theodolite.fleet.outcome import Outcome

Series = dict[str, list[tuple[int, float]]]
"""By name of a metric, (step, value) in order of steps."""

RUN_COLUMNS = (
    *("workload", "width", "depth", "base_width", "base_depth", "optimizer", "parameterization"),
    *("lr", "weight_decay", "seed", "steps"),
)
ATTEMPT_COLUMNS = ("status", "step", "held_out", "seconds", "device", "engine", "error", "ended")


@dataclass(frozen=True)
class Attempt:
    """What a ledger keeps of one attempt: what is read back is equal to the last bit."""

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
        """Made here and now. Texts go through `plain_text`, so that none can be refused later."""
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
            readings={plain_text(name): json.loads(_json(item)) for name, item in outcome.readings.items()},
        )

    @functools.cached_property
    def metrics_digest(self) -> str:
        """Of all series."""
        return digest_of(self.metrics)

    @functools.cached_property
    def digest(self) -> str:
        """Of everything, of the metrics by their digest."""
        return _digest(self, self.metrics_digest)


@dataclass(frozen=True)
class Entry:
    """An attempt as it lies in the tables, compared with its digest, without its metrics."""

    number: int
    attempt: Attempt
    metrics_digest: str

    @property
    def settles(self) -> bool:
        """Is there nothing to be run again?"""
        return bool(self.attempt.values["status"] != "failed")


def flat(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The value of a run with one name for each number: sizes as width and depth, options with a dot.

    >>> flat({"size": [64, 2], "base": None, "lr": 0.1, "options": {"betas": [0.9, 0.95]}})
    {'width': 64, 'depth': 2, 'base_width': None, 'base_depth': None, 'lr': 0.1, 'options.betas': (0.9, 0.95)}
    """
    values: dict[str, Any] = {}
    for name, value in spec.items():
        if name in ("size", "base"):
            width, depth = value or (None, None)
            before = "" if name == "size" else "base_"
            values |= {f"{before}width": width, f"{before}depth": depth}
        else:
            values |= leaves(name, value)
    return values


def leaves(name: str, value: Any) -> dict[str, Any]:
    """A value of JSON as cells of a table: mappings are spread out, lists become tuples.

    >>> leaves("sizes", {"stream": 1.5, "branches": [1, 2]})
    {'sizes.stream': 1.5, 'sizes.branches': (1, 2)}
    """
    if isinstance(value, Mapping):
        return {
            key: cell for part, item in value.items() for key, cell in leaves(f"{name}.{part}", item).items()
        }
    return {name: _frozen(value)}


def run_columns(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Of the value of a run what has a column of its own. A whole number of more than 64 bits has none."""
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
    # Not `_json`: null in the place of infinity would be another run.
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
        [(number, name, _json(value)) for name, value in attempt.readings.items()],
    )
    digests = {"attempt": number, "run": attempt.run, "content": attempt.digest}
    _insert(connection, "INSERT INTO digests", digests | {"metrics": attempt.metrics_digest})


def fault_of(attempt: Attempt, metrics_digest: object, digest: object) -> str | None:
    """What is wrong with an attempt that was read, by its digests; None if it is as it was written."""
    if attempt.metrics_digest != metrics_digest:
        return METRICS_DIFFER
    return _fault(attempt, attempt.metrics_digest, digest)


def entries(connection: sqlite3.Connection, *, after: int = 0) -> list[Entry]:
    """The attempts with higher numbers, in their order, without their metrics.

    Damage is raised as SQLite would raise it. An attempt that is gone is missed, as its digest lies elsewhere
    in the file, and numbers have no gaps. No index is trusted: what is found by one is compared.
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
            readings=dict(_readings(connection, number)),
        )
        fault = _fault(attempt, digests["metrics"], digests["content"])
        if fault is None and run != {"identity": attempt.run, **run_columns(attempt.spec)}:
            fault = "its run's columns do not match its run's value"
        if fault is not None:
            raise damage(f"attempt {number} of run {digests['run']} is not as it was written: {fault}")
    return Entry(number, attempt, digests["metrics"])


def with_metrics(connection: sqlite3.Connection, found: Entry) -> Attempt:
    """All of an attempt."""
    return replace(found.attempt, metrics=metrics(connection, found))


def metrics(connection: sqlite3.Connection, found: Entry) -> Series:
    """The series of an attempt. SQLite has no NaN: it is NULL there."""
    series: Series = {}
    query = "SELECT name, step, value FROM metrics WHERE attempt = ? ORDER BY name, step"
    with _damage_in(found.number):
        for name, step, value in connection.execute(query, (found.number,)):
            series.setdefault(name, []).append((step, math.nan if value is None else value))
        if digest_of(series) != found.metrics_digest:
            run = found.attempt.run
            raise damage(f"attempt {found.number} of run {run} is not as it was written: {METRICS_DIFFER}")
    return series


METRICS_DIFFER = "its metrics do not match their digest"


def _digest(attempt: Attempt, metrics_digest: str) -> str:
    content = (attempt.run, attempt.spec, attempt.environment, attempt.values, attempt.readings)
    return digest_of((*content, metrics_digest))


def _fault(attempt: Attempt, metrics_digest: str, digest: object) -> str | None:
    if digest_of(attempt.spec)[:16] != attempt.run:
        return "its run's value does not match its run's identity"
    return None if _digest(attempt, metrics_digest) == digest else "its values do not match their digest"


@contextlib.contextmanager
def _damage_in(number: int) -> Iterator[None]:
    """Only damage makes text that is no JSON, a column that is not there or a number that is a text."""
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise damage(f"attempt {number} is not whole") from error


def _readings(connection: sqlite3.Connection, attempt: int) -> Iterator[tuple[str, Any]]:
    query = "SELECT name, value FROM readings WHERE attempt = ? ORDER BY name"
    for name, value in connection.execute(query, (attempt,)):
        yield name, json.loads(value)


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


def _json(value: Any) -> str:
    """JSON that every tool reads: it has no number that is not finite, so such a one is null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _real(value: Any) -> float:
    """A float as SQLite gives it back: it has no negative zero."""
    return float(value) + 0.0
