"""The ledger: all runs of a study in one SQLite file that is only ever added to."""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theodolite.core.errors import UseError
from theodolite.core.files import plain_text
from theodolite.core.optional import needed
from theodolite.fleet import opening, tables
from theodolite.fleet.exporting import export, read_exported, salvaged
from theodolite.fleet.opening import LedgerError, Lock
from theodolite.fleet.provenance import ADDED
from theodolite.fleet.tables import Attempt, Entry, Series

if TYPE_CHECKING:  # a run needs torch, a ledger does not
    import pandas

    from theodolite.fleet.run import Outcome, Run

__all__ = ["Ledger", "LedgerError"]

RECORD = "make one with Run(…, probes=('gradient',))"
PATIENCE_WITH_READERS = 100
"""Milliseconds that the driver waits for a reader before it leaves a record in the log beside the file."""


class Ledger:
    """All runs of a study, in one file.

    `Ledger.open` is for the one driver that writes, `Ledger.read` for everybody else, at any time. A path is
    a folder, in which the file is `ledger.sqlite`, or a file that ends in .sqlite or .db. What is read is
    compared with digests of what was written; a `LedgerError` names what does not match.

    >>> import tempfile
    >>> from theodolite.fleet.run import Outcome, Run
    >>> from theodolite.core.size import Size
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
        self._entries: list[Entry] = []
        self._by_run: dict[str, list[Entry]] = {}
        with _explained(self.path):
            self.name, self.spec = tables.study_of(connection)

    @classmethod
    def open(cls, path: str | Path, *, name: str, spec: Mapping[str, Any]) -> Ledger:
        """Open a ledger to write, or make it. There can be one driver at a time.

        Args:
            path: folder or file; made if it is not there.
            name: of the study.
            spec: what is studied, as JSON. A ledger with another spec is refused.
        """
        file = opening.file_of(path)
        with contextlib.ExitStack() as undo:
            lock = undo.enter_context(contextlib.closing(opening.lock(file)))
            connection = undo.enter_context(contextlib.closing(opening.open_to_write(file)))
            with _explained(file), _transaction(connection):
                if tables.is_empty(connection):
                    tables.create(connection, name, spec)
            lock.hold_file()
            ledger = cls(file, connection, lock)
            ledger._clear_log()
            _refuse_another(ledger, plain_text(name), json.loads(json.dumps(spec)))
            undo.pop_all()
        return ledger

    @classmethod
    def read(cls, path: str | Path) -> Ledger:
        """Read it, also while a driver is writing."""
        file = opening.file_of(path)
        with opening.closed_on_error(opening.open_to_read(file)) as connection:
            return cls(file, connection, None)

    @classmethod
    def import_(cls, source: str | Path, path: str | Path) -> Ledger:
        """A new ledger with all that was exported, opened to be read."""
        return cls.written(path, *read_exported(Path(source).expanduser()))

    @classmethod
    def salvage(
        cls, source: str | Path, path: str | Path, *, said: Callable[[str], None] = lambda line: None
    ) -> Ledger:
        """A new ledger with the intact attempts of a damaged one, opened to be read.

        `said` is called with a line for each attempt that is left out.
        """
        return cls.written(path, *salvaged(opening.file_of(source), said))

    @classmethod
    def written(
        cls, path: str | Path, name: str, spec: Mapping[str, Any], every: Iterator[Attempt]
    ) -> Ledger:
        """A new ledger that holds these attempts, in this order, opened to be read."""
        file = opening.file_of(path)
        with contextlib.closing(opening.lock(file)):
            if file.exists():
                raise UseError(f"{file} is there already: give a path for a new ledger")
            try:
                connected = contextlib.closing(opening.open_to_write(file))
                with connected as connection, _explained(file), _transaction(connection):
                    tables.create(connection, name, spec)
                    for attempt in every:
                        tables.write(connection, attempt)
            except BaseException as error:
                file.unlink(missing_ok=True)
                if isinstance(error, sqlite3.IntegrityError):
                    raise UseError(f"what is to go into {file} is no ledger: {error}") from error
                raise
        return cls.read(file)

    def settled(self) -> set[str]:
        """The identities of the runs that finished or diverged: they need not be run again."""
        return {entry.attempt.run for entry in self._read() if entry.settles}

    def sources(self) -> dict[str, set[str]]:
        """By workload, the source hashes with which its settled runs were made; none for built-in ones."""
        found: dict[str, set[str]] = {}
        for entry in self._read():
            source = entry.attempt.environment["workload_source"]
            if entry.settles and source is not None:
                found.setdefault(entry.attempt.spec["workload"], set()).add(source)
        return found

    def append(self, outcome: Outcome) -> None:
        """Add an outcome. When this returns it is on the disk; if it raises, nothing was written."""
        if self._lock is None:
            raise UseError(f"{self.path} was opened to be read: Ledger.open is for the driver")
        attempt = Attempt.of(outcome)
        try:
            with _explained(self.path), _transaction(self._connection):
                tables.write(self._connection, attempt)
        except sqlite3.IntegrityError as error:
            raise UseError(
                f"run {attempt.run} ({outcome.run}) cannot be added to {self.path}: {error}. "
                "A run that has finished or diverged is not run again: leave out ledger.settled()"
            ) from error
        self._clear_log()

    def rows(self) -> list[dict[str, Any]]:
        """A flat mapping for each run, of the attempt that settled it, else of the last."""
        counted = self._counted()
        return [_flat_row(entry.attempt, len(self._by_run[entry.attempt.run])) for entry in counted]

    def runs(self) -> list[Run]:
        """The runs that were tried, as values."""
        from theodolite.fleet.run import Run

        self._read()
        return [Run.from_dict(tries[0].attempt.spec) for tries in self._by_run.values()]

    def metrics(self, identity: str) -> Series:
        """By name, the (step, value) pairs of a run, of the attempt that `rows` shows."""
        self._read()
        if identity not in self._by_run:
            raise UseError(f"{self.path} has no run {identity!r}: see the identities in rows()")
        with _explained(self.path):
            return tables.metrics(self._connection, _counting(self._by_run[identity]))

    def frame(self) -> pandas.DataFrame:
        """`rows` as a pandas DataFrame."""
        frame = needed("pandas").DataFrame(self.rows())
        whole = {name: "Int64" for name in ("base_width", "base_depth") if name in frame}
        return frame.astype(whole)

    def frame_of_metrics(self) -> pandas.DataFrame:
        """Every value of every run as a pandas DataFrame: identity, name, step, value."""
        found = [
            (run, name, *value)
            for run in (row["identity"] for row in self.rows())
            for name, series in self.metrics(run).items()
            for value in series
        ]
        frame = needed("pandas").DataFrame(found, columns=["identity", "name", "step", "value"])
        return frame.astype({"step": "int64", "value": "float64"})

    def export(self, path: str | Path) -> tuple[Path, Path]:
        """Write two Parquet or CSV files, by the suffix of the name, and give their paths."""
        return export(Path(path).expanduser(), self.name, self.spec, self.attempts())

    def attempts(self) -> Iterator[Attempt]:
        """Every attempt at every run, in the order in which they ended."""
        for entry in self._read():
            with _explained(self.path):
                attempt = tables.with_metrics(self._connection, entry)
            yield attempt

    def close(self) -> None:
        """Close it; another driver can open it then."""
        self._connection.close()
        if self._lock is not None:
            opening.drop_log_copy(self.path)
            self._lock.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self) -> list[Entry]:
        """Every attempt without its metrics; only new ones are read, as a ledger only grows."""
        with _explained(self.path), _snapshot(self._connection):
            new = tables.entries(self._connection, after=len(self._entries))
        self._entries += new
        for entry in new:
            self._by_run.setdefault(entry.attempt.run, []).append(entry)
        return self._entries

    def _counted(self) -> list[Entry]:
        """Of each run the attempt that settled it, else the last; in the order in which they ended."""
        self._read()
        return sorted(map(_counting, self._by_run.values()), key=lambda entry: entry.number)

    def _clear_log(self) -> None:
        """Move committed pages from SQLite's log to the file, so that the log stays small.

        If a reader is in the way or the disk is full, they stay in the log, where they are as safe, and are
        moved with the next record.
        """
        connection = self._connection
        connection.execute(f"PRAGMA busy_timeout = {PATIENCE_WITH_READERS}")
        with contextlib.suppress(sqlite3.OperationalError, OSError):
            opening.keep_log(self.path)
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            opening.drop_log_copy(self.path, moved=not busy)
        connection.execute(f"PRAGMA busy_timeout = {opening.PATIENCE}")


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. The last pages of the file stay free."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        before = tables.pages(connection)
        yield
        tables.keep_the_end_free(connection, before)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):  # the first error is being raised already
                connection.execute("ROLLBACK")


@contextlib.contextmanager
def _snapshot(connection: sqlite3.Connection) -> Iterator[None]:
    """Read a consistent state, whatever a driver writes meanwhile."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:  # some errors of SQLite's end it
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError:
        raise  # about what is written, not about the file
    except sqlite3.DatabaseError as error:
        raise opening.explained(path, error) from error


