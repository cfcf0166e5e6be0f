"""The ledger: all runs of a study in one SQLite file that is only ever added to."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from theodolite.errors import UseError
from theodolite.fleet import attempts, opening, schema, spare
from theodolite.fleet.attempts import Attempt
from theodolite.fleet.locking import Lock
from theodolite.fleet.opening import LedgerError
from theodolite.fleet.optional import needed

if TYPE_CHECKING:  # a run needs torch, a ledger does not
    import pandas

    from theodolite.fleet.outcome import Outcome
    from theodolite.fleet.run import Run

__all__ = ["Ledger", "LedgerError"]

PATIENCE_WITH_READERS = 100
"""Milliseconds that the driver waits for a reader before it leaves a record in the log beside the file."""


class Ledger:
    """All runs of a study, in one file.

    `Ledger.open` is for the one driver that writes, `Ledger.read` for everybody else, at any time. A path is
    a folder, in which the file is `ledger.sqlite`, or a file that ends in .sqlite or .db.

    >>> import tempfile
    >>> from theodolite.fleet.outcome import Outcome
    >>> from theodolite.fleet.run import Run
    >>> from theodolite.size import Size
    >>> run = Run("mlp-mixture", Size(64, 2), lr=0.1, parameterization="standard")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Ledger.open(folder, name="first", spec={"steps": 100}) as ledger:
    ...         ledger.append(Outcome(run, "finished", 100, 1.25, {"loss": ((0, 2.5), (99, 1.5))}))
    ...     with Ledger.read(folder) as ledger:
    ...         (row,) = ledger.rows()
    ...         losses = ledger.metrics(run.identity)["loss"]
    >>> row["width"], row["status"], row["held_out"], losses
    (64, 'finished', 1.25, [(0, 2.5), (99, 1.5)])
    """

    path: Path
    """The file."""
    name: str
    spec: Mapping[str, Any]

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: Lock | None) -> None:
        self.path = path
        self._connection = connection
        self._lock = lock
        with _explained(self.path):
            self.name, spec = connection.execute("SELECT name, spec FROM study").fetchone()
        self.spec = json.loads(spec)

    @classmethod
    def open(cls, path: str | Path, *, name: str, spec: Mapping[str, Any]) -> Ledger:
        """Be the driver: make the ledger, or go on with it. There can be one driver at a time.

        Args:
            path: folder or file; made if it is not there.
            name: of the study.
            spec: what is studied, as JSON. A ledger about something else is refused, not continued.
        """
        file = opening.file_of(path)
        lock = opening.lock(file)
        try:
            connection = opening.open_to_write(file, after_an_accident=lock.was_left_behind)
            try:
                with _explained(file), _transaction(connection):
                    if schema.is_empty(connection):
                        schema.create(connection, name, spec)
                ledger = cls(file, connection, lock)
                ledger._clear_log()
                _refuse_another(ledger, name, json.loads(json.dumps(spec)))
            except BaseException:
                connection.close()
                raise
        except BaseException as error:
            damaged = lock.was_left_behind or isinstance(error, LedgerError)
            lock.release(all_is_well=not damaged)
            raise
        return ledger

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """Read it, also while a driver is writing."""
        file = opening.file_of(path)
        return cls(file, opening.open_to_read(file), None)

    @classmethod
    def import_(cls, source: str | Path, path: str | Path) -> Ledger:
        """A new ledger with all that was exported, opened to be read."""
        from theodolite.fleet.exporting import read_exported

        return cls.written(path, *read_exported(Path(source).expanduser()))

    @classmethod
    def salvage(cls, source: str | Path, path: str | Path) -> Ledger:
        """A new ledger with all that can still be read whole of a damaged one, opened to be read."""
        from theodolite.fleet.salvaging import salvaged

        return cls.written(path, *salvaged(opening.file_of(source)))

    @classmethod
    def written(
        cls, path: str | Path, name: str, spec: Mapping[str, Any], every: Iterator[Attempt]
    ) -> Ledger:
        """A new ledger that holds these attempts, in this order, opened to be read."""
        file = opening.file_of(path)
        lock = opening.lock(file)
        try:
            if file.exists():
                raise UseError(f"{file} is there already: give a path for a new ledger")
            connection = opening.open_to_write(file, after_an_accident=False)
            try:
                with _explained(file), _transaction(connection):
                    schema.create(connection, name, spec)
                    for attempt in every:
                        attempts.write(connection, attempt)
            except BaseException as error:
                connection.close()
                file.unlink()
                if isinstance(error, sqlite3.IntegrityError):
                    raise UseError(f"what is to go into {file} is no ledger: {error}") from error
                raise
            connection.close()
        finally:
            lock.release(all_is_well=True)
        return cls.read(file)

    def settled(self) -> set[str]:
        """The identities of the runs that finished or diverged: they need not be run again."""
        with _explained(self.path):
            found = self._connection.execute("SELECT run FROM attempts WHERE status <> 'failed'").fetchall()
        return {identity for (identity,) in found}

    def sources(self) -> dict[str, set[str]]:
        """By workload, the hashes of the files it had when its settled runs were made; none if built in."""
        query = """
            SELECT DISTINCT runs.workload, environments.workload_source FROM attempts
            JOIN runs ON runs.identity = attempts.run
            JOIN environments ON environments.identity = attempts.environment
            WHERE attempts.status <> 'failed' AND environments.workload_source IS NOT NULL
        """
        found: dict[str, set[str]] = {}
        with _explained(self.path):
            for workload, source in self._connection.execute(query):
                found.setdefault(workload, set()).add(source)
        return found

    def append(self, outcome: Outcome) -> None:
        """Add what came of an attempt. When this returns it is on the disk; if it raises, nothing is."""
        if self._lock is None:
            raise UseError(f"{self.path} was opened to be read: Ledger.open is for the driver")
        attempt = Attempt.of(outcome)
        try:
            with _explained(self.path), _transaction(self._connection):
                attempts.write(self._connection, attempt)
        except sqlite3.IntegrityError as error:
            raise UseError(
                f"run {attempt.run} ({outcome.run}) cannot be added to {self.path}: {error}. "
                "A run that has finished or diverged is not run again: leave out ledger.settled()"
            ) from error
        self._clear_log()

    def rows(self) -> list[dict[str, Any]]:
        """One flat mapping for each run, with the attempt that settled it, else the last."""
        with _explained(self.path):
            cursor = self._connection.execute("SELECT * FROM results ORDER BY attempt")
            names = [column[0] for column in cursor.description]
            found = [dict(zip(names, row, strict=True)) for row in cursor]
            readings = [dict(attempts.read_readings(self._connection, row["attempt"])) for row in found]
        return [_flat_row(row, taken) for row, taken in zip(found, readings, strict=True)]

    def runs(self) -> list[Run]:
        """The runs that were tried, as values."""
        from theodolite.fleet.run import Run

        with _explained(self.path):
            specs = self._connection.execute("SELECT spec FROM runs ORDER BY rowid").fetchall()
        return [Run.from_dict(json.loads(spec)) for (spec,) in specs]

    def metrics(self, identity: str) -> attempts.Series:
        """By name, (step, value) of a run; empty if it recorded none. Of the attempt that `rows` shows."""
        with _explained(self.path):
            query = f"SELECT {schema.LATEST} FROM attempts WHERE run = ?"
            (attempt,) = self._connection.execute(query, (identity,)).fetchone()
            if attempt is None:
                raise UseError(f"{self.path} has no run {identity!r}: see the identities in rows()")
            return attempts.read_metrics(self._connection, attempt)

    def frame(self) -> pandas.DataFrame:
        """`rows` as a table of pandas."""
        frame = needed("pandas").DataFrame(self.rows())
        whole = {name: "Int64" for name in ("base_width", "base_depth") if name in frame}
        return frame.astype(whole)

    def frame_of_metrics(self) -> pandas.DataFrame:
        """Every value of every run as a table of pandas: identity, name, step, value."""
        query = """
            SELECT results.identity, metrics.name, metrics.step, metrics.value
            FROM results JOIN metrics ON metrics.attempt = results.attempt
            ORDER BY results.attempt, metrics.name, metrics.step
        """
        with _explained(self.path):
            found = self._connection.execute(query).fetchall()
        frame = needed("pandas").DataFrame(found, columns=["identity", "name", "step", "value"])
        return frame.astype({"step": "int64", "value": "float64"})

    def export(self, path: str | Path) -> tuple[Path, Path]:
        """Write all of it as Parquet or CSV, by the name's ending: the two files that were written."""
        from theodolite.fleet.exporting import export

        with _explained(self.path):
            return export(Path(path).expanduser(), self.name, self.spec, self.attempts())

    def attempts(self) -> Iterator[Attempt]:
        """Every attempt at every run, in the order in which they ended."""
        yield from attempts.read(self._connection)

    def close(self) -> None:
        """Let another driver have it."""
        self._connection.close()
        if self._lock is not None:
            spare.drop_if_moved(self.path)
            self._lock.release(all_is_well=True)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _clear_log(self) -> None:
        """Move what was committed from SQLite's log to the file, so that the log never holds much.

        If a reader is in the way, or the disk is full, it stays in the log, where it is as safe. It is moved
        with the next record.
        """
        connection = self._connection
        connection.execute(f"PRAGMA busy_timeout = {PATIENCE_WITH_READERS}")
        with contextlib.suppress(sqlite3.OperationalError, OSError):
            spare.keep(self.path)
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if not busy:
                spare.drop(self.path)
        connection.execute(f"PRAGMA busy_timeout = {opening.PATIENCE}")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. The last pages of the file stay free."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        before = schema.pages(connection)
        yield
        schema.keep_the_end_free(connection, before)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # what went wrong is on its way up already
                connection.execute("ROLLBACK")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError:
        raise  # about what is written, not about the file
    except sqlite3.DatabaseError as error:
        raise opening.explained(path, error) from error


