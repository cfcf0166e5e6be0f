"""Training `α·W` and training `W' = αW` without α are the same, if all else is absorbed.

Twenty steps in float64 with each optimizer written out here, with weight decay, momentum and an eps that
matters. Both runs are of one network; only `Hyper.absorbed` lies between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from theodolite.optimizers import OPTIMIZERS, Base, Hyper

from .parts import tensor

STEPS = 20
KINDS = ("input", "first hidden", "last hidden", "last bias", "output")
SHAPES = {
    "input": (12, 6),
    "first hidden": (12, 12),
    "last hidden": (12, 12),
    "last bias": (12,),
    "output": (3, 12),
}

# lr, eps and decay at base size: steps that train, an eps of the size of what it is compared with.
SETTINGS = {
    "sgd": Base(lr=0.05, weight_decay=0.1),
    "adamw": Base(lr=0.02, weight_decay=0.5, eps=0.05),
    "diffgrad": Base(lr=0.04, weight_decay=0.5, eps=0.05),
    "schedule-free": Base(lr=0.02, weight_decay=0.5, eps=0.05),
    "lion": Base(lr=0.01, weight_decay=0.5),
    "sophia": Base(lr=0.05, weight_decay=0.5, eps=0.01),
    "muon": Base(lr=0.03, weight_decay=0.5, eps=0.5),
    "muon-original": Base(lr=0.03, weight_decay=0.5, eps=0.5),
    "muon-kimi": Base(lr=0.03, weight_decay=0.5, eps=0.5),
    "muon-spectral": Base(lr=0.03, weight_decay=0.5, eps=0.5),
    "shampoo": Base(lr=0.03, weight_decay=0.5, eps=0.02),
    "soap": Base(lr=0.02, weight_decay=0.5, eps=0.05),
    "sso": Base(lr=0.03, weight_decay=0.5, eps=0.5),
}
EPS = SETTINGS.keys() - {"sgd", "lion"}

State = dict[str, Tensor]
Step = Callable[[Tensor, Tensor, Tensor, Hyper, State, int], Tensor]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_absorbed_and_explicit_multipliers_train_alike(optimizer: str, layers: int) -> None:
    hypers = hyperparameters(optimizer, layers)
    # A third and a fifth, and no power of two, which would hide in the exponent of a float.
    assert {round(1 / hyper.multiplier, 3) for hyper in hypers.values()} == (
        {1, 5, 3} if layers == 2 else {1, 5, round(math.sqrt(3), 3)}
    )
    explicit = trained(optimizer, hypers)
    absorbed = trained(optimizer, {kind: hyper.absorbed() for kind, hyper in hypers.items()})
    for kind, hyper in hypers.items():
        for step in range(STEPS + 1):
            ours, theirs = absorbed[step][kind], hyper.multiplier * explicit[step][kind]
            assert (ours - theirs).norm() <= 1e-9 * theirs.norm(), (kind, step)
        # They went somewhere.
        assert (absorbed[-1][kind] - absorbed[0][kind]).norm() > 0.05 * absorbed[0][kind].norm(), kind


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_absorbed_value_matters(optimizer: str) -> None:
    # One value off by 5 % is seen: the test above is not blind to any.
    hypers = {kind: hyper.absorbed() for kind, hyper in hyperparameters(optimizer, 2).items()}
    right = trained(optimizer, hypers)[-1]["output"]
    fields = {"std", "lr", "weight_decay"} | ({"eps"} if optimizer in EPS else set())
    # A retraction takes back what weight decay does, and the length of the start.
    fields = {"lr", "eps", "extent"} if optimizer == "sso" else fields
    for field in fields | ({"extent"} if optimizer == "sophia" else set()):
        changed = {**hypers}
        changed["output"] = dataclasses.replace(
            hypers["output"], **{field: getattr(hypers["output"], field) * 1.05}
        )
        wrong = trained(optimizer, changed)[-1]["output"]
        assert (wrong - right).norm() > 1e-5 * right.norm(), field


def hyperparameters(optimizer: str, layers: int) -> dict[str, Hyper]:
    """By the rule, at five times the width and three times the depth; vectors of matrix optimizers apart."""
    found = {}
    for kind in KINDS:
        if kind == "first hidden" and layers == 1:
            continue
        if kind == "last bias" and OPTIMIZERS[optimizer].matrices_only:
            continue
        base = dataclasses.replace(SETTINGS[optimizer], std=0.4)
        hyper = OPTIMIZERS[optimizer].rule(*tensor(kind, 5, 3, layers=layers), base)
        # The rule's lr, eps and decay are for sizes this network does not have: take the base's.
        found[kind] = dataclasses.replace(
            hyper, std=0.4, lr=base.lr, weight_decay=base.weight_decay, eps=base.eps, extent=1.0
        )
    return found


def trained(optimizer: str, hypers: dict[str, Hyper]) -> list[dict[str, Tensor]]:
    """The weights after every step."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    # The same numbers with and without a multiplier: std carries it.
    values = {kind: draw(*SHAPES[kind]) * hyper.std for kind, hyper in hypers.items()}
    x, target = draw(16, 6), draw(16, 3)
    states: dict[str, State] = {kind: {} for kind in hypers}
    history = [values]
    for step in range(1, STEPS + 1):
        leaves = {kind: value.clone().requires_grad_() for kind, value in values.items()}
        loss = (outputs(leaves, hypers, x) - target).square().mean()
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=optimizer == "sophia")
        gradients = dict(zip(leaves, found, strict=True))
        signs = {kind: draw(*SHAPES[kind]).sign() for kind in leaves}
        curvatures = dict.fromkeys(leaves, torch.zeros((), dtype=torch.float64))
        if optimizer == "sophia":
            # One sign vector per tensor: u∘Hu estimates the diagonal of the Hessian.
            for kind, leaf in leaves.items():
                product = (gradients[kind] * signs[kind]).sum()
                curvatures[kind] = signs[kind] * torch.autograd.grad(product, leaf, retain_graph=True)[0]
        values = {
            kind: BY_NAME[optimizer](
                value, gradients[kind].detach(), curvatures[kind], hypers[kind], states[kind], step
            )
            for kind, value in values.items()
        }
        history.append(values)
    return history


