"""Optimizers of pytorch_optimizer, with what is wrong in them put right.

What they share is in `theodolite.optimizers.borrowed_step`; each class names what is its own. Made by
`plan.optimizer(model)`; docs/optimizers.md tells how each fault was seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytorch_optimizer as source
import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.optimizers.borrowed_step import ByAge, Group


class Lion(ByAge, source.Lion):
    """`W ← W − lr·(sign(β₁M + (1 − β₁)∇W) + weight_decay·W)`, then `M ← β₂M + (1 − β₂)∇W`.

    Nothing is wrong with it but what is with all of them.

    References:
        Chen et al., Symbolic discovery of optimization algorithms, 2023.
    """


class SophiaH(ByAge, source.SophiaH):  # type: ignore[misc]
    """`W ← W − lr·(clip(M/max(H, eps), ±p) + weight_decay·W)`.

    H is the moving average of estimates of the Hessian's diagonal, `z ⊙ ∇²f z`, made every `update_period`
    steps. They need gradients through which one can differentiate: `loss.backward(create_graph=True)`.

    Mended: without such gradients, or with fused attention, torch's message told nobody what to do.

    References:
        Liu et al., Sophia: a scalable stochastic second-order optimizer, 2023.
    """

    def _check(self, cohorts: list[tuple[Group, Group]]) -> None:
        if cohorts[0][0]["age"] % self.update_period:
            return
        if not any(param.grad.requires_grad for cohort, _ in cohorts for param in cohort["params"]):
            raise UseError(
                "the gradients have no graph, and Sophia has to differentiate them now. Make them by "
                "loss.backward(create_graph=True), with attention in its math backend"
            )

    @staticmethod
    def compute_hutchinson_hessian(*given: Any, **options: Any) -> None:
        """Add estimates of the Hessian's diagonal to the state."""
        try:
            source.SophiaH.compute_hutchinson_hessian(*given, **options)
        except RuntimeError as error:
            if not (operation := re.search(r"derivative for '?([\w:]+)'? is not implemented", str(error))):
                raise
            raise UseError(
                f"Sophia has to differentiate the gradients, and {operation[1]} has no second derivative. "
                "Fused attention has none: call the model, and loss.backward(create_graph=True), within "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
            ) from error


class SOAP(ByAge, source.SOAP):
    """Adam in the eigenbases of Shampoo's statistics, `W ← (1 − lr·weight_decay)·(W − lr·Q_L N Q_Rᵀ)`.

    `N = M̂'/(√V̂' + eps)` with the moments `M' = Q_LᵀMQ_R` and V' of the gradient in these bases, which are
    turned by one power iteration every `precondition_frequency` steps. A tensor's first gradient only finds
    its bases, as the authors have it: in its own eigenbasis a gradient is diagonal, and Adam would blow up
    the rounding beside the diagonal to full size.

    Mended: eps was added before the bias correction (at step 2 it counted 4.5 times); bases of float64 were
    computed in float32; a tensor whose gradients come late skipped no step; a learning rate that is a tensor
    was written into.

    References:
        Vyas et al., SOAP: improving and stabilizing Shampoo using Adam, 2024.
    """

    def _of_age(self, group: Mapping[str, Any], age: int) -> dict[str, Any]:
        eps = _corrected(group, max(age, 1)) if group["correct_bias"] else group["eps"]
        return {"step": age, "eps": eps, "lr": float(group["lr"])}

    def get_orthogonal_matrix_qr(
        self, state: Any, max_precondition_dim: int = 10000, merge_dims: bool = False
    ) -> list[Any]:
        """The bases after one more power iteration, in the precision of the tensor."""
        moment = state["exp_avg_sq"]
        if merge_dims or moment.dtype != torch.float64:
            return list(super().get_orthogonal_matrix_qr(state, max_precondition_dim, merge_dims))
        bases = []
        for axis, (statistics, basis) in enumerate(zip(state["GG"], state["Q"], strict=True)):
            if len(statistics) == 0:  # too long a dimension has none
                bases.append(basis)
                continue
            product = statistics @ basis
            order = torch.argsort((basis * product).sum(0), descending=True)
            moment = moment.index_select(axis, order)
            bases.append(torch.linalg.qr(product[:, order])[0])
        state["exp_avg_sq"] = moment
        return bases