def _counting(tries: list[Entry]) -> Entry:
    """The attempt at a run that counts."""
    return max(tries, key=lambda entry: (entry.settles, entry.number))


def _flat_row(attempt: Attempt, tries: int) -> dict[str, Any]:
    """The main columns first, then the rest of the run's value, then its readings."""
    spec, values = tables.flat(attempt.spec), attempt.values
    for name, usual in ADDED.items():  # see Run.to_dict
        spec.setdefault(name, usual)
    first = ("workload", "width", "depth", "optimizer", "parameterization", "lr", "seed")
    row: dict[str, Any] = {"identity": attempt.run}
    row |= {name: spec.pop(name) for name in first if name in spec}
    row |= {name: values[name] for name in ("status", "step", "held_out", "seconds")}
    # The number of held-out batches is a field of the run, their loss is the result.
    row |= {"held_out_batches" if name == "held_out" else name: value for name, value in spec.items()}
    for name, value in attempt.readings.items():
        for cell, leaf in tables.leaves(name, value).items():
            row[f"reading.{cell}" if cell in row else cell] = leaf
    row |= {name: values[name] for name in ("device", "engine", "error", "ended")}
    return row | {"attempts": tries}


def _refuse_another(ledger: Ledger, name: str, spec: Mapping[str, Any]) -> None:
    """Refuse to continue a ledger of another study."""
    if ledger.name != name:
        raise UseError(
            f"{ledger.path} holds the study {ledger.name!r}, not {name!r}: give this one another folder "
            "(--out)"
        )
    if ledger.spec == spec:
        return
    there, here = (
        {key.removeprefix("."): repr(value) for key, value in tables.leaves("", given).items()}
        for given in (ledger.spec, spec)
    )
    differ = [
        f"{key} is {there.get(key, 'not set')} there and {here.get(key, 'not set')} here"
        for key in dict.fromkeys([*there, *here])
        if there.get(key) != here.get(key)
    ]
    listed = "; ".join(differ[:5] + [f"and {len(differ) - 5} more"] * (len(differ) > 5))
    raise UseError(
        f"{ledger.path} holds the study {name!r} with other settings"
        f"{listed and ': '}{listed}. Give this one another folder (--out)"
    )


