"""The RMS operator norms of every tensor during the first steps of training."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.anatomy import Anatomy
from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.part import Part
from theodolite.core.batches import Batch, on_device
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.planning.plan import Plan
from theodolite.probes.scaling.rms_norm import rms_norms
from theodolite.workloads import Workload

SUSPICIOUS, ROUNDING = 1e-4, 1e-3
"""A gradient below so many times the largest of all tensors may be rounding alone. It is, if of what float32
gives float64 leaves less than so much."""


@dataclass(frozen=True)
class Course:
    """One tensor: `‖W₀‖_R`, and its changes."""

    part: Part
    start: float
    """`‖W₀‖_R`."""
    steps: tuple[float, ...]
    """`‖W_t − W_{t−1}‖_R` for t = 1, 2, …"""
    drift: float
    """`‖W_t − W₀‖_R` after the last step."""
    converged: bool
    """Did every iteration behind these numbers converge?"""
    only_rounding: bool = False
    """Is its gradient zero but for rounding, as that of the keys' bias before a softmax?"""

    @property
    def step(self) -> float:
        """The geometric mean of the steps that moved the tensor; 0 if none did.

        >>> part = Part("w", (8, 8), "linear", "hidden", 8, 8, True, True, (1,), (0,))
        >>> round(Course(part, 1.0, (0.0, 1.0, 4.0), 3.0, converged=True).step, 6)
        2.0
        """
        moved = [step for step in self.steps if step != 0]
        return math.exp(sum(map(math.log, moved)) / len(moved)) if moved else 0.0


@dataclass(frozen=True)
class Training:
    """What a training under a plan did to its tensors."""

    size: Size
    anatomy: Anatomy
    courses: Mapping[str, Course]
    losses: tuple[float, ...]
    """Before each step."""


def observe(
    workload: Workload,
    plan: Plan,
    anatomy: Anatomy,
    *,
    steps: int = 8,
    seed: int = 0,
    device: str = "cpu",
) -> Training:
    """Train a new network under a plan for a few steps, and measure every tensor at each of them.

    The anatomy is that of the network at the plan's size. A plan whose size is its base is the standard
    parameterization at that size: the network's own initialisation, and one learning rate for all.
    """
    if steps < 1:
        raise UseError(f"steps is {steps!r}: a change can be measured after one step or more")
    losses: list[float] = []
    rounded: frozenset[str] = frozenset()
    sizes: list[dict[str, tuple[float, bool]]] = []
    with untouched_randomness(seed):
        model = plan.build(seed, device=device).train()
        optimizer = plan.optimizer(model, check_gradients=False)  # a divergence is a result
        tensors = {name: one for name, one in canonical_parameters(model) if anatomy[name].trained}
        first = _copied(tensors)
        start = rms_norms(first, anatomy)
        before = first
        for step in range(steps):
            optimizer.zero_grad()
            loss = workload.evaluate(model, on_device(workload.draw(seed, step), device))
            loss.backward()
            if step == steps - 1:
                rounded = _only_rounding(workload, model, on_device(workload.draw(seed, step), device))
            optimizer.step()
            losses.append(loss.item())
            now = _copied(tensors)
            sizes.append(rms_norms(_difference(now, before), anatomy))
            before = now
        drift = rms_norms(_difference(before, first), anatomy) if steps > 1 else sizes[0]
    courses = {
        name: Course(
            part=part,
            start=start[name][0],
            steps=tuple(size[name][0] for size in sizes),
            drift=drift[name][0],
            converged=all(one[name][1] for one in (start, *sizes, drift)),
            only_rounding=name in rounded,
        )
        for name, part in ((part.name, part) for part in anatomy.trained)
    }
    return Training(plan.size, anatomy, courses, tuple(losses))


def _only_rounding(workload: Workload, model: nn.Module, batch: Batch) -> frozenset[str]:
    """The tensors whose gradient is gone once it is computed in float64.

    Asked only where a gradient is far smaller than that of other tensors; a network that cannot be run in
    float64 has none.
    """
    sizes = {name: _size(one.grad) for name, one in canonical_parameters(model) if one.grad is not None}
    small = {name for name, size in sizes.items() if 0 < size < SUSPICIOUS * max(sizes.values())}
    if not small:
        return frozenset()
    finer = copy.deepcopy(model).double()
    finer.zero_grad()
    try:
        workload.evaluate(finer, tree_map(_doubled, batch)).backward()
    except (RuntimeError, TypeError, UseError):  # a dtype that is written into the network
        return frozenset()
    exact = {name: _size(one.grad) for name, one in canonical_parameters(finer) if one.grad is not None}
    return frozenset(name for name in small if exact.get(name, 0.0) < ROUNDING * sizes[name])


def _size(gradient: Tensor) -> float:
    return gradient.detach().double().square().mean().sqrt().item()


def _doubled(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _difference(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # In float32: the difference of two bf16 numbers may not be one.
    return {name: now[name].float() - before[name].float() for name in now}