class Shampoo(ByAge, source.Shampoo):
    """`W ← W − lr·(L^(−1/4) ∇W R^(−1/4) + weight_decay·W)`, `L = eps·I + Σ∇W∇Wᵀ`, `R = eps·I + Σ∇Wᵀ∇W`.

    Mended: with `preconditioning_compute_steps` of k nothing moved before step k; every update was kept, for
    a momentum there was none of; sums in bfloat16 stop growing, which is refused.

    References:
        Gupta, Koren and Singer, Shampoo: preconditioned stochastic tensor optimization, 2018.
    """

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state.get(param, {}).pop("momentum_buffer", None)
        return loss

    def _of_age(self, group: Mapping[str, Any], age: int) -> dict[str, Any]:
        return {"step": age - 1}  # roots are due where a multiple of k follows: at age 0, k, 2k, …

    def _check(self, cohorts: list[tuple[Group, Group]]) -> None:
        for cohort, _ in cohorts:
            for name, param in zip(cohort["param_names"], cohort["params"], strict=True):
                if param.dtype in (torch.bfloat16, torch.float16):
                    raise UseError(
                        f"{name} is {param.dtype}, in which Shampoo's sums of squares stop growing after a "
                        "few hundred steps. Keep weights in float32, and compute under torch.autocast"
                    )


class _NoHiddenFloor:
    """√v + eps, where pytorch_optimizer has `√(v + 1e-15) + eps`, which is 3·10⁻⁸ at least."""

    @staticmethod
    def apply_ams_bound(
        ams_bound: bool, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor | None, eps: float
    ) -> Tensor:
        """The denominator of one tensor."""
        if ams_bound and max_exp_avg_sq is not None:
            exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        return exp_avg_sq.sqrt().add_(eps)

    @staticmethod
    def apply_ams_bound_foreach(
        ams_bound: bool, exp_avg_sqs: list[Tensor], max_exp_avg_sqs: list[Tensor], eps: float
    ) -> tuple[Tensor, ...]:
        """The denominators of several."""
        if ams_bound:
            torch._foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs)
            exp_avg_sqs = max_exp_avg_sqs
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, eps)
        return denominators


class DiffGrad(_NoHiddenFloor, ByAge, source.DiffGrad):  # type: ignore[misc]
    """`W ← W − lr·(ξ·m̂/(√v̂ + eps) + weight_decay·W)` with `ξ = sigmoid(|∇W_before − ∇W|)`: Adam times ξ.

    ξ is between 1/2 and 1. Entries of gradients are far below one in all but the smallest networks, so ξ is
    nearly 1/2, and diffGrad nearly Adam at half the learning rate: see docs/studies/diffgrad.md.

    Mended: eps was added before the bias correction (at the first step it counted 32 times), and 1e-15 under
    the root, which is more than eps.

    References:
        Dubey et al., diffGrad: an optimization method for convolutional neural networks, 2019.
    """

    def _of_age(self, group: Mapping[str, Any], age: int) -> dict[str, Any]:
        return {"step": age, "eps": _corrected(group, age + 1)}


class ScheduleFreeAdamW(_NoHiddenFloor, ByAge, source.ScheduleFreeAdamW):  # type: ignore[misc]
    """AdamW steps of z, whose average x is what is asked for; gradients are taken at y, in between.

    `z ← z − lr·(∇f(y)/(√v̂ + eps) + weight_decay·y)`, `x ← (1 − c)·x + c·z`, `y = (1 − β₁)·z + β₁·x`.
    The parameters are y while training and x after `eval()`; `train()` goes back. It takes the place of a
    schedule: the learning rate stays, after a warmup.

    Mended: the gradients were overwritten; a step after `eval()` moved x as if it were y, and is refused;
    1e-15 stood under the root, which is more than eps.

    References:
        Defazio et al., The road less scheduled, 2024.
    """

    changes_gradients = True

    def _check(self, cohorts: list[tuple[Group, Group]]) -> None:
        if not all(group["train_mode"] for _, group in cohorts):
            raise UseError(
                "the parameters are the averages, after eval(): call optimizer.train() before the gradients "
                "of the next step are computed"
            )


def _corrected(group: Mapping[str, Any], steps: int) -> float:
    """The eps that is `group["eps"]` after the bias correction of √v, which comes later."""
    eps: float = group["eps"] * math.sqrt(1 - group["betas"][1] ** steps)
    return eps
