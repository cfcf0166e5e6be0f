"""One call at a time, outside the caller's autocast.

Random number generators, backend switches, warning filters and the tensors of a model are shared by all
threads, and a measurement changes them for its duration. So public calls run one at a time: another thread
waits. A `with` block that runs the user's own code (`scaled`, `tempered`, `track`) does not hold the lock.

Autocast keeps the weights that it has cast until its outermost block ends. Inside such a block, whatever
changes weights would go on computing with the old ones, and sums of our own would be rounded. So public calls
leave the caller's autocast. What the network's own `forward` or the loss enters inside is respected.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LOCK = threading.RLock()
"""Of the process. `untouched_randomness` holds it too."""

_KINDS = ("cpu", "cuda", "xpu", "mps")
"""Devices that autocast is switched on for one by one."""


@contextmanager
def exclusive(*, keep_autocast: bool = False) -> Iterator[None]:
    """Hold the lock of the process, outside the caller's autocast; usable as a decorator.

    Args:
        keep_autocast: compute as the caller's autocast says, but without the weights it has cast before.

    >>> layer = torch.nn.Linear(1, 1)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     with exclusive():
    ...         inside = layer(torch.ones(1, 1)).dtype
    ...     inside, layer(torch.ones(1, 1)).dtype
    (torch.float32, torch.bfloat16)
    """
    with LOCK, outside_autocast(keep=keep_autocast):
        yield


@contextmanager
def outside_autocast(*, keep: bool = False) -> Iterator[None]:
    """Leave the caller's autocast, or `keep` it without what it has cast; for what needs no lock."""
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    on = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    if not depth and not on:
        yield
        return
    cached = torch.is_autocast_cache_enabled()
    try:
        # Blocks that are entered inside are outermost ones then, and clear the cache at their end.
        for _ in range(depth):
            torch.autocast_decrement_nesting()
        if keep:
            torch.set_autocast_cache_enabled(False)
        else:
            for kind in on:
                torch.set_autocast_enabled(kind, False)
        torch.clear_autocast_cache()
        yield
    finally:
        for _ in range(depth):
            torch.autocast_increment_nesting()
        for kind in on:
            torch.set_autocast_enabled(kind, True)
        torch.set_autocast_cache_enabled(cached)
        torch.clear_autocast_cache()  # weights may be others now
