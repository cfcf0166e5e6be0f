"""The largest eigenvalue of a Hessian, and how near gradient descent is to the edge of stability.

On a quadratic, SGD with momentum β and learning rate h is stable along an eigenvector of the Hessian if

    h·(λ + decay) ≤ 2(1 + β)               2(1 + β)/(1 + 2β) with Nesterov's momentum

With a learning rate for each group, and D the diagonal matrix of these, `D^½ (H + decay) D^½` takes the place
of h·(H + decay). The edge is its largest eigenvalue over the bound: 1 is the edge of stability.

References:
    Cohen et al., Gradient descent on neural networks typically occurs at the edge of stability, 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress
from theodolite.core.replicas import on_all_ranks
from theodolite.present.result import Block, Result
from theodolite.probes.curvature.eigenvalues import MOST_PRODUCTS, eigenvalues
from theodolite.probes.curvature.operator import Hessian, Operator, operator_of
from theodolite.probes.curvature.sampling import Estimate


@dataclass(frozen=True)
class Sharpness(Result):
    """The largest eigenvalue λ_max of a Hessian."""

    kind: ClassVar[str] = "sharpness"
    loads: ClassVar[bool] = True

    value: float
    """λ_max, never above the true value but for rounding."""
    error: float
    """The approximate error of `value`."""
    residual: float
    """Some eigenvalue lies within this distance of `value`, whatever the spectrum."""
    converged: bool
    products: int
    status: str

    @property
    def edge(self) -> float:
        """`2/λ_max`: on a quadratic loss gradient descent diverges with a larger learning rate.

        Infinite if no eigenvalue is positive.
        """
        return 2 / self.value if self.value > 0 else math.inf

    def blocks(self) -> Iterator[Block]:
        """One line."""
        yield f"λ_max {self.value:.4g} ± {self.error:.1g}, 2/λ_max {self.edge:.4g}; {self.status}"


@exclusive()
@on_all_ranks
def sharpness(
    model: Operator | nn.Module,
    loss: Loss | None = None,
    batch: Batches | None = None,
    *,
    rtol: float = 1e-3,
    most_products: int = MOST_PRODUCTS,
    parameters: str | Sequence[str] | None = None,
    temperature: float = 1.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Sharpness:
    """The largest eigenvalue of a Hessian, or of any symmetric operator; arguments as in `eigenvalues`.

    >>> model = nn.Linear(2, 1, bias=False).double()
    >>> batch = torch.diag(torch.tensor([1.0, 3.0])).double(), torch.zeros(2, 1).double()
    >>> print(sharpness(model, nn.functional.mse_loss, batch))
    λ_max 9 ± ..., 2/λ_max 0.2222; converged after 2 products
    """
    operator = operator_of(model, loss, batch, parameters=parameters, temperature=temperature)
    found = eigenvalues(operator, rtol=rtol, most_products=most_products, seed=seed, progress=progress)
    value, error, residual = (float(one[0]) for one in (found.values, found.errors, found.residuals))
    return Sharpness(value, error, residual, found.converged, found.products, found.status)


def edge(operator: Hessian, model: nn.Module, optimizer: Optimizer) -> Estimate:
    """`h·λ_max/2` for plain gradient descent, with the optimizer's present learning rates.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> from theodolite.probes.curvature.operator import hessian
    >>> H = hessian(model, nn.functional.mse_loss, (torch.ones(1, 1), torch.zeros(1, 1)))  # λ = 2
    >>> round(edge(H, model, optimizer).value, 6)
    0.5
    """
    bound = _bound(optimizer)
    groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
    tensors = dict(canonical_parameters(model))
    rates: dict[str, Tensor] = {}
    decays: dict[str, Tensor] = {}
    for name in operator.names:
        if (group := groups.get(id(tensors[name]))) is None:
            raise UseError(
                f"{name} requires a gradient and is not in the optimizer, so it has no learning rate. "
                "Freeze it, or give it to the optimizer"
            )
        rates[name] = torch.full(operator.shapes[name], float(group["lr"]))
        decays[name] = torch.full(operator.shapes[name], float(group["weight_decay"]))
    scale, decay = operator.flat(rates), operator.flat(decays)
    top = sharpness(_Scaled(operator, scale.sqrt(), scale * decay))  # type: ignore[arg-type]
    return Estimate(top.value / bound, top.error / bound)


class _Scaled:
    """`D^½ H D^½` plus a diagonal matrix."""

    def __init__(self, operator: Hessian, root: Tensor, diagonal: Tensor) -> None:
        self._operator, self._root, self._diagonal = operator, root, diagonal
        self.size, self.device, self.dtype = operator.size, operator.device, operator.dtype

    def __matmul__(self, vector: Tensor) -> Tensor:
        root, diagonal = self._root, self._diagonal
        if vector.ndim == 2:
            root, diagonal = root[:, None], diagonal[:, None]
        return root * (self._operator @ (root * vector)) + diagonal * vector


def _bound(optimizer: Optimizer) -> float:
    if not isinstance(optimizer, torch.optim.SGD):
        raise UseError(
            f"'edge' is about gradient descent, and the optimizer is {type(optimizer).__name__}: its steps "
            "are not lr times the gradient. Measure 'sharpness'"
        )
    kinds = {(group["momentum"], group["nesterov"], group["dampening"]) for group in optimizer.param_groups}
    if len(kinds) > 1 or next(iter(kinds))[2]:
        raise UseError("'edge' needs one momentum for all groups, without dampening. Measure 'sharpness'")
    ((momentum, nesterov, _),) = kinds
    return 2 * (1 + momentum) / (1 + 2 * momentum if nesterov else 1)
