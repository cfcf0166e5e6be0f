"""What a rule takes and what it gives."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from theodolite.core.errors import UseError


@dataclass(frozen=True)
class Ratios:
    """How many times larger than at base size: one tensor's fans, and the number of residual branches.

    >>> Ratios(fan_in=8, fan_out=8, depth=4)
    Ratios(fan_in=8, fan_out=8, depth=4, own=1.0)
    """

    fan_in: float = 1.0
    fan_out: float = 1.0
    depth: float = 1.0
    own: float = 1.0
    """The same of what the network's own forward pass multiplies the tensor's output by."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise UseError(f"the ratio of {name} is {value!r}: ratios of sizes are positive numbers")


@dataclass(frozen=True)
class Base:
    """Hyperparameters of one tensor at base size."""

    lr: float
    weight_decay: float = 0.0
    eps: float = 1e-8
    std: float = 1.0


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one tensor at the target size, and how they change with a multiplier.

    The layer computes `multiplier · W x`, and the optimizer does `W ← W − lr·(A + weight_decay·W)`.
    """

    multiplier: float
    std: float
    lr: float
    weight_decay: float
    eps: float
    extent: float = 1.0
    """Factor on what the optimizer keeps in units of the weight: the radius of SSO, the clip of Sophia."""
    degree: int = 0
    """The update A is homogeneous of this degree in the gradient: 1 for SGD, 0 for a sign."""
    eps_degree: int = 1
    """eps is compared with a power of the gradient: Adam's with the first, Shampoo's with the second."""

    def absorbed(self) -> Hyper:
        """The same training without a multiplier: `W' = αW` in place of `α·W`.

        As `∂/∂W = α·∂/∂W'`, an update of degree p becomes `A' = α^(−p)·A`; W' must move by `α·lr·A`, and
        `lr·weight_decay` must stay.

        >>> Hyper(0.5, std=1, lr=8, weight_decay=1, eps=1).absorbed()        # Adam
        Hyper(multiplier=1.0, std=0.5, lr=4.0, weight_decay=2.0, eps=2.0, ...)
        >>> Hyper(0.5, std=1, lr=8, weight_decay=1, eps=1, degree=1).absorbed()  # SGD
        Hyper(multiplier=1.0, std=0.5, lr=2.0, weight_decay=4.0, eps=2.0, ...)
        """
        step = self.multiplier ** (1 + self.degree)
        return dataclasses.replace(
            self,
            multiplier=1.0,
            std=self.std * self.multiplier,
            lr=self.lr * step,
            weight_decay=self.weight_decay / step,
            eps=self.eps / self.multiplier**self.eps_degree,
            extent=self.extent * self.multiplier,
        )
