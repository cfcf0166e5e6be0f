"""The spectral condition: how large weights, their updates and their gradients may be at each size.

With `‖A‖_R = √(n_in/n_out)·‖A‖₂`, features learn at the same speed at every width and depth if each layer
`α·W x` of a network with L residual branches satisfies

    outside of the branches      α‖W‖_R ~ 1               α‖ΔW‖_R ~ 1
    in branches of ≥ 2 layers    α₁α₂‖W₁‖_R‖W₂‖_R ~ 1/L    α₁α₂‖W₂‖_R‖ΔW₁‖_R ~ 1/L, and 1 ↔ 2
    in branches of one layer     α‖W‖_R ~ 1/√L            α‖ΔW‖_R ~ 1/L
    on the stream, in each block α‖W‖_R ~ 1               α‖ΔW‖_R ~ 1/L

In a branch of one layer, L independent vectors with mean zero sum to √L times one of them. On the stream, as
the γ of `γ·x + f(x)`, the changes of all blocks add up. The functions below give ratios to the base size.
Vectors are matrices with one input, so `‖b‖_R` is the root mean square of b.

Only the fans of a tensor matter, which settles the unusual cases: a router, or the keys of a fixed number of
heads, has a fan-out that does not grow and is like an output inside a branch; a depthwise kernel has a fan-in
that does not grow and is like an input; the gain of a QK-norm, shared by all heads, has no fan that grows.

References:
    Spectral condition for muP under width–depth scaling, section 3 and appendices B and C.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError


@dataclass(frozen=True)
class Ratios:
    """Target size over base size: the fans of one tensor, and the number of residual branches.

    >>> Ratios(fan_in=8, fan_out=8, depth=4)
    Ratios(fan_in=8, fan_out=8, depth=4, own=1.0)
    """

    fan_in: float = 1.0
    fan_out: float = 1.0
    depth: float = 1.0
    own: float = 1.0
    """The ratio of the factors that the network itself multiplies the tensor's output by."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value > 0):
                raise UseError(f"the ratio of {name} is {value!r}: ratios of sizes are positive numbers")


