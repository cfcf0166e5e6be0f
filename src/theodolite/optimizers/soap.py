"""SOAP: Adam in the eigenbases of Shampoo, `W ← (1 − lr·weight_decay)·(W − lr·Q_L N Q_Rᵀ)`.

`N = M̂'/(√V̂' + eps)` with the moments `M' = Q_LᵀMQ_R` and V' of the gradient in these bases, which are turned
by one power iteration every `precondition_frequency` steps. The first gradient of a tensor only finds its
bases, as the authors intend: in its own eigenbasis a gradient is diagonal, and Adam would enlarge the
rounding errors beside the diagonal to full size. The sign of a diagonal matrix there is UVᵀ here, and eps is
added to the singular values of the gradient.

Every dimension of a tensor gets a basis of its own, those of a kernel and of experts too, which changes the
update by a factor that does not depend on width.

References:
    Vyas et al., SOAP: improving and stabilizing Shampoo using Adam, 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from theodolite.optimizers.borrowed import NEGATED, Borrowed, ByAge, corrected_eps
from theodolite.optimizers.horizon import Memory
from theodolite.optimizers.scaling import GRADIENT_NORM, ORTHOGONAL
from theodolite.optimizers.spec import Eps, OptimizerSpec


class SoapFixes(ByAge):
    """Adds eps after the bias correction (before it, eps counts 4.5 times at step 2), computes bases of
    float64 in float64, and reads a learning rate that is a tensor without writing into it."""

    def _of_age(self, group: Mapping[str, Any], age: int) -> dict[str, Any]:
        eps = corrected_eps(group, max(age, 1)) if group["correct_bias"] else group["eps"]
        return {"step": age, "eps": eps, "lr": float(group["lr"])}

    def get_orthogonal_matrix_qr(
        self, state: Any, max_precondition_dim: int = 10000, merge_dims: bool = False
    ) -> list[Any]:
        """The bases after one more power iteration, in the precision of the tensor."""
        moment = state["exp_avg_sq"]
        if merge_dims or moment.dtype != torch.float64:
            made = super().get_orthogonal_matrix_qr(state, max_precondition_dim, merge_dims)  # type: ignore[misc]
            return list(made)
        bases = []
        for axis, (statistics, basis) in enumerate(zip(state["GG"], state["Q"], strict=True)):
            if len(statistics) == 0:  # the dimension is too long to have one
                bases.append(basis)
                continue
            product = statistics @ basis
            order = torch.argsort((basis * product).sum(0), descending=True)
            moment = moment.index_select(axis, order)
            bases.append(torch.linalg.qr(product[:, order])[0])
        state["exp_avg_sq"] = moment
        return bases


SPECS = (
    OptimizerSpec(
        "soap",
        Borrowed("SOAP", (SoapFixes,)),
        update=ORTHOGONAL,
        eps=Eps(GRADIENT_NORM),
        matrices_only=True,
        memory=Memory({"betas": (0.95, 0.95)}),
        keeps_squares=True,
        refused=NEGATED,
    ),
)
