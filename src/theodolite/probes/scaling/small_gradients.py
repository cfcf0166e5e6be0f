"""Gradients too small for a step to say anything: rounding alone, or far below the optimizer's eps."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.batches import Batch, in_float64
from theodolite.core.errors import UseError
from theodolite.optimizers.scaling import GRADIENT_ENTRY
from theodolite.optimizers.spec import find_optimizers
from theodolite.planning.plan import Plan
from theodolite.workloads import Workload

SUSPICIOUS, ROUNDING = 1e-4, 1e-3
"""A gradient smaller than `SUSPICIOUS` times the largest of all tensors may be rounding alone. It is, if
float64 leaves less than `ROUNDING` of it."""
NEAR_EPS = 10.0
"""Below so many times eps, a gradient is so small that eps has a say in how far the tensor moves."""


def only_rounding(workload: Workload, model: nn.Module, batch: Batch) -> frozenset[str]:
    """The tensors whose gradient vanishes when it is computed in float64.

    Computed only if a gradient is far smaller than those of other tensors; empty for a network that cannot
    run in float64.
    """
    sizes = _gradient_sizes(model)
    small = {name for name, size in sizes.items() if 0 < size < SUSPICIOUS * max(sizes.values())}
    if not small:
        return frozenset()
    finer = copy.deepcopy(model).double()
    for own, copied in zip(model.parameters(), finer.parameters(), strict=True):
        vars(copied).update(vars(own))  # a copy of a Parameter loses them, and microsoft/mup reads its own
    finer.zero_grad()
    try:
        workload.evaluate(finer, in_float64(batch)).backward()
    except (RuntimeError, TypeError, UseError):  # the network fixes a dtype
        return frozenset()
    exact = _gradient_sizes(finer)
    return frozenset(name for name in small if exact.get(name, 0.0) < ROUNDING * sizes[name])


@torch.no_grad()
def times_eps(plan: Plan, tensors: Mapping[str, Tensor], before: Mapping[str, float]) -> dict[str, float]:
    """How many times eps the gradient of each tensor is, or was before: the average of squares remembers.

    By the root mean square of the entries that are not zero. Only of tensors whose optimizer adds eps to the
    size of an entry, as Adam does in `m/(√v + eps)`.
    """
    found = {}
    for name, tensor in tensors.items():
        row = plan[name]
        spec = find_optimizers().get(row.rule)
        if spec is None or spec.eps is None or spec.eps.compared is not GRADIENT_ENTRY or row.eps <= 0:
            continue
        now = 0.0
        if tensor.grad is not None:
            grad = tensor.grad.to_dense()
            now = grad.abs().double().norm().item() / max(1, int(grad.count_nonzero())) ** 0.5
        found[name] = max(now / row.eps, before.get(name, 0.0))
    return found


def _gradient_sizes(model: nn.Module) -> dict[str, float]:
    return {
        name: tensor.grad.to_dense().double().square().mean().sqrt().item()
        for name, tensor in canonical_parameters(model)
        if tensor.grad is not None
    }
