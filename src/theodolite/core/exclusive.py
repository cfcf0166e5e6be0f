"""`exclusive`: public calls run one at a time, outside the caller's autocast.

Random number generators, backend switches, warning filters and the tensors of a model are shared by all
threads, and a measurement changes them temporarily. So public calls run one at a time, and other threads
wait. A `with` block that runs the user's own code (`scaled`, `tempered`, `track`) does not hold the lock.

Autocast caches the weights that it has cast until its outermost block ends. Inside such a block, code that
changes weights would still compute with the old ones, and our own sums would be rounded. So public calls
leave the caller's autocast. Autocast blocks inside the network's `forward` or the loss stay in effect.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LOCK = threading.RLock()
"""The lock of the process. `untouched_randomness` holds it too."""

_KINDS = ("cpu", "cuda", "xpu", "mps")
"""Device types with an autocast switch of their own."""


@contextmanager
def exclusive(*, keep_autocast: bool = False) -> Iterator[None]:
    """Hold the lock of the process, outside the caller's autocast; usable as a decorator.

    Args:
        keep_autocast: stay in the caller's autocast, but without its cached weights.

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
    """The same without the lock: leave the caller's autocast, or `keep` it without its cached weights."""
    torch.autocast_increment_nesting()
    depth = torch.autocast_decrement_nesting()
    on = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    if not depth and not on:
        yield
        return
    cached = torch.is_autocast_cache_enabled()
    try:
        # Blocks that are entered inside are then outermost and clear the cache at their end.
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
        torch.clear_autocast_cache()  # weights may have changed
