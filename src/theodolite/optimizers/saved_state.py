"""Saved optimizer states, matched to the parameters by name, in the dtypes they were saved in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.optimizers.step_checks import Group, names_of

OWN = ("params", "param_names", "name", "shapes", "rule", "axes", "rows")
"""Keys of a group that no saved state changes."""

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "momentum", "hessian_moment")
"""State tensors with the shape of their parameter."""


def restored(groups: Sequence[Group], saved: Mapping[str, Any]) -> tuple[dict[Tensor, Any], list[Group]]:
    """The state by parameter, and for each group the options that its parameters were saved with.

    Groups may be divided and ordered differently. The keys of `saved["state"]` are the entries of the saved
    groups' `params`: numbers, or the names that `torch.distributed.checkpoint` puts there.
    """
    found, state = _named(groups, saved), {}
    for group in groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            key, home = found[name]
            _check_shape(name, param, "shape", home.get("shapes", {}).get(name))
            if key in saved["state"]:
                state[param] = _moved(saved["state"][key], param, home)
                _check_shapes(name, param, state[param])
    return state, [_options(group, {name: home for name, (_, home) in found.items()}) for group in groups]


def shapes_of(group: Group) -> dict[str, tuple[int, ...]]:
    """The shapes of a group's parameters, by name: a state of SGD without momentum tells nothing else."""
    return {
        name: tuple(param.shape) for name, param in zip(group["param_names"], group["params"], strict=True)
    }


def refuse_other_shapes(groups: Sequence[Group], saved: Mapping[str, Any]) -> None:
    """Refuse a saved state, matched by position, whose moments do not have the shapes of the parameters."""
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    named = [pair for group in groups for pair in zip(names_of(group), group["params"], strict=True)]
    for key, (name, param) in zip(keys, named, strict=False):  # torch compares the counts
        _check_shapes(name, param, saved["state"].get(key, {}))


def _named(groups: Sequence[Group], saved: Mapping[str, Any]) -> dict[str, tuple[Any, Group]]:
    """By name of each parameter: its key in the saved state, and its saved group."""
    names = [name for group in groups for name in group["param_names"]]
    saved_groups = saved["param_groups"]
    homes = [(key, group) for group in saved_groups for key in group["params"]]
    if all(isinstance(key, str) for key, _ in homes):
        saved_names = [key for key, _ in homes]
    elif all("param_names" in group for group in saved_groups):
        saved_names = [name for group in saved_groups for name in group["param_names"]]
    else:
        sizes = [len(group["params"]) for group in groups]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        if sizes != saved_sizes:
            raise UseError(
                "the saved state has no names, so it can only be matched by position, and it has groups of "
                f"{saved_sizes} parameters where this optimizer has {sizes}"
            )
        if not saved["state"]:
            raise UseError(
                "the saved state has neither names nor moments, so it cannot be matched to a network. Save "
                "the state of a planned optimizer, or one after its first step"
            )
        saved_names = names
    missing, unknown = sorted(set(names) - set(saved_names)), sorted(set(saved_names) - set(names))
    if missing or unknown:
        raise UseError(
            "the saved state belongs to another network."
            + _said(" Not in the state", missing)
            + _said(" Not in this optimizer", unknown)
            + " Load it into the optimizer of the network it was saved with"
        )
    return dict(zip(saved_names, homes, strict=True))


def _options(group: Group, homes: Mapping[str, Group]) -> Group:
    """The options that the parameters of a group were saved with; they must agree."""
    first, *others = group["param_names"]
    for key in ("rule", "axes", "rows"):
        if key in homes[first] and key in group and _tupled(homes[first][key]) != _tupled(group[key]):
            raise UseError(
                f"{first} was saved with {key} {homes[first][key]!r} and now has {group[key]!r}. "
                "Load the state into the optimizer of the same plan"
            )
    options = {key: value for key, value in homes[first].items() if key not in OWN}
    for name in others:
        if homes[name] is homes[first]:
            continue
        for key, value in options.items():
            if homes[name].get(key) != value:
                raise UseError(
                    f"{first} was saved with {key} {value!r} and {name} with {homes[name].get(key)!r}, and "
                    "here they are in one group. Load the state into the optimizer of the same plan"
                )
    return options


def _moved(value: Any, param: Tensor, group: Group, key: Any = None) -> Any:
    """The same values on the device of the parameter; step counts where the optimizer needs them."""
    if isinstance(value, Tensor):
        if key != "step":
            return value.to(param.device)
        on_device = group.get("capturable") or group.get("fused")
        return value.to(param.device, torch.float32) if on_device else value
    if isinstance(value, dict):
        return {inner: _moved(one, param, group, inner) for inner, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(one, param, group) for one in value)
    return value


def _check_shapes(name: str, param: Tensor, state: Any) -> None:
    for key in MOMENTS:
        value = state.get(key)
        if isinstance(value, Tensor):
            _check_shape(name, param, key, value.shape)


def _check_shape(name: str, param: Tensor, key: str, saved: Sequence[int] | None) -> None:
    if saved is not None and tuple(saved) != tuple(param.shape):
        raise UseError(
            f"{name} has shape {tuple(param.shape)}, and the saved {key} {'is ' * (key == 'shape')}"
            f"{tuple(saved)}. Load the state into the optimizer of the network it was saved with"
        )


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, (list, tuple)) else value


def _said(heading: str, names: Sequence[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{heading}: {', '.join(names[:3])}{rest}." if names else ""
