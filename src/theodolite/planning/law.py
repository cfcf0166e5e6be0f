"""How a tensor starts: the distribution its entries are drawn from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["constant", "normal", "uniform", "truncated", "own", "kept"]


@dataclass(frozen=True)
class Law:
    """A distribution of initial values.

    >>> Law("normal", std=0.02).scaled(0.5)
    Law(kind='normal', std=0.01, mean=0.0, bound=None, factor=1.0)
    >>> print(Law("uniform", std=1 / 3**0.5), Law("constant", mean=1.0), sep="; ")
    uniform, std 0.5774; 1
    """

    kind: Kind
    """`own` is whatever the network draws by itself, with its mean and std changed to these;
    `kept` is left as it is."""
    std: float = 0.0
    """Of a complex tensor: the root mean square of `|z − E z|`."""
    mean: float = 0.0
    """Of a complex tensor: `|E z|`."""
    bound: float | None = None
    """Of a truncated normal: how far from the mean values may lie. Its `std` is that of the values that
    result."""
    factor: float = 1.0
    """Of `own`: by how much it was scaled. Biases and gains are the network's own values times this."""

    @property
    def size(self) -> float:
        """The root mean square of a value."""
        return math.hypot(self.mean, self.std)

    def scaled(self, factor: float, *, mean: float | None = None) -> Law:
        """The law of `factor` times a value; with another factor for the mean, if there is one."""
        bound = None if self.bound is None else self.bound * factor
        return dataclasses.replace(
            self,
            std=self.std * factor,
            mean=self.mean * (factor if mean is None else mean),
            bound=bound,
            factor=self.factor * factor if self.kind == "own" else 1.0,
        )

    def shifted(self, by: float) -> Law:
        """The law of a value plus a number."""
        return dataclasses.replace(self, mean=self.mean + by)

    def without_chance(self, count: int) -> Law:
        """Without a mean that `count` values have by accident: below eight standard errors.

        >>> Law("own", std=1.0, mean=0.1).without_chance(100).mean
        0.0
        """
        accident = self.kind == "own" and abs(self.mean) < 8 * self.std / math.sqrt(count)
        return dataclasses.replace(self, mean=0.0) if accident else self

    def __str__(self) -> str:
        if self.kind == "constant":
            return f"{self.mean:.4g}"
        if self.kind == "kept":
            return self.kind
        centre = f", mean {self.mean:.4g}" if self.mean else ""
        return f"{self.kind}, std {self.std:.4g}{centre}"

    def draw_complex(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Values whose real and imaginary parts have half of the variance each, with a real mean.

        >>> values = Law("normal", std=1.0).draw_complex((100_000,), torch.Generator().manual_seed(0))
        >>> round(values.abs().square().mean().item(), 2), round(values.imag.std().item(), 2)
        (1.0, 0.71)
        """
        parts = self.shifted(-self.mean).scaled(math.sqrt(0.5)).draw((*shape, 2), generator)
        return torch.view_as_complex(parts).add_(self.mean)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Values in float32 on the CPU; the same generator gives the same values everywhere.

        >>> values = Law("uniform", std=1.0).draw((100_000,), torch.Generator().manual_seed(0))
        >>> round(values.std().item(), 2), round(values.max().item(), 2)
        (1.0, 1.73)
        """
        values = torch.empty(shape, dtype=torch.float32, device="cpu")
        if self.kind == "constant":
            return values.fill_(self.mean)
        if self.kind == "normal":
            return values.normal_(self.mean, self.std, generator=generator)
        if self.kind == "uniform":
            half = self.std * math.sqrt(3)
            return values.uniform_(self.mean - half, self.mean + half, generator=generator)
        if self.kind == "truncated" and self.bound is not None:
            return self._draw_truncated(shape, self.bound, generator)
        raise ValueError(f"a law of kind {self.kind!r} cannot be drawn")

    def _draw_truncated(self, shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
        """By the inverse of the distribution function, in float64: its tails need the digits."""
        if self.std == 0:
            return torch.full(shape, self.mean, device="cpu")
        cut = cut_of(self.std / bound)
        edge = math.erf(cut / math.sqrt(2))
        values = torch.empty(shape, dtype=torch.float64, device="cpu")
        values.uniform_(-edge, edge, generator=generator).erfinv_().mul_(bound / cut * math.sqrt(2))
        return values.clamp_(-bound, bound).add_(self.mean).float()


def truncated_std(cut: float) -> float:
    """Std of a standard normal variable that lies within ±cut: `√(1 − 2cφ(c)/(2Φ(c) − 1))`.

    >>> round(truncated_std(2.0), 6)
    0.879626
    """
    if cut > 38:  # beyond the last float64 of the normal density
        return 1.0
    if cut < 0.01:  # nearly uniform; the closed form would cancel
        return cut / math.sqrt(3)
    density = math.exp(-(cut**2) / 2) / math.sqrt(2 * math.pi)
    return math.sqrt(1 - 2 * cut * density / math.erf(cut / math.sqrt(2)))


def cut_of(ratio: float) -> float:
    """The cut at which the std is this part of the bound: solves `truncated_std(c)/c = ratio`.

    >>> round(cut_of(truncated_std(2.0) / 2.0), 6)
    2.0
    """
    low, high = 0.005, max(40.0, 2 / ratio)
    for _ in range(200):
        middle = math.sqrt(low * high)
        if truncated_std(middle) / middle > ratio:
            low = middle
        else:
            high = middle
    return high
