"""The law of a tensor's entries while it is being made, and what operations do to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from theodolite.planning.law import Law, truncated_std

FAR = 9.0
"""In standard deviations: a normal variable lies farther out once in 10¹⁸ draws."""


@dataclass(frozen=True)
class Spread:
    """`shift + scale·z`, each entry for itself.

    z is 0, standard normal, uniform in [-1, 1], or standard normal within ±cut.
    """

    z: Literal["constant", "normal", "uniform", "truncated"]
    shift: float = 0.0
    scale: float = 0.0
    cut: float = math.inf

    def law(self) -> Law:
        """The same, said by its mean and std."""
        scale = abs(self.scale)
        if self.z == "constant" or scale == 0:
            return Law("constant", mean=self.shift)
        if self.z == "normal":
            return Law("normal", std=scale, mean=self.shift)
        if self.z == "uniform":
            return Law("uniform", std=scale / math.sqrt(3), mean=self.shift)
        return Law("truncated", scale * truncated_std(self.cut), self.shift, bound=scale * self.cut)

    def moved(self, factor: float, shift: float) -> Spread:
        """Of `factor·x + shift`."""
        return replace(self, shift=factor * self.shift + shift, scale=factor * self.scale)

    @property
    def reach(self) -> tuple[float, float]:
        """The least and the greatest value that will ever be seen."""
        half = {"constant": 0.0, "uniform": 1.0}.get(self.z, min(self.cut, FAR)) * abs(self.scale)
        return self.shift - half, self.shift + half


def truncated(mean: float, std: float, low: float, high: float) -> Spread | None:
    """A normal variable of which values outside of the bounds were drawn again."""
    if std <= 0:
        return None
    if abs((high - mean) - (mean - low)) <= 1e-9 * (high - low):
        return Spread("truncated", mean, std, (high - mean) / std)
    # Where next to nothing is cut off, it does not matter that the bounds lie unevenly.
    return Spread("normal", mean, std) if min(high - mean, mean - low) > FAR * std else None


def constant(spread: Spread | None, function: Callable[[float], float]) -> Spread | None:
    """A function of a number; of numbers that were drawn it has no simple law."""
    if spread is None or spread.z != "constant":
        return None
    try:
        return Spread("constant", function(spread.shift))
    except (ArithmeticError, ValueError, TypeError):  # a root of a negative number
        return None


def erfinv(spread: Spread | None) -> Spread | None:
    """`√2·erfinv(u)` is normal for u uniform in (-1, 1), and truncated for less of it."""
    if spread is None or spread.z != "uniform" or abs(spread.shift) > 1e-6 * abs(spread.scale):
        return None
    edge = abs(spread.scale)
    if edge > 1:
        return None
    cut = math.sqrt(2) * torch.erfinv(torch.tensor(edge, dtype=torch.float64, device="cpu")).item()
    kind: Literal["normal", "truncated"] = "truncated" if math.isfinite(cut) else "normal"
    return Spread(kind, 0.0, math.sqrt(0.5), cut)


def clamped(spread: Spread | None, low: Any, high: Any) -> Spread | None:
    """Unchanged, if it cuts off nothing but rounding."""
    if spread is None or isinstance(low, Tensor) or isinstance(high, Tensor):
        return None
    least, greatest = spread.reach
    slack = 1e-6 * max(abs(least), abs(greatest))
    kept = (low is None or low <= least + slack) and (high is None or high >= greatest - slack)
    return spread if kept else None