def _flat_row(result: dict[str, Any], readings: dict[str, Any]) -> dict[str, Any]:
    """First what one looks for, then the rest of the run's value, then what was read."""
    spec = attempts.flat(json.loads(result.pop("spec")))
    first = ("workload", "width", "depth", "optimizer", "parameterization", "lr", "seed")
    row = {"identity": result["identity"]}
    row |= {name: spec.pop(name) for name in first if name in spec}
    row |= {name: result[name] for name in ("status", "step", "held_out", "seconds")}
    # The number of held-out batches is a field of the run, their loss is the result.
    row |= {"held_out_batches" if name == "held_out" else name: value for name, value in spec.items()}
    for name, value in readings.items():
        for cell, leaf in attempts.leaves(name, value).items():
            row[f"reading.{cell}" if cell in row else cell] = leaf
    row |= {name: result[name] for name in ("device", "engine", "error", "ended", "attempts")}
    return row


def _refuse_another(ledger: Ledger, name: str, spec: Mapping[str, Any]) -> None:
    """A ledger is about one study."""
    if ledger.name != name:
        raise UseError(
            f"{ledger.path} holds the study {ledger.name!r}, not {name!r}: give this one another path"
        )
    if ledger.spec == spec:
        return
    there, here = (attempts.leaves("", given) for given in (ledger.spec, spec))
    missing = object()
    differ = [
        f"{key.removeprefix('.')} is {_shown(there, key)} there and {_shown(here, key)} here"
        for key in dict.fromkeys([*there, *here])
        if there.get(key, missing) != here.get(key, missing)
    ]
    listed = "; ".join([*differ[:5], *([f"and {len(differ) - 5} more"] if len(differ) > 5 else [])])
    raise UseError(
        f"{ledger.path} holds the study {name!r} with other settings"
        f"{listed and ': '}{listed}. Give this one another path"
    )


def _shown(values: Mapping[str, Any], key: str) -> str:
    return repr(values[key]) if key in values else "not set"