def outputs(values: dict[str, Tensor], hypers: dict[str, Hyper], x: Tensor) -> Tensor:
    """A residual block between an input and an output, each tensor with its multiplier."""
    used = {kind: hypers[kind].multiplier * value for kind, value in values.items()}
    h = x @ used["input"].T
    z = h @ used["first hidden"].T if "first hidden" in used else h
    h = h + z.tanh() @ used["last hidden"].T + used.get("last bias", 0.0)
    return h @ used["output"].T


# Optimizers: W ← W − lr·(A + weight_decay·W)


def decayed_step(weight: Tensor, update: Tensor, hyper: Hyper) -> Tensor:
    return weight - hyper.lr * (update + hyper.weight_decay * weight)


def averaged(state: State, name: str, value: Tensor, beta: float) -> Tensor:
    state[name] = beta * state.get(name, torch.zeros_like(value)) + (1 - beta) * value
    return state[name]


def sgd(weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int) -> Tensor:
    state["m"] = 0.9 * state.get("m", torch.zeros_like(gradient)) + gradient
    return decayed_step(weight, state["m"], hyper)


def adamw(
    weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int
) -> Tensor:
    m = averaged(state, "m", gradient, 0.9) / (1 - 0.9**step)
    v = averaged(state, "v", gradient.square(), 0.95) / (1 - 0.95**step)
    return decayed_step(weight, m / (v.sqrt() + hyper.eps), hyper)


def diffgrad(
    weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int
) -> Tensor:
    """As it is where entries of the gradient are small, which its rule is for: the sigmoid of their change is
    one half. Elsewhere it is not homogeneous, and no multiplier can be absorbed."""
    return adamw(weight, gradient, curvature, dataclasses.replace(hyper, lr=hyper.lr / 2), state, step)


def schedule_free(
    weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int
) -> Tensor:
    """The weight is y; z and x stand in the state."""
    v = averaged(state, "v", gradient.square(), 0.999) / (1 - 0.999**step)
    z, x = state.get("z", weight), state.get("x", weight)
    z = z - hyper.lr * (gradient / (v.sqrt() + hyper.eps) + hyper.weight_decay * weight)
    state["z"], state["x"] = z, x + (z - x) / step
    return 0.1 * state["z"] + 0.9 * state["x"]


