"""From a path to a connection: one driver at a time, readers at any time, and repair after an accident.

SQLite first writes a record to a log (`NAME-wal`) and then moves its pages from there into the file. If it is
stopped half-way, it needs the log to repair the file. As long as that takes, a copy of the log lies beside it
(`NAME-spare`).
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import os
import shutil
import socket
import sqlite3
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.fleet import tables

PATIENCE = 10_000
"""Milliseconds to wait for another program that is writing, such as a shell of SQLite's."""
MOST_EXTENDED = 16
"""The largest factor by which a truncated file is extended."""
SUFFIXES = (".sqlite", ".sqlite3", ".db")
FAR = 1 << 40
"""The byte that is locked, far behind the file's end and the bytes that SQLite locks."""
_DIGEST = hashlib.sha256().digest_size


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

    All of it is checked first, as writing into a damaged file damages more. Every commit waits for the disk.
    """

    def connect() -> sqlite3.Connection:
        with closed_on_error(_connect(path, "rwc")) as connection:
            if not tables.is_empty(connection):
                tables.check(connection, path)
                _examine(connection)
            # Only now: this changes the file, and it may have been another program's.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA wal_autocheckpoint = 0")  # the ledger does it after every record
        return connection

    restore_log(path)
    return _repaired(path, connect, lambda: repair(path))


def open_to_read(path: Path) -> sqlite3.Connection:
    """A reader's connection. It waits for nobody and changes nothing, and works in read-only folders."""
    if not path.is_file():
        raise UseError(f"there is no ledger at {path}: give the folder or the file of one")

    def connect() -> sqlite3.Connection:
        # A reader with write access removes SQLite's two files beside the ledger if it is the last.
        for mode in ("rw", "ro", "ro&immutable=1"):
            try:
                with closed_on_error(_connect(path, mode)) as connection:
                    connection.execute("PRAGMA query_only = ON")
                    if tables.is_empty(connection):
                        raise UseError(f"{path} is empty: there is no ledger in it yet")
                    tables.check(connection, path)
                return connection
            except sqlite3.OperationalError as error:
                if mode == "ro&immutable=1" or not _is(error, "SQLITE_CANTOPEN", "SQLITE_READONLY"):
                    raise
        raise AssertionError("the last mode returns or raises")

    def repair_if_nobody_writes() -> None:
        with contextlib.closing(lock(path)):
            restore_log(path)
            repair(path)

    if _spare_of(path).exists():
        with contextlib.suppress(UseError):  # then a driver is at work, or the folder is read-only
            repair_if_nobody_writes()
    return _repaired(path, connect, repair_if_nobody_writes)


def repair(path: Path) -> None:
    """Extend a truncated file with zeros to its length; the lock is held.

    SQLite refuses a file with fewer pages than its header says. The last pages of a ledger are unused. If
    more was lost, `_examine` finds it. A header that asks for a much longer file is damaged itself.
    """
    with path.open("rb") as file:
        header = file.read(100)
    bytes_each = int.from_bytes(header[16:18], "big")
    length = int.from_bytes(header[28:32], "big") * (65536 if bytes_each == 1 else bytes_each)
    is_ledger = int.from_bytes(header[68:72], "big") == tables.APPLICATION
    if is_ledger and path.stat().st_size < length <= MOST_EXTENDED * path.stat().st_size:
        os.truncate(path, length)


def explained(path: Path, error: sqlite3.Error) -> UseError:
    """What an error of SQLite means, and what to do."""
    if _is_damage(error):
        return LedgerError(
            f"{path} is damaged ({error}). `theodolite ledger salvage {path} NEW` puts all runs that are "
            "whole into a new ledger; the others can be run again there"
        )
    if _is(error, "SQLITE_NOTADB"):
        return UseError(f"{path} is not a ledger: it is not even a SQLite file. Give another path")
    if _is(error, "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM", "SQLITE_AUTH"):
        return UseError(f"{path} cannot be opened ({error}): give a path in a folder that is yours")
    if _is(error, "SQLITE_FULL"):
        return LedgerError(
            f"the disk of {path} is full: free some space, and the same command continues here. Nothing that "
            "was written before is lost"
        )
    if _is(error, "SQLITE_IOERR"):
        return LedgerError(
            f"{path} cannot be written or read ({error}): the disk may be full, a quota used up or the disk "
            "gone. When that is fixed, the same command continues here"
        )
    if _is(error, "SQLITE_BUSY", "SQLITE_LOCKED"):
        return LedgerError(
            f"{path} is locked by another program, such as a shell of SQLite's: end that first"
        )
    return LedgerError(f"{path}: {error}")


def _repaired(
    path: Path, connect: Callable[[], sqlite3.Connection], repair_it: Callable[[], None]
) -> sqlite3.Connection:
    """Connect; if the file is damaged, repair it and check all of it."""
    try:
        try:
            return connect()
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            repair_it()
            with closed_on_error(connect()) as connection:
                _examine(connection)
            return connection
    except sqlite3.Error as error:
        raise explained(path, error) from error


