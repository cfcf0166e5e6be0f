"""Muon: momentum, orthogonalised, for every weight that is a matrix in some layout.

With the singular value decomposition `∇W = UΣVᵀ` the update is `A = s·UVᵀ` (without momentum), so
`‖A‖_R = s·√(n_in/n_out)`. The scales s, by rule and option:

    muon            none       1
    muon-original   original   √max(1, n_out/n_in)      Jordan et al., torch's default
    muon-kimi       rms        0.2·√max(n_in, n_out)    Liu et al., torch's match_rms_adamw
    muon-spectral   spectral   √(n_out/n_in)            an update of RMS norm one at every shape

The maxima are those of the actual fans: an embedding stays on the side of its vocabulary until the width
exceeds it. eps is added to the Frobenius norm of the momentum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.optimizers.condition import Ratios
from theodolite.optimizers.horizon import Memory, squares_of_momentum
from theodolite.optimizers.matrices import LINEAR, Axes, MatrixLayout, Rows
from theodolite.optimizers.matrix_optimizer import MatrixOptimizer, Moving
from theodolite.optimizers.matrix_step import ROUNDED, move
from theodolite.optimizers.orthogonal import newton_schulz
from theodolite.optimizers.scaling import GRADIENT_NORM, ORTHOGONAL, UNIT, Scaling, aspect, fraction
from theodolite.optimizers.sharding import Replicas, local
from theodolite.optimizers.spec import Eps, Hypers, OptimizerSpec, Slot, State, Vectorised
from theodolite.optimizers.step_checks import Group

SCALES: dict[str, Callable[[float, float], float]] = {
    "none": lambda fan_in, fan_out: 1.0,
    "original": lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    "rms": lambda fan_in, fan_out: 0.2 * math.sqrt(max(fan_in, fan_out)),
    "spectral": lambda fan_in, fan_out: math.sqrt(fan_out / fan_in),
}
"""The factor on the orthogonal update."""


class Muon(MatrixOptimizer):
    """Orthogonalised momentum: `W ← (1 − lr·weight_decay)·W − lr·s·NS(M)`.

    `M ← momentum·M + (1 − momentum)·∇W`; with Nesterov's form NS gets `momentum·M + (1 − momentum)·∇W` of the
    new M. NS is the Newton–Schulz iteration, `≈ UVᵀ`, of all matrices of one shape at once, over all groups.
    It computes in bfloat16 where that is faster (on accelerators, and on CPUs with instructions for it), and
    in float64 for float64.

    Weights in bfloat16 are moved in float32 and rounded once. Shards (`fully_shard`) are sent to one owner of
    each matrix and back, by two collectives for a whole step; replicas divide the work if `shared_over` names
    them. A gradient that is not finite is refused before anything moves.

    Args:
        params: matrices, or groups of them.
        lr: learning rate.
        momentum: of the moving average of gradients.
        nesterov: look one step ahead?
        weight_decay: decoupled; times the learning rate without its scale.
        scale: s by name: `none` 1, `original` √max(1, out/in), `rms` 0.2·√max(in, out),
            `spectral` √(out/in).
        axes: (in, out), the dimensions of inputs and of outputs; the others are a stack of matrices. By
            default a tensor of two dimensions is (out, in), and one of four or five the kernel of a
            convolution, (out, in·positions); one of three needs them. A transposed weight has ((0,), (1,)),
            experts (expert, out, in) have ((2,), (1,)).
        rows: blocks of outputs that are matrices by themselves, as in fused queries, keys and values: the
            half-open ranges of each block.
        eps: added to the Frobenius norm that a matrix is divided by.
        steps: of Newton–Schulz.
        shared_over: a DistributedDataParallel model, or the process group of replicas: each replica
            orthogonalises its share of the matrices, and one collective exchanges the results.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
    >>> weight.grad = torch.diag(torch.tensor([3.0, 1.0]))
    >>> Muon([weight], lr=0.1).step()
    >>> bool((weight.diagonal() + 0.1).abs().max() < 0.035)      # both directions move by about lr
    True

    References:
        Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; Liu et al., Muon is
        scalable for LLM training, 2025.
    """

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
        step = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        matrices = {"scale": scale, "axes": axes, "rows": rows, "eps": eps, "steps": steps}
        super().__init__(params, {**step, **matrices})

    def _check_options(self, group: Group) -> None:
        super()._check_options(group)
        if group["scale"] not in SCALES:
            raise UseError(f"scale is {group['scale']!r}: it is one of {', '.join(SCALES)}")

    def _move(self, moving: Moving) -> None:
        for group, params in moving:
            exact = [local(param) for param in params if param.dtype not in ROUNDED]
            if group["weight_decay"] and exact:
                torch._foreach_mul_(exact, 1 - float(group["lr"]) * group["weight_decay"])
        for steps, how in self._arranged(moving, lambda group, *fans: SCALES[group["scale"]](*fans)):
            move(steps, how, self._replicas)


# The step of many models


def muon_average(grad: Tensor, state: State, hyper: Hypers) -> Tensor:
    """Average the momentum, and return what is orthogonalised."""
    average = state["momentum_buffer"]
    average.lerp_(grad, 1 - hyper["momentum"])
    ahead = hyper["momentum"] * average + (1 - hyper["momentum"]) * grad
    return torch.where(hyper["nesterov"] > 0, ahead, average)


def stacked_layout(shared: Mapping[str, Any]) -> MatrixLayout:
    """The layout of a parameter with models as one more dimension in front, a stack like any other."""
    in_axes, out_axes = shared["axes"]
    return MatrixLayout(
        (tuple(axis + 1 for axis in in_axes), tuple(axis + 1 for axis in out_axes)), shared["rows"]
    )


def stacked_orthogonal(update: Tensor, eps: Tensor, slot: Slot) -> Tensor:
    """`s·NS` of the parameters (M, n) of all models; eps is (M, 1)."""
    scale, steps = SCALES[slot.shared.get("scale", "none")], slot.shared["steps"]

    def orthogonal(matrices: Tensor) -> Tensor:
        fan_out, fan_in = matrices.shape[-2:]
        made = newton_schulz(matrices, steps=steps, eps=for_matrices(eps, matrices))
        return made * scale(fan_in, fan_out)

    return stacked_layout(slot.shared).mapped(orthogonal, update.unflatten(1, slot.shape)).flatten(1)


def for_matrices(numbers: Tensor, matrices: Tensor) -> Tensor:
    """One number for each model, (M, 1), as one for each of their matrices, (stack, 1, 1)."""
    return numbers.repeat_interleave(len(matrices) // len(numbers), dim=0)[:, :, None]


def _stacked_move(weight: Tensor, update: Tensor, hyper: Hypers, alive: Tensor) -> None:
    moved = update.to(weight.dtype) + hyper["weight_decay"] * weight
    weight.sub_(torch.where(alive, hyper["lr"] * moved, 0.0))


def _stacked_step(
    weight: Tensor, grad: Tensor, state: State, hyper: Hypers, alive: Tensor, slot: Slot
) -> None:
    ahead = slot.fused(muon_average)(grad, state, hyper)
    slot.fused(_stacked_move)(weight, stacked_orthogonal(ahead, hyper["eps"], slot), hyper, alive)


# The rules


def _scaled(scale: str, words: str) -> Scaling:
    def own(part: Part, ratios: Ratios) -> float:
        at_base = SCALES[scale](part.fan_in / ratios.fan_in, part.fan_out / ratios.fan_out)
        return SCALES[scale](part.fan_in, part.fan_out) / at_base

    return Scaling(
        lambda part, ratios: own(part, ratios) * aspect(part, ratios),
        lambda part, ratios: f"{fraction(own(part, ratios))}·√(r_in/r_out)",
        lambda part, ratios: (
            f"the update is an orthogonal matrix times {words}, which is {fraction(own(part, ratios))} times "
            "what it was"
        ),
    )


def _muon(name: str, scale: str, update: Scaling) -> OptimizerSpec:
    return OptimizerSpec(
        name,
        Muon,
        update=update,
        eps=Eps(GRADIENT_NORM, usual=1e-7),
        memory=Memory({"momentum": 0.95}, squares=squares_of_momentum),
        matrices_only=True,
        layout=("axes", "rows"),
        shares_work=True,
        fixed={"scale": scale},
        vectorised=Vectorised(
            _stacked_step,
            state=("momentum_buffer",),
            numbers={"momentum": 0.95, "nesterov": True, "eps": 1e-7},
            shared={"scale": scale, "axes": LINEAR, "rows": (), "steps": 5},
        ),
    )


SPECS = (
    _muon("muon", "none", ORTHOGONAL),
    _muon("muon-original", "original", _scaled("original", "√max(1, fan-out/fan-in)")),
    _muon("muon-kimi", "rms", _scaled("rms", "0.2·√max(fan-in, fan-out)")),
    _muon("muon-spectral", "spectral", UNIT),
)
