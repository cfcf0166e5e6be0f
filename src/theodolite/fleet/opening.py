"""From a path to a connection: for the driver, for a reader, and after an accident."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.fleet import attempts, schema, spare
from theodolite.fleet.locking import Lock

PATIENCE = 10_000
"""Milliseconds to wait for another program that is writing, such as a shell of SQLite's."""
MOST_MENDED = 16
"""How many times as long a file that was cut short may become again."""
SUFFIXES = (".sqlite", ".sqlite3", ".db")


class LedgerError(UseError):
    """A ledger could not be read or written."""


def file_of(path: str | Path) -> Path:
    """The file of a ledger: a path that ends in .sqlite or .db, else `ledger.sqlite` in that folder.

    >>> print(file_of("studies/transfer"), file_of("old.db"))
    studies/transfer/ledger.sqlite old.db
    """
    path = Path(path).expanduser()
    if path.suffix.lower() not in SUFFIXES or path.is_dir():
        if path.is_file():
            raise UseError(
                f"{path} is a file, and its name does not end in .sqlite or .db: it is not a ledger"
            )
        path /= "ledger.sqlite"
    # What lies beside a ledger, the lock and SQLite's log, lies beside the file that a link leads to.
    return path.resolve() if path.is_symlink() else path


def lock(path: Path) -> Lock:
    """Be the one driver of a ledger. Its folder is made if it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Lock(path)
    except OSError as error:
        raise UseError(
            f"the ledger {path} cannot be written: {error.strerror}. Give a path in a folder that is yours"
        ) from error


def open_to_write(path: Path) -> sqlite3.Connection:
    """The driver's connection; it holds the lock. The file may be new and empty.

    All of it is looked at first, as to write into a damaged file damages more. Every commit waits for the
    disk.
    """

    def connect() -> sqlite3.Connection:
        connection = _connect(path, "rwc")
        try:
            if not schema.is_empty(connection):
                schema.check(connection, path)
                _examine(connection)
            # Only now: this changes the file, and it may have been another program's.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # the ledger does it after every record
        except BaseException:
            connection.close()
            raise
        return connection

    spare.restore(path)
    return _mended(path, connect, lambda: mend(path))


def open_to_read(path: Path) -> sqlite3.Connection:
    """A reader's connection. It waits for nobody and changes nothing, also in a folder that is read-only."""
    if not path.is_file():
        raise UseError(f"there is no ledger at {path}: give the folder or the file of one")

    def connect() -> sqlite3.Connection:
        # A reader that may write clears away SQLite's two files beside the ledger when it is the last to go.
        for mode in ("rw", "ro", "ro&immutable=1"):
            connection = _connect(path, mode)
            try:
                connection.execute("PRAGMA query_only = ON")
                if schema.is_empty(connection):
                    raise UseError(f"{path} is empty: there is no ledger in it yet")
                schema.check(connection, path)
            except sqlite3.OperationalError as error:
                connection.close()
                if mode == "ro&immutable=1" or not _is(error, "SQLITE_CANTOPEN", "SQLITE_READONLY"):
                    raise
            except BaseException:
                connection.close()
                raise
            else:
                return connection
        raise AssertionError("the last mode returns or raises")

    def mend_if_nobody_writes() -> None:
        held = lock(path)
        try:
            spare.restore(path)
            mend(path)
        finally:
            held.release()

    if spare.is_left(path):
        with contextlib.suppress(UseError):  # then a driver is at work, or the folder is read-only
            mend_if_nobody_writes()
    return _mended(path, connect, mend_if_nobody_writes)


def mend(path: Path) -> None:
    """Give a file that was cut short its length again; the lock is held.

    SQLite refuses a file with fewer pages than its header says. The last pages of a ledger are free ones, so
    zeros in their place are as good. If more was cut off, `_examine` finds it. A header that wants a file
    many times as long is damaged itself.
    """
    with path.open("rb") as file:
        header = file.read(100)
    bytes_each = int.from_bytes(header[16:18], "big")
    length = int.from_bytes(header[28:32], "big") * (65536 if bytes_each == 1 else bytes_each)
    is_ledger = int.from_bytes(header[68:72], "big") == schema.APPLICATION
    if is_ledger and path.stat().st_size < length <= MOST_MENDED * path.stat().st_size:
        os.truncate(path, length)


def explained(path: Path, error: sqlite3.Error) -> UseError:
    """What an error of SQLite means, and what to do."""
    if _is(error, "SQLITE_FULL"):
        return LedgerError(
            f"the disk of {path} is full: free some space, and the same command goes on from here. "
            "Nothing that was written before is lost"
        )
    if _is(error, "SQLITE_IOERR"):
        return LedgerError(
            f"{path} cannot be written or read ({error}): the disk may be full, a quota used up or the disk "
            "gone. When that is mended, the same command goes on from here"
        )
    if _is(error, "SQLITE_NOTADB"):
        return UseError(f"{path} is not a ledger: it is not even a SQLite file. Give another path")
    if _is_damage(error):
        return LedgerError(
            f"{path} is damaged ({error}). `theodolite ledger salvage {path} NEW` puts all runs that are "
            "whole into a new ledger; the others can be run again there"
        )
    if _is(error, "SQLITE_BUSY", "SQLITE_LOCKED"):
        return LedgerError(
            f"{path} is locked by another program, such as a shell of SQLite's: end that first"
        )
    if _is(error, "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH"):
        return UseError(f"{path} cannot be opened ({error}): give a path in a folder that is yours")
    return LedgerError(f"{path}: {error}")


def _mended(
    path: Path, connect: Callable[[], sqlite3.Connection], mend_it: Callable[[], None]
) -> sqlite3.Connection:
    """Connect; if the file is damaged, mend it and look at all of it."""
    try:
        try:
            return connect()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            mend_it()
            connection = connect()
            try:
                _examine(connection)
            except BaseException:
                connection.close()
                raise
            return connection
    except sqlite3.Error as error:
        raise explained(path, error) from error


def _examine(connection: sqlite3.Connection) -> None:
    """Look at every attempt, and at every page."""
    for entry in attempts.entries(connection):
        attempts.metrics(connection, entry)
    schema.check_pages(connection)


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None
        )
    except sqlite3.Error as error:
        raise explained(path, error) from error
    connection.execute(f"PRAGMA busy_timeout = {PATIENCE}")
    return connection


def _is(error: sqlite3.Error, *names: str) -> bool:
    return getattr(error, "sqlite_errorname", "").startswith(names)


def _is_damage(error: sqlite3.Error) -> bool:
    return _is(error, "SQLITE_CORRUPT") or "decode to UTF-8" in str(error)
