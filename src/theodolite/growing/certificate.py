"""Is the loss lower after a change than before? A statement with a bounded probability of being wrong.

Both models have a loss for each of some examples that were not used to make or choose the change. The mean
of the differences `d = before − after`, clipped to [−B, B], is bounded from below at level δ. The bounds hold
for any distribution on that range and any number of independent examples; they are not approximations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from theodolite.core import arguments
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, counted

Method = Literal["bernstein", "betting"]
CLIPPED_SHARE = 0.01
"""The share of the differences of the second split that lies beyond B."""
STAKE = 0.75
"""The largest share of the capital that is bet on one example."""


@dataclass(frozen=True)
class Certificate(Result):
    """What a sample of examples says about the mean difference of two losses. Made by `certificate`."""

    kind: ClassVar[str] = "certificate"
    loads: ClassVar[bool] = True

    mean: float
    """Of the clipped differences `before − after`: above 0, the loss fell."""
    lower: float
    """Lower bound of the true mean of the clipped difference, at level δ."""
    upper: float
    """Upper bound, at level δ: each of the two separately."""
    examples: int
    delta: float
    """The probability that the lower bound of any candidate is wrong."""
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
    """Examples needed at this mean and variance for a lower bound above 0; None if no number is enough."""
    method: Method = "bernstein"

    @property
    def holds(self) -> bool:
        """Is it certified that the mean clipped difference is above 0?"""
        return self.lower > 0

    @property
    def harms(self) -> bool:
        """Is it certified that it is below 0?"""
        return self.upper < 0

    @property
    def verdict(self) -> str:
        """What is certified, in one sentence."""
        if self.holds:
            return f"certified: the mean clipped loss of an example falls by at least {self.lower:.3g}"
        if self.harms:
            return (
                f"certified to harm: the mean clipped loss of an example rises by at least {-self.upper:.3g}"
            )
        if self.needed is None:
            return "not certified: the loss did not fall on these examples, and more like them do not help"
        about = "about " if self.method == "betting" else ""
        return (
            f"not certified: the lower bound is {self.lower:.3g}. At this mean and spread {about}"
            f"{self.needed:,} examples are needed, and there are {self.examples:,}"
        )

    title = verdict

    def blocks(self) -> Iterator[Block]:
        """What is certified, its numbers, and what is not certified."""
        name = "empirical Bernstein" if self.method == "bernstein" else "betting"
        rows = [
            ("difference", f"{self.mean:.4g}, mean of {self.examples:,} examples"),
            (
                "bounds",
                f"{self.lower:.4g} to {self.upper:.4g}, each at {_percent(1 - self.delta)} by {name}",
            ),
            (
                "clipping",
                f"to ±{self.bound:.4g}: {_percent(self.clipped)} of the differences are beyond; the "
                f"unclipped mean is {self.unclipped_mean:.4g}",
            ),
        ]
        wrong = _percent(self.delta)
        if self.candidates > 1:
            level = (
                f"{self.candidates}, each at δ = {self.delta / self.candidates:.3g}, so that all bounds hold"
            )
            rows.append(("candidates", f"{level} together"))
            wrong += f" for all {self.candidates} candidates together"
        yield self.verdict
        yield Table(("quantity", "value"), rows)
        yield (
            "This is about the mean of the clipped difference over the distribution that these examples were "
            "drawn from, independently, for this one pair of models. The probability of being wrong is at "
            f"most {wrong}, for each of the two verdicts, gain and harm. It is not about the unclipped mean "
            "or about other data. It does not say that a new block is the cause, nor that further training "
            "keeps the gain."
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
        before: the loss of each example, (m,), from `theodolite.probes.example_losses.losses_of`.
        after: of the same examples in the same order.
        bound: B. It must be fixed without looking at these losses: see `clip_from`.
        delta: the probability of being wrong.
        candidates: how many pairs are certified on the same examples: δ is divided among them.
        method: `bernstein`, or `betting`, which needs about a third as many examples. Choose before looking.

    >>> torch.manual_seed(0)
    <...>
    >>> before = torch.rand(500)
    >>> found = certificate(before, before - 0.1 + 0.2 * torch.randn(500), bound=0.6)
    >>> found.holds, round(found.mean, 3), round(found.lower, 3), found.needed
    (True, 0.097, 0.051, 189)
    """
    level = _level(delta, candidates, method)
    arguments.positive("bound", bound, wanted="differences are clipped to ±bound, a finite number above 0")
    differences = _differences(before, after)
    require_examples(len(differences), delta, candidates, method)
    clipped = differences.clamp(-bound, bound)
    return Certificate(
        mean=float(clipped.mean()),
        lower=lower_bound(clipped, bound, level, method),
        upper=-lower_bound(-clipped, bound, level, method),
        examples=len(clipped),
        delta=delta,
        candidates=candidates,
        bound=bound,
        variance=float(clipped.var()),
        clipped=float((differences.abs() > bound).double().mean()),
        unclipped_mean=float(differences.mean()),
        needed=needed_examples(clipped, bound, level, method),
        method=method,
    )


