"""What every optimizer does by its paper, in float64, and its rows in the tables of width–depth muP.

The test file of each module of optimizers holds a dict `REFERENCES`; the tests for all optimizers read it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from theodolite import optimizers
from theodolite.optimizers import OPTIMIZERS, Base, Hyper

State = dict[str, Any]
Step = Callable[[Tensor, Tensor, Tensor, Hyper, State, int], Tensor]
"""Weight, gradient, diagonal of the Hessian, hyperparameters, what is kept, and the step counted from 1."""
Factors = tuple[float, float, float]
"""On lr, weight decay and eps, before multipliers are absorbed."""
Rows = Callable[[float, float], Mapping[str, Factors]]
"""By column of the table, at width ratio n and depth ratio L."""


@dataclass(frozen=True)
class Reference:
    """One optimizer."""

    step: Step
    first: Callable[..., Tensor]
    """A of the first step `W ← W − lr·A` for a gradient, or a stack of them; takes `eps` and, if needed,
    `clip`, `curvature`, `weight` and `lr`."""
    rows: Rows
    """In blocks of two or more layers."""
    rows_alone: Rows
    """In blocks of one layer, where they differ."""
    unequal: Callable[[float, float, float], Factors]
    """For a hidden matrix whose fan-in, the larger one, grows by i, and its fan-out by o."""
    base: Base
    """Steps that train a small network, and an eps as large as what it is added to."""
    eps: Callable[[float, float], float] = lambda entry, norm: 0.0
    """As large as what it is added to at the first step, given the root mean square of a gradient's entries
    and its Frobenius norm."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """With which the optimizer is the one written out."""
    numbers: Mapping[str, tuple[Any, Any, Any]] = field(default_factory=dict)
    """Values for three models, of options for many models that `test_vectorised.NUMBERS` does not have."""
    is_continuous: bool = True
    """False if rounding errors grow to the size of a step."""
    absorbable: Step | None = None
    """A step that absorbs multipliers exactly, if the one of the paper does so only in a limit."""
    matters: frozenset[str] = frozenset(["std", "lr", "weight_decay", "eps", "extent"])
    """Hyperparameters that the training depends on."""
    tolerance: float = 1e-12


@functools.cache
def references() -> dict[str, Reference]:
    """By name; every optimizer has one."""
    found: dict[str, Reference] = {}
    for module in pkgutil.iter_modules(optimizers.__path__):
        if hasattr(importlib.import_module(f"{optimizers.__name__}.{module.name}"), "SPECS"):
            found |= importlib.import_module(f"{__package__}.test_{module.name}").REFERENCES
    assert found.keys() == OPTIMIZERS.keys()
    return found


# What formulas are made of


def averaged(state: State, name: str, value: Tensor, beta: float) -> Tensor:
    state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
    found: Tensor = state[name]
    return found


def moved(w: Tensor, update: Tensor, hyper: Hyper) -> Tensor:
    return w - hyper.lr * (update + hyper.weight_decay * w)


def adam_update(g: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    m = averaged(state, "m", g, 0.9) / (1 - 0.9**t)
    v = averaged(state, "v", g**2, 0.999) / (1 - 0.999**t)
    return m / (v.sqrt() + hyper.eps)


def muon_update(g: Tensor, hyper: Hyper, state: State) -> Tensor:
    """With Nesterov momentum and five Newton–Schulz iterations, which do not converge."""
    m = averaged(state, "m", g, 0.95)
    x = 0.95 * m + 0.05 * g
    x = x / (x.norm() + hyper.eps)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x


def sign_first(gradient: Tensor, eps: float = 0.0, **_: Any) -> Tensor:
    return gradient / (gradient.abs() + eps)


def orthogonal_first(gradient: Tensor, **_: Any) -> Tensor:
    u, _, v = compact_svd(gradient)
    return u @ v


@lru_cache(maxsize=1)  # several optimizers read one gradient
def compact_svd(matrices: Tensor, most: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """U, Σ and Vᵀ of the part that is not zero: a gradient has at most the rank of its batch."""
    rank = min(most, *matrices.shape[-2:])
    probe = torch.randn(
        matrices.shape[-1], rank, dtype=matrices.dtype, generator=torch.Generator().manual_seed(1)
    )
    basis = torch.linalg.qr(matrices @ probe).Q
    u, s, v = torch.linalg.svd(basis.mT @ matrices, full_matrices=False)
    kept = s > 1e-9 * s.amax(-1, keepdim=True)
    return basis @ u * kept.unsqueeze(-2), s, v


# Rows that several optimizers share


def sign_rows(n: float, L: float) -> dict[str, Factors]:
    return {
        "input": (1, 1, 1 / n),
        "hidden": (1 / n, n, 1 / (n * L)),
        "output": (1, 1, 1 / n),
        "vector in block": (1, 1, 1 / (n * L)),
        "input in block": (1, 1, 1 / (n * L)),
        "output in block": (1, 1, 1 / (n * L)),
        "fixed in block": (1, 1, 1 / L),
        "fixed": (1, 1, 1),
    }


def sign_rows_alone(n: float, L: float) -> dict[str, Factors]:
    return {
        "hidden": (1 / (n * sqrt(L)), n, 1 / (n * sqrt(L))),
        "vector in block": (1 / sqrt(L), 1, 1 / (n * sqrt(L))),
        "input in block": (1 / sqrt(L), 1, 1 / (n * sqrt(L))),
    }


def sign_unequal(i: float, o: float, L: float) -> Factors:
    return 1 / i, i, 1 / (o * L)


def orthogonal_rows(n: float, L: float) -> dict[str, Factors]:
    return {
        "input": (sqrt(n), 1 / sqrt(n), 1 / sqrt(n)),
        "hidden": (1, 1, 1 / L),
        "output": (sqrt(n), 1 / sqrt(n), 1 / sqrt(n)),
        "input in block": (sqrt(n), 1 / sqrt(n), 1 / (L * sqrt(n))),
        "output in block": (sqrt(n), 1 / sqrt(n), 1 / (L * sqrt(n))),
    }


def orthogonal_rows_alone(n: float, L: float) -> dict[str, Factors]:
    return {"hidden": (1 / sqrt(L), 1, 1 / sqrt(L))}


def orthogonal_unequal(i: float, o: float, L: float) -> Factors:
    return sqrt(o / i), sqrt(i / o), sqrt(i / o) / L


def unit_rows(n: float, L: float) -> dict[str, Factors]:
    return {
        "input": (1, 1, 1 / sqrt(n)),
        "hidden": (1, 1, 1 / L),
        "output": (n, 1 / n, 1 / sqrt(n)),
        "input in block": (1, 1, 1 / (L * sqrt(n))),
        "output in block": (n, 1 / n, 1 / (L * sqrt(n))),
    }


def unit_unequal(i: float, o: float, L: float) -> Factors:
    return 1, 1, sqrt(i / o) / L


def with_eps(rows: Rows, power: int) -> Rows:
    """The same rows with another power of the factor on eps."""
    return lambda n, L: {column: (lr, decay, eps**power) for column, (lr, decay, eps) in rows(n, L).items()}
