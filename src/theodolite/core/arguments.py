"""Checks of arguments: each returns the value or raises a `UseError` with the argument's name and value."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

from theodolite.core.errors import UseError

T = TypeVar("T")
MOST_SEEDS = 2**63


def is_whole(value: Any) -> bool:
    """Is it an integer? `True` is not, NumPy's integers are.

    >>> is_whole(3), is_whole(True), is_whole(3.0)
    (True, False, False)
    """
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Is it a finite real number? `True` is not.

    >>> is_number(0.5), is_number(False), is_number(float("nan"))
    (True, False, False)
    """
    try:
        return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def whole(
    name: str, value: Any, *, least: int | None = None, most: int | None = None, wanted: str = ""
) -> int:
    """An integer from `least` to `most`.

    >>> whole("steps", 10, least=1)
    10
    >>> whole("steps", 0, least=1)
    Traceback (most recent call last):
    theodolite.UseError: steps is 0: give an integer, at least 1
    """
    good = is_whole(value) and (least is None or value >= least) and (most is None or value <= most)
    if not good:
        bounds = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
        raise UseError(f"{name} is {_said(value)}: {wanted or ', '.join(['give an integer', *bounds])}")
    return int(value)


def positive(name: str, value: Any, *, wanted: str = "give a positive finite number") -> float:
    """A finite number above zero.

    >>> positive("lr", 0.1)
    0.1
    >>> positive("lr", float("inf"))
    Traceback (most recent call last):
    theodolite.UseError: lr is inf: give a positive finite number
    """
    if not is_number(value) or value <= 0:
        raise UseError(f"{name} is {_said(value)}: {wanted}")
    return float(value)


def number(name: str, value: Any, *, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number from `least` to `most`.

    >>> number("momentum", 1.5, least=0, most=1)
    Traceback (most recent call last):
    theodolite.UseError: momentum is 1.5: give a finite number from 0 to 1
    """
    if not is_number(value) or not least <= value <= most:
        bounds = (
            f" from {least:g} to {most:g}"
            if math.isfinite(least) and math.isfinite(most)
            else f", at least {least:g}"
            if math.isfinite(least)
            else f", at most {most:g}"
            if math.isfinite(most)
            else ""
        )
        raise UseError(f"{name} is {_said(value)}: give a finite number{bounds}")
    return float(value)


def parse_number(text: str) -> float:
    """A number as people write it: `0.001`, `1e-3` or `2^-10`.

    >>> parse_number("2^-3")
    0.125
    """
    base, caret, exponent = text.strip().partition("^")
    try:
        found = float(base) ** float(exponent) if caret else float(base)
    except (ValueError, OverflowError, ZeroDivisionError):
        found = math.nan
    if isinstance(found, complex) or not math.isfinite(found):
        raise UseError(f"{text.strip()!r} is no finite number: write one such as 0.001 or 2^-10")
    return found


def multiple(name: str, value: int, of: int, why: str) -> None:
    """Check that an integer is a multiple of another one; the error names its neighbours that are.

    >>> multiple("width", 100, 32, "heads have 32 dimensions")
    Traceback (most recent call last):
    theodolite.UseError: width is 100, not a multiple of 32 (heads have 32 dimensions): give 96 or 128
    """
    if value % of:
        below = value // of * of
        fixes = f"{below} or {below + of}" if below else f"{of}"
        raise UseError(f"{name} is {value}, not a multiple of {of} ({why}): give {fixes}")


def one_of(name: str, value: T, choices: Collection[T]) -> T:
    """One of the choices.

    >>> one_of("norm", "laier", ["layer", "rms"])
    Traceback (most recent call last):
    theodolite.UseError: norm is 'laier'. Did you mean 'layer'? It is one of layer, rms
    """
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        near = did_you_mean(value, choices)
        raise UseError(f"{name} is {_said(value)}.{near} It is one of {', '.join(map(str, choices))}")
    return value


def did_you_mean(value: Any, choices: Iterable[Any], *, cutoff: float = 0.6) -> str:
    """` Did you mean 'layer'?`, or nothing if no choice is as alike as `cutoff`, from 0 to 1."""
    near = difflib.get_close_matches(str(value), list(map(str, choices)), n=1, cutoff=cutoff)
    return f" Did you mean {near[0]!r}?" if near else ""


def seed(name: str, value: Any) -> int:
    """A seed of random numbers: an integer from 0 to 2⁶³ − 1."""
    return whole(name, value, least=0, most=MOST_SEEDS - 1)


def seeds(name: str, value: Any, *, most: int = 1000) -> tuple[int, ...]:
    """Seeds of repeated runs: a number of them, which is 0, 1, …, or the seeds themselves.

    >>> seeds("seeds", 3), seeds("seeds", [7, 11])
    ((0, 1, 2), (7, 11))
    >>> seeds("seeds", [1, 1])
    Traceback (most recent call last):
    theodolite.UseError: seeds is [1, 1]: name every seed once
    """
    if not isinstance(value, Sequence | range) or isinstance(value, str):
        return tuple(range(whole(name, value, least=1, most=most, wanted=f"give 1 to {most}, or the seeds")))
    if not value:
        raise UseError(f"{name} is {value!r}: give at least one seed")
    found = tuple(seed(name, one) for one in value)
    if len(set(found)) < len(found):
        raise UseError(f"{name} is {value!r}: name every seed once")
    return found


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]} … {text[-50:]}"
