"""One attempt at a run as plain values: to the tables and back."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from theodolite.fleet.environment import Environment, environment

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
    """What a ledger keeps of one attempt."""

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
        """Made here and now."""
        return Attempt(
            run=outcome.run.identity,
            spec=outcome.run.to_dict(),
            environment=environment(outcome.run.workload),
            values={
                "status": outcome.status,
                "step": int(outcome.step),
                "held_out": None if outcome.held_out is None else float(outcome.held_out),
                "seconds": float(outcome.seconds),
                "device": outcome.device,
                "engine": outcome.engine,
                "error": outcome.error,
                "ended": datetime.now(UTC).isoformat(timespec="milliseconds"),
            },
            metrics={
                name: [(int(step), float(value)) for step, value in series]
                for name, series in outcome.metrics.items()
            },
            readings=dict(outcome.readings),
        )

    @property
    def num_metrics(self) -> int:
        """How many values there are in all series."""
        return sum(map(len, self.metrics.values()))


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


def write(connection: sqlite3.Connection, attempt: Attempt) -> None:
    """Put an attempt into the tables, inside the caller's transaction."""
    fields = flat(attempt.spec)
    _insert(
        connection,
        "INSERT OR IGNORE INTO runs",
        {"identity": attempt.run, "spec": _json(attempt.spec)}
        | {name: fields.get(name) for name in RUN_COLUMNS},
    )
    made_with = hashlib.sha256(_json(attempt.environment).encode()).hexdigest()[:16]
    _insert(connection, "INSERT OR IGNORE INTO environments", {"identity": made_with, **attempt.environment})
    counts = {"num_metrics": attempt.num_metrics, "num_readings": len(attempt.readings)}
    values = {"run": attempt.run, "environment": made_with, **attempt.values, **counts}
    number = _insert(connection, "INSERT INTO attempts", values)
    connection.executemany(
        "INSERT INTO metrics VALUES (?, ?, ?, ?)",
        [(number, name, step, value) for name, series in attempt.metrics.items() for step, value in series],
    )
    connection.executemany(
        "INSERT INTO readings VALUES (?, ?, ?)",
        [(number, name, _json(value)) for name, value in attempt.readings.items()],
    )


def read(connection: sqlite3.Connection) -> Iterator[Attempt]:
    """All attempts, in their order."""
    for (number,) in connection.execute("SELECT id FROM attempts ORDER BY id").fetchall():
        yield read_one(connection, number)


def read_one(connection: sqlite3.Connection, number: int) -> Attempt:
    """The attempt with that number. A LookupError says that something of it is missing."""
    values = _row(connection, "SELECT * FROM attempts WHERE id = ?", number)
    run = _row(connection, "SELECT * FROM runs WHERE identity = ?", values["run"])
    made_with = _row(connection, "SELECT * FROM environments WHERE identity = ?", values["environment"])
    attempt = Attempt(
        run=values["run"],
        spec=json.loads(run["spec"]),
        environment={name: value for name, value in made_with.items() if name != "identity"},
        values={name: values[name] for name in ATTEMPT_COLUMNS},
        metrics=read_metrics(connection, number),
        readings=dict(read_readings(connection, number)),
    )
    distinct = sum(len(dict(series)) for series in attempt.metrics.values())  # a damaged table has rows twice
    whole = attempt.num_metrics == distinct == values["num_metrics"]
    if not whole or len(attempt.readings) != values["num_readings"]:
        raise LookupError(number)
    return attempt


def read_metrics(connection: sqlite3.Connection, attempt: int) -> Series:
    """The series of an attempt. SQLite has no NaN: it is NULL there."""
    series: Series = {}
    query = "SELECT name, step, value FROM metrics WHERE attempt = ? ORDER BY name, step"
    for name, step, value in connection.execute(query, (attempt,)):
        series.setdefault(name, []).append((step, math.nan if value is None else value))
    return series


def read_readings(connection: sqlite3.Connection, attempt: int) -> Iterator[tuple[str, Any]]:
    """The readings of an attempt."""
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
