"""Learning-rate schedules: one factor for all groups at every step, so that their ratios stay.

A refined schedule follows the gradient norms of a first run. With G_t the gradient norm at step t of a run of
T steps, after a median filter over a tenth of the run:

    w_t = 1/G_t²          (norm="l2", for SGD)        w_t = 1/G_t      (norm="l1", for Adam: ‖g_t‖₁)
    η_t ∝ w_t Σ_{p > t} w_p,      p up to T, largest η_t = 1

The bound behind it is for the last of the iterates 0, …, T. No step sees the gradient at T, so w_T is set to
w_{T−1}: no step has a learning rate of 0, and constant norms give exactly linear decay, `1 − t/T`. Large
gradients at the start become a warmup; gradients that shrink or grow bend the rest.

The width of the filter is an odd number near a tenth of T. Before the start it sees the first norm repeated,
after the end the norms in reverse, as in the paper's code: the end of a run matters most.

References:
    Defazio et al., When, why and how much? Adaptive learning rate scheduling by refinement, 2023, algorithms
    1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from theodolite.core.errors import UseError

DECAY_SHARE = 0.2
"""The share of a warmup–stable–decay run over which it decays."""

KINDS = ("constant", "cosine", "linear", "wsd")


@dataclass(frozen=True)
class LRFactor:
    """The factor on every learning rate at a step, counted from 0.

        warmup      (t + 1)/warmup for t < warmup: linear, and the first step is not lost
        constant    1
        cosine      final + (1 − final)·(1 + cos πs)/2, s from 0 after the warmup to 1 at `steps`
        linear      final + (1 − final)·(1 − s)
        wsd         1, and linear to `final` over the last fifth of the steps
        refined     `factors[t]`, as `refine` found them

    and `final` after `steps`, except for `constant`. All kinds are one class, so that a scheduler made for
    one kind goes on with the saved state of another.

    >>> [LRFactor("linear", steps=4, warmup=2)(step) for step in range(6)]
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
    """A torch scheduler that multiplies the learning rate of every group by `LRFactor` at each step.

    Args:
        optimizer: any torch optimizer.
        kind: `constant`, `cosine`, `linear` or `wsd`; or what `refine` gave. A list of these, one for each
            parameter group, gives each group a course of its own: then ratios between groups do change.
        steps: after how many the learning rate has reached its end. A refined schedule is stretched to them;
            it may leave them out.
        warmup: steps of linear increase before.
        final: the end, as a fraction of the learning rate.

    >>> import torch
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
        return LambdaLR(optimizer, LRFactor(kind, steps, warmup, final))
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
        LRFactor("refined", course.steps, factors=course.factors) for course in stretched
    ]
    return LambdaLR(optimizer, factors[0] if isinstance(kind, Refined) else factors)


Norm = Literal["l2", "l1"]

SMOOTHING = 0.1
"""The share of a run that the median is taken over."""


@dataclass(frozen=True)
class Refined:
    """A schedule made by `refine`: at step t the learning rate is multiplied by `factors[t]`."""

    factors: tuple[float, ...]
    """One for each step, the largest 1; none is 0."""

    @property
    def steps(self) -> int:
        """How many it is for."""
        return len(self.factors)

    @property
    def peak(self) -> int:
        """The step of the largest learning rate: what is before is warm-up."""
        return self.factors.index(max(self.factors))

    def to(self, steps: int) -> Refined:
        """The same course over another number of steps: straight lines between the factors, 0 at the end.

        >>> refine([1.0] * 4).to(8).factors
        (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
        """
        if isinstance(steps, bool) or not isinstance(steps, (int, np.integer)) or steps < 1:
            raise UseError(f"steps is {steps!r}: a schedule has a whole number of steps, at least one")
        if steps == self.steps:
            return self
        here = np.arange(steps) * (self.steps / steps)
        stretched = np.interp(here, np.arange(self.steps + 1), [*self.factors, 0.0])
        return Refined(tuple((stretched / stretched.max()).tolist()))

    def __call__(self, step: int) -> float:
        """The factor at a step; 0 after the last."""
        return self.factors[step] if step < self.steps else 0.0

    def __str__(self) -> str:
        marks = [0, self.steps // 4, self.steps // 2, 3 * self.steps // 4]
        course = ", ".join(f"{self.factors[mark]:.3g} at {mark}" for mark in marks)
        return f"refined schedule of {self.steps} steps: {course}; 1 at {self.peak}"


def refine(gradient_norms: Sequence[float], *, norm: Norm = "l2", smoothing: float = SMOOTHING) -> Refined:
    """The schedule that the gradient norms of a first run ask for.

    Args:
        gradient_norms: one for each step, of the whole network or of one parameter group. Of a run in a
            ledger `theodolite.fleet.gradient_norms` gives them.
        norm: which norm they are: `l2`, as for SGD, or `l1`, the sum of absolute values, as for Adam.
        smoothing: the share of the run that the median is taken over; 0 for no filter.

    It goes to an optimizer by `schedule(optimizer, refined)`. Only ratios between norms matter.

    >>> refine([3.0] * 5).factors
    (1.0, 0.8, 0.6, 0.4, 0.2)
    >>> print(refine([10.0] * 100 + [1.0] * 900))
    refined schedule of 1000 steps: 0.01 at 0, 0.833 at 250, 0.556 at 500, 0.278 at 750; 1 at 100
    """
    if norm not in get_args(Norm):
        raise UseError(f"norm is {norm!r}: it is one of {', '.join(get_args(Norm))}")
    if not 0 <= smoothing <= 1:
        raise UseError(f"smoothing is {smoothing!r}: it is the share of a run, from 0 to 1")
    norms = _checked(gradient_norms)
    filtered = _median(norms, _odd(smoothing * len(norms)))
    # Of the smallest norm the weight is 1, so that no square overflows.
    weights = (filtered.min() / filtered) ** (2 if norm == "l2" else 1)
    later = np.cumsum(np.append(weights, weights[-1])[::-1])[::-1]
    factors = weights * later[1:]
    factors /= factors.max()
    if not factors.min() > 0:
        step = int(factors.argmin())
        raise UseError(
            f"gradient_norms[{step}] is {norms[step]:.4g} and the smallest {norms.min():.4g}: the learning "
            "rate there would be 0. Has the run diverged, or was a loss scaled?"
        )
    return Refined(tuple(factors.tolist()))


def _checked(given: Sequence[float]) -> NDArray[np.float64]:
    try:
        norms = np.asarray(_numbers(given), dtype=np.float64)
    except (TypeError, ValueError):
        raise UseError(
            f"gradient_norms is of type {type(given).__name__}: give a list of numbers, one for each step"
        ) from None
    if norms.ndim != 1:
        raise UseError(
            f"gradient_norms has the shape {norms.shape}: give one number for each step. Of several groups, "
            "refine each and give schedule(optimizer, [refined, …])"
        )
    if len(norms) < 2:
        raise UseError(f"gradient_norms holds {len(norms)} steps: a schedule needs at least 2")
    for step in np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))[:1].tolist():
        why = (
            "nothing was learnt at this step. Leave steps without a gradient out, or repeat the one before"
            if norms[step] == 0
            else "a norm is a finite number above 0. Cut a run that diverged off before it did"
        )
        raise UseError(f"gradient_norms[{step}] is {norms[step]:g}: {why}")
    return norms


def _numbers(given: object) -> object:
    """Tensors as plain numbers, also those on a GPU, in bfloat16 or with a graph; anything else as it is."""
    if isinstance(given, (list, tuple)):
        return [_numbers(each) for each in given]
    return given.tolist() if hasattr(given, "tolist") else given


def _odd(width: float) -> int:
    return 2 * (math.floor(width) // 2) + 1


def _median(norms: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The running median; the edge is repeated on the left and mirrored on the right."""
    if width == 1:
        return norms
    from scipy.ndimage import median_filter

    half = width // 2
    padded = np.pad(np.pad(norms, (half, 0), mode="edge"), (0, half), mode="reflect")
    found: NDArray[np.float64] = median_filter(padded, size=width, mode="nearest")
    return found[half : half + len(norms)]
