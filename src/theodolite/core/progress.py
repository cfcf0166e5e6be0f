"""Progress of long calls: one signature for every `progress=`."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of all work that is done: `progress("measuring", 0.25)`."""


def silent(title: str, done: float) -> None:
    """Progress that nobody watches."""


def share(
    progress: Progress | None, title: str, start: float = 0.0, end: float = 1.0
) -> Callable[[float], None]:
    """What an inner step calls with its own fraction; it is told under one title, from `start` to `end`.

    >>> half = share(lambda title, done: print(title, done), "second half", 0.5, 1.0)
    >>> half(0.5)
    second half 0.75
    """
    return lambda done: (progress or silent)(title, start + (end - start) * done)


def part(progress: Progress | None, start: float, end: float) -> Progress:
    """Progress of a call that is a part of another, from `start` to `end` of it."""
    return lambda title, done: (progress or silent)(title, start + (end - start) * done)
