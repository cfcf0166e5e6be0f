"""End the process that forks workers, and the workers, when their driver ends, whatever they are doing.

That process imports this module first, before anything that takes long. Elsewhere importing it does nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Have the system kill this process when the thread that started it ends, even in a slow import."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if sys.platform == "linux" and any("multiprocessing.forkserver" in word for word in sys.orig_argv):
    _end_with_parent()
    os.register_at_fork(after_in_child=_end_with_parent)  # a fork does not inherit it
