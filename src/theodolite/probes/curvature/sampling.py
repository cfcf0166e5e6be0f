"""From samples to an estimate."""

from __future__ import annotations

import math

from torch import Tensor

from theodolite.probes.curvature.estimate import Estimate


def mean_of(samples: Tensor) -> Estimate:
    """The mean of independent samples and its standard error, which one sample alone does not tell.

    >>> from torch import tensor
    >>> mean_of(tensor([1.0, 3.0]))
    Estimate(value=2.0, error=1.0)
    >>> mean_of(tensor([1.0]))
    Estimate(value=1.0, error=inf)
    """
    numbers = samples.double()
    spread = float(numbers.std()) if len(numbers) > 1 else math.inf
    return Estimate(float(numbers.mean()), spread / math.sqrt(len(numbers)))


def root_of(square: Estimate) -> Estimate:
    """The square root of an estimate, whose error is halved in proportion.

    >>> root_of(Estimate(4.0, 1.0))
    Estimate(value=2.0, error=0.25)
    """
    value = math.sqrt(max(square.value, 0.0))
    return Estimate(value, square.error / (2 * value) if value else math.sqrt(square.error))
