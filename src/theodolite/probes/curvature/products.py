"""Products with an operator, counted, and the random vectors they begin with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.probes.curvature.operator import Operator
from theodolite.probes.finite import among, not_finite

Progress = Callable[[float], None]
"""Is told, now and then, which share of the work is done: a number from 0 to 1."""


class Products:
    """Products with an operator, of vectors in at least float32: halves cannot be kept orthogonal."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator
        self.size, self.device = operator.size, operator.device
        self.dtype = torch.promote_types(operator.dtype, torch.float32)
        self.num = 0
        """How many were made so far."""
        self._last: Tensor | None = None

    def of_vector(self, vector: Tensor) -> Tensor:
        """`H v`, (P,)."""
        self.num += 1
        self._last = (self.operator @ vector).detach().to(self.dtype)
        return self._last

    def of_rows(self, rows: Tensor) -> Tensor:
        """`H v` of each row, (k, P)."""
        self.num += len(rows)
        self._last = (self.operator @ rows.mT).detach().to(self.dtype).mT
        return self._last

    def refuse_nonsense(self, *numbers: float) -> None:
        """Numbers made from products have to be finite."""
        if not all(abs(number) < float("inf") for number in numbers):
            raise UseError(
                f"among the first {self.num} products with the operator is one that is not "
                f"finite{self._culprits()}. Look at the weights and the batch for nan and for very large "
                f"numbers; {self.operator.dtype} may be too narrow for the second derivatives"
            )

    def _culprits(self) -> str:
        """In which tensors the last product is not finite, if the operator knows their names."""
        shapes = getattr(self.operator, "shapes", None)
        if shapes is None or self._last is None:
            return ""
        pieces = self._last.split([shape.numel() for shape in shapes.values()], dim=-1)
        names = not_finite(dict(zip(shapes, pieces, strict=True)))
        return f", in {among(names, len(shapes))}" if names else ""

    def normal(self, generator: torch.Generator) -> Tensor:
        """A vector of normal numbers, the same on every device and in every precision."""
        return torch.randn(self.size, generator=generator).to(self.device, self.dtype)

    def signs(self, num: int, generator: torch.Generator) -> Tensor:
        """Vectors of random signs ±1, (num, P), the same on every device and in every precision."""
        bits = torch.randint(0, 2, (num, self.size), generator=generator, dtype=torch.int8)
        return bits.to(self.device, self.dtype).mul_(2).sub_(1)


def require_at_least(least: int, **given: int) -> None:
    """Options that count something."""
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UseError(f"{name} is {value!r}: it has to be a whole number of at least {least}")
