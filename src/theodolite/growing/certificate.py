"""Is the loss lower after a change than before it? A statement with a known chance of being wrong.

On units that had no part in making or choosing the change, both models give each unit a loss. The mean of the
differences `d = before − after`, clipped to [−B, B], is bounded from below at level δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.growing.concentration import (
    Method,
    checked_level,
    least_units,
    lower_bound,
    needed_units,
)

CLIPPED_SHARE = 0.01
"""Of the differences of the second split, the share that lies beyond B."""


@dataclass(frozen=True)
class Certificate:
    """What a sample of units says about the mean difference of two losses. Made by `certificate`."""

    mean: float
    """Of the clipped differences `before − after`: above 0, the loss fell."""
    lower: float
    """The true mean of the clipped difference is above this, at level δ."""
    upper: float
    """It is below this, at level δ: each of the two ends by itself."""
    units: int
    delta: float
    """The chance that the lower end of any of the candidates is wrong."""
    candidates: int
    bound: float
    """B."""
    variance: float
    """Of the clipped differences, unbiased."""
    clipped: float
    """The share of differences beyond ±B."""
    unclipped_mean: float
    """Of the differences as they are. Nothing is certified about it."""
    needed: int | None
    """Units it takes at this mean and variance until the lower end is above 0; None: no number would."""
    method: Method = "bernstein"

    @property
    def holds(self) -> bool:
        """Is it certified that the mean clipped difference is above 0?"""
        return self.lower > 0

    @property
    def harms(self) -> bool:
        """Is it certified that it is below 0?"""
        return self.upper < 0

    def __str__(self) -> str:
        """What is certified, and what is not, in words."""
        return "\n".join([self._verdict(), self._numbers(), self._meaning()])

    def _verdict(self) -> str:
        if self.holds:
            return f"certified: in the mean a unit's loss, clipped, falls by at least {self.lower:.3g}"
        if self.harms:
            return (
                f"certified to harm: in the mean a unit's loss, clipped, rises by at least {-self.upper:.3g}"
            )
        if self.needed is None:
            return (
                "not certified: the loss did not fall on these units, and more that are like them do not help"
            )
        about = "about " if self.method == "betting" else ""
        return (
            f"not certified: the lower bound is {self.lower:.3g}. At this mean and spread it would take "
            f"{about}{self.needed:,} units, and there are {self.units:,}"
        )

    def _numbers(self) -> str:
        name = "empirical Bernstein" if self.method == "bernstein" else "betting"
        lines = [
            f"  difference  {self.mean:.4g} in the mean of {self.units:,} units",
            f"  bounds      from {self.lower:.4g} to {self.upper:.4g}, each end at "
            f"{_percent(1 - self.delta)} by {name}",
            f"  clipping    to ±{self.bound:.4g}: {_percent(self.clipped)} of the differences are beyond; "
            f"unclipped, the mean is {self.unclipped_mean:.4g}",
        ]
        if self.candidates > 1:
            lines.append(
                f"  candidates  {self.candidates}, each at δ = {self.delta / self.candidates:.3g}, so that "
                "all ends hold together"
            )
        return "\n".join(lines)

    def _meaning(self) -> str:
        wrong = f"{_percent(self.delta)}" + (
            f" for all {self.candidates} candidates together" if self.candidates > 1 else ""
        )
        return (
            "It is about the mean of the clipped difference over the distribution that these units were\n"
            "drawn from, independently, for this one pair of models. The chance of being wrong is at most\n"
            f"{wrong}, for each of the two verdicts, gain and harm. It is not about the unclipped mean,\n"
            "nor about other data. It does not say that a new block is the cause, nor that training on will\n"
            "keep the gain."
        )


def certificate(
    before: Tensor,
    after: Tensor,
    *,
    bound: float,
    delta: float = 0.05,
    candidates: int = 1,
    method: Method = "bernstein",
) -> Certificate:
    """Certify that losses are lower after a change, in the mean of the clipped differences.

    Args:
        before: the loss of each unit, (m,), as of `theodolite.probes.example_losses.losses_of`.
        after: of the same units in the same order.
        bound: B. It must be fixed without a look at these losses: see `clip_from`.
        delta: the chance of being wrong.
        candidates: how many pairs are certified on the same units: each gets δ over their number.
        method: `bernstein`, or `betting`, which needs about a third as many units. Choose before looking.

    >>> torch.manual_seed(0)
    <...>
    >>> before = torch.rand(500)
    >>> found = certificate(before, before - 0.1 + 0.2 * torch.randn(500), bound=0.6)
    >>> found.holds, round(found.mean, 3), round(found.lower, 3), found.needed
    (True, 0.097, 0.051, 189)
    """
    level = checked_level(delta, candidates, method)
    if not (math.isfinite(bound) and bound > 0):
        raise UseError(f"bound is {bound}: differences are clipped to ±bound, a finite number above 0")
    differences = _differences(before, after)
    least = least_units(delta, candidates, method)
    if len(differences) < least:
        raise UseError(
            f"{len(differences)} units are too few to certify anything: at delta {delta} for {candidates} "
            f"candidate(s) it takes at least {least} by {method}, if every one of them gains the most"
        )
    clipped = differences.clamp(-bound, bound)
    return Certificate(
        mean=float(clipped.mean()),
        lower=lower_bound(clipped, bound, level, method),
        upper=-lower_bound(-clipped, bound, level, method),
        units=len(clipped),
        delta=delta,
        candidates=candidates,
        bound=bound,
        variance=float(clipped.var()),
        clipped=float((differences.abs() > bound).double().mean()),
        unclipped_mean=float(differences.mean()),
        needed=needed_units(clipped, bound, level, method),
        method=method,
    )


def clip_from(before: Tensor, after: Tensor) -> float:
    """B for a certificate, from the losses of a split that the certificate is not made of.

    The size that 1 % of the differences exceed. A smaller B makes the bound tighter, but what it certifies is
    then less of the mean one cares about: a change that harms few units much could pass.

    >>> clip_from(torch.zeros(1001), torch.linspace(-1, 0, 1001)).__round__(3)
    0.99
    """
    sizes = _differences(before, after).abs()
    found = float(torch.quantile(sizes, 1 - CLIPPED_SHARE)) if len(sizes) < 2**24 else float(sizes.max())
    found = found or float(sizes.max())
    if found == 0:
        raise UseError(
            f"both models have the same loss on each of {len(sizes)} units, so there is nothing to certify: "
            "was the change made?"
        )
    return found


def _differences(before: Tensor, after: Tensor) -> Tensor:
    """In float64 on the CPU."""
    for name, losses in (("before", before), ("after", after)):
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            raise UseError(f"{name} is {described(losses)}: give the loss of each unit, in a tensor (m,)")
    if len(before) != len(after):
        raise UseError(
            f"there are {len(before)} losses before and {len(after)} after: they are of the same units, in "
            "the same order"
        )
    if len(before) < 2:
        raise UseError(f"{len(before)} unit(s) have no spread: a certificate takes many units")
    for name, losses in (("before", before), ("after", after)):
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise UseError(
                f"the loss of unit {bad[0]} {name} the change is {float(losses[bad[0]])} ({len(bad)} of "
                f"{len(losses)} are not finite): there is no mean to certify"
            )
    return before.detach().cpu().double() - after.detach().cpu().double()


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