def clip_from(before: Tensor, after: Tensor) -> float:
    """B for a certificate, from the losses of a split that is not certified on.

    The size that 1 % of the differences exceed. A smaller B gives a tighter bound, but certifies less of the
    mean one cares about: a change that harms few examples a lot could pass.

    >>> clip_from(torch.zeros(1001), torch.linspace(-1, 0, 1001)).__round__(3)
    0.99
    """
    sizes = _differences(before, after).abs()
    found = float(torch.quantile(sizes, 1 - CLIPPED_SHARE)) if len(sizes) < 2**24 else float(sizes.max())
    found = found or float(sizes.max())
    if found == 0:
        raise UseError(
            f"both models have the same loss on each of {len(sizes)} examples, so there is nothing to "
            "certify: was the change made?"
        )
    return found


def least_examples(delta: float = 0.05, candidates: int = 1, method: Method = "bernstein") -> int:
    """With fewer examples than this no certificate can hold, whatever the losses are.

    >>> least_examples(), least_examples(candidates=10), least_examples(method="betting")
    (19, 29, 6)
    """
    level = _level(delta, candidates, method)
    number = 2
    if method == "bernstein":
        return max(number, math.floor(1 + 14 * math.log(2 / level) / 3) + 1)
    zero = torch.tensor([0.5], dtype=torch.float64)
    while True:
        unit = torch.ones(number, dtype=torch.float64)
        if _capital(unit, _stakes(unit, level), zero) >= math.log(1 / level):
            return number
        number += 1


def require_examples(number: int, delta: float, candidates: int, method: Method) -> None:
    """Refuse a sample that is too small to certify anything."""
    least = least_examples(delta, candidates, method)
    if number < least:
        raise UseError(
            f"{counted(number, 'example')} to certify on {'is' if number == 1 else 'are'} too few: at delta "
            f"{delta} for {counted(candidates, 'candidate')}, {method} needs at least {least}, even if every "
            "example has the largest gain, and usually some hundreds or thousands. Give more data"
        )


def lower_bound(values: Tensor, bound: float, delta: float, method: Method = "bernstein") -> float:
    """A lower bound of the mean of values in [−B, B], wrong with a probability of at most δ.

    `bernstein` (Maurer and Pontil 2009, Theorem 4, for a range of 2B), with V the unbiased sample variance:

        x̄ − √(2V ln(2/δ)/m) − 14B ln(2/δ)/(3(m−1))

    `betting` (Waudby-Smith and Ramdas 2024): for each candidate mean, a game that is fair if it is the true
    mean. The stakes depend on earlier examples only. The bound is the largest mean at which the capital ever
    reaches 1/δ, which happens in a fair game with a probability of at most δ (Ville). The examples are
    shuffled with a fixed seed, because the given order may depend on the losses.

    >>> values = torch.tensor([0.5] * 80 + [-0.5] * 20)
    >>> round(lower_bound(values, 0.5, 0.05), 3), round(lower_bound(values, 0.5, 0.05, "betting"), 3)
    (0.104, 0.202)
    """
    if method == "bernstein":
        return _by_bernstein(float(values.mean()), float(values.var()), len(values), bound, delta)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    unit = (values.double().cpu()[order] + bound) / (2 * bound)  # in [0, 1]
    stakes = _stakes(unit, delta)
    low, high = 0.0, 1.0
    # The capital falls with the candidate mean: finer and finer grids find where it last reaches 1/δ.
    for _ in range(6):
        means = torch.linspace(low, high, 33, dtype=torch.float64)[1:-1]
        reached = int((_capital(unit, stakes, means) >= math.log(1 / delta)).sum())
        step = (high - low) / 32
        low, high = low + reached * step, low + (reached + 1) * step
    return min((2 * low - 1) * bound, float(values.mean()))


