"""What can still be read of a ledger that is damaged."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from theodolite.errors import UseError
from theodolite.fleet import attempts, opening, spare
from theodolite.fleet.attempts import Attempt


def salvaged(path: Path) -> tuple[str, dict[str, Any], Iterator[Attempt]]:
    """Name and spec of the study, and all attempts that are whole.

    It works on a copy. Attempts are looked up one by one, as what they are made of may be gone for some and
    not for others. One of which any value is missing is left out: its run can be made again.
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
                name, spec = connection.execute("SELECT name, spec FROM study").fetchone()
            except (sqlite3.DatabaseError, TypeError) as error:
                raise opening.LedgerError(
                    f"{path} cannot be salvaged: not even what it is about can be read ({error})"
                ) from error
            found = list(_whole_ones(connection))
    return name, json.loads(spec), iter(found)


def _whole_ones(connection: sqlite3.Connection) -> Iterator[Attempt]:
    settled: set[str] = set()
    for number in sorted({*_numbers(connection, "ASC"), *_numbers(connection, "DESC")}):
        try:
            attempt = attempts.read_one(connection, number)
        except (sqlite3.DatabaseError, LookupError, ValueError):
            continue
        if attempt.run not in settled:
            yield attempt
        if attempt.values["status"] != "failed":
            settled.add(attempt.run)


def _numbers(connection: sqlite3.Connection, order: str) -> Iterator[int]:
    """The numbers of the attempts from one end of the table, as far as it can be read."""
    with contextlib.suppress(sqlite3.DatabaseError):
        for (number,) in connection.execute(f"SELECT id FROM attempts ORDER BY id {order}"):
            yield number
