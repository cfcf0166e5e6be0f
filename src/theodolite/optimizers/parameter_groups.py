"""Parameter groups: which weight decay each tensor has there, and new groups with another one.

decoupled   W ← W − lr·λ·W, beside the step
coupled     ∇W ← ∇W + λ·W, which then goes through momentum and preconditioner like any gradient
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.optimizers.spec import find_optimizers

COUPLED = {"Adagrad", "Adadelta", "Adamax", "ASGD", "RMSprop"}
"""Classes of torch without an option for it that add λ·W to the gradient."""
MEMBERS = ("params", "param_names")
"""Keys of a group with one entry for each tensor; all others are options."""


@dataclass(frozen=True)
class Handling:
    """How the optimizers treat one tensor."""

    state: Literal["trained", "frozen", "absent", "twice", "unknown"]
    """`frozen`: it has no gradient, so no step moves it; `absent`: no group has it; `twice`: several do,
    and the numbers are those of the first;
    `unknown`: its optimizer has no option `weight_decay`, so it may decay or not."""
    weight_decay: float = 0.0
    lr: float = math.nan
    """The group's learning rate before any schedule."""
    rule: str = ""
    """The class of the optimizer that trains it."""
    decoupled: bool | None = None
    """None if it is not known, or nothing decays."""
    rate: float = 0.0
    """The fraction that a decoupled decay takes in a step, lr·λ; nan if decay is coupled."""
    count: int = 1
    """The number of groups that have it."""


def handlings(
    tensors: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> tuple[dict[str, Handling], int]:
    """How the optimizers treat each tensor, by name; and the number of other tensors they train."""
    places: dict[int, list[Handling]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            how = _in_group(optimizer, group)
            for tensor in group["params"]:
                places.setdefault(id(tensor), []).append(how)
    found = {}
    for name, tensor in tensors.items():
        own = places.pop(id(tensor), [Handling("absent")])
        if not tensor.requires_grad:
            own = [Handling("frozen")]
        elif len(own) > 1:
            own = [replace(own[0], state="twice", count=len(own))]
        (found[name],) = own
    return found, len(places)


def is_decoupled(optimizer: Any, group: Mapping[str, Any]) -> bool | None:
    """Is a group's decay decoupled? None if that is not known.

    >>> weights = [torch.ones(1)]
    >>> adam, adamw = torch.optim.Adam(weights), torch.optim.AdamW(weights)
    >>> is_decoupled(adam, adam.param_groups[0]), is_decoupled(adamw, adamw.param_groups[0])
    (False, True)
    """
    for option in ("decoupled_weight_decay", "weight_decouple"):  # in torch, in pytorch_optimizer
        if option in group:
            return bool(group[option])
    names = {kind.__name__ for kind in type(layers(optimizer, group)[-1]).__mro__}
    if names & {"Adafactor", "Lion"} or any("AdamW" in name for name in names):
        return True
    specs = [spec for spec in find_optimizers().values() if spec.class_name in names]
    if any(spec.decoupled and "weight_decouple" not in spec.fixed for spec in specs):
        return True
    return False if names & COUPLED or any(not spec.decoupled for spec in specs) else None


def is_scheduled(optimizer: Any) -> bool:
    """Does a schedule of torch exist for an optimizer, or for one inside it?"""
    return any(
        hasattr(one.step, "_wrapped_by_lr_sched")
        for group in optimizer.param_groups
        for one in layers(optimizer, group)
    )


def regrouped(groups: Sequence[Mapping[str, Any]], due: Mapping[int, float]) -> list[dict[str, Any]]:
    """New groups in which some tensors have another weight decay: the old groups in order, then added ones.

    A group whose tensors all get the same decay keeps them. Otherwise a tensor moves to the first group that
    differs from its own only in the decay, or to a new one. No old group becomes empty.

    Args:
        groups: of an optimizer; they are left unchanged.
        due: by `id` of a tensor, its new weight decay.

    >>> gain, matrix = torch.ones(2), torch.ones(2, 2)
    >>> one = {"params": [matrix, gain], "lr": 0.1, "weight_decay": 0.5}
    >>> [(len(group["params"]), group["weight_decay"]) for group in regrouped([one], {id(gain): 0.0})]
    [(1, 0.5), (1, 0.0)]
    """
    made = [dict(group) for group in groups]
    moving: list[tuple[dict[str, Any], float, dict[str, list[Any]]]] = []
    for group in made:
        by_decay = _by_decay(group, due)
        own = group.get("weight_decay", 0.0)
        stays = own if own in by_decay else next(iter(by_decay), own)
        moving += [(group, decay, part) for decay, part in by_decay.items() if decay != stays]
        group.update(by_decay.get(stays, {}))
        if stays != own:
            group["weight_decay"] = stays
    for source, decay, members in moving:
        options = {
            # Schedules change a learning rate that is a tensor in place, so each group gets its own.
            key: value.clone() if isinstance(value, Tensor) else value
            for key, value in source.items()
            if key not in (*MEMBERS, "name")
        }
        options["weight_decay"] = decay
        home = next((group for group in made if _alike(group, options)), None)
        if home is None:
            named = {"name": f"{source['name']}-decay-{decay:g}"} if "name" in source else {}
            made.append({**members, **options, **named})
        else:
            home.update({key: [*home[key], *value] for key, value in members.items()})
    return made


def _in_group(optimizer: Optimizer, group: Mapping[str, Any]) -> Handling:
    lr = group.get("initial_lr", group.get("lr"))
    lr = math.nan if lr is None else float(lr)
    rule = type(layers(optimizer, group)[-1])
    if "weight_decay" not in group and not rule.__module__.startswith("torch.optim"):
        return Handling("unknown", lr=lr, rule=rule.__name__)
    decay = float(group.get("weight_decay") or 0.0)
    decoupled = is_decoupled(optimizer, group) if decay else None
    # pytorch_optimizer's fixed decay takes λ, independent of the learning rate.
    taken = decay if group.get("fixed_decay") else lr * decay
    return Handling(
        "trained",
        weight_decay=decay,
        lr=lr,
        rule=rule.__name__,
        decoupled=decoupled,
        rate=0.0 if not decay else taken if decoupled else math.nan,
    )


def layers(optimizer: Any, group: Mapping[str, Any]) -> list[Any]:
    """An optimizer, the one it wraps, and so on; the last makes the steps of a group."""
    found = [optimizer]
    while True:
        inner = getattr(found[-1], "_inner", None)
        if isinstance(inner, Mapping) and group.get("rule") in inner:
            found.append(inner[group["rule"]])
        elif isinstance(held := getattr(found[-1], "optimizer", None), Optimizer):
            found.append(held)
        else:
            return found


def _by_decay(group: Mapping[str, Any], due: Mapping[int, float]) -> dict[float, dict[str, list[Any]]]:
    """The members of a group by their new decay."""
    found: dict[float, dict[str, list[Any]]] = {}
    keys = [key for key in MEMBERS if key in group]
    for row in zip(*(group[key] for key in keys), strict=True):
        decay = due.get(id(row[0]), group.get("weight_decay", 0.0))
        part = found.setdefault(decay, {key: [] for key in keys})
        for key, value in zip(keys, row, strict=True):
            part[key].append(value)
    return found


def _alike(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Does the group have exactly these options?"""
    own = {key: value for key, value in group.items() if key not in (*MEMBERS, "name")}

    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            return one.device == other.device and bool(torch.equal(one, other))
        return type(one) is type(other) and bool(one == other)

    return own.keys() == options.keys() and all(equal(own[key], options[key]) for key in own)
