"""Parameter groups in which some tensors have another weight decay, and all else is as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MEMBERS = ("params", "param_names")
"""What a group has one of for each tensor; all else are options."""


def regrouped(groups: Sequence[Mapping[str, Any]], due: Mapping[int, float]) -> list[dict[str, Any]]:
    """New groups from old ones: the first as many as there were, in their order, then those that are needed.

    A group whose tensors all get the same decay keeps them. Else a tensor moves to a group that differs from
    its own in nothing but the decay; the first such, or a new one. None of the old groups is left empty.

    Args:
        groups: as an optimizer has them; they are left as they are.
        due: by `id` of a tensor, the weight decay it is to have.

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
        options = {key: _own(value) for key, value in source.items() if key not in (*MEMBERS, "name")}
        options["weight_decay"] = decay
        home = next((group for group in made if _alike(group, options)), None)
        if home is None:
            named = {"name": f"{source['name']}-decay-{decay:g}"} if "name" in source else {}
            made.append({**members, **options, **named})
        else:
            home.update({key: [*home[key], *value] for key, value in members.items()})
    return made


def _by_decay(group: Mapping[str, Any], due: Mapping[int, float]) -> dict[float, dict[str, list[Any]]]:
    """The members of a group by the decay they are to have."""
    found: dict[float, dict[str, list[Any]]] = {}
    keys = [key for key in MEMBERS if key in group]
    for row in zip(*(group[key] for key in keys), strict=True):
        decay = due.get(id(row[0]), group.get("weight_decay", 0.0))
        part = found.setdefault(decay, {key: [] for key in keys})
        for key, value in zip(keys, row, strict=True):
            part[key].append(value)
    return found


def _alike(group: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    """Has the group just these options?"""
    own = {key: value for key, value in group.items() if key not in (*MEMBERS, "name")}
    return own.keys() == options.keys() and all(_equal(own[key], options[key]) for key in own)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.device == other.device and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)


def _own(value: Any) -> Any:
    """A schedule changes a learning rate that is a tensor in place: each group has its own."""
    return value.clone() if isinstance(value, Tensor) else value