@dataclass(frozen=True)
class Base:
    """Hyperparameters of one tensor at base size."""

    lr: float
    weight_decay: float = 0.0
    eps: float = 1e-8
    std: float = 1.0


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of one tensor at the target size, and how they change with a multiplier.

    The layer computes `multiplier · W x`, and the optimizer does `W ← W − lr·(A + weight_decay·W)`.
    """

    multiplier: float
    std: float
    lr: float
    weight_decay: float
    eps: float
    extent: float = 1.0
    """Factor on an option of the optimizer in units of the weight: the radius of SSO, the clip of Sophia."""
    degree: int = 0
    """Degree of A: `A(c·∇W) = c^degree·A(∇W)`, 1 for SGD, 0 for a sign. −1 if A has the units of W."""
    eps_degree: int = 1
    """eps is compared with this power of the gradient: 1 for Adam, 2 for Shampoo."""

    def absorbed(self) -> Hyper:
        """The hyperparameters that train `W' = αW` without a multiplier as these train `α·W`.

        As `∂/∂W = α·∂/∂W'`, an update of degree p becomes `A' = α^(−p)·A`; W' must move by `α·lr·A`, and
        `lr·weight_decay` must stay.

        >>> Hyper(0.5, std=1, lr=8, weight_decay=1, eps=1).absorbed()        # Adam
        Hyper(multiplier=1.0, std=0.5, lr=4.0, weight_decay=2.0, eps=2.0, ...)
        >>> Hyper(0.5, std=1, lr=8, weight_decay=1, eps=1, degree=1).absorbed()  # SGD
        Hyper(multiplier=1.0, std=0.5, lr=2.0, weight_decay=4.0, eps=2.0, ...)
        """
        step = self.multiplier ** (1 + self.degree)
        return replace(
            self,
            multiplier=1.0,
            std=self.std * self.multiplier,
            lr=self.lr * step,
            weight_decay=self.weight_decay / step,
            eps=self.eps / self.multiplier**self.eps_degree,
            extent=self.extent * self.multiplier,
        )


Rule = Callable[[Part, Ratios, Base], Hyper]
"""Hyperparameters as a function of size."""


def meet(
    part: Part,
    ratios: Ratios,
    base: Base,
    *,
    update: float,
    degree: int = 0,
    floor: float = 1.0,
    floor_degree: int = 1,
) -> Hyper:
    """The hyperparameters with which an optimizer's updates meet the condition.

    The learning rate makes `lr·‖A‖_R` the change that the condition allows. The weight decay keeps
    `weight_decay·‖W‖_R ~ ‖A‖_R`, so that both terms of a step stay comparable.

    Args:
        part: the tensor.
        ratios: how much larger it is than at base size.
        base: its hyperparameters at base size.
        update: the growth of `‖A‖_R`, where the optimizer does `W ← W − lr·(A + weight_decay·W)`.
        degree: `A(c·g) = c^degree·A(g)`.
        floor: the growth of what eps is added to.
        floor_degree: the power of the gradient that eps is added to.
    """
    return Hyper(
        multiplier=multiplier(part, ratios),
        std=base.std * deviation(part, ratios),
        lr=base.lr * (change(part, ratios) / update),
        weight_decay=base.weight_decay * (update / norm(part, ratios)),
        eps=base.eps * floor,
        degree=degree,
        eps_degree=floor_degree,
    )


def multiplier(part: Part, ratios: Ratios) -> float:
    """α: `1/r_in` for outputs, `1/r_L` (one layer: `1/√r_L`) for the end of a branch, else 1.

    Divided by what the network's own forward pass already multiplies by.
    """
    alpha = 1 / ratios.fan_in if part.role == "output" else 1.0
    if part.ends_branch:
        alpha /= math.sqrt(ratios.depth) if part.branch_layers == 1 else ratios.depth
    return alpha / ratios.own


def deviation(part: Part, ratios: Ratios) -> float:
    """The initial std: `1/√r_in`; 1 for outputs, biases and gains.

    The std of an output stays, and its multiplier `1/r_in` makes the readout of a wide network start small.
    """
    return 1.0 if part.role == "output" else 1 / math.sqrt(ratios.fan_in)


def centre(part: Part, ratios: Ratios) -> float:
    """The initial mean: `1/r_in`, as n equal terms sum to n and not to √n; 1 where the std stays."""
    return deviation(part, ratios) ** 2


def norm(part: Part, ratios: Ratios) -> float:
    """`‖W‖_R` at that initialisation: 1, for outputs `r_in`."""
    return ratios.fan_in if part.role == "output" else 1.0


def change(part: Part, ratios: Ratios) -> float:
    """The `‖ΔW‖_R` that the condition allows: that of W; times `1/√r_L` in a branch of one layer, `1/r_L` on
    the stream."""
    allowed = norm(part, ratios)
    if part.on_stream:
        return allowed / ratios.depth
    return allowed / math.sqrt(ratios.depth) if part.branch_layers == 1 else allowed


def gradient(part: Part, ratios: Ratios) -> float:
    """`‖∇W‖₂` of a network that meets the condition.

    The allowed change moves the loss by `⟨∇W, ΔW⟩ ~ ‖∇W‖₂·‖ΔW‖₂` (gradients have low rank): by 1 outside of
    the branches, by 1/L in each of L. And `‖ΔW‖₂ = √(n_out/n_in)·‖ΔW‖_R`.
    """
    share = 1.0 if part.block is None and not part.on_stream else 1 / ratios.depth
    return share * math.sqrt(ratios.fan_in / ratios.fan_out) / change(part, ratios)


def gradient_entry(part: Part, ratios: Ratios) -> float:
    """The root mean square of the gradient's entries, at low rank `‖∇W‖₂/√(n_in·n_out)`."""
    return gradient(part, ratios) / math.sqrt(ratios.fan_in * ratios.fan_out)
