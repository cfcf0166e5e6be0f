"""A second copy of SQLite's log, for the moment in which the file itself is changed.

SQLite first writes a record to a log (`NAME-wal`) and then moves its pages from there into the file. Who is
stopped half-way needs the log to mend the file. As long as that takes, a copy of the log lies beside it
(`NAME-spare`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def keep(path: Path) -> None:
    """Copy the log of this file.

    It does not wait for the disk: the log itself is there already. If the power fails, a copy that is not
    whole is not used.
    """
    log = _log_of(path).read_bytes()
    part = path.with_name(f"{path.name}-spare.part")
    part.write_bytes(log + hashlib.sha256(log).digest())
    part.replace(_spare_of(path))


def drop(path: Path) -> None:
    """The log was moved."""
    _spare_of(path).unlink(missing_ok=True)


def drop_if_moved(path: Path) -> None:
    """SQLite removes the log when the last one who had the file open has moved all of it."""
    if not _log_of(path).exists():
        drop(path)


def restore(path: Path) -> None:
    """Give a log that was cut short its end again, or one that is gone to a file that needs it.

    The lock is held. A log that does not begin like the copy belongs to something later. One that is gone or
    empty may have been moved, and more records after it: then the file has more than the copy gives it.
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
    """Is a file sound with this log, and has it no fewer records than without? It works on copies."""
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


def is_left(path: Path) -> bool:
    """Is there a copy that somebody had no time to drop?"""
    return _spare_of(path).exists()


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _spare_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-spare")
