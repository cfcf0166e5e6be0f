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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from theodolite.core.arguments import number, one_of, whole
from theodolite.core.errors import UseError
from theodolite.present.result import Block, Result
from theodolite.present.text import Table

KINDS = ("constant", "cosine", "linear", "wsd")
DECAY_SHARE = 0.2
"""The fraction of a warmup–stable–decay schedule that decays."""

Norm = Literal["l2", "l1"]
SMOOTHING = 0.1
"""The width of the median filter as a fraction of the run."""


@dataclass(frozen=True)
class LRFactor:
    """The factor on every learning rate at a step, counted from 0.

        warmup      (t + 1)/warmup for t < warmup: linear, and the first step is not lost
        constant    1
        cosine      final + (1 − final)·(1 + cos πs)/2, s from 0 after the warmup to 1 at `steps`
        linear      final + (1 − final)·(1 − s)
        wsd         1, and linear to `final` over the last fifth of the steps
        refined     `factors[t]`, as computed by `refine`

    and `final` after `steps`, except for `constant`. All kinds are one class, so that a scheduler made for
    one kind can load the saved state of another.

    >>> [LRFactor("linear", steps=4, warmup=2)(step) for step in range(6)]
    [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    kind: str
    steps: int
    warmup: int = 0
    final: float = 0.0
    factors: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not (self.kind == "refined" and len(self.factors) == self.steps):
            one_of("the schedule", self.kind, KINDS)
        # As plain integers: NumPy's do not go into JSON.
        object.__setattr__(self, "steps", whole("steps", self.steps, least=1))
        wanted = f"give a number of steps below {self.steps}, or 0"
        warmup = whole("warmup", self.warmup, least=0, most=self.steps - 1, wanted=wanted)
        object.__setattr__(self, "warmup", warmup)
        number("final", self.final, least=0, most=1)

    @property
    def stable_until(self) -> int:
        """The step until which the rate stays what it is after the warm-up."""
        if self.kind == "constant":
            return self.steps
        if self.kind == "wsd":
            return max(self.warmup, self.steps - max(1, round(DECAY_SHARE * self.steps)))
        return self.warmup

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        if self.kind == "refined":
            return self.factors[step] if step < self.steps else self.final
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.kind == "constant":
            return 1.0
        start = self.stable_until
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
    """A torch scheduler that multiplies the learning rate of every group by the same factor at each step.

    Args:
        optimizer: any torch optimizer.
        kind: `constant`, `cosine`, `linear` or `wsd`; or a schedule that `refine` has made. A list of these,
            one for each parameter group, changes the ratios between groups.
        steps: the length of the schedule. A refined one is stretched to it, or keeps its own.
        warmup: steps of linear increase at the start.
        final: the last learning rate, as a fraction.

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
            raise UseError(f"steps is not given: a {kind} schedule needs its length, as steps=10_000")
        return LambdaLR(optimizer, LRFactor(kind, steps, warmup, final))
    given = [kind] if isinstance(kind, Refined) else list(kind)
    groups = len(optimizer.param_groups)
    if not given or not all(isinstance(one, Refined) for one in given):
        raise UseError(f"the schedule is {kind!r}: give a name, what refine(…) returns, or a list of these")
    if not isinstance(kind, Refined) and len(given) != groups:
        raise UseError(
            f"{len(given)} refined schedules are given for {groups} parameter groups: give one for each, or "
            "a single one for all"
        )
    for name, value in (("warmup", warmup), ("final", final)):
        if value:
            raise UseError(f"{name} is {value}: a refined schedule has its own start and end. Leave it out")
    if steps is None and len({one.steps for one in given}) > 1:
        lengths = ", ".join(str(one.steps) for one in given)
        raise UseError(f"the refined schedules have {lengths} steps: give the number of steps, steps=…")
    made = [one if steps is None else one.to(steps) for one in given]
    factors: list[Callable[[int], float]] = [
        LRFactor("refined", one.steps, factors=one.factors) for one in made
    ]
    return LambdaLR(optimizer, factors[0] if isinstance(kind, Refined) else factors)