@contextlib.contextmanager
def closed_on_error(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Close a connection if the block raises an error."""
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _examine(connection: sqlite3.Connection) -> None:
    """Check every attempt and every page."""
    for entry in tables.entries(connection):
        tables.metrics(connection, entry)
    tables.check_pages(connection)


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


def keep_log(path: Path) -> None:
    """Copy the log of this file. A copy that is not whole, as after a power failure, is not used."""
    log = _log_of(path).read_bytes()
    part = path.with_name(f"{path.name}-spare.part")
    part.write_bytes(log + hashlib.sha256(log).digest())
    part.replace(_spare_of(path))


def drop_log_copy(path: Path, *, moved: bool = False) -> None:
    """Remove the copy if the log was moved, as SQLite said, or as it is gone."""
    if moved or not _log_of(path).exists():
        _spare_of(path).unlink(missing_ok=True)


def restore_log(path: Path) -> None:
    """Restore a truncated or missing log from its copy, if the file needs it; the lock is held.

    A log that does not begin like the copy is a later one. A log that is gone or empty may have been moved,
    and later records too: then the file has more records than the copy gives it.
    """
    with contextlib.suppress(FileNotFoundError):
        copy = _spare_of(path).read_bytes()
        kept, digest = copy[:-_DIGEST], copy[-_DIGEST:]
        log = _log_of(path).read_bytes() if _log_of(path).exists() else b""
        is_longer = len(log) < len(kept) and kept.startswith(log)
        if is_longer and hashlib.sha256(kept).digest() == digest and (log or _is_needed(path, kept)):
            with _log_of(path).open("wb") as file:
                file.write(kept)
                file.flush()
                os.fsync(file.fileno())


def _is_needed(path: Path, kept: bytes) -> bool:
    """Is the file sound with this log, with no fewer records than without? Works on copies."""
    with tempfile.TemporaryDirectory() as folder:
        without, copy = Path(folder, "without"), Path(folder, "with")
        for each in (without, copy):
            shutil.copyfile(path, each)
        _log_of(copy).write_bytes(kept)
        records = _records(copy)
        return records is not None and records >= (_records(without, sound=False) or 0)


def _records(path: Path, *, sound: bool = True) -> int | None:
    """How many attempts a ledger has; None if it cannot be read, or is not sound and has to be."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            if sound and connection.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
                return None
            (count,) = connection.execute("SELECT COUNT(*) FROM attempts").fetchone()
            return int(count)
    except sqlite3.Error:
        return None


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _spare_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-spare")


class Lock:
    """The right to write a file, for as long as this process lives or until it is closed.

    It is a system lock on a file beside it, `NAME-lock`, which also says who holds it; and in case somebody
    removes that, one on a byte of the file itself that SQLite does not use.

    The handle of the file itself is kept until the end, since closing it would end the locks that SQLite has
    on the file in this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock_file = path.with_name(f"{path.name}-lock")
        self._own: int | None = None
        self._handle = self._taken()
        _held[self._handle] = None
        try:
            self.hold_file()
        except BaseException:
            self.close()
            raise
        since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        with contextlib.suppress(OSError):  # the disk may be full
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, holder.encode(), 0)

    def hold_file(self) -> None:
        """Lock the file itself too, if it is there: a new one once it was made."""
        if self._own is not None or not self._path.exists():
            return
        status = os.stat(self._path)
        if status.st_nlink > 1:
            raise UseError(
                f"{self._path} has {status.st_nlink} names (hard links), and a driver does not see one that "
                "writes under another name: remove the others, or copy it and give the copy"
            )
        if (status.st_dev, status.st_ino) in _held.values():  # another handle would have to be closed again
            raise self._refusal(f"process {os.getpid()}")
        handle = os.open(self._path, os.O_RDWR)
        try:
            if sys.platform == "linux":
                # Of the handle, not of the process: it lasts when another handle of the file is closed.
                wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, FAR, 1, 0)
                fcntl.fcntl(handle, fcntl.F_OFD_SETLK, wanted)
            else:
                fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, FAR)
        except BlockingIOError:
            os.close(handle)
            raise self._refusal("another process") from None
        except OSError:  # a file system without such locks
            pass
        self._own = handle
        _held[handle] = status.st_dev, status.st_ino

    def close(self) -> None:
        """Let others write. In a forked process this does nothing."""
        if self._own in _held:
            _close(self._own)
        if self._handle in _held:
            self._lock_file.unlink(missing_ok=True)
            _close(self._handle)

    def _taken(self) -> int:
        while True:
            with contextlib.ExitStack() as undo:
                handle = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
                undo.callback(os.close, handle)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
                    raise self._refusal(holder) from None
                # Whoever released it just now has removed the file that we opened: then there is a new one.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(handle), os.stat(self._lock_file)):
                        undo.pop_all()
                        return handle

    def _refusal(self, holder: str) -> UseError:
        return UseError(
            f"{self._path} is being written by {holder}. Wait until that has ended, or give another path"
        )


_held: dict[int, tuple[int, int] | None] = {}
"""The handles that hold locks; those of ledgers with device and inode."""


def _close(handle: int) -> None:
    del _held[handle]
    os.close(handle)


def _let_go() -> None:
    """In a forked process, which would hold the locks when the driver is gone."""
    for handle in [*_held]:
        _close(handle)


os.register_at_fork(after_in_child=_let_go)
