"""Muon, for every weight that is a matrix in some layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.optimizers.finite import check_step
from theodolite.optimizers.matrices import Axes, Rows, check_matrices
from theodolite.optimizers.moving import ROUNDED, Arranged, Moving, arranged, move
from theodolite.optimizers.restoring import refuse_other_shapes
from theodolite.optimizers.sharding import Replicas, is_sharded, local

SCALES: dict[str, Callable[[int, int], float]] = {
    "none": lambda fan_in, fan_out: 1.0,
    "original": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    "rms": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_in, fan_out)),
    "spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
}
"""What the orthogonal update is multiplied by; see `theodolite.optimizers.muon_rules`."""


class Muon(Optimizer):
    """Momentum, made orthogonal: `W ← (1 − lr·weight_decay)·W − lr·s·NS(M)`.

    `M ← momentum·M + (1 − momentum)·∇W`, and with Nesterov's form NS gets
    `momentum·M + (1 − momentum)·∇W` once more. NS is the Newton–Schulz iteration, `≈ UVᵀ`, for all
    matrices of one shape at once, over all groups. It computes in bfloat16 where that is faster (on an
    accelerator, and on CPUs that multiply it), and in float64 for float64.

    Weights in bfloat16 are read, moved in float32 and rounded once. Shards (`fully_shard`) are sent to one
    owner of each matrix and back, by two collectives for a whole step; replicas share the work out if they
    are named. A gradient that is not finite is refused, and nothing has moved then.

    Args:
        params: matrices, or groups of them.
        lr: learning rate.
        momentum: of the moving average of gradients.
        nesterov: look one step ahead?
        weight_decay: decoupled, by the learning rate without its scale.
        scale: s by name: `none` 1, `original` √max(1, out/in), `rms` 0.2·√max(in, out),
            `spectral` √(out/in).
        axes: (in, out), the dimensions inputs and outputs run over; the others are a stack of matrices.
            Without them a tensor of two dimensions is (out, in), one of four or five the kernel of a
            convolution, (out, in·positions), and one of three has to say. A transposed weight has
            ((0,), (1,)), experts (expert, out, in) have ((2,), (1,)).
        rows: blocks of outputs that are matrices by themselves, as in fused queries, keys and values: for
            each block its half-open ranges.
        eps: added to the Frobenius norm the matrix is divided by.
        steps: of Newton–Schulz.
        shared_over: a DistributedDataParallel model, or the process group of replicas: each of them makes its
            share of the matrices orthogonal, and one collective gives all to all.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> weight.grad = torch.diag(torch.tensor([3.0, 1.0]))
    >>> Muon([weight], lr=0.1).step()
    >>> bool((weight.diagonal() + 0.1).abs().max() < 0.035)      # both directions move by about lr
    True

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is
        scalable for LLM training, 2025.
    """

    # Of the class, as torch copies groups and state of an optimizer and nothing else.
    check_gradients = True
    """Are gradients looked at? False where somebody else has done so."""
    _replicas: Replicas | None = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        scale: str = "none",
        axes: Axes | None = None,
        rows: Rows = (),
        eps: float = 1e-7,
        steps: int = 5,
        *,
        shared_over: Any = None,
    ) -> None:
        self._replicas = Replicas.of(shared_over)
        self._last: tuple[object, list[Arranged]] | None = None
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "nesterov": nesterov,
                "weight_decay": weight_decay,
                "scale": scale,
                "axes": axes,
                "rows": rows,
                "eps": eps,
                "steps": steps,
            },
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add matrices; options not given are the optimizer's."""
        super().add_param_group(param_group)
        try:
            if param_group["scale"] not in SCALES:
                raise UseError(f"scale is {param_group['scale']!r}: it is one of {', '.join(SCALES)}")
            if not 0 <= param_group["momentum"] < 1:
                raise UseError(f"momentum is {param_group['momentum']!r}: it has to be in [0, 1)")
            for option in ("lr", "weight_decay", "eps"):
                if not float(param_group[option]) >= 0:
                    raise UseError(f"{option} is {param_group[option]!r}: it has to be 0 or more")
            if param_group["steps"] < 1:
                raise UseError(f"steps is {param_group['steps']!r}: Newton–Schulz takes at least one")
            check_matrices("Muon", param_group)
        except UseError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        over = [] if self._replicas is None else [self._replicas.group]
        check_step(self.param_groups, {"Muon": self.param_groups}, look=self.check_gradients, over=over)
        moving = []
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None and param.numel()]
            if not params:
                continue
            grads, buffers = averaged(params, self.state, group["momentum"])
            lr = float(group["lr"])
            exact = [local(param) for param in params if param.dtype not in ROUNDED]
            if group["weight_decay"] and exact:
                torch._foreach_mul_(exact, 1 - lr * group["weight_decay"])
            for param, grad, buffer in zip(params, grads, buffers, strict=True):
                moving.append(Moving(param, grad, buffer, group, lr))
        for one in self._arranged(moving):
            move([moving[place] for place in one.places], one, self._replicas)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does it; momenta of another shape are refused."""
        refuse_other_shapes(self.param_groups, state_dict)
        super().load_state_dict(state_dict)

    def _arranged(self, moving: Sequence[Moving]) -> list[Arranged]:
        """What goes together in a step; found again only when parameters or options are others."""
        groups = {id(one.group): one.group for one in moving}
        options = [[group[key] for key in ARRANGING] for group in groups.values()]
        kinds = [(param.shape, param.dtype, param.device) for param, *_ in moving]
        found = [(id(one.param), id(one.group)) for one in moving], kinds, options
        if self._last is None or self._last[0] != found:
            self._last = found, arranged(moving, SCALES, replicated=self._replicas is not None)
        return self._last[1]

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "check_gradients": self.check_gradients,
            "_replicas": self._replicas,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._last = None


ARRANGING = ("scale", "axes", "rows", "steps", "eps")
"""Options that what goes together in a step depends on."""


def averaged(params: Sequence[Tensor], state: Any, momentum: float) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, and the momenta that they have been averaged into: of each what this process holds."""
    for param in params:
        if "momentum_buffer" not in state[param]:
            state[param]["momentum_buffer"] = torch.zeros_like(param)
    grads = [local(_cut_alike(param)) for param in params]
    buffers = [local(state[param]["momentum_buffer"]) for param in params]
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    return grads, buffers


def _cut_alike(param: Any) -> Tensor:
    """The gradient, cut over processes as its parameter is."""
    grad: Any = param.grad
    if is_sharded(param) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    found: Tensor = grad
    return found
