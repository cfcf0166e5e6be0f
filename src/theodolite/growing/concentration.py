"""How far below the mean of a sample the true mean may lie: two bounds for values between −B and B.

Both hold for any distribution on that range and any number of independent units. Neither is an approximation.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from theodolite.core.errors import UseError

Method = Literal["bernstein", "betting"]
METHODS: tuple[str, ...] = get_args(Method)

STAKE = 0.75
"""The largest share of the capital that is staked on one unit."""


def lower_bound(values: Tensor, bound: float, delta: float, method: Method = "bernstein") -> float:
    """A number that the mean of values in [−B, B] lies below with a probability of at most δ.

    `bernstein` (Maurer and Pontil 2009, Theorem 4, for a range of 2B), with V the unbiased sample variance:

        x̄ − √(2V ln(2/δ)/m) − 14B ln(2/δ)/(3(m−1))

    `betting` (Waudby-Smith and Ramdas 2024): for each number a game that is fair if it is the true mean. The
    stakes depend on earlier units only. The bound is the largest number at which the capital ever reaches
    1/δ, which it does in a fair game with a probability of at most δ (Ville). The units come in an order that
    is drawn once and for all, as the given one may know of the losses.

    >>> values = torch.tensor([0.5] * 80 + [-0.5] * 20)
    >>> round(lower_bound(values, 0.5, 0.05), 3), round(lower_bound(values, 0.5, 0.05, "betting"), 3)
    (0.104, 0.202)
    """
    if method == "betting":
        return _by_betting(values, bound, delta)
    return _by_bernstein(float(values.mean()), float(values.var()), len(values), bound, delta)


def least_units(delta: float = 0.05, candidates: int = 1, method: Method = "bernstein") -> int:
    """With fewer units than this no certificate can hold, whatever the losses are.

    >>> least_units(), least_units(candidates=10), least_units(method="betting")
    (19, 29, 6)
    """
    level = checked_level(delta, candidates, method)
    number = 2
    if method == "bernstein":
        return max(number, math.floor(1 + 14 * math.log(2 / level) / 3) + 1)
    zero = torch.tensor([0.5], dtype=torch.float64)
    while _capital(torch.ones(number, dtype=torch.float64), level, zero) < math.log(1 / level):
        number += 1
    return number


def needed_units(values: Tensor, bound: float, delta: float, method: Method = "bernstein") -> int | None:
    """How many units it takes until the bound is above 0, if they are like these; None: no number would.

    By `bernstein` for the same mean and variance, exactly. By `betting` for the same distribution, about:
    ln(1/δ) over the best growth of the capital, `max_λ mean ln(1 + λx)`.
    """
    mean = float(values.mean())
    if mean <= 0:
        return None
    if method == "betting":
        return max(least_units(delta, method=method), math.ceil(math.log(1 / delta) / _growth(values, bound)))
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


def checked_level(delta: float, candidates: int, method: Method) -> float:
    """The level of one candidate: δ over their number (Bonferroni)."""
    if not 1e-300 < delta < 1:
        raise UseError(f"delta is {delta}: it is the chance of being wrong, between 1e-300 and 1, as 0.05")
    if isinstance(candidates, bool) or not isinstance(candidates, int) or candidates < 1:
        raise UseError(
            f"candidates is {candidates!r}: it is how many pairs are certified on these units, 1 or more"
        )
    if method not in METHODS:
        raise UseError(f"method is {method!r}: it is one of {', '.join(METHODS)}")
    return delta / candidates


def _by_bernstein(mean: float, variance: float, number: int, bound: float, delta: float) -> float:
    log = math.log(2 / delta)
    return mean - math.sqrt(2 * variance * log / number) - 14 * bound * log / (3 * (number - 1))


def _by_betting(values: Tensor, bound: float, delta: float) -> float:
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(0))
    unit = (values.double().cpu()[order] + bound) / (2 * bound)  # in [0, 1]
    low, high = 0.0, 1.0
    # The capital falls with the mean that is bet against: ever finer grids find where it last reaches 1/δ.
    for _ in range(6):
        means = torch.linspace(low, high, 33, dtype=torch.float64)[1:-1]
        reached = int((_capital(unit, delta, means) >= math.log(1 / delta)).sum())
        step = (high - low) / 32
        low, high = low + reached * step, low + (reached + 1) * step
    return min((2 * low - 1) * bound, float(values.mean()))


def _capital(unit: Tensor, delta: float, means: Tensor) -> Tensor:
    """By mean, the logarithm of the largest capital in a game that pays `1 + λ_t(x_t − mean)`, 0 ≤ x ≤ 1."""
    count = torch.arange(1, len(unit) + 1, dtype=torch.float64)
    centre = (0.5 + unit.cumsum(0)) / (count + 1)
    variance = (0.25 + (unit - centre).square().cumsum(0)) / (count + 1)
    known = torch.cat([variance.new_tensor([0.25]), variance[:-1]])  # from the units before only
    stake = (2 * math.log(1 / delta) / (len(unit) * known)).sqrt()
    stakes = torch.minimum(stake, STAKE / means[:, None])
    return (stakes * (unit - means[:, None])).log1p().cumsum(1).amax(1)


def _growth(values: Tensor, bound: float) -> float:
    """`max_λ mean ln(1 + λx)`, above 0 as the mean is."""
    values = values.double()
    from scipy.optimize import minimize_scalar  # slow to import

    found = minimize_scalar(
        lambda stake: -float((stake * values).log1p().mean()), bounds=(0.0, STAKE / bound), method="bounded"
    )
    mean, square = float(values.mean()), float(values.square().mean())
    small = min(STAKE / bound, mean / square) / 2  # where the search's tolerance hides a growth this small
    return max(-float(found.fun), float((small * values).log1p().mean()), 1e-300)
