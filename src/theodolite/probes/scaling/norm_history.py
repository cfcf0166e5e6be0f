"""The norms of all tensors and of their steps, during a few steps of training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import geometric_mean

import torch
from torch import Tensor

from theodolite.anatomy import Anatomy
from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.part import Part
from theodolite.core.batches import on_device
from theodolite.core.building import untouched_randomness
from theodolite.core.size import Size
from theodolite.planning.plan import Plan
from theodolite.probes.scaling.small_gradients import NEAR_EPS, only_rounding, times_eps
from theodolite.probes.scaling.spectral_norm import rms_norms
from theodolite.workloads import Workload


@dataclass(frozen=True)
class NormHistory:
    """The norms of one tensor during training: `‖W₀‖_R`, and its changes."""

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
    """Is its gradient zero up to rounding, as that of the keys' bias before a softmax?"""
    over_eps: tuple[float, ...] = ()
    """At each step, how many times eps its gradient is or was (`times_eps`); empty if eps plays no part."""

    @property
    def step(self) -> float:
        """The geometric mean of the steps that moved the tensor; 0 if none did.

        Steps that eps has shortened are left out, unless all are.

        >>> part = Part("w", (8, 8), "linear", "hidden", 8, 8, True, True, (1,), (0,))
        >>> round(NormHistory(part, 1.0, (0.0, 1.0, 4.0), 3.0, converged=True).step, 6)
        2.0
        """
        moved = [step for step in self.steps if step != 0]
        pairs = zip(self.steps, self.over_eps, strict=False)
        free = [step for step, times in pairs if step != 0 and times >= NEAR_EPS]
        return geometric_mean(free or moved) if moved else 0.0

    @property
    def most_over_eps(self) -> float:
        """The largest of `over_eps`; infinite where eps plays no part, or the gradient is always zero."""
        return self.over_eps[-1] if any(self.over_eps) else math.inf


@dataclass(frozen=True)
class Training:
    """The norms of all tensors in a training run under a plan."""

    size: Size
    anatomy: Anatomy
    histories: Mapping[str, NormHistory]
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
    losses: list[float] = []
    rounded: frozenset[str] = frozenset()
    sizes: list[dict[str, tuple[float, bool]]] = []
    over_eps: list[dict[str, float]] = []
    with untouched_randomness(seed), torch.enable_grad():
        model = plan.build(seed, device=device).train()
        optimizer = plan.optimizer(model, check_gradients=False)  # a divergence is a result
        tensors = {name: one for name, one in canonical_parameters(model) if anatomy[name].trained}
        first = before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        start = rms_norms(first, anatomy)
        for step in range(steps):
            batch = on_device(workload.draw(seed, step), device)
            optimizer.zero_grad()
            loss = workload.evaluate(model, batch)
            loss.backward()
            if step == steps - 1:
                rounded = only_rounding(workload, model, batch)
            over_eps.append(times_eps(plan, tensors, over_eps[-1] if over_eps else {}))
            optimizer.step()
            losses.append(loss.item())
            now = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            sizes.append(rms_norms(_difference(now, before), anatomy))
            before = now
        drift = rms_norms(_difference(before, first), anatomy) if steps > 1 else sizes[0]
    histories = {
        part.name: NormHistory(
            part=part,
            start=start[part.name][0],
            steps=tuple(size[part.name][0] for size in sizes),
            drift=drift[part.name][0],
            converged=all(one[part.name][1] for one in (start, *sizes, drift)),
            only_rounding=part.name in rounded,
            over_eps=tuple(one[part.name] for one in over_eps if part.name in one),
        )
        for part in anatomy.trained
    }
    return Training(plan.size, anatomy, histories, tuple(losses))


@torch.no_grad()
def _difference(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # In float32: the difference of two bf16 numbers may not be one.
    return {name: now[name].float() - before[name].float() for name in now}
