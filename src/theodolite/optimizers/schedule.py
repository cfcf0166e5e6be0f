"""Schedules that keep the ratios between learning rates: one factor for all groups at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from theodolite.core.errors import UseError
from theodolite.optimizers.refining import Refined

DECAY_SHARE = 0.2
"""The share of a warmup–stable–decay run over which it decays."""

KINDS = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True)
class Factor:
    """The factor on every learning rate at a step, counted from 0.

        warmup      (t + 1)/warmup for t < warmup: linear, and the first step is not lost
        constant    1
        cosine      final + (1 − final)·(1 + cos πs)/2, s from 0 after the warmup to 1 at `steps`
        linear      final + (1 − final)·(1 − s)
        wsd         1, and linear to `final` over the last fifth of the steps
        refined     `factors[t]`, as `refine` found them

    and `final` after `steps`, except for `constant`. All kinds are one class, so that a scheduler made for
    one kind goes on with the saved state of another.

    >>> [Factor("linear", steps=4, warmup=2)(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    kind: str
    steps: int
    warmup: int = 0
    final: float = 0.0
    factors: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS and not (self.kind == "refined" and len(self.factors) == self.steps):
            raise UseError(f"the schedule is {self.kind!r}: it is one of {', '.join(KINDS)}")
        for name, value in (("steps", self.steps), ("warmup", self.warmup)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise UseError(f"{name} is {value!r}: it is a number of steps")
            object.__setattr__(self, name, int(value))  # numpy's integers do not go into JSON
        if self.steps < 1:
            raise UseError(f"steps is {self.steps}: a schedule has at least one step")
        if not 0 <= self.warmup < self.steps:
            raise UseError(f"warmup is {self.warmup}: it has to be less than the {self.steps} steps, or 0")
        if not 0 <= self.final <= 1:
            raise UseError(f"final is {self.final!r}: it is a fraction of the learning rate, from 0 to 1")

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        if self.kind == "refined":
            return self.factors[step] if step < self.steps else self.final
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        start = self.warmup
        if self.kind == "wsd":
            start = max(start, self.steps - max(1, round(DECAY_SHARE * self.steps)))
        progress = min(max(0.0, (step - start) / (self.steps - start)), 1.0)
        shape = (1 + math.cos(math.pi * progress)) / 2 if self.kind == "cosine" else 1 - progress
        return self.final + (1 - self.final) * shape


def schedule(
    optimizer: Optimizer,
    kind: str | Refined | Sequence[Refined] = "cosine",
    *,
    steps: int | None = None,
    warmup: int = 0,
    final: float = 0.0,
) -> LambdaLR:
    """A torch scheduler that multiplies the learning rate of every group by `Factor` at each step.

    Args:
        optimizer: any torch optimizer.
        kind: `constant`, `cosine`, `linear` or `wsd`; or what `refine` gave. A list of these, one for each
            parameter group, gives each group a course of its own: then ratios between groups do change.
        steps: after how many the learning rate has reached its end. A refined schedule is stretched to them;
            it may leave them out.
        warmup: steps of linear increase before.
        final: the end, as a fraction of the learning rate.

    >>> import torch
    >>> from theodolite.optimizers.refining import refine
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
    >>> scheduler = schedule(optimizer, refine([1.0, 1.0, 1.0, 1.0]))
    >>> for _ in range(2):
    ...     optimizer.step()
    ...     scheduler.step()
    >>> scheduler.get_last_lr()
    [0.25]
    """
    if isinstance(kind, str):
        if steps is None:
            raise UseError(f"steps is not given: a {kind} schedule needs to know its end, as steps=10_000")
        return LambdaLR(optimizer, Factor(kind, steps, warmup, final))
    courses = [kind] if isinstance(kind, Refined) else list(kind)
    groups = len(optimizer.param_groups)
    if not courses or not all(isinstance(course, Refined) for course in courses):
        raise UseError(f"the schedule is {kind!r}: give a name, what refine(…) gives, or a list of these")
    if not isinstance(kind, Refined) and len(courses) != groups:
        raise UseError(
            f"{len(courses)} refined schedules are given for {groups} parameter groups: give one for each, "
            "or a single one for all"
        )
    if warmup or final:
        name, value = ("warmup", warmup) if warmup else ("final", final)
        raise UseError(f"{name} is {value}: a refined schedule has its own start and end. Leave it out")
    if steps is None and len({course.steps for course in courses}) > 1:
        lengths = ", ".join(str(course.steps) for course in courses)
        raise UseError(f"the refined schedules have {lengths} steps: say by steps=… how many are to be made")
    stretched = [course if steps is None else course.to(steps) for course in courses]
    factors: list[Callable[[int], float]] = [
        Factor("refined", course.steps, factors=course.factors) for course in stretched
    ]
    return LambdaLR(optimizer, factors[0] if isinstance(kind, Refined) else factors)
