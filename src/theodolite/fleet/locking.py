"""One driver at a time: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

from theodolite.core.errors import UseError


class Lock:
    """The right to write a file, for as long as this process lives or until it is released.

    It is a lock of the system's on a file beside, `NAME-lock`, which also says who holds it, and for the case
    that somebody removes that, one on the file itself: on a byte that lies far behind all that SQLite uses.

    The handle of the file itself is kept until the end. To close any handle of it ends the locks that SQLite
    has on it in this process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock_file = path.with_name(f"{path.name}-lock")
        self._own: int | None = None
        self._handle = self._taken()
        try:
            self.hold_file()
        except BaseException:
            self._lock_file.unlink(missing_ok=True)
            os.close(self._handle)
            raise
        since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        with contextlib.suppress(OSError):  # the disk may be full
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, holder.encode(), 0)
        _held.add(self._handle)

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
        if (status.st_dev, status.st_ino) in _files.values():  # another handle would have to be closed again
            raise self._refusal(f"process {os.getpid()}")
        handle = os.open(self._path, os.O_RDWR)
        try:
            _lock_far_byte(handle)
        except BlockingIOError:
            os.close(handle)
            raise self._refusal("another process") from None
        except OSError:  # a file system without such locks
            pass
        self._own = handle
        _files[handle] = status.st_dev, status.st_ino

    def release(self) -> None:
        """Let others have it. In a process that was forked off this does nothing."""
        if self._own in _files:
            del _files[self._own]
            os.close(self._own)
        if self._handle in _held:
            _held.remove(self._handle)
            self._lock_file.unlink(missing_ok=True)
            os.close(self._handle)

    def _taken(self) -> int:
        while True:
            handle = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever released it just now has removed the file that we opened: then there is a new one.
                if os.path.samestat(os.fstat(handle), os.stat(self._lock_file)):
                    return handle
            except FileNotFoundError:
                pass
            except BlockingIOError:
                holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
                os.close(handle)
                raise self._refusal(holder) from None
            except OSError:
                os.close(handle)
                raise
            os.close(handle)

    def _refusal(self, holder: str) -> UseError:
        return UseError(
            f"{self._path} is being written by {holder}. Wait until that has ended, or give another path"
        )


FAR = 1 << 40
"""The byte that is locked. It need not be there. SQLite locks some just behind the first gigabyte."""


def _lock_far_byte(handle: int) -> None:
    if sys.platform == "linux":
        # Of the handle, not of the process: it lasts when another handle of the file is closed.
        wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, FAR, 1, 0)
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, wanted)
    else:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, FAR)


_held: set[int] = set()
_files: dict[int, tuple[int, int]] = {}
"""The handles of the files themselves, with device and inode."""


def _let_go() -> None:
    """In a forked process: else it would go on holding the locks when the driver is gone."""
    for handle in (*_held, *_files):
        os.close(handle)
    _held.clear()
    _files.clear()


os.register_at_fork(after_in_child=_let_go)
