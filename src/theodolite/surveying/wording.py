"""Numbers of things in sentences."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """A number and its noun.

    >>> counted(1, "check"), counted(3, "check"), counted(2, "matrix")
    ('1 check', '3 checks', '2 matrices')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {_plural(noun)}"


def all_of(count: int, noun: str) -> str:
    """All things there are, to open a sentence with.

    >>> all_of(1, "branch"), all_of(2, "branch"), all_of(3, "branch")
    ('The only branch', 'Both branches', 'All 3 branches')
    """
    if count == 1:
        return f"The only {noun}"
    return f"Both {_plural(noun)}" if count == 2 else f"All {count:,} {_plural(noun)}"


def listed(names: list[str]) -> str:
    """Names in a row; of more than three, the first two.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b", "c", "d"])
    ('a', 'a, b and c', 'a, b and 2 more')
    """
    if len(names) > 3:
        return f"{', '.join(names[:2])} and {len(names) - 2} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def times(factor: float) -> str:
    """A factor in two digits, a large one in three.

    >>> times(3.14159), times(144.2)
    ('3.1', '144')
    """
    return f"{factor:.3g}" if factor >= 100 else f"{factor:.2g}"


def plain(value: float) -> str:
    """A number in three digits, a large one to the unit.

    >>> plain(0.01234), plain(41123.4)
    ('0.0123', '41,123')
    """
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def with_minus(value: object) -> str:
    """A number, or what has numbers in it, with true minus signs.

    >>> with_minus("-0.45 (-0.89 to -0.01)")
    '−0.45 (−0.89 to −0.01)'
    """
    return str(value).replace("-", "−")


def _plural(noun: str) -> str:
    if noun.endswith("matrix"):
        return f"{noun[:-1]}ces"
    return f"{noun}es" if noun.endswith("ch") else f"{noun}s"
