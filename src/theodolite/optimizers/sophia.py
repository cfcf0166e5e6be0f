"""Sophia: `A = clip(M/max(H, eps), ±p)`, entries of at most p.

H is the moving average of estimates of the Hessian's diagonal, `z ⊙ ∇²f z`, made every `update_period` steps.

M/H has the units of the weight: H goes as the square of the gradient's entries g, so M/H goes as 1/g. The
clip p follows it (`extent`), so that the share of clipped entries stays, and lr·p is what lr is for AdamW.
A multiplier scales M/H and p as it scales the weight, and eps as H.

References:
    Liu et al., Sophia: a scalable stochastic second-order optimizer, 2023.
"""

from __future__ import annotations

import re
from typing import Any

from theodolite.core.errors import UseError
from theodolite.optimizers.borrowed import DECOUPLED, NEGATED, Borrowed, ByAge
from theodolite.optimizers.condition import gradient_entry
from theodolite.optimizers.horizon import Memory
from theodolite.optimizers.scaling import GRADIENT_ENTRY, Scaling, entry_factors
from theodolite.optimizers.spec import Eps, Extent, OptimizerSpec
from theodolite.optimizers.step_checks import Group


class SophiaFixes(ByAge):
    """Says what to do where gradients cannot be differentiated: without a graph, or with fused attention."""

    def _check(self, cohorts: list[tuple[Group, Group]]) -> None:
        if cohorts[0][0]["age"] % self.update_period:  # type: ignore[attr-defined]
            return
        if not any(param.grad.requires_grad for cohort, _ in cohorts for param in cohort["params"]):
            raise UseError(
                "the gradients have no graph, and Sophia has to differentiate them now. Compute them by "
                "loss.backward(create_graph=True), with attention in its math backend"
            )

    def compute_hutchinson_hessian(self, *given: Any, **options: Any) -> None:
        """Add estimates of the Hessian's diagonal to the state."""
        try:
            super().compute_hutchinson_hessian(*given, **options)  # type: ignore[misc]
        except RuntimeError as error:
            if not (operation := re.search(r"derivative for '?([\w:]+)'? is not implemented", str(error))):
                raise
            raise UseError(
                f"Sophia has to differentiate the gradients, and {operation[1]} has no second derivative. "
                "Fused attention has none: call the model, and loss.backward(create_graph=True), within "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            ) from error


SPECS = (
    OptimizerSpec(
        "sophia",
        Borrowed("SophiaH", (SophiaFixes,)),
        update=Scaling(
            lambda part, ratios: ratios.fan_in / gradient_entry(part, ratios),
            lambda part, ratios: "·".join(["r_in", *entry_factors(part)]),
            "the update is clipped at p, which grows as m/h does, and the fan-in adds up",
        ),
        degree=-1,
        eps=Eps(GRADIENT_ENTRY.squared(), usual=1e-12, degree=2),
        extent=Extent(
            "p",
            0.01,
            Scaling(
                lambda part, ratios: 1 / gradient_entry(part, ratios),
                lambda part, ratios: "·".join(entry_factors(part)),
                "m/h goes as one over an entry of the gradient",
            ),
        ),
        memory=Memory({"betas": (0.96, 0.99)}),
        second_order=True,
        fixed=DECOUPLED,
        refused=NEGATED,
    ),
)