def lion(
    weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int
) -> Tensor:
    before = state.get("m", torch.zeros_like(gradient))
    averaged(state, "m", gradient, 0.99)
    return decayed_step(weight, (0.9 * before + 0.1 * gradient).sign(), hyper)


def sophia(
    weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int
) -> Tensor:
    m = averaged(state, "m", gradient, 0.96)
    h = averaged(state, "h", curvature, 0.99)
    limit = 0.5 * hyper.extent  # the clip
    return decayed_step(weight, (m / h.clamp_min(hyper.eps)).clamp(-limit, limit), hyper)


def muon(scale: Callable[[int, int], float]) -> Step:
    """With Nesterov momentum and five Newton–Schulz steps, which do not converge."""

    def step_(
        weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int
    ) -> Tensor:
        state["m"] = 0.95 * state.get("m", torch.zeros_like(gradient)) + gradient
        x = gradient + 0.95 * state["m"]
        x = x / (x.norm() + hyper.eps)
        for _ in range(5):
            gram = x @ x.mT
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return decayed_step(weight, scale(*weight.shape) * x, hyper)

    return step_


def shampoo(
    weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int
) -> Tensor:
    zero = torch.zeros((), dtype=gradient.dtype)
    state["left"] = state.get("left", zero) + gradient @ gradient.mT
    state["right"] = state.get("right", zero) + gradient.mT @ gradient
    roots = []
    for gram in (state["left"], state["right"]):
        values, vectors = torch.linalg.eigh(gram)
        roots.append(vectors * (values.clamp_min(0) + hyper.eps) ** -0.25 @ vectors.mT)
    return decayed_step(weight, roots[0] @ gradient @ roots[1], hyper)


def soap(
    weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int
) -> Tensor:
    """Adam in the eigenbases of the accumulated GGᵀ and GᵀG, found anew at every step."""
    bases = []
    for name, gram in (("left", gradient @ gradient.mT), ("right", gradient.mT @ gradient)):
        values, vectors = torch.linalg.eigh(averaged(state, name, gram, 0.9))
        # No gradient was ever outside; eigenvectors there are arbitrary.
        bases.append(vectors * (values > 1e-10 * values.max()))
    m = averaged(state, "m", gradient, 0.9) / (1 - 0.9**step)
    rotated_m, rotated = (bases[0].mT @ matrix @ bases[1] for matrix in (m, gradient))
    v = averaged(state, "v", rotated.square(), 0.95) / (1 - 0.95**step)
    update = bases[0] @ (rotated_m / (v.sqrt() + hyper.eps)) @ bases[1].mT
    return decayed_step(weight, update, hyper)


def sso(weight: Tensor, gradient: Tensor, curvature: Tensor, hyper: Hyper, state: State, step: int) -> Tensor:
    """A step along an orthogonal matrix, then back to the sphere of radius √(out/in)."""
    aspect = math.sqrt(weight.shape[0] / weight.shape[1])
    m = averaged(state, "m", gradient, 0.9)
    u, s, v = torch.linalg.svd(m, full_matrices=False)
    moved = decayed_step(weight, aspect * u * (s / (s + hyper.eps * 0.01)) @ v, hyper)
    return moved * (hyper.extent * aspect / torch.linalg.matrix_norm(moved, 2))


BY_NAME: dict[str, Step] = {
    "sgd": sgd,
    "adamw": adamw,
    "diffgrad": diffgrad,
    "schedule-free": schedule_free,
    "lion": lion,
    "sophia": sophia,
    "muon": muon(lambda out, in_: 1.0),
    "muon-original": muon(lambda out, in_: math.sqrt(max(1, out / in_))),
    "muon-kimi": muon(lambda out, in_: 0.2 * math.sqrt(max(out, in_))),
    "muon-spectral": muon(lambda out, in_: math.sqrt(out / in_)),
    "shampoo": shampoo,
    "soap": soap,
    "sso": sso,
}