def needed_examples(values: Tensor, bound: float, delta: float, method: Method = "bernstein") -> int | None:
    """How many examples like these give a lower bound above 0; None if no number is enough.

    For `bernstein` exact, at the same mean and variance. For `betting` approximate, for the same
    distribution: ln(1/δ) over the best growth of the capital, `max_λ mean ln(1 + λx)`.
    """
    mean = float(values.mean())
    if mean <= 0:
        return None
    if method == "betting":
        least = least_examples(delta, method=method)
        return max(least, math.ceil(math.log(1 / delta) / _growth(values, bound)))
    variance = float(values.var())
    low, high = 1, 2
    while _by_bernstein(mean, variance, high, bound, delta) <= 0:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _by_bernstein(mean, variance, middle, bound, delta) > 0:
            high = middle
        else:
            low = middle
    return high


def _level(delta: float, candidates: int, method: Method) -> float:
    """The level of one candidate: δ over their number (Bonferroni)."""
    if not (arguments.is_number(delta) and 1e-300 < delta < 1):
        raise UseError(
            f"delta is {delta}: give the probability of being wrong, between 1e-300 and 1, as 0.05"
        )
    arguments.whole("candidates", candidates, least=1)
    arguments.one_of("method", method, get_args(Method))
    return delta / candidates


def _by_bernstein(mean: float, variance: float, number: int, bound: float, delta: float) -> float:
    log = math.log(2 / delta)
    return mean - math.sqrt(2 * variance * log / number) - 14 * bound * log / (3 * (number - 1))


def _stakes(unit: Tensor, delta: float) -> Tensor:
    """What is staked on each example, from earlier examples only."""
    count = torch.arange(1, len(unit) + 1, dtype=torch.float64)
    centre = (0.5 + unit.cumsum(0)) / (count + 1)
    variance = (0.25 + (unit - centre).square().cumsum(0)) / (count + 1)
    known = torch.cat([variance.new_tensor([0.25]), variance[:-1]])
    return (2 * math.log(1 / delta) / (len(unit) * known)).sqrt()


def _capital(unit: Tensor, stakes: Tensor, means: Tensor) -> Tensor:
    """By mean, the logarithm of the largest capital in a game that pays `1 + λ_t(x_t − mean)`, 0 ≤ x ≤ 1."""
    kept = torch.minimum(stakes, STAKE / means[:, None])
    return (kept * (unit - means[:, None])).log1p().cumsum(1).amax(1)


def _growth(values: Tensor, bound: float) -> float:
    """`max_λ mean ln(1 + λx)`, above 0 as the mean is."""
    from scipy.optimize import minimize_scalar  # slow to import

    values = values.double()
    found = minimize_scalar(
        lambda stake: -float((stake * values).log1p().mean()), bounds=(0.0, STAKE / bound), method="bounded"
    )
    mean, square = float(values.mean()), float(values.square().mean())
    small = min(STAKE / bound, mean / square) / 2  # for a growth below the tolerance of the search
    return max(-float(found.fun), float((small * values).log1p().mean()), 1e-300)


def _differences(before: Tensor, after: Tensor) -> Tensor:
    """In float64 on the CPU."""
    both = (("before", before), ("after", after))
    for name, losses in both:
        if not isinstance(losses, Tensor) or losses.ndim != 1:
            raise UseError(f"{name} is {described(losses)}: give the loss of each example, in a tensor (m,)")
    if len(before) != len(after):
        raise UseError(
            f"there are {len(before)} losses before and {len(after)} after: give those of the same examples, "
            "in the same order"
        )
    if len(before) < 2:
        raise UseError(f"{len(before)} example(s) have no spread: a certificate needs many")
    for name, losses in both:
        bad = (~losses.isfinite()).nonzero().flatten().tolist()
        if bad:
            raise UseError(
                f"the loss of example {bad[0]} {name} the change is {float(losses[bad[0]])} ({len(bad)} of "
                f"{len(losses)} are not finite): there is no mean to certify"
            )
    return before.detach().cpu().double() - after.detach().cpu().double()


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
