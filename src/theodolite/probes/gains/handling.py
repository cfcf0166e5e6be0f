"""What optimizers do to tensors now: the group each is in, and what weight decay means there.

decoupled   W ← W − lr·λ·W, beside the step
coupled     ∇W ← ∇W + λ·W, which then goes through momentum and preconditioner like any gradient
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from theodolite.optimizers import OPTIMIZERS

COUPLED = {"Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop"} | {
    spec.class_name for spec in OPTIMIZERS.values() if not spec.decoupled
}
"""Classes without an option for it that add λ·W to the gradient: torch's, and those of plans."""
DECOUPLED = {"Adafactor", "Lion"} | {
    spec.class_name for spec in OPTIMIZERS.values() if spec.decoupled and "weight_decouple" not in spec.fixed
}
"""The same, those that shrink W beside the step; and all that are called AdamW in some way."""
OPTIONS = ("decoupled_weight_decay", "weight_decouple")
"""What an option of a group is called that says which it is: torch, pytorch_optimizer."""


@dataclass(frozen=True)
class Handling:
    """What is done to one tensor."""

    state: Literal["trained", "frozen", "absent", "twice", "unknown"]
    """`frozen`: it takes no gradient, so no step moves it; `absent`: no group has it; `twice`: several do;
    `unknown`: it is trained by an optimizer that has no option `weight_decay`, so it may decay or not."""
    weight_decay: float = 0.0
    lr: float = math.nan
    """The group's learning rate before any schedule."""
    rule: str = ""
    """Which optimizer trains it, by name."""
    decoupled: bool | None = None
    """None where it is not known, and where nothing decays."""
    rate: float = 0.0
    """The fraction of itself that a decoupled decay takes in a step, lr·λ; nan where decay is coupled."""
    count: int = 1
    """Groups that have it."""


def handlings(
    tensors: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> tuple[dict[str, Handling], int]:
    """By name, what the optimizers do to each tensor; and how many other tensors they train."""
    places: dict[int, list[Handling]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            how = _in_group(optimizer, group)
            for tensor in group["params"]:
                places.setdefault(id(tensor), []).append(how)
    found = {}
    for name, tensor in tensors.items():
        own = places.pop(id(tensor), [])
        if not tensor.requires_grad:
            found[name] = Handling("frozen")
        elif not own:
            found[name] = Handling("absent")
        elif len(own) > 1:
            found[name] = Handling("twice", max(how.weight_decay for how in own), count=len(own))
        else:
            found[name] = own[0]
    return found, len(places)


def is_decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool | None:
    """Does a group's decay go beside the step, or through it? None if that cannot be told.

    >>> import torch
    >>> weights = [torch.ones(1)]
    >>> adam, adamw = torch.optim.Adam(weights), torch.optim.AdamW(weights)
    >>> is_decoupled(adam, adam.param_groups[0]), is_decoupled(adamw, adamw.param_groups[0])
    (False, True)
    """
    for option in OPTIONS:
        if option in group:
            return bool(group[option])
    names = {kind.__name__ for kind in type(_layers(optimizer, group)[-1]).__mro__}
    if names & DECOUPLED or any("AdamW" in name for name in names):
        return True
    return False if names & COUPLED else None


def is_scheduled(optimizer: Any) -> bool:
    """Was a schedule of torch made for an optimizer, or for one inside of it?"""
    return any(
        hasattr(one.step, "_wrapped_by_lr_sched")
        for group in optimizer.param_groups
        for one in _layers(optimizer, group)
    )


def _in_group(optimizer: Optimizer, group: Mapping[str, Any]) -> Handling:
    lr = group.get("initial_lr", group.get("lr"))
    lr = math.nan if lr is None else float(lr)
    rule = type(_layers(optimizer, group)[-1])
    if "weight_decay" not in group and not rule.__module__.startswith("torch.optim"):
        return Handling("unknown", lr=lr, rule=rule.__name__)
    decay = float(group.get("weight_decay") or 0.0)
    decoupled = is_decoupled(optimizer, group) if decay else None
    # pytorch_optimizer's fixed decay takes λ itself, whatever the learning rate.
    taken = decay if group.get("fixed_decay") else lr * decay
    return Handling(
        "trained",
        weight_decay=decay,
        lr=lr,
        rule=rule.__name__,
        decoupled=decoupled,
        rate=0.0 if not decay else taken if decoupled else math.nan,
    )


def _layers(optimizer: Any, group: Mapping[str, Any]) -> list[Any]:
    """An optimizer, what it holds, and so on; the last is the one that makes the steps of a group."""
    found = [optimizer]
    while True:
        inner = getattr(found[-1], "_inner", None)
        if isinstance(inner, Mapping) and group.get("rule") in inner:
            found.append(inner[group["rule"]])
        elif isinstance(held := getattr(found[-1], "optimizer", None), Optimizer):
            found.append(held)
        else:
            return found
