"""Every probe of second order, called on a model, a loss and a batch in its cheapest way."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from theodolite import probes

Probe = Callable[[nn.Module, Any, Any], Any]


def vector(operator: Any) -> torch.Tensor:
    return torch.ones(operator.size, dtype=operator.dtype)


def product(model: nn.Module, loss: Any, batch: Any) -> Any:
    operator = probes.hessian(model, loss, batch)
    return operator @ vector(operator)


def gauss_newton(model: nn.Module, loss: Any, batch: Any) -> Any:
    operator = probes.hessian(model, loss, batch).gauss_newton
    return operator @ vector(operator)


def residual(model: nn.Module, loss: Any, batch: Any) -> Any:
    operator = probes.hessian(model, loss, batch).residual
    return operator @ vector(operator)


def tracked(model: nn.Module, loss: Any, batch: Any) -> Any:
    """One measurement before training starts, and no training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probes.track(model, loss, batch, optimizer, measure=["loss", "sharpness"]) as tracking:
        pass
    return [dict(row.values) for row in tracking.rows]


def outliers(model: nn.Module, loss: Any, batch: Any) -> Any:
    """With a coarse density."""
    with pytest.MonkeyPatch.context() as patch:
        module = import_module("theodolite.probes.curvature.density")
        patch.setattr(module, "OUTLIER_PROBES", 2)
        patch.setattr(module, "OUTLIER_STEPS", 8)
        return probes.outliers(model, loss, batch, most=3, most_products=30)


EVERY: dict[str, Probe] = {
    "hessian": product,
    "gauss_newton": gauss_newton,
    "residual": residual,
    "gradient": lambda model, loss, batch: probes.hessian(model, loss, batch).gradient,
    "curvature": lambda model, loss, batch: probes.curvature(model, loss, batch, directions=4),
    "along_temperature": lambda model, loss, batch: probes.along_temperature(
        model, loss, batch, [0.5, 2.0], directions=4
    ),
    "along_scale": lambda model, loss, batch: probes.along_scale(
        model, loss, batch, [0.5, 2.0], directions=4
    ),
    "eigenvalues": lambda model, loss, batch: probes.eigenvalues(model, loss, batch, k=2, rtol=1e-2),
    "sharpness": lambda model, loss, batch: probes.sharpness(model, loss, batch),
    "trace": lambda model, loss, batch: probes.trace(model, loss, batch, rtol=0.5),
    "density": lambda model, loss, batch: probes.density(model, loss, batch, probes=2, steps=5),
    "outliers": outliers,
    "track": tracked,
    "landscape": lambda model, loss, batch: probes.landscape(model, loss, batch, num=3),
    "landscape, hessian": lambda model, loss, batch: probes.landscape(
        model, loss, batch, num=3, axes="hessian"
    ),
}
