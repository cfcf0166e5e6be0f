"""What a network and its own optimizer have at one size: initial values, options, forward multipliers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from theodolite.anatomy import Anatomy, dissect
from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.part import Part, Role
from theodolite.core.arguments import one_of
from theodolite.core.batches import Batch
from theodolite.core.building import build_hollow, build_model, in_one_line, untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.group_scales import apply_group_scales
from theodolite.planning.factory import MakeOptimizer, OwnOptions, make_optimizers, read_options
from theodolite.planning.init_reading import QUICK_PARAMETERS, Distributions, read_init
from theodolite.probes.scaling.small_gradients import only_rounding
from theodolite.workloads import Workload

MOST_PARAMETERS = 50_000_000
"""Gradients of a larger network are not computed."""


@dataclass(frozen=True)
class Reading:
    """A network at one size, as it is built and as its own optimizer will train it."""

    size: Size
    anatomy: Anatomy
    inits: Distributions
    """Of the tensors that are trained."""
    options: Mapping[str, OwnOptions]
    notes: tuple[str, ...]
    """What the factory returned beside its optimizers."""
    scales: tuple[str, ...] = ()
    """Names of factors in the groups that were multiplied in."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Those of the anatomy; what the factory has frozen is frozen."""
        frozen = {name for name, one in self.options.items() if one.state == "frozen"}
        return tuple(
            replace(part, role="frozen") if part.trained and part.name in frozen else part
            for part in self.anatomy.values()
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that an optimizer trains and that the forward pass uses."""
        moved = ("trained", "unknown", "twice")
        return tuple(part.name for part in self.anatomy.trained if self.options[part.name].state in moved)


def read(
    workload: Workload,
    make: MakeOptimizer,
    size: Size,
    *,
    batch: Batch,
    roles: Mapping[str, Role] | None = None,
    rules: Mapping[str, str] | None = None,
) -> Reading:
    """Read the network at one size, without training it.

    Initial values are those of a built network: the numbers in its source where they can be recorded, else
    measured. Above `QUICK_PARAMETERS` it is built without memory for its weights, if that works.
    """
    anatomy = dissect(workload.build, batch[0], size=size, roles=roles)
    model = _built(workload, size)
    try:
        made = make_optimizers(make, model)
    except UseError:
        if not any(tensor.is_meta for tensor in model.parameters()):
            raise
        model = build_model(workload.build, size, seed=0)  # a factory that looks at values
        made = make_optimizers(make, model)
    scales = apply_group_scales(made.optimizers)
    options = read_options(model, made.optimizers)
    return Reading(
        size,
        anatomy,
        read_init(workload.build, size, {part.name for part in anatomy.trained}),
        {name: _with_rule(one, rules or {}) for name, one in options.items()},
        made.notes,
        scales,
    )


def gradient_sizes(
    workload: Workload, make: MakeOptimizer, size: Size, *, seed: int, steps: int
) -> dict[str, float]:
    """The root mean square of each gradient's entries, the largest of so many steps with the own optimizer.

    Only of entries that are not zero. Without those tensors whose gradient is rounding alone, or zero at two
    steps: behind two tensors that start at zero, it grows for a long time. Empty for a network of more than
    `MOST_PARAMETERS`.
    """
    hollow = build_hollow(workload.build, size)
    if sum(tensor.numel() for tensor in hollow.parameters()) > MOST_PARAMETERS:
        return {}
    found: dict[str, float] = {}
    still: Counter[str] = Counter()
    with untouched_randomness(seed), torch.enable_grad():
        model = build_model(workload.build, size, seed=seed).train()
        optimizers = make_optimizers(make, model).optimizers if steps > 1 else ()
        apply_group_scales(optimizers)
        tensors = dict(canonical_parameters(model))
        for step in range(steps):
            batch = workload.draw(seed, step)
            model.zero_grad()
            workload.evaluate(model, batch).backward()
            rounded = only_rounding(workload, model, batch) if step == steps - 1 else frozenset()
            for name, tensor in tensors.items():
                grad = None if tensor.grad is None else tensor.grad.to_dense()
                moving = 0 if grad is None else int(grad.count_nonzero())
                still[name] += not moving
                if grad is not None and moving:
                    rms = grad.abs().double().norm().item() / math.sqrt(moving)
                    found[name] = max(found.get(name, 0.0), rms)
            for optimizer in optimizers if step < steps - 1 else ():
                _step(optimizer)
    kept = (name for name in found if name not in rounded and still[name] < 2)
    return {name: found[name] for name in kept if math.isfinite(found[name])}


def _step(optimizer: Optimizer) -> None:
    """A step of somebody else's optimizer, which may want more than gradients."""
    try:
        optimizer.step()
    except Exception as error:
        raise UseError(
            f"a step of the factory's {type(optimizer).__name__} failed: {in_one_line(error)}. An audit "
            "calls step() after backward(); with train=False (--no-train) it makes no step"
        ) from error


def check_rules(rules: Mapping[str, str] | None) -> dict[str, str]:
    """The user's rules by the names of classes, checked."""
    if rules is not None and not isinstance(rules, Mapping):
        raise UseError(f"rules is {rules!r}: give a rule by the name of a class, {{'MyAdam': 'adamw'}}")
    return {name: one_of(f"rules[{name!r}]", rule, list(OPTIMIZERS)) for name, rule in (rules or {}).items()}


def _built(workload: Workload, size: Size) -> nn.Module:
    """The network: with values if it is small."""
    model = build_hollow(workload.build, size)
    if sum(tensor.numel() for tensor in model.parameters()) <= QUICK_PARAMETERS:
        return build_model(workload.build, size, seed=0)
    return model


def _with_rule(one: OwnOptions, rules: Mapping[str, str]) -> OwnOptions:
    return replace(one, rule=rules[one.class_name]) if one.class_name in rules else one
