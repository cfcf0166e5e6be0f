"""Parameter groups from the rows of a plan."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS
from theodolite.planning.rows import PlanRow

Options = Mapping[str, Mapping[str, Any]]
"""By rule: the options that the caller gave its optimizer."""


def param_groups(
    rows: Mapping[str, PlanRow], tensors: Mapping[str, Tensor], options: Options
) -> list[dict[str, Any]]:
    """Plain parameter groups, equal rows merged, in the order of their first tensors.

    Beside `params`, `param_names`, `lr` and `weight_decay` a group has a `name` for loggers, what its
    optimizer calls eps and the plan's options, the `rule` that gave the numbers, and `planned_lr`, by which
    the ratios between groups can be checked later.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, tensor in tensors.items():
        held = _group_options(rows[name], options[rows[name].rule])
        group = groups.setdefault(_key(held), {"params": [], "param_names": [], **held})
        group["params"].append(tensor)
        group["param_names"].append(name)
    for group, name in zip(groups.values(), _group_names(rows, list(groups.values())), strict=True):
        group["name"] = name
    return list(groups.values())


def count_groups(rows: Iterable[PlanRow], options: Options) -> int:
    """The number of groups of these rows."""
    return len({_key(_group_options(row, options[row.rule])) for row in rows})


def trained_tensors(
    rows: Iterable[PlanRow], tensors: Mapping[str, Tensor], skip: Sequence[str]
) -> dict[str, Tensor]:
    """The tensors of the rows that are not skipped; refuse those that were frozen after planning."""
    if isinstance(skip, str):
        raise UseError(f"skip is {skip!r}: give a list of patterns, skip=[{skip!r}]")
    skipped: set[str] = set()
    for pattern in skip:
        found = [name for name in tensors if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise UseError(f"skip: no tensor's name matches {pattern!r}")
        skipped.update(found)
    kept = {row.name: tensors[row.name] for row in rows if row.name not in skipped}
    frozen = [name for name, tensor in kept.items() if not tensor.requires_grad]
    if frozen:
        more = f" and {len(frozen) - 3} more" if len(frozen) > 3 else ""
        raise UseError(
            f"{', '.join(frozen[:3])}{more}: frozen (requires_grad is False), but the plan trains them. "
            f"Unfreeze them, or leave them out: plan.optimizer(model, skip={frozen!r})"
        )
    if not kept:
        raise UseError(f"skip={list(skip)!r} leaves no tensor to train")
    return kept


def _group_names(rows: Mapping[str, PlanRow], groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """A name for each group: its roles, its rule if there are several, its first tensor if needed."""
    several_rules = len({group["rule"] for group in groups}) > 1
    found = []
    for group in groups:
        roles = "+".join(dict.fromkeys(rows[name].role for name in group["param_names"]))
        found.append(f"{group['rule']}-{roles}" if several_rules else roles)
    often = Counter(found)
    return [
        f"{name}:{group['param_names'][0]}" if often[name] > 1 else name
        for name, group in zip(found, groups, strict=True)
    ]


def _group_options(row: PlanRow, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the group of a row holds beside its tensors."""
    options = {
        **given,
        "lr": row.lr,
        "weight_decay": row.weight_decay,
        "rule": row.rule,
        "planned_lr": row.lr,
    }
    spec = OPTIMIZERS.get(row.rule)
    if spec is None:  # a rule of the user's
        return {**options, "eps": row.eps}
    options |= spec.fixed
    if spec.eps:
        options[spec.eps.option] = row.eps
    if spec.extent:
        value = given.get(spec.extent.option, spec.extent.usual)
        options[spec.extent.option] = None if value is None else value * row.extent
    layout = {"axes": (tuple(row.in_axes), tuple(row.out_axes)), "rows": row.rows}
    return {**options, **{option: layout[option] for option in spec.layout}}


def _key(options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Equal but for rounding is equal: rows come to the same number in different ways."""
    values = (f"{value:.12e}" if isinstance(value, float) else repr(value) for value in options.values())
    return (*options, *values)
