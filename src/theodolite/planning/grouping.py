"""From a plan and a network to parameter groups and an optimizer."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, Planned
from theodolite.optimizers.sharding import replicas_of
from theodolite.optimizers.spec import Make
from theodolite.planning.fitting import matched
from theodolite.planning.plan import Plan, Row


def param_groups(plan: Plan, model: nn.Module, *, skip: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Plain parameter groups, equal rows merged, in the order of their first tensors.

    Beside `params`, `param_names`, `lr` and `weight_decay` a group has a `name` by which loggers show it,
    what its optimizer understands of eps and of the plan's options, the `rule` that gave the numbers, and
    `planned_lr`, by which the ratios between groups can be checked later.

    >>> import theodolite as th, torch
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> plan = th.plan(th.models.GPT, tokens, size=th.Size(64, 2), base=th.Size(64, 2), lr=0.25)
    >>> groups = param_groups(plan, th.models.GPT(64, 2))
    >>> len(groups), groups[0]["lr"], groups[0]["param_names"][0]       # at base size all tensors are alike
    (1, 0.25, 'embed.weight')
    >>> groups[0]["name"]
    'input+gain+hidden+output'
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, tensor in _trained(plan, matched(plan, model), skip).items():
        options = _options(plan, plan[name])
        group = groups.setdefault(_key(options), {"params": [], "param_names": [], **options})
        group["params"].append(tensor)
        group["param_names"].append(name)
    for group, name in zip(groups.values(), _group_names(plan, groups.values()), strict=True):
        group["name"] = name
    return list(groups.values())


def _group_names(plan: Plan, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """A name for each group: the roles in it, and what else tells it from the others.

    That is the rule, where there are several, and the first tensor, where roles occur in several groups.
    """
    groups = list(groups)
    several_rules = len({group["rule"] for group in groups}) > 1
    found = []
    for group in groups:
        roles = "+".join(dict.fromkeys(plan[name].role for name in group["param_names"]))
        found.append(f"{group['rule']}-{roles}" if several_rules else roles)
    often = Counter(found)
    return [
        f"{name}:{group['param_names'][0]}" if often[name] > 1 else name
        for name, group in zip(found, groups, strict=True)
    ]


def num_groups(plan: Plan) -> int:
    """How many groups there are if none of the network's tensors is skipped."""
    return len({_key(_options(plan, row)) for row in plan.trained})


def make_optimizer(
    plan: Plan,
    model: nn.Module,
    *,
    skip: Sequence[str] = (),
    make: Make | None = None,
    check_gradients: bool = True,
) -> Optimizer:
    """One optimizer for all tensors, and the plan's real multipliers on the network.

    `make` takes the place of the plan's own optimizer; what a matrix optimizer leaves to AdamW stays there.
    Of a DistributedDataParallel model the replicas share Muon's work out.
    """
    own = plan.optimizer_name
    if make is None and own not in OPTIMIZERS:
        raise UseError(
            f"{own} is a rule of yours, so there is no optimizer for it here: "
            "plan.optimizer(model, make=lambda groups: YourOptimizer(groups))"
        )
    groups = param_groups(plan, model, skip=skip)
    replicas = replicas_of(model)
    makes: dict[str, Callable[..., Optimizer]] = {
        rule: make
        if make is not None and rule == own
        else OPTIMIZERS[rule].maker(_given(plan, rule), shared_over=replicas)
        for rule in dict.fromkeys(group["rule"] for group in groups)
    }
    defaults = {"lr": plan.lr, "weight_decay": plan.weight_decay}
    optimizer = Planned(groups, makes, defaults=defaults, check_gradients=check_gradients)
    plan.attach(model)
    return optimizer


def _trained(plan: Plan, tensors: dict[str, Tensor], skip: Sequence[str]) -> dict[str, Tensor]:
    """The tensors that the plan trains and that are not skipped; none was frozen since."""
    if isinstance(skip, str):
        raise UseError(f"skip is {skip!r}: give a list of patterns, skip=[{skip!r}]")
    skipped: set[str] = set()
    for pattern in skip:
        found = [name for name in tensors if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not found:
            raise UseError(f"skip: no tensor's name matches {pattern!r}")
        skipped.update(found)
    kept = {row.name: tensors[row.name] for row in plan.trained if row.name not in skipped}
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


def _options(plan: Plan, row: Row) -> dict[str, Any]:
    """What stands in the group of a row, except for its tensors."""
    given = _given(plan, row.rule)
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


def _given(plan: Plan, rule: str) -> dict[str, Any]:
    return dict(plan.options if rule == plan.optimizer_name else plan.vector_options)


def _key(options: dict[str, Any]) -> tuple[Any, ...]:
    """Equal but for rounding is equal: rows come to the same number by different ways."""
    return (*options, *(_rounded(value) for value in options.values()))


def _rounded(value: Any) -> Any:
    return f"{value:.12e}" if isinstance(value, float) else repr(value)
