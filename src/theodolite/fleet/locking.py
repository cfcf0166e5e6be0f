"""One driver at a time: a lock that ends with the process that holds it."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
from pathlib import Path

from theodolite.errors import UseError


class Lock:
    """The right to write a file, for as long as this process lives or until it is released.

    It is a lock of the system's on a file beside, `NAME-lock`, which also says who holds it. The file itself
    is left alone: closing any handle of it would end the locks that SQLite has on it in this process.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.with_name(f"{path.name}-lock")
        self._handle = self._taken(path)
        self.was_left_behind = os.fstat(self._handle).st_size > 0
        """Did the driver before end without releasing it?"""
        since = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        with contextlib.suppress(OSError):  # the disk may be full
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, holder.encode(), 0)
        _held.add(self._handle)

    def release(self, *, all_is_well: bool) -> None:
        """Let others have it; unless all is well, the next one finds it left behind.

        In a process that was forked off this does nothing.
        """
        if self._handle in _held:
            _held.remove(self._handle)
            if all_is_well:
                self._file.unlink(missing_ok=True)
            os.close(self._handle)

    def _taken(self, path: Path) -> int:
        while True:
            handle = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Whoever released it just now has removed the file that we opened: then there is a new one.
                if os.path.samestat(os.fstat(handle), os.stat(self._file)):
                    return handle
            except FileNotFoundError:
                pass
            except BlockingIOError:
                holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
                os.close(handle)
                raise UseError(
                    f"{path} is being written by {holder}. Wait until that has ended, or give another path"
                ) from None
            except OSError:
                os.close(handle)
                raise
            os.close(handle)


_held: set[int] = set()


def _let_go() -> None:
    """In a forked process: else it would go on holding the lock when the driver is gone."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
