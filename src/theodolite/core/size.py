"""`Size`: the width and depth of a network, and what it is trained on: the batch and the number of tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

from theodolite.core.arguments import whole
from theodolite.core.errors import UseError
from theodolite.core.files import OMIT_NONE

LARGEST = {"width": 2**24, "depth": 2**14, "batch": 2**40, "tokens": 2**62}
"""Larger values are mistakes: building such a network would use up all memory."""


@functools.total_ordering
@dataclass(frozen=True, repr=False)
class Size:
    """Width and depth, the arguments of `build(width, depth)`; batch and tokens where they matter too.

    Args:
        width: of the network.
        depth: its number of blocks.
        batch: examples in a step: sequences, images. None if it is the usual one and does not change.
        tokens: targets seen in all of training: predicted tokens, labels. None if it does not change.

    >>> print(Size(width=256, depth=4))
    256 × 4
    >>> print(Size(256, 4, batch=64, tokens=20_000_000))
    256 × 4, batch 64, 20M tokens
    >>> Size(width=0, depth=4)
    Traceback (most recent call last):
    theodolite.UseError: width is 0: a size is two positive whole numbers, for example Size(256, 4)
    """

    width: int
    depth: int
    batch: int | None = field(default=None, metadata=OMIT_NONE)
    tokens: int | None = field(default=None, metadata=OMIT_NONE)

    def __post_init__(self) -> None:
        for name in ("width", "depth"):
            wanted = "a size is two positive whole numbers, for example Size(256, 4)"
            object.__setattr__(self, name, whole(name, getattr(self, name), least=1, wanted=wanted))
        for name, example in (("batch", 64), ("tokens", 20_000_000)):
            value = getattr(self, name)
            if value is not None:
                if isinstance(value, float) and value.is_integer():  # 2e9 tokens
                    value = int(value)
                wanted = f"give a positive whole number, for example Size(256, 4, {name}={example})"
                object.__setattr__(self, name, whole(name, value, least=1, wanted=wanted))
        for name, most in LARGEST.items():
            if (getattr(self, name) or 0) > most:
                raise UseError(f"{name} is {getattr(self, name)}: the largest that is built is {most}")

    @property
    def network(self) -> Size:
        """Width and depth alone: networks of one size are built alike, whatever they are trained on."""
        return self if self.batch is None and self.tokens is None else Size(self.width, self.depth)

    def at(self, *, batch: int | None = None, tokens: int | None = None) -> Size:
        """The same network trained on another batch or number of tokens; what is None stays.

        >>> Size(256, 4, batch=64).at(tokens=10**9)
        Size(width=256, depth=4, batch=64, tokens=1000000000)
        """
        given = {"batch": batch, "tokens": tokens}
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Size):
            return NotImplemented
        return self._place < other._place

    @property
    def _place(self) -> tuple[int, ...]:
        return self.width, self.depth, self.batch or 0, self.tokens or 0

    def __repr__(self) -> str:
        said = ((name, value) for name, value in vars(self).items() if value is not None)
        return f"Size({', '.join(f'{name}={value}' for name, value in said)})"

    def __str__(self) -> str:
        text = f"{self.width} × {self.depth}"
        if self.batch is not None:
            text += f", batch {self.batch}"
        if self.tokens is not None:
            text += f", {rounded(self.tokens)} tokens"
        return text


def rounded(count: int) -> str:
    """A large count in few digits.

    >>> [rounded(count) for count in (4096, 131_072, 20_000_000, 2_500_000_000, 13_000_000_000_000)]
    ['4096', '131k', '20M', '2.5B', '13T']
    """
    for letter, unit in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= 10 * unit or (count >= unit and unit > 10**3):
            return f"{count / unit:.3g}{letter}"
    return str(count)
