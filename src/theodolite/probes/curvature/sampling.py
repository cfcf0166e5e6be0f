"""Products of an operator with random vectors, and estimates from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.core.finite import among, not_finite
from theodolite.probes.curvature.operator import Operator

NORMAL_95 = 1.959964
"""Standard errors on each side of a 95 % interval."""


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error.

    >>> Estimate(10.0, 0.5)
    Estimate(value=10.0, error=0.5)
    >>> print(Estimate(10.0, 0.5))
    10 (9.02 to 11)
    >>> print(Estimate(10.0, 0.0))
    10 (exact)
    >>> print(Estimate(math.nan, 0.0))
    nan (not finite)
    """

    value: float
    error: float
    """One standard error; 0 if the value is exact."""

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return self.value - NORMAL_95 * self.error

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        return self.value + NORMAL_95 * self.error

    @property
    def exact(self) -> bool:
        """Was it computed, not estimated?"""
        return self.error == 0 and math.isfinite(self.value)

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return f"{self.value} (not finite)"
        range_ = "exact" if self.exact else f"{self.low:.3g} to {self.high:.3g}"
        return f"{self.value:.3g} ({range_})"


def mean_of(samples: Tensor) -> Estimate:
    """The mean of independent samples and its standard error, which is infinite for one sample.

    >>> mean_of(torch.tensor([1.0, 3.0]))
    Estimate(value=2.0, error=1.0)
    >>> mean_of(torch.tensor([1.0]))
    Estimate(value=1.0, error=inf)
    """
    numbers = samples.double()
    spread = float(numbers.std()) if len(numbers) > 1 else math.inf
    return Estimate(float(numbers.mean()), spread / math.sqrt(len(numbers)))


def ratio_of(upper: Tensor, lower: Tensor) -> Estimate:
    """The ratio of the means of two samples that were drawn in pairs, by error propagation.

    >>> ratio_of(torch.tensor([1.0, 3.0]), torch.tensor([4.0, 4.0]))
    Estimate(value=0.5, error=0.25)
    >>> ratio_of(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))  # they vary together
    Estimate(value=0.5, error=0.0)
    """
    upper, lower = upper.double(), lower.double()
    ratio = upper.mean() / lower.mean()
    return Estimate(float(ratio), mean_of((upper - ratio * lower) / lower.mean()).error)


def root_of(square: Estimate) -> Estimate:
    """The square root of an estimate, by error propagation.

    >>> root_of(Estimate(4.0, 1.0))
    Estimate(value=2.0, error=0.25)
    """
    value = math.sqrt(max(square.value, 0.0))
    return Estimate(value, square.error / (2 * value) if value else math.sqrt(square.error))


class Products:
    """Products with an operator, counted, of vectors in at least float32: halves cannot be kept orthogonal.

    Random vectors are drawn on the CPU and are the same on every device and in every precision.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.size, self.device = operator.size, operator.device
        self.dtype = torch.promote_types(operator.dtype, torch.float32)
        self.num = 0
        """The number of products so far."""
        self._last: Tensor | None = None

    def of_vector(self, vector: Tensor) -> Tensor:
        """`H v`, (P,)."""
        return self.of_rows(vector[None])[0]

    def of_rows(self, rows: Tensor) -> Tensor:
        """`H v` of each row, (k, P)."""
        self.num += len(rows)
        self._last = (self.operator @ rows.mT).detach().to(self.dtype).mT
        return self._last

    def require_finite(self, *numbers: float) -> None:
        """Refuse numbers that are not finite, with the names of the tensors in the last product."""
        if all(abs(number) < float("inf") for number in numbers):
            return
        where, shapes = "", getattr(self.operator, "shapes", None)
        if shapes is not None and self._last is not None:
            pieces = self._last.split([shape.numel() for shape in shapes.values()], dim=-1)
            if names := not_finite(dict(zip(shapes, pieces, strict=True))):
                where = f", in {among(names, len(shapes))}"
        raise UseError(
            f"one of the first {self.num} products with the operator is not finite{where}. Look at the "
            f"weights and the batch for nan and for very large numbers; {self.operator.dtype} may be too "
            "narrow for the second derivatives"
        )

    def normal(self, generator: torch.Generator) -> Tensor:
        """A vector of normal numbers, (P,)."""
        return torch.randn(self.size, generator=generator).to(self.device, self.dtype)

    def signs(self, num: int, generator: torch.Generator) -> Tensor:
        """Vectors of random signs ±1, (num, P)."""
        bits = torch.randint(0, 2, (num, self.size), generator=generator, dtype=torch.int8)
        return bits.to(self.device, self.dtype).mul_(2).sub_(1)
