"""Lion: `A = sign(β₁M + (1 − β₁)∇W)`, then `M ← β₂M + (1 − β₂)∇W`.

References:
    Chen et al., Symbolic discovery of optimization algorithms, 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from theodolite.optimizers.borrowed import DECOUPLED, NEGATED, Borrowed
from theodolite.optimizers.horizon import Memory, squares_of_average
from theodolite.optimizers.scaling import SIGN
from theodolite.optimizers.spec import Hypers, OptimizerSpec, State, Vectorised, by_entries


def _step(weight: Tensor, grad: Tensor, state: State, hyper: Hypers, alive: Tensor) -> None:
    average = state["exp_avg"]
    update = torch.sign(torch.lerp(grad, average, hyper["beta1"]))
    average.lerp_(grad, 1 - hyper["beta2"])
    weight.sub_(torch.where(alive, hyper["lr"] * (update + hyper["weight_decay"] * weight), 0.0))


def _for_batch(options: Mapping[str, Any], batch: float) -> dict[str, Any]:
    """Betas with which the newest examples have the weight that they had: `1 − β₁β₂^(m−1)` in m steps."""
    mixed, kept = options["betas"]
    return {"betas": (min(mixed * kept ** (batch - 1), 1.0), kept**batch)}


def _squares(options: Mapping[str, Any]) -> float:
    mixed, kept = options["betas"]
    return float((1 - mixed) ** 2 + mixed**2 * squares_of_average(kept))


SPECS = (
    OptimizerSpec(
        "lion",
        Borrowed("Lion"),
        update=SIGN,
        memory=Memory({"betas": (0.9, 0.99)}, _for_batch, squares=_squares),
        fixed=DECOUPLED,
        refused=NEGATED,
        vectorised=Vectorised(by_entries(_step), state=("exp_avg",), numbers={"betas": (0.9, 0.99)}),
    ),
)
