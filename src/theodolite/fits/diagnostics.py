"""What the data cannot tell, in plain words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from theodolite.fits.laws import Law
from theodolite.fits.minimizing import Minimum, on_bounds
from theodolite.fits.result import Array, Estimate, Form

FEW_SIZES = 4
NARROW = 10.0
"""A range of sizes below this factor is narrow."""
FAINT = 1e-3
"""A term that is nowhere more than this share of the loss is not seen."""
ALIKE = 1e-5
"""Smallest eigenvalue of the normalised normal matrix below which two directions of θ look alike."""

_GREEK = {"alpha": "α", "beta": "β", "delta_0": "δ₀", "gamma": "γ"}


def symbol(name: str) -> str:
    """A constant as a reader knows it.

    >>> symbol("alpha"), symbol("A")
    ('α', 'A')
    """
    return _GREEK.get(name, name)


def of_ranges(data: Mapping[str, Array], names: Iterable[str]) -> list[str]:
    """Too few sizes, or too narrow a range of them."""
    found = []
    for name in names:
        column = data[name]
        distinct, range_ = (
            len(np.unique(column)),
            column.max() / max(column.min(), 1.0 if name == "depth" else 0),
        )
        if distinct < FEW_SIZES:
            found.append(
                f"There are only {distinct} different values of {name}: a curve through so few fits by "
                f"itself. Run at least {FEW_SIZES}, better six."
            )
        elif range_ < NARROW:
            found.append(
                f"{name} spans a factor of {range_:.3g} only. What holds over less than one decade says "
                f"little about the next: add smaller or larger runs."
            )
    return found


def of_intervals(form: Form, constants: Mapping[str, Estimate]) -> list[str]:
    """Exponents whose interval is wider than they are."""
    found = []
    for name in form.exponents:
        one = constants[name]
        # An s of the depth recursion is told from 1, where the power law ends.
        size = abs(one.value - 1) if name == "s" else abs(one.value)
        if not np.isfinite(one.high - one.low):
            found.append(
                f"There is no interval for {symbol(name)}: the runs leave nothing to tell the noise by. "
                "Run more sizes."
            )
        elif not one.low <= one.value <= one.high:
            found.append(
                f"The interval of {symbol(name)}, {one.low:.3g} to {one.high:.3g}, does not hold its value "
                f"({one.value:.3g}): noise moves this fit to one side. Leave outliers out, or run more sizes."
            )
        elif one.high - one.low > size:
            beyond = f"{symbol(name)} − 1" if name == "s" else symbol(name)
            found.append(
                f"The data do not determine {symbol(name)}: its interval, {one.low:.3g} to {one.high:.3g}, "
                f"is wider than {beyond} itself ({size:.3g}). Do not extrapolate with it."
            )
    return found


def of_search(law: Law, minimum: Minimum) -> list[str]:
    """What the optimum itself shows: bounds, terms that are not seen, directions that look alike."""
    theta, found = minimum.theta, []
    for name in on_bounds(law, theta):
        found.append(
            f"The search ended on a bound of {symbol(name)}: the data push it as far as it may go, so its "
            "value is the bound's and not the data's."
        )
    shares = law.shares(theta)
    unseen = [name for name, share in shares.items() if share.max() < FAINT]
    for name in unseen:
        what = (
            "No irreducible loss is seen (E is next to nothing)"
            if name == "E"
            else f"The term of {symbol(name)} is nowhere more than {FAINT:.1%} of the loss"
        )
        remedy = "runs that come closer to it" if name == "E" else "runs where it matters"
        found.append(f"{what}: the data cannot determine it. Add {remedy}.")
    if not unseen and _smallest_eigenvalue(law, theta) < ALIKE:
        found.append(
            "Some of the constants can be traded against one another without changing the fit: the normal "
            "matrix is nearly singular. Add runs where the inputs vary separately, not in step."
        )
    if minimum.num_reached < max(2, 0.05 * minimum.num_starts):
        found.append(
            f"Only {minimum.num_reached} of {minimum.num_starts} starts reached this optimum: there may be a "
            "better one that none has found."
        )
    return found


def _smallest_eigenvalue(law: Law, theta: Array) -> float:
    """Of the derivatives' Gram matrix, each brought to unit length: 1 if all differ, 0 if some are alike."""
    derivative = law.evaluate(theta[None])[1][0]
    lengths = np.linalg.norm(derivative, axis=1, keepdims=True)
    unit = derivative / np.where(lengths > 0, lengths, 1.0)
    return float(np.linalg.eigvalsh(unit @ unit.T)[0])