def gradient_norms(ledger: str | Path | Ledger, run: str | None = None) -> tuple[float, ...]:
    """One gradient norm (l2, of the whole network) for each step of a run that finished.

    Args:
        ledger: the folder, its file, or an open ledger.
        run: the identity, or the beginning of it; may be left out if only one run has norms.

    The run has to have the probe `gradient`. Between recorded steps norms are interpolated linearly.
    """
    if not isinstance(ledger, Ledger):
        with Ledger.read(ledger) as opened:
            return gradient_norms(opened, run)
    rows = ledger.rows()
    found = [row for row in rows if row["identity"].startswith(run or "")]
    if run is None:
        found = [row for row in found if "gradient" in row["probes"]]
        if not found:
            raise UseError(f"none of the {len(rows)} runs in {ledger.path} recorded gradient norms: {RECORD}")
    if len(found) != 1:
        few = ", ".join(row["identity"] for row in (found or rows)[:3])
        said = f"{len(found)} runs" if found else "no run"
        asked = "with gradient norms" if run is None else f"whose identity begins with {run!r}"
        raise UseError(f"{ledger.path} has {said} {asked}: say which by run=…, as {few}")
    row = found[0]
    name = f"run {row['identity']} in {ledger.path}"
    if row["status"] != "finished":
        raise UseError(
            f"{name} {row['status']} at step {row['step']}: its norms are not those of a run to follow. Give "
            "one that finished"
        )
    recorded = ledger.metrics(row["identity"]).get("gradient")
    if not recorded:
        raise UseError(f"{name} recorded no gradient norms: {RECORD}")
    steps, norms = zip(*recorded, strict=True)
    for step, norm in recorded:
        if not math.isfinite(norm):
            raise UseError(f"the gradient norm of {name} is {norm} at step {step}: give another run")
    if steps[0] != 0 or steps[-1] != row["steps"] - 1:
        raise UseError(
            f"{name} has gradient norms from step {steps[0]} to {steps[-1]}, and {row['steps']} steps: the "
            "others are missing"
        )
    return tuple(np.interp(np.arange(row["steps"]), steps, norms).tolist())
