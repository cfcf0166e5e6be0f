"""How near gradient descent is to the edge of stability.

On a quadratic, SGD with momentum β and learning rate h moves along an eigenvector of the Hessian stably if

    h·(λ + decay) ≤ 2(1 + β)               2(1 + β)/(1 + 2β) with Nesterov's momentum

Groups may have learning rates of their own: with D the diagonal matrix of these, `D^½ (H + decay) D^½` is in
the place of h·(H + decay). The edge is its largest eigenvalue over the bound: 1 is the edge.

References:
    Cohen et al., Gradient descent on neural networks typically occurs at the edge of stability, 2021.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.errors import UseError
from theodolite.probes.curvature.operator import Hessian
from theodolite.probes.curvature.sharpness import sharpness


@dataclass(frozen=True)
class Edge:
    """`h·λ_max/2` for plain gradient descent: above 1 it is unstable along the top eigenvector."""

    value: float
    error: float


def edge(here: Hessian, model: nn.Module, optimizer: Optimizer) -> Edge:
    """Where the optimizer is, with the learning rates it has now.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    >>> from theodolite.probes.curvature.operator import hessian
    >>> here = hessian(model, nn.functional.mse_loss, (torch.ones(1, 1), torch.zeros(1, 1)))  # λ = 2
    >>> round(edge(here, model, optimizer).value, 6)
    0.5
    """
    bound = _bound(optimizer)
    rates = _by_name(optimizer, model, "lr")
    decays = _by_name(optimizer, model, "weight_decay")
    missing = [name for name in here.names if name not in rates]
    if missing:
        raise UseError(
            f"{missing[0]} requires a gradient and is not in the optimizer, so it has no learning rate. "
            "Freeze it, or give it to the optimizer"
        )
    scale = here.flat({name: torch.full(here.shapes[name], rates[name]) for name in here.names})
    decay = here.flat({name: torch.full(here.shapes[name], decays[name]) for name in here.names})
    found = sharpness(_Scaled(here, scale.sqrt(), scale * decay))  # type: ignore[arg-type]
    return Edge(found.value / bound, found.error / bound)


@dataclass(frozen=True)
class _Scaled:
    """`D^½ H D^½` plus a diagonal."""

    of: Hessian
    root: Tensor
    diagonal: Tensor

    @property
    def size(self) -> int:
        return self.of.size

    @property
    def device(self) -> torch.device:
        return self.of.device

    @property
    def dtype(self) -> torch.dtype:
        return self.of.dtype

    def __matmul__(self, vector: Tensor) -> Tensor:
        root, diagonal = (
            (self.root, self.diagonal) if vector.ndim == 1 else (self.root[:, None], self.diagonal[:, None])
        )
        return root * (self.of @ (root * vector)) + diagonal * vector


def _bound(optimizer: Optimizer) -> float:
    if not isinstance(optimizer, torch.optim.SGD):
        raise UseError(
            f"'edge' is about gradient descent, and the optimizer is {type(optimizer).__name__}: its steps "
            "are not lr times the gradient. Measure 'sharpness'"
        )
    kinds = {(group["momentum"], group["nesterov"], group["dampening"]) for group in optimizer.param_groups}
    if len(kinds) > 1 or next(iter(kinds))[2]:
        raise UseError("'edge' knows one momentum for all groups, without dampening. Measure 'sharpness'")
    ((momentum, nesterov, _),) = kinds
    return 2 * (1 + momentum) / (1 + 2 * momentum if nesterov else 1)


def _by_name(optimizer: Optimizer, model: nn.Module, key: str) -> Mapping[str, float]:
    values = {id(tensor): float(group[key]) for group in optimizer.param_groups for tensor in group["params"]}
    return {name: values[id(tensor)] for name, tensor in canonical_parameters(model) if id(tensor) in values}
