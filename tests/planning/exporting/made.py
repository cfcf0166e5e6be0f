"""Plans to export, exported files as modules, and steps to compare."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import theodolite as th
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.rows import PlanRow

TOKENS = torch.randint(17, (4, 9), generator=torch.Generator().manual_seed(1))
BASE, SIZE = th.Size(16, 2), th.Size(32, 4)


def build(width: int, depth: int, *, tied: bool = False) -> nn.Module:
    """A small GPT with biases and LayerNorm: tensors of every usual role."""
    return th.models.GPT(width, depth, vocab=17, context=8, head_dim=8, bias=True, norm="layer", tied=tied)


TIED = partial(build, tied=True)


@functools.cache
def gpt_plan(optimizer: str = "adamw", tied: bool = False, weight_decay: float = 0.1) -> th.Plan:
    """A plan for twice the width and depth."""
    return th.plan(
        TIED if tied else build,
        TOKENS[:, :-1],
        size=SIZE,
        base=BASE,
        optimizer=optimizer,
        lr=2**-6,
        weight_decay=weight_decay,
    )


def run(text: str) -> types.ModuleType:
    """An exported file as a module; nothing of theodolite may be imported by it."""
    assert "import theodolite" not in text
    assert "from theodolite" not in text
    module = types.ModuleType("exported")
    exec(compile(text, "exported.py", "exec"), module.__dict__)
    return module


class Parts(nn.Module):
    """Tensors that hold matrices in every layout."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Any]] = {
    "wide": ((12, 20), (1,), (0,), ()),
    "tall": ((30, 10), (1,), (0,), ()),
    "transposed": ((10, 30), (0,), (1,), ()),
    "fused": ((30, 10), (1,), (0,), (((0, 14),), ((14, 22),), ((22, 30),))),
    "equal": ((30, 10), (1,), (0,), (((0, 10),), ((10, 20),), ((20, 30),))),
    "interleaved": ((24, 10), (1,), (0,), (((0, 4), (8, 12), (16, 20)), ((4, 8), (12, 16), (20, 24)))),
    "experts": ((3, 8, 16), (2,), (1,), ()),
    "experts_back": ((3, 8, 16), (1,), (2,), ()),
    "kernel": ((12, 4, 3, 3), (1, 2, 3), (0,), ()),
    "kernel_back": ((4, 12, 3, 3), (0, 2, 3), (1,), ()),
    "kernel_1d": ((12, 4, 3), (1, 2), (0,), ()),
    "kernel_last": ((3, 4, 10), (0, 1), (2,), ()),
}
"""By name: shape, dimensions of inputs and of outputs, blocks of outputs."""


def parts_plan(
    names: tuple[str, ...] = tuple(LAYOUTS),
    rule: str = "muon",
    *,
    lr: Callable[[int], float] = lambda place: 0.02,
    options: Mapping[str, Any] | None = None,
) -> th.Plan:
    """A plan, made by hand, for a network of these tensors."""
    rows = {}
    for place, name in enumerate(names):
        shape, in_axes, out_axes, blocks = LAYOUTS[name]
        rows[name] = PlanRow(
            name,
            shape,
            "hidden",
            None,
            torch.Size(shape[axis] for axis in in_axes).numel(),
            torch.Size(shape[axis] for axis in out_axes).numel(),
            in_axes,
            out_axes,
            blocks,
            scale_free=False,
            init=InitDistribution("normal", std=0.5),
            rule=rule,
            lr=lr(place),
            weight_decay=0.3,
            eps=1e-7,
        )
    empty: dict[str, float] = {}
    return th.Plan(SIZE, BASE, rule, 0.02, 0.3, 1e-7, "paper", dict(options or {}), {}, rows, empty)


def parts(plan: th.Plan) -> nn.Module:
    """The network of `parts_plan`, with values."""
    model = Parts({name: row.shape for name, row in plan.rows.items()})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.normal_(generator=generator)
    return model


def trained_parts(model: nn.Module, *optimizers: Any, steps: int = 3) -> dict[str, Tensor]:
    """How far each tensor moves along fixed gradients, the same for every optimizer."""
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        for tensor in model.parameters():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return {name: tensor.detach() - before[name] for name, tensor in model.named_parameters()}


def trained_gpt(model: nn.Module, *optimizers: Any, steps: int = 3) -> dict[str, Tensor]:
    """How far each tensor of the GPT moves in training."""
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for step in range(steps):
        tokens = (TOKENS + step) % 17
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    return {name: tensor.detach() - before[name] for name, tensor in model.named_parameters()}


def apart(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> dict[str, float]:
    """By tensor: the norm of the difference over the norm."""
    assert one.keys() == two.keys()
    return {name: float((one[name] - two[name]).norm() / two[name].norm()) for name in one}


def settings(optimizers: Any, model: nn.Module) -> dict[str, dict[str, Any]]:
    """By tensor: the parameter group that it is in, with its class."""
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    found: dict[str, dict[str, Any]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                assert names[id(tensor)] not in found
                found[names[id(tensor)]] = {**group, "class": type(optimizer).__name__}
    return found
