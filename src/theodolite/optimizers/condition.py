"""The spectral condition: how large weights, their changes and their gradients may be at any size.

With `‖A‖_R = √(n_in/n_out)·‖A‖₂`, features learn at the same speed at every width and depth if each layer
`α·W x` of a network of L residual branches has

    outside of the branches      α‖W‖_R ~ 1               α‖ΔW‖_R ~ 1
    in branches of ≥ 2 layers    α₁α₂‖W₁‖_R‖W₂‖_R ~ 1/L    α₁α₂‖W₂‖_R‖ΔW₁‖_R ~ 1/L, and 1 ↔ 2
    in branches of one layer     α‖W‖_R ~ 1/√L            α‖ΔW‖_R ~ 1/L
    on the stream, in each block α‖W‖_R ~ 1               α‖ΔW‖_R ~ 1/L

(one layer: L independent vectors of mean zero add up to √L of one; on the stream, as the γ of `γ·x + f(x)`,
the changes of all blocks add up). All that follows is ratios to the base size. Vectors are matrices with one
input, so that `‖b‖_R` is the root mean square of b.

Everything is said in terms of a tensor's own fans, which answers the odd cases: a router or the keys of a
fixed number of heads have a fan-out that does not grow and are output-like inside a branch; a depthwise
kernel has a fan-in that does not grow and is input-like; a QK-norm's gain, shared by all heads, has neither.

References:
    Spectral condition for muP under width–depth scaling, section 3 and appendices B and C.
"""

from __future__ import annotations

import math

from theodolite.anatomy.part import Part
from theodolite.optimizers.hyper import Base, Hyper, Ratios


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
    """The hyperparameters with which updates of a given size meet the condition.

    Args:
        part: the tensor.
        ratios: how much larger it is than at base size.
        base: its hyperparameters at base size.
        update: by how much `‖A‖_R` is larger than at base size, where the optimizer does
            `W ← W − lr·(A + weight_decay·W)`.
        degree: `A(c·g) = c^degree·A(g)`.
        floor: by how much what eps is added to is larger than at base size.
        floor_degree: the power of the gradient that eps is added to.

    The learning rate makes `lr·‖A‖_R` the change allowed; the decay keeps `weight_decay·‖W‖_R ~ ‖A‖_R`, so
    that both terms of the step stay comparable.
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
    """α: `1/r_in` for outputs, `1/r_L` (one layer: `1/√r_L`) for what ends a branch, else 1.

    That is what a layer is multiplied by in all. What the network's own forward pass does of it is taken off:
    the rest is left to be done.
    """
    alpha = 1 / ratios.fan_in if part.role == "output" else 1.0
    if part.ends_branch:
        alpha /= math.sqrt(ratios.depth) if part.branch_layers == 1 else ratios.depth
    return alpha / ratios.own


def deviation(part: Part, ratios: Ratios) -> float:
    """The initial std: `1/√r_in`, as activations want it; 1 for outputs, biases and gains.

    An output's std stays, and its multiplier `1/r_in` makes the readout of a wide network start small.
    """
    return 1.0 if part.role == "output" else 1 / math.sqrt(ratios.fan_in)


def centre(part: Part, ratios: Ratios) -> float:
    """The initial mean: `1/r_in`, as n equal terms add up to n and not to √n; 1 where the std stays."""
    return deviation(part, ratios) ** 2


def norm(part: Part, ratios: Ratios) -> float:
    """`‖W‖_R` at the initialisation above: 1, for outputs `r_in`."""
    return ratios.fan_in if part.role == "output" else 1.0


def change(part: Part, ratios: Ratios) -> float:
    """The `‖ΔW‖_R` the condition asks for: 1, for outputs `r_in`; in one-layer branches `1/√r_L` of that.

    On the stream `1/r_L` of it, as all changes there add up.
    """
    allowed = norm(part, ratios)
    if part.on_stream:
        return allowed / ratios.depth
    return allowed / math.sqrt(ratios.depth) if part.branch_layers == 1 else allowed


def gradient(part: Part, ratios: Ratios) -> float:
    """`‖∇W‖₂` of a network that meets the condition.

    The change allowed moves the loss by `⟨∇W, ΔW⟩ ~ ‖∇W‖₂·‖ΔW‖₂` (gradients are of low rank): by 1 outside of
    the branches, by 1/L in each of L. And `‖ΔW‖₂ = √(n_out/n_in)·‖ΔW‖_R`.
    """
    share = 1.0 if part.block is None and not part.on_stream else 1 / ratios.depth
    return share * math.sqrt(ratios.fan_in / ratios.fan_out) / change(part, ratios)


def gradient_entry(part: Part, ratios: Ratios) -> float:
    """The root mean square of the gradient's entries, at low rank `‖∇W‖₂/√(n_in·n_out)`."""
    return gradient(part, ratios) / math.sqrt(ratios.fan_in * ratios.fan_out)
