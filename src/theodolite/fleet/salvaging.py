"""What can still be read of a ledger that is damaged."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.fleet import attempts, opening, schema, spare
from theodolite.fleet.attempts import Attempt


def salvaged(path: Path, said: Callable[[str], None]) -> tuple[str, dict[str, Any], Iterator[Attempt]]:
    """Name and spec of the study, and all attempts that are as they were written.

    It works on a copy. Attempts are looked up one by one, as what they are made of may be gone for some and
    not for others. One that does not match its digest is left out, and named: its run can be made again.
    """
    if not path.is_file():
        raise UseError(f"there is no ledger at {path}: give the folder or the file of one")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        for ending in ("", "-wal", "-spare"):
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{ending}", f"{copy}{ending}")
        spare.restore(copy)
        opening.mend(copy)
        with contextlib.closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            try:
                connection.execute("PRAGMA writable_schema = ON")  # go on if a definition cannot be read
                name, spec = schema.study_of(connection)
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
            attempt = attempts.with_metrics(connection, attempts.entry(connection, number))
        except sqlite3.DatabaseError as error:
            reason = " ".join(str(error).split())
            said(f"left out: {'' if reason.startswith('attempt') else f'attempt {number}: '}{reason}")
            continue
        if attempt.run not in settled:
            yield attempt
        if attempt.values["status"] != "failed":
            settled.add(attempt.run)


def _numbers(connection: sqlite3.Connection) -> set[int]:
    """The numbers of the attempts, from both ends of both tables that have them. They have no gaps."""
    found: set[int] = set()
    unread: sqlite3.DatabaseError | None = None
    for query in ("SELECT id FROM attempts", "SELECT attempt FROM digests"):
        for order in ("ASC", "DESC"):
            try:
                for (number,) in connection.execute(f"{query} ORDER BY 1 {order}"):
                    found.add(number)
            except sqlite3.DatabaseError as error:
                unread = error
    if unread is not None and not found:
        raise unread
    return found | set(range(1, len(found) + 1))
