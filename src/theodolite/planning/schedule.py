"""Schedules that keep the ratios between learning rates: one factor for all groups at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from theodolite.errors import UseError

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

    and `final` after `steps`, except for `constant`.

    >>> [Factor("linear", steps=4, warmup=2)(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    kind: str
    steps: int
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UseError(f"the schedule is {self.kind!r}: it is one of {', '.join(KINDS)}")
        for name, value in (("steps", self.steps), ("warmup", self.warmup)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise UseError(f"{name} is {value!r}: it is a number of steps")
        if self.steps < 1:
            raise UseError(f"steps is {self.steps}: a schedule has at least one step")
        if not 0 <= self.warmup < self.steps:
            raise UseError(f"warmup is {self.warmup}: it has to be less than the {self.steps} steps, or 0")
        if not 0 <= self.final <= 1:
            raise UseError(f"final is {self.final!r}: it is a fraction of the learning rate, from 0 to 1")

    def __call__(self, step: int) -> float:
        """The factor at a step."""
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
    optimizer: Optimizer, kind: str = "cosine", *, steps: int, warmup: int = 0, final: float = 0.0
) -> LambdaLR:
    """A torch scheduler that multiplies the learning rate of every group by `Factor` at each step.

    Args:
        optimizer: any torch optimizer.
        kind: `constant`, `cosine`, `linear` or `wsd`.
        steps: after how many the learning rate has reached its end.
        warmup: steps of linear increase before.
        final: the end, as a fraction of the learning rate.
    """
    return LambdaLR(optimizer, Factor(kind, steps, warmup, final))
