"""Options of a network, refused with the option, the value and the fix."""

from __future__ import annotations

from collections.abc import Iterable

from theodolite.core.errors import UseError
from theodolite.core.size import Size


def require_size(width: int, depth: int) -> None:
    """Refuse a width or a depth that is not a positive whole number.

    >>> require_size(256, 0)
    Traceback (most recent call last):
    theodolite.UseError: depth is 0: a size is two positive whole numbers, for example Size(256, 4)
    """
    Size(width, depth)


def require_positive(**options: int) -> None:
    """Refuse an option that is not a positive whole number.

    >>> require_positive(vocab=-1)
    Traceback (most recent call last):
    theodolite.UseError: vocab is -1: give a positive whole number
    """
    for option, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UseError(f"{option} is {value!r}: give a positive whole number")


def require_one_of(option: str, value: object, choices: Iterable[str]) -> None:
    """Refuse a value that is none of the choices.

    >>> require_one_of("norm", "rsm", ("rms", "layer"))
    Traceback (most recent call last):
    theodolite.UseError: norm is 'rsm': give one of 'rms', 'layer'
    """
    choices = tuple(choices)
    if value not in choices:
        raise UseError(f"{option} is {value!r}: give one of {', '.join(map(repr, choices))}")


def require_multiple(option: str, value: int, of: int, why: str) -> None:
    """Refuse a value that is not a multiple of another, naming its neighbours that are.

    >>> require_multiple("width", 100, 32, "heads have 32 dimensions")
    Traceback (most recent call last):
    theodolite.UseError: width is 100, not a multiple of 32 (heads have 32 dimensions): give 96 or 128
    """
    if value % of:
        below = value // of * of
        fixes = f"{below} or {below + of}" if below else f"{of}"
        raise UseError(f"{option} is {value}, not a multiple of {of} ({why}): give {fixes}")
