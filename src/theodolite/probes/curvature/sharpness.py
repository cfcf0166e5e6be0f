"""The largest eigenvalue of a Hessian, and the step it allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.exclusive import exclusive
from theodolite.probes.curvature.eigenvalues import MOST_PRODUCTS, eigenvalues
from theodolite.probes.curvature.operator import Operator
from theodolite.probes.curvature.products import Progress
from theodolite.probes.curvature.replicas import on_all_ranks

TOLERANCE = 1e-3


@dataclass(frozen=True)
class Sharpness:
    """The largest eigenvalue λ_max of a Hessian."""

    value: float
    """λ_max, never above the truth but for rounding."""
    error: float
    """What it is off by, about."""
    residual: float
    """Some eigenvalue lies within this of `value`, whatever the spectrum is."""
    converged: bool
    products: int
    status: str

    @property
    def edge(self) -> float:
        """`2/λ_max`: with a larger learning rate gradient descent diverges on a quadratic loss.

        Infinite where no eigenvalue is positive.
        """
        return 2 / self.value if self.value > 0 else math.inf

    def __str__(self) -> str:
        return f"λ_max {self.value:.4g} ± {self.error:.1g}, 2/λ_max {self.edge:.4g}; {self.status}"


@exclusive()
@on_all_ranks
def sharpness(
    measured: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    tolerance: float = TOLERANCE,
    most_products: int = MOST_PRODUCTS,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sharpness:
    """The largest eigenvalue of a Hessian, or of any symmetric operator; arguments as in `eigenvalues`.

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()
    >>> print(sharpness(model, nn.functional.mse_loss, batch))
    λ_max 9 ± ..., 2/λ_max 0.2222; converged after 2 products
    """
    found = eigenvalues(
        measured,
        loss,
        batch,
        tolerance=tolerance,
        most_products=most_products,
        parameters=parameters,
        temperature=temperature,
        seed=seed,
        progress=progress,
    )
    return Sharpness(
        float(found.values[0]),
        float(found.errors[0]),
        float(found.residuals[0]),
        found.converged,
        found.products,
        found.status,
    )
