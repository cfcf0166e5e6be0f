"""The distribution of a tensor's initial values.

`InitDistribution` describes it by mean and std, as a plan needs it. `Affine` describes it while operations
are applied to the tensor, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from scipy.special import erfinv
from torch import Tensor

from theodolite.present.text import number


@dataclass(frozen=True)
class InitDistribution:
    """What the initial values of a tensor are drawn from.

    >>> InitDistribution("normal", std=0.02).scaled(0.5)
    InitDistribution(kind='normal', std=0.01, mean=0.0, bound=None, factor=1.0)
    >>> print(InitDistribution("uniform", std=1 / 3**0.5), InitDistribution("constant", mean=1.0), sep="; ")
    uniform 0.577; 1
    """

    kind: Literal["constant", "normal", "uniform", "truncated", "own", "kept"]
    """`own`: the values that the network draws by itself, changed to this mean and std. `kept`: unchanged."""
    std: float = 0.0
    """For a complex tensor: the root mean square of `|z − E z|`."""
    mean: float = 0.0
    """For a complex tensor: `|E z|`."""
    bound: float | None = None
    """Of a truncated normal: the largest distance from the mean. `std` is that of the truncated values."""
    factor: float = 1.0
    """Of `own`: the factor it was scaled by. Biases and gains are the network's own values times this."""

    @property
    def size(self) -> float:
        """The root mean square of a value."""
        return math.hypot(self.mean, self.std)

    def scaled(self, factor: float, *, mean: float | None = None) -> InitDistribution:
        """The distribution of `factor` times a value; `mean` is another factor for the mean."""
        return replace(
            self,
            std=self.std * factor,
            mean=self.mean * (factor if mean is None else mean),
            bound=None if self.bound is None else self.bound * factor,
            factor=self.factor * factor if self.kind == "own" else 1.0,
        )

    def shifted(self, by: float) -> InitDistribution:
        """The distribution of a value plus a number."""
        return replace(self, mean=self.mean + by)

    def without_chance(self, count: int) -> InitDistribution:
        """Drop a mean that `count` values have by chance: below eight standard errors.

        >>> InitDistribution("own", std=1.0, mean=0.1).without_chance(100).mean
        0.0
        """
        by_chance = self.kind == "own" and abs(self.mean) < 8 * self.std / math.sqrt(count)
        return replace(self, mean=0.0) if by_chance else self

    def __str__(self) -> str:
        if self.kind == "constant":
            return number(self.mean)
        if self.kind == "kept":
            return "as built"
        centre = f"{number(self.mean)} ± " if self.mean else ""
        return f"{self.kind} {centre}{number(self.std)}"

    def draw_complex(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Values with a real mean, and half of the variance in each of the real and imaginary parts.

        >>> normal = InitDistribution("normal", std=1.0)
        >>> values = normal.draw_complex((100_000,), torch.Generator().manual_seed(0))
        >>> round(values.abs().square().mean().item(), 2), round(values.imag.std().item(), 2)
        (1.0, 0.71)
        """
        parts = self.shifted(-self.mean).scaled(math.sqrt(0.5)).draw((*shape, 2), generator)
        return torch.view_as_complex(parts).add_(self.mean)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Values in float32 on the CPU; the same generator gives the same values everywhere.

        >>> values = InitDistribution("uniform", std=1.0).draw((100_000,), torch.Generator().manual_seed(0))
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
            if self.std == 0:
                return values.fill_(self.mean)
            # By the inverse of the distribution function, in float64: its tails need the digits.
            cut = cut_of(self.std / self.bound)
            edge = math.erf(cut / math.sqrt(2))
            wide = torch.empty(shape, dtype=torch.float64, device="cpu").uniform_(
                -edge, edge, generator=generator
            )
            wide.erfinv_().mul_(self.bound / cut * math.sqrt(2)).clamp_(-self.bound, self.bound)
            return wide.add_(self.mean).float()
        raise ValueError(f"a distribution of kind {self.kind!r} cannot be drawn from")


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
    """Solve `truncated_std(cut)/cut = ratio`, the std over the bound.

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


FAR = 9.0
"""In standard deviations: a normal variable lies farther out once in 10¹⁸ draws."""


@dataclass(frozen=True)
class Affine:
    """The distribution of `shift + scale·z`, independently for each entry.

    z is 0, standard normal, uniform in [-1, 1], or standard normal within ±cut.
    """

    z: Literal["constant", "normal", "uniform", "truncated"]
    shift: float = 0.0
    scale: float = 0.0
    cut: float = math.inf

    def distribution(self) -> InitDistribution:
        """The same by its mean and std."""
        scale = abs(self.scale)
        if self.z == "constant" or scale == 0:
            return InitDistribution("constant", mean=self.shift)
        std = scale / math.sqrt(3) if self.z == "uniform" else scale * truncated_std(self.cut)
        bound = scale * self.cut if self.z == "truncated" else None
        return InitDistribution(self.z, std, self.shift, bound)

    def moved(self, factor: float, shift: float) -> Affine:
        """Of `factor·x + shift`."""
        return replace(self, shift=factor * self.shift + shift, scale=factor * self.scale)

    def mapped(self, function: Callable[[float], float]) -> Affine | None:
        """Of a function of x, which is known for a constant only."""
        if self.z != "constant":
            return None
        try:
            return Affine("constant", function(self.shift))
        except (ArithmeticError, ValueError, TypeError):  # a root of a negative number
            return None

    def erfinv(self) -> Affine | None:
        """`√2·erfinv(u)` is normal for u uniform in (-1, 1), and truncated if u stays within less."""
        edge = abs(self.scale)
        if self.z != "uniform" or abs(self.shift) > 1e-6 * edge or edge > 1:
            return None
        cut = math.sqrt(2) * float(erfinv(edge))
        return Affine("truncated" if math.isfinite(cut) else "normal", 0.0, math.sqrt(0.5), cut)

    def clamped(self, low: Any, high: Any) -> Affine | None:
        """Unchanged if the bounds cut off nothing but rounding; otherwise unknown."""
        if isinstance(low, Tensor) or isinstance(high, Tensor):
            return None
        half = {"constant": 0.0, "uniform": 1.0}.get(self.z, min(self.cut, FAR)) * abs(self.scale)
        least, greatest = self.shift - half, self.shift + half
        slack = 1e-6 * max(abs(least), abs(greatest))
        kept = (low is None or low <= least + slack) and (high is None or high >= greatest - slack)
        return self if kept else None


def truncated(mean: float, std: float, low: float, high: float) -> Affine | None:
    """A normal variable, drawn again where it lies outside of the bounds."""
    if std <= 0:
        return None
    if abs((high - mean) - (mean - low)) <= 1e-9 * (high - low):
        return Affine("truncated", mean, std, (high - mean) / std)
    # Uneven bounds do not matter where next to nothing is cut off.
    return Affine("normal", mean, std) if min(high - mean, mean - low) > FAR * std else None
