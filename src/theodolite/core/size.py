"""The two numbers a network is scaled by."""

from __future__ import annotations

from dataclasses import dataclass

from theodolite.core.errors import UseError

LARGEST = {"width": 2**24, "depth": 2**14}
"""More is a slip of the pen: such a network would be built until memory is at an end."""


@dataclass(frozen=True, order=True)
class Size:
    """How wide and how deep: what `build(width, depth)` is called with.

    >>> print(Size(width=256, depth=4))
    256 × 4
    >>> Size(width=0, depth=4)
    Traceback (most recent call last):
    theodolite.UseError: width is 0: a size is two positive whole numbers, for example Size(256, 4)
    """

    width: int
    depth: int

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("depth", self.depth)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UseError(
                    f"{name} is {value!r}: a size is two positive whole numbers, for example Size(256, 4)"
                )
            if value > LARGEST[name]:
                raise UseError(f"{name} is {value}: the largest that is built is {LARGEST[name]}")

    def __str__(self) -> str:
        return f"{self.width} × {self.depth}"
