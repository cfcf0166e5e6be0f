"""Training `α·W` and training `W' = αW` without α are the same, if all else is absorbed.

Twenty steps in float64 with each optimizer as its test file writes it out, with weight decay, momentum and an
eps that matters. Both runs are of one network; only `Hyper.absorbed` lies between them.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from theodolite.optimizers import OPTIMIZERS, Hyper

from .parts import tensor
from .reference import State, references

STEPS = 20
KINDS = ("input", "first hidden", "last hidden", "last bias", "output")
SHAPES = {
    "input": (12, 6),
    "first hidden": (12, 12),
    "last hidden": (12, 12),
    "last bias": (12,),
    "output": (3, 12),
}


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
    spec, fields = OPTIMIZERS[optimizer], set(references()[optimizer].matters)
    lacking = {"eps": spec.eps is None, "extent": spec.extent is None, "weight_decay": not spec.decays}
    for field in fields - {name for name, lacks in lacking.items() if lacks}:
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
        base = dataclasses.replace(references()[optimizer].base, std=0.4)
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
    paper = references()[optimizer]
    move = paper.absorbable or paper.step
    history = [values]
    for step in range(1, STEPS + 1):
        leaves = {kind: value.clone().requires_grad_() for kind, value in values.items()}
        loss = (outputs(leaves, hypers, x) - target).square().mean()
        twice = OPTIMIZERS[optimizer].second_order
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=twice)
        gradients = dict(zip(leaves, found, strict=True))
        signs = {kind: draw(*SHAPES[kind]).sign() for kind in leaves}
        curvatures = dict.fromkeys(leaves, torch.zeros((), dtype=torch.float64))
        if twice:
            # One sign vector per tensor: u∘Hu estimates the diagonal of the Hessian.
            for kind, leaf in leaves.items():
                product = (gradients[kind] * signs[kind]).sum()
                curvatures[kind] = signs[kind] * torch.autograd.grad(product, leaf, retain_graph=True)[0]
        values = {
            kind: move(value, gradients[kind].detach(), curvatures[kind], hypers[kind], states[kind], step)
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
