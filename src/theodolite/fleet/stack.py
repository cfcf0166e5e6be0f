"""Many models of one shape as stacks of tensors, each with hyperparameters of its own."""

# M models

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.fleet.plans import planned
from theodolite.fleet.run import OWN, Run
from theodolite.fleet.training import Workloads, conditions, workload_for
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.schedule import LRFactor
from theodolite.optimizers.spec import Vectorised
from theodolite.planning import Plan
from theodolite.workloads import Workload


@dataclass(frozen=True)
class Tensors:
    """One parameter of M models, and how it is trained."""

    name: str
    shape: tuple[int, ...]
    rule: str
    values: Tensor
    """(M, …)."""
    hyper: int
    """The place of its hyperparameters in `Stack.hypers`."""
    shared: Mapping[str, Any]
    """Options that are the same for all models."""


@dataclass(frozen=True)
class Stack:
    """M models of one shape, before their first step."""

    runs: tuple[Run, ...]
    model: nn.Module
    """One of them: its functions are used, its values are not."""
    tensors: tuple[Tensors, ...]
    hypers: tuple[Mapping[str, Tensor], ...]
    """By name, (M, 1); tensors that are trained alike share them."""
    buffers: Mapping[str, Tensor]
    """(M, …), with the parameters that are not trained."""
    factors: Tensor
    """(steps, M), of the schedule."""
    temperature: Tensor
    """(M,)."""

    @torch.no_grad()
    def single(self, place: int) -> nn.Module:
        """The network that all share, with the values of one of them until the next call."""
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        for name, values in [*((one.name, one.values) for one in self.tensors), *self.buffers.items()]:
            own[name].copy_(values[place])
        return self.model


APART = (
    *("lr", "seed", "parameterization", "base", "weight_decay", "decay", "eps", "vector_lr", "init_scale"),
    "horizon",
    *("temperature", "schedule", "warmup", "final", "every"),
)
"""Fields in which the models of one program may differ."""
INDIFFERENT = ("foreach", "fused", "capturable", "differentiable", "weight_decouple", "fixed_decay")
"""Options of torch's and pytorch_optimizer's that do not change the numbers, or that a plan fixes."""
PLANNED = ("params", "param_names", "name", "lr", "weight_decay", "rule", "planned_lr")
Hyper = tuple[torch.dtype, tuple[tuple[str, tuple[float, ...]], ...]]
"""The dtype of a tensor, and by name a number for each model."""


def kin(run: Run, workload: Workload) -> str:
    """A key that runs share if they fit into one program: they differ only in numbers for each model."""
    alike = {name: value for name, value in run.to_dict().items() if name not in APART}
    for name, rule in (("options", run.optimizer), ("vector_options", "adamw")):
        spec = OPTIMIZERS.get(rule)  # none of an optimizer of the workload's own
        numbers = spec.vectorised.numbers if spec and spec.vectorised else {}
        alike[name] = {option: None if option in numbers else value for option, value in alike[name].items()}
    # A multiplier is a hook on the network, which all models share.
    alike["multipliers"] = sorted(planned(run, workload).multipliers.items())
    return json.dumps(alike, sort_keys=True)


def families_of(runs: Sequence[Run], workloads: Workloads) -> tuple[list[list[Run]], list[tuple[Run, str]]]:
    """Runs grouped by `kin`, and runs whose workload raises an error, with the traceback."""
    families: dict[str, list[Run]] = {}
    failures = []
    for run in runs:
        try:
            with conditions(run.workload, workloads):
                families.setdefault(kin(run, workload_for(run, workloads)), []).append(run)
        except Exception:
            failures.append((run, traceback.format_exc()))
    return list(families.values()), failures


def stack(runs: Sequence[Run], workload: Workload, device: str) -> Stack:
    """Build the models of runs that share a program, and stack them. Equal initialisations are drawn once."""
    plans = [planned(run, workload) for run in runs]
    model = plans[0].build(runs[0].seed).train()
    drawn: dict[tuple[int, str], dict[str, Tensor]] = {}
    starts = []
    for run, plan in zip(runs, plans, strict=True):
        key = run.seed, repr([(name, row.init) for name, row in plan.rows.items()])
        if key not in drawn:
            one = plan.build(run.seed)
            drawn[key] = {**dict(one.named_parameters()), **dict(one.named_buffers())}
        starts.append([*drawn].index(key))
    groups = [_by_name(plan, model) for plan in plans]

    def stacked(name: str) -> Tensor:
        few = torch.stack([tensors[name].detach() for tensors in drawn.values()]).to(device)
        return few[torch.tensor(starts, device=device)]

    tensors: list[Tensors] = []
    hypers: dict[Hyper, int] = {}
    for name, parameter in model.named_parameters():
        if name not in groups[0]:
            continue
        settings = [group[name] for group in groups]
        rule = settings[0]["rule"]
        shared = {option: settings[0][option] for option in vectorised(rule).shared}
        hyper = hypers.setdefault(_hyper(settings, parameter.dtype), len(hypers))
        tensors.append(Tensors(name, tuple(parameter.shape), rule, stacked(name), hyper, shared))
    schedules = [LRFactor(run.schedule, run.steps, run.warmup, run.final) for run in runs]
    factors = torch.tensor([[factor(step) for factor in schedules] for step in range(runs[0].steps)])
    return Stack(
        runs=tuple(runs),
        model=model.to(device),
        tensors=tuple(tensors),
        hypers=tuple(
            {name: torch.tensor(column, dtype=dtype, device=device)[:, None] for name, column in columns}
            for dtype, columns in hypers
        ),
        buffers={name: stacked(name) for name in next(iter(drawn.values())) if name not in groups[0]},
        factors=factors.to(device, torch.float64),
        temperature=torch.tensor([run.temperature for run in runs], device=device),
    )


def why_not_stacked(run: Run, workload: Workload) -> str | None:
    """Why the optimizer of a run cannot train many models at once; None if it can."""
    if run.parameterization == OWN:
        return "the workload's own optimizer trains one model at a time"
    if OPTIMIZERS[run.optimizer].vectorised is None:
        able = ", ".join(name for name, spec in OPTIMIZERS.items() if spec.vectorised)
        return f"{run.optimizer} has no step for many models at once ({able} have)"
    plan = planned(run, workload)
    for group in plan.param_groups(plan.build(run.seed)):
        step = vectorised(group["rule"])
        for option, value in group.items():
            known = option in (*PLANNED, *step.numbers, *step.shared, *INDIFFERENT)
            if not known and (option not in step.without or step.without[option] != value):
                return f"{group['rule']} for many models at once has no option {option}={value!r}"
    return None


def vectorised(rule: str) -> Vectorised:
    """The step for many models of a rule that has one."""
    step = OPTIMIZERS[rule].vectorised
    assert step is not None, rule
    return step


def _by_name(plan: Plan, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The settings of every tensor, with defaults for options that were not given."""
    found = {}
    for group in plan.param_groups(model):
        step = vectorised(group["rule"])
        settings = {**step.numbers, **step.shared, **group}
        found.update(dict.fromkeys(group["param_names"], settings))
    return found


def _hyper(settings: Sequence[Mapping[str, Any]], dtype: torch.dtype) -> Hyper:
    columns: dict[str, tuple[float, ...]] = {}
    for name in ("lr", "weight_decay", *vectorised(settings[0]["rule"]).numbers):
        if name == "betas":
            for place, beta in enumerate(("beta1", "beta2")):
                columns[beta] = tuple(float(one["betas"][place]) for one in settings)
        else:
            columns[name] = tuple(float(one[name]) for one in settings)
    return dtype, tuple(columns.items())
