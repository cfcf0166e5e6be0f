"""A learning rate set by the curvature along the gradient: DAL.

    lr = min(cap, 2/(‖Hg‖/‖g‖)^p)

‖Hg‖/‖g‖ is the curvature along the step: to lowest order, gradient descent departs from gradient flow by
h²/2·Hg. On a quadratic it is at most λ_max, and along an eigenvector it is λ, where p = 1 is the edge of
stability. A smaller p takes shorter steps if the curvature is below 1 and longer ones if it is above.

References:
    Rosca et al., On a continuous time model of gradient descent dynamics and instability in deep learning,
    2023, section 7.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from theodolite.core.arguments import positive, whole
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import on_all_ranks
from theodolite.optimizers.planned import set_lr
from theodolite.probes.curvature.operator import hessian
from theodolite.probes.steps.update import parameter_names

CAP = 5.0
"""The largest learning rate, in flat regions; the paper's."""


class DriftAdjusted:
    """Sets the learning rates of an optimizer before its step, from one Hessian product on the batch.

    The group with the largest learning rate gets `min(cap, 2/(‖Hg‖/‖g‖)^power)`, and the ratios between
    groups stay as they were initially.

    Args:
        optimizer: the rule is derived for gradient descent; with momentum or Adam it is a rule of thumb.
            Parameters that require no gradient are left out.
        model: what is trained.
        loss: `loss(logits, targets) -> scalar`.
        power: p. 1 is DAL, less is DAL-p.
        cap: the largest learning rate.
        every: measure every so many calls; in between the learning rate stays.

    A call that measures costs a forward pass and two backward passes, one of them of second order.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    >>> adjusted = DriftAdjusted(optimizer, model, nn.functional.mse_loss)
    >>> batch = torch.tensor([[2.0]]), torch.zeros(1, 1)  # the second derivative is 8
    >>> adjusted.step(batch)
    >>> adjusted.get_last_lr()
    [0.25]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        loss: Loss,
        *,
        power: float = 1.0,
        cap: float = CAP,
        every: int = 1,
    ) -> None:
        self.optimizer, self._model, self._loss = optimizer, model, loss
        self.power, self.cap = positive("power", power), positive("cap", cap)
        self.every = whole("every", every, least=1)
        parameter_names(optimizer, model)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.lr = positive("the largest learning rate", max(rates))
        """Of the group with the largest."""
        self._shares = [rate / self.lr for rate in rates]
        self.curvature = math.nan
        """‖Hg‖/‖g‖, when it was last measured."""
        self.calls = 0

    @exclusive()
    @on_all_ranks
    def step(self, batch: Batches) -> None:
        """Set the learning rates for the optimizer's next step, on this batch.

        The gradient is computed anew, so it does not matter whether `backward` has run. A batch whose loss is
        not finite is refused, and the learning rates stay.
        """
        if len(self.optimizer.param_groups) != len(self._shares):
            raise UseError(
                f"the optimizer has {len(self.optimizer.param_groups)} parameter groups, and had "
                f"{len(self._shares)} when this was made: the ratios of the others are not known. Make a new "
                "DriftAdjusted"
            )
        if self.calls % self.every == 0:
            self.curvature = self._measured(batch)
            # Without curvature or gradient the cap holds.
            bent = self.curvature**self.power
            self.lr = min(self.cap, 2 / bent) if bent > 0 else self.cap
        self.calls += 1
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            set_lr(group, rate)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [share * self.lr for share in self._shares]

    def state_dict(self) -> dict[str, Any]:
        """The state without optimizer and model, as values that JSON knows."""
        return {
            "power": self.power,
            "cap": self.cap,
            "every": self.every,
            "shares": list(self._shares),
            "curvature": None if math.isnan(self.curvature) else self.curvature,
            "lr": self.lr,
            "calls": self.calls,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        missing = [key for key in self.state_dict() if key not in state_dict]
        if missing:
            raise UseError(f"the state has no {missing[0]!r}: give what DriftAdjusted.state_dict() returned")
        if len(state_dict["shares"]) != len(self.optimizer.param_groups):
            raise UseError(
                f"the state is of {len(state_dict['shares'])} parameter groups, and the optimizer has "
                f"{len(self.optimizer.param_groups)}"
            )
        self.power, self.cap, self.every = (state_dict[key] for key in ("power", "cap", "every"))
        self.lr, self.calls, self._shares = state_dict["lr"], state_dict["calls"], [*state_dict["shares"]]
        self.curvature = math.nan if state_dict["curvature"] is None else state_dict["curvature"]

    def _measured(self, batch: Batches) -> float:
        own = parameter_names(self.optimizer, self._model)
        names = [name for tensor, name in own.items() if tensor.requires_grad]
        if not names:
            raise UseError(
                "no parameter of the optimizer requires a gradient. Set requires_grad on those to train"
            )
        here = hessian(self._model, self._loss, batch, parameters=names)
        slope = here.gradient
        length = float(torch.linalg.vector_norm(slope, dtype=torch.float64))
        if length == 0:
            return 0.0
        # A unit vector, so that half precision neither overflows nor underflows.
        bent = float(torch.linalg.vector_norm(here @ (slope / length), dtype=torch.float64))
        if not math.isfinite(bent):
            raise UseError(
                f"‖Hg‖/‖g‖ is {bent} at ‖g‖ = {length:.3g}: there is no learning rate to set. Check the "
                "batch and the weights"
            )
        return bent