@dataclass(frozen=True)
class Refined(Result):
    """A schedule made by `refine`: at step t the learning rate is multiplied by `factors[t]`."""

    kind: ClassVar[str] = "refined schedule"
    loads: ClassVar[bool] = True
    factors: tuple[float, ...]
    """One for each step, the largest 1; none is 0."""

    @property
    def steps(self) -> int:
        """Its length."""
        return len(self.factors)

    @property
    def peak(self) -> int:
        """The step of the largest learning rate, at which the warmup ends."""
        return self.factors.index(max(self.factors))

    def to(self, steps: int) -> Refined:
        """The same schedule over another number of steps, by linear interpolation to 0 at the end.

        >>> refine([1.0] * 4).to(8).factors
        (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
        """
        if whole("steps", steps, least=1) == self.steps:
            return self
        here = np.arange(steps) * (self.steps / steps)
        stretched = np.interp(here, np.arange(self.steps + 1), [*self.factors, 0.0])
        return Refined(tuple((stretched / stretched.max()).tolist()))

    def __call__(self, step: int) -> float:
        """The factor at a step; 0 after the last."""
        return self.factors[step] if step < self.steps else 0.0

    def blocks(self) -> Iterator[Block]:
        """One sentence."""
        marks = [0, self.steps // 4, self.steps // 2, 3 * self.steps // 4]
        course = ", ".join(f"{self.factors[mark]:.3g} at {mark}" for mark in marks)
        yield f"refined schedule of {self.steps} steps: {course}; 1 at {self.peak}"

    def table(self) -> Table:
        """Steps and factors."""
        return Table(["step", "factor"], [[step, factor] for step, factor in enumerate(self.factors)])


def refine(gradient_norms: Sequence[float], *, norm: Norm = "l2", smoothing: float = SMOOTHING) -> Refined:
    """A schedule computed from the gradient norms of a first run.

    Only ratios between norms matter. `schedule(optimizer, refined)` applies it.

    Args:
        gradient_norms: one for each step, of the whole network or of one parameter group;
            `theodolite.fleet.gradient_norms` reads them from a ledger.
        norm: which norm they are: `l2`, as for SGD, or `l1`, the sum of absolute values, as for Adam.
        smoothing: the width of the median filter as a fraction of the run; 0 for no filter.

    >>> refine([3.0] * 5).factors
    (1.0, 0.8, 0.6, 0.4, 0.2)
    >>> print(refine([10.0] * 100 + [1.0] * 900))
    refined schedule of 1000 steps: 0.01 at 0, 0.833 at 250, 0.556 at 500, 0.278 at 750; 1 at 100
    """
    one_of("norm", norm, get_args(Norm))
    number("smoothing", smoothing, least=0, most=1)
    norms = _checked(gradient_norms)
    filtered = _median(norms, 2 * (math.floor(smoothing * len(norms)) // 2) + 1)
    # The weight of the smallest norm is 1, so that no square overflows.
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
            f"gradient_norms has the shape {norms.shape}: give one number for each step. For several groups, "
            "refine each and give schedule(optimizer, [refined, …])"
        )
    if len(norms) < 2:
        raise UseError(f"gradient_norms holds {len(norms)} steps: a schedule needs at least 2")
    for step in np.flatnonzero(~(np.isfinite(norms) & (norms > 0)))[:1].tolist():
        why = (
            "nothing was learnt at this step. Leave out steps without a gradient, or repeat the norm before"
            if norms[step] == 0
            else "a norm is a finite number above 0. Cut off the run before it diverged"
        )
        raise UseError(f"gradient_norms[{step}] is {norms[step]:g}: {why}")
    return norms


def _numbers(given: object) -> object:
    """Tensors as plain numbers, also those on a GPU, in bfloat16 or with a graph; anything else unchanged."""
    if isinstance(given, (list, tuple)):
        return [_numbers(each) for each in given]
    return given.tolist() if hasattr(given, "tolist") else given


def _median(norms: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """The running median; the edge is repeated on the left and mirrored on the right."""
    if width == 1:
        return norms
    from scipy.ndimage import median_filter

    half = width // 2
    padded = np.pad(np.pad(norms, (half, 0), mode="edge"), (0, half), mode="reflect")
    found: NDArray[np.float64] = median_filter(padded, size=width, mode="nearest")
    return found[half : half + len(norms)]
