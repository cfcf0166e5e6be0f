"""Shampoo: `A = L^(−1/4) ∇W R^(−1/4)` with `L = eps·I + Σ∇W∇Wᵀ` and `R = eps·I + Σ∇Wᵀ∇W`.

For a single gradient `∇W = UΣVᵀ` that is UVᵀ, an orthogonal matrix. eps is added to squares of the gradient.

References:
    Gupta, Koren and Singer, Shampoo: preconditioned stochastic tensor optimization, 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from theodolite.core.errors import UseError
from theodolite.optimizers.borrowed import DECOUPLED, NEGATED, Borrowed, ByAge
from theodolite.optimizers.scaling import GRADIENT_NORM, ORTHOGONAL
from theodolite.optimizers.spec import Eps, OptimizerSpec
from theodolite.optimizers.step_checks import Group


class ShampooFixes(ByAge):
    """Moves from the first step on, also with `preconditioning_compute_steps`; keeps no copy of its update;
    refuses bfloat16, in which sums of squares stop growing."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state.get(param, {}).pop("momentum_buffer", None)
        return loss

    def _of_age(self, group: Mapping[str, Any], age: int) -> dict[str, Any]:
        return {"step": age - 1}  # roots are computed where a multiple of k follows: at age 0, k, 2k, …

    def _check(self, cohorts: list[tuple[Group, Group]]) -> None:
        for cohort, _ in cohorts:
            for name, param in zip(cohort["param_names"], cohort["params"], strict=True):
                if param.dtype in (torch.bfloat16, torch.float16):
                    raise UseError(
                        f"{name} is {param.dtype}, in which Shampoo's sums of squares stop growing after a "
                        "few hundred steps. Keep weights in float32, and compute under torch.autocast"
                    )


SPECS = (
    OptimizerSpec(
        "shampoo",
        Borrowed("Shampoo", (ShampooFixes,)),
        update=ORTHOGONAL,
        eps=Eps(GRADIENT_NORM.squared(), usual=1e-6, option="matrix_eps", degree=2),
        fades=True,
        matrices_only=True,
        keeps_squares=True,
        fixed=DECOUPLED,
        refused={**NEGATED, "momentum": "pytorch_optimizer averages raw gradients with preconditioned ones"},
    ),
)
