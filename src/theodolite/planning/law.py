"""How a tensor starts: the distribution its entries are drawn from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["constant", "normal", "uniform", "truncated", "own"]


@dataclass(frozen=True)
class Law:
    """A distribution of initial values.

    >>> Law("normal", std=0.02).scaled(0.5)
    Law(kind='normal', std=0.01, mean=0.0, bound=None)
    >>> print(Law("uniform", std=1 / 3**0.5), Law("constant", mean=1.0), sep="; ")
    uniform, std 0.5774; 1
    """

    kind: Kind
    """`own` is whatever the network draws by itself, rescaled to the std."""
    std: float = 0.0
    mean: float = 0.0
    bound: float | None = None
    """Of a truncated normal: how far from the mean values may lie. Its `std` is that of the values that
    result."""

    def scaled(self, factor: float) -> Law:
        """The law of `factor` times a value."""
        bound = None if self.bound is None else self.bound * factor
        return dataclasses.replace(self, std=self.std * factor, mean=self.mean * factor, bound=bound)

    def __str__(self) -> str:
        if self.kind == "constant":
            return f"{self.mean:.4g}"
        centre = f", mean {self.mean:.4g}" if self.mean else ""
        return f"{self.kind}, std {self.std:.4g}{centre}"

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Values in float32 on the CPU; the same generator gives the same values everywhere.

        >>> values = Law("uniform", std=1.0).draw((100_000,), torch.Generator().manual_seed(0))
        >>> round(values.std().item(), 2), round(values.max().item(), 2)
        (1.0, 1.73)
        """
        values = torch.empty(shape, dtype=torch.float32)
        if self.kind == "constant":
            return values.fill_(self.mean)
        if self.kind == "normal":
            return values.normal_(self.mean, self.std, generator=generator)
        if self.kind == "uniform":
            half = self.std * math.sqrt(3)
            return values.uniform_(self.mean - half, self.mean + half, generator=generator)
        raise ValueError(f"a law of kind {self.kind!r} cannot be drawn")
