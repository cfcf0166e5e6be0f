"""`Size`: the width and depth of a network."""

from __future__ import annotations

from dataclasses import dataclass

from theodolite.core.arguments import whole
from theodolite.core.errors import UseError

LARGEST = {"width": 2**24, "depth": 2**14}
"""Larger values are mistakes: building such a network would use up all memory."""


@dataclass(frozen=True, order=True)
class Size:
    """Width and depth, the arguments of `build(width, depth)`.

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
            wanted = "a size is two positive whole numbers, for example Size(256, 4)"
            object.__setattr__(self, name, whole(name, value, least=1, wanted=wanted))
            if value > LARGEST[name]:
                raise UseError(f"{name} is {value}: the largest that is built is {LARGEST[name]}")

    def __str__(self) -> str:
        return f"{self.width} × {self.depth}"
