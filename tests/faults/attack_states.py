"""Optimizers with the state of another network, with numbers that are none, with huge and tiny gradients."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import theodolite as th
from theodolite import UseError
from theodolite.optimizers import OPTIMIZERS

from .attack import Attack

WIDTH, BASE = 12, 8
INPUTS = torch.randn(10, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(10) % 3


def build(width: int, depth: int) -> nn.Module:
    inner = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), *inner, nn.Linear(width, 3))


@functools.cache
def _anatomies() -> dict[th.Size, th.Anatomy]:
    sizes = [th.Size(BASE, 1), th.Size(WIDTH, 1), th.Size(2 * WIDTH, 1), th.Size(WIDTH, 2)]
    return {size: th.dissect(build, INPUTS, size=size) for size in sizes}


@functools.cache
def _plan(rule: str, width: int = WIDTH, depth: int = 1, eps: float | None = None) -> th.Plan:
    sizes = {"size": th.Size(width, depth), "base": th.Size(BASE, 1), "anatomies": _anatomies()}
    return th.plan(build, INPUTS, optimizer=rule, lr=0.1, eps=eps, **sizes)  # type: ignore[arg-type]


def _trained(plan: th.Plan, steps: int = 2) -> tuple[nn.Module, Optimizer]:
    model = plan.build()
    optimizer = plan.optimizer(model)
    for _ in range(steps):
        _differentiate(model)
        _step(optimizer)
    return model, optimizer


def _differentiate(model: nn.Module, scale: float = 1.0) -> None:
    params = list(model.parameters())
    loss = nn.functional.cross_entropy(model(INPUTS), TARGETS)
    for param, grad in zip(params, torch.autograd.grad(loss, params, create_graph=True), strict=True):
        param.grad = grad * scale  # Sophia differentiates it once more


def _step(optimizer: Optimizer) -> None:
    torch.manual_seed(0)
    optimizer.step()


def _refused(act: Callable[[], object]) -> str | None:
    """None if it was refused in one line; else what happened."""
    try:
        act()
    except UseError as error:
        return None if "\n" not in str(error) else f"the error has several lines: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was taken"


def _values(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    state = optimizer.state_dict()
    kept = [value for one in state["state"].values() for value in one.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *kept)]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _other_states(count: int, _: Path) -> Iterator[str | None]:
    """The state of a network twice as wide, one block deeper, or trained by another rule."""
    others: list[Callable[[str], th.Plan]] = [
        lambda rule: _plan(rule, 2 * WIDTH),
        lambda rule: _plan(rule, WIDTH, 2),
        lambda rule: _plan("adamw" if rule != "adamw" else "sgd"),
        lambda rule: _plan("lion" if rule != "lion" else "muon"),
    ]
    tries = list(itertools.product((0, 2), others, OPTIMIZERS))
    for steps, other, rule in _first(tries, count):
        model, optimizer = _trained(_plan(rule))
        saved = copy.deepcopy(_trained(other(rule), steps)[1].state_dict())
        before, groups = _values(model, optimizer), copy.deepcopy(optimizer.state_dict()["param_groups"])
        fault = _refused(functools.partial(optimizer.load_state_dict, saved))
        if fault is None and not _same(before, _values(model, optimizer)):
            fault = "weights or state were changed"
        if fault is None and groups != optimizer.state_dict()["param_groups"]:
            fault = "groups were changed"
        yield fault and f"{rule} after {steps} steps: {fault}"


def _reordered(count: int, _: Path) -> Iterator[str | None]:
    """A state whose groups stand in another order is matched by name: it trains on as before."""
    for turn, rule in _first(list(itertools.product((1, 2), OPTIMIZERS)), count):
        model, optimizer = _trained(_plan(rule))
        saved = copy.deepcopy(optimizer.state_dict())
        groups = saved["param_groups"]
        saved["param_groups"] = groups[turn % len(groups) :] + groups[: turn % len(groups)]
        for group in saved["param_groups"]:
            group["params"].reverse()
            group["param_names"].reverse()
            group["lr"] /= 2  # a schedule has gone on
        twin = copy.deepcopy(model)
        resumed = _plan(rule).optimizer(twin)
        resumed.load_state_dict(saved)
        for group in optimizer.param_groups:
            group["lr"] /= 2
        for one, its in ((model, optimizer), (twin, resumed)):
            _differentiate(one)
            _step(its)
        alike = all(map(torch.equal, model.parameters(), twin.parameters()))
        yield None if alike else f"{rule}: the next step is another one"


def _odd_numbers(count: int, _: Path) -> Iterator[str | None]:
    """nan, infinity or a negative number in every option of every group of every rule."""
    made = {rule: _trained(_plan(rule), 1) for rule in OPTIMIZERS}
    tries = [
        (value, rule, place, option)
        for value in (math.nan, math.inf, -math.inf, -1.0)
        for rule, (_, optimizer) in made.items()
        for place, group in enumerate(optimizer.param_groups)
        for option, old in group.items()
        if isinstance(old, float) or option == "betas"
    ]
    tries.sort(key=lambda one: one[3] != "lr")  # the one that schedulers set comes first
    for value, rule, place, option in _first(tries, count):
        model, optimizer = copy.deepcopy(made[rule])
        group = optimizer.param_groups[place]
        group[option] = (0.9, value) if option == "betas" else value
        _differentiate(model)
        before = _values(model, optimizer)
        fault = _refused(functools.partial(_step, optimizer))
        if fault is None and not _same(before, _values(model, optimizer)):
            fault = "refused, after weights or state have moved"
        elif fault == "it was taken" and all(bool(one.isfinite().all()) for one in _values(model, optimizer)):
            fault = None  # an option that this step does not need
        yield fault and f"{rule}, {option} of group {place} is {value}: {fault}"


def _sizes(count: int, _: Path) -> Iterator[str | None]:
    """Hidden matrices get huge or tiny gradients. Muon's and SSO's step does not depend on their scale."""
    scales = [1e25, 1e-25, 1e30, 1e-30, 1e15, 1e-15, 2.0**40, 2.0**-40]
    for scale, rule in _first(list(itertools.product(scales, OPTIMIZERS)), count):
        invariant = OPTIMIZERS[rule].matrices_only and not OPTIMIZERS[rule].keeps_squares
        plan = _plan(rule, eps=0.0 if invariant else None)
        moved = []
        for factor in (1.0, scale):
            model = plan.build()
            optimizer = plan.optimizer(model)
            _differentiate(model)
            hidden = [param for param in model.parameters() if param.shape == (WIDTH, WIDTH)]
            for param in hidden:
                assert param.grad is not None
                param.grad = param.grad * factor
            start = [param.detach().clone() for param in model.parameters()]
            for _ in range(2):  # SOAP's first gradient only finds its bases
                fault = _refused(functools.partial(_step, optimizer))
            if fault is None and not _same(start, [param.detach() for param in model.parameters()]):
                fault = "refused, and weights have moved"
            begun = dict(zip(model.parameters(), start, strict=True))
            moved.append(torch.cat([(param - begun[param]).detach().flatten() for param in hidden]))
        if fault == "it was taken":
            off = float((moved[1] - moved[0]).norm() / moved[0].norm()) if invariant else 0.0
            fault = None if off < 1e-2 else f"the step is off by {off:.2g}"
            if not bool(moved[1].isfinite().all()):
                fault = "weights are not finite"
            elif scale > 1 and not bool(moved[1].any()):
                fault = "no step was made, and nothing was said"
        yield fault and f"{rule}, gradients times {scale:g}: {fault}"


def _first(tries: list[Any], count: int) -> Iterator[Any]:
    return itertools.islice(itertools.cycle(tries), count)


ATTACKS = [
    Attack(
        "the optimizer state of another width, depth or rule is loaded",
        "refused in one line; weights, state and learning rates are as before",
        _other_states,
        few=13,
        many=104,
    ),
    Attack(
        "an optimizer state is loaded whose groups are in another order",
        "matched by name: the next step is the same bit by bit",
        _reordered,
        few=13,
        many=26,
    ),
    Attack(
        "nan, infinity or a negative number is set in a parameter group",
        "refused in one line before anything moves, or all weights stay finite",
        _odd_numbers,
        few=60,
        many=600,
    ),
    Attack(
        "gradients of 1e±25 reach an optimizer",
        "Muon and SSO make the step of gradients of 1; others a finite one, or they refuse in one line",
        _sizes,
        few=26,
        many=104,
    ),
]
