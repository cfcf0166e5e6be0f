"""From columns of runs to a Fit: check the points, search, bootstrap, hold out, and say what is not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from theodolite.core.arguments import seed as check_seed
from theodolite.core.arguments import whole
from theodolite.core.errors import UseError
from theodolite.core.progress import Progress
from theodolite.fits.minimizing import Array, Flags, Law, Minimum, bootstrap, minimize
from theodolite.fits.result import Fit, FitEstimate, Form, HeldOutRuns, estimate, symbol

HELD_OUT_SHARE = 0.1
"""Of the points, the largest; with them all that are as large as the smallest of these."""
FEWEST_DRAWS = 20
FEW_SIZES = 4
NARROW = 10.0
"""A range of sizes below this factor is narrow."""
FAINT = 1e-3
"""A term that is nowhere more than this share of the loss is not seen."""
ALIKE = 1e-5
"""Smallest eigenvalue of the normalised normal matrix below which two directions of θ look alike."""


def fit_law(
    form: Form,
    make_law: Callable[[Mapping[str, Array]], Law],
    data: Mapping[str, Array],
    drop_worst: int,
    draws: int,
    seed: int,
    progress: Progress | None,
) -> Fit:
    """Fit a law of the loss to points."""
    points, inputs = without_worst(data, drop_worst, draws, seed), form.predicts
    law = make_law(points)
    num_constants = law.num_constants
    _refuse_too_few(form.name, points, inputs, num_constants)
    log_loss = np.log(points["loss"])
    if progress is not None:
        progress(f"search from {len(law.starts)} starts", 0.0)
    minimum = minimize(law, log_loss)
    _, distinct = np.unique(np.stack([points[name] for name in inputs]), axis=1, return_inverse=True)
    drawn = bootstrap(law, log_loss, minimum.theta, distinct.reshape(-1), draws, seed, progress)
    return made_fit(
        form,
        law.constants(minimum.theta),
        law.constants(drawn),
        [*_search_warnings(law, minimum, in_step=_in_step(points, inputs)), *range_warnings(points, inputs)],
        data=points,
        fitted=np.exp(law.evaluate(minimum.theta[None])[0][0]),
        num_starts=minimum.num_starts,
        num_reached=minimum.num_reached,
        held_out=_hold_out(form, make_law, points, num_constants),
        num_dropped=drop_worst,
        seed=seed,
    )


def checked(
    form: str, columns: Mapping[str, ArrayLike | None], *, zero_allowed: tuple[str, ...] = ()
) -> dict[str, Array]:
    """The columns as arrays of one length, all numbers positive.

    >>> checked("power", {"x": [1, 2], "loss": [3.0, float("nan")]})
    Traceback (most recent call last):
    theodolite.UseError: loss of point 2 is nan: ...
    """
    found = {}
    for name, column in columns.items():
        if column is None:
            raise UseError(f"{form} needs {name}, and there is none. Give {name}=…, one number for each run")
        give = "Give one number for each run"
        try:
            found[name] = np.asarray(column, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise UseError(f"{form}: {name} holds a value that is not a number ({error}). {give}") from None
        if found[name].ndim != 1:
            raise UseError(f"{form}: {name} has {found[name].ndim} dimensions. {give}, in a plain list")
        if not found[name].size:
            raise UseError(f"{form}: {name} is empty. {give}")
    lengths = {name: len(column) for name, column in found.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UseError(f"{form} needs columns of one length, but {said}. Give one number for each run")
    for name, column in found.items():
        bad = ~np.isfinite(column) | (column < 0 if name in zero_allowed else column <= 0)
        if bad.any():
            place = int(np.argmax(bad))
            raise UseError(
                f"{name} of point {place + 1} is {column[place]:g}: every {name} must be a positive number. "
                "Leave that run out, or correct the column"
            )
    return found


def sizes_and_loss(form: str, loss: Any, parameters: Any, tokens: Any, compute: Any) -> dict[str, Array]:
    """The columns parameters, tokens, compute and loss, from two of the first three, by `C = 6ND`."""
    columns = {"parameters": parameters, "tokens": tokens, "compute": compute}
    given = {name: column for name, column in columns.items() if column is not None}
    if len(given) < 2:
        have = " and ".join(given) or "none"
        raise UseError(f"{form} needs two of parameters, tokens and compute (6·N·D); it was given {have}")
    known = checked(form, given)
    if "parameters" not in known:
        known["parameters"] = known["compute"] / (6 * known["tokens"])
    if "tokens" not in known:
        known["tokens"] = known["compute"] / (6 * known["parameters"])
    data = checked(form, {"parameters": known["parameters"], "tokens": known["tokens"], "loss": loss})
    return data | {"compute": 6 * data["parameters"] * data["tokens"]}


def without_worst(data: Mapping[str, Array], drop_worst: int, draws: int, seed: int) -> dict[str, Array]:
    """Without the points of the highest loss. The options of every fit are checked here."""
    num = len(data["loss"])
    whole("draws", draws, least=FEWEST_DRAWS, wanted=f"give at least {FEWEST_DRAWS}, better 1000")
    check_seed("seed", seed)
    whole("drop_worst", drop_worst, least=0, most=num - 1, wanted=f"of {num} points give 0 to {num - 1}")
    kept = np.sort(np.argsort(-data["loss"], kind="stable")[drop_worst:])
    return {name: column[kept] for name, column in data.items()}


def made_fit(
    form: Form,
    values: Mapping[str, Any],
    samples: Mapping[str, Array],
    warnings: Sequence[str],
    **fields: Any,
) -> Fit:
    """The fit, with what is derived from its constants, their intervals, and warnings about these."""
    derived = form.derived or (lambda constants: {})
    drawn, at = {**samples, **derived(samples)}, {**values, **derived(values)}
    constants = {name: estimate(float(value), drawn[name]) for name, value in at.items()}
    said = (*interval_warnings(form, constants), *warnings)
    return Fit(form.name, form.equation, constants, drawn, warnings=said, **fields)


def largest(scale: Array) -> Flags:
    """Which points are the largest: a tenth of them, and all that are as large as the smallest of these.

    >>> largest(np.array([1.0, 2.0, 4.0, 4.0])).tolist()
    [False, False, True, True]
    """
    num = int(np.ceil(HELD_OUT_SHARE * len(scale)))
    return scale >= np.sort(scale)[-num]


def compare(form: Form, what: str, scale: Array, predicted: Array, measured: Array) -> HeldOutRuns:
    """Predictions of the largest points beside what was measured."""
    off = predicted / measured - 1
    return HeldOutRuns(
        what=what,
        num_points=len(off),
        scale=form.scale,
        above=float(scale.min()),
        error=float(np.abs(off).mean()),
        worst=float(off[np.abs(off).argmax()]),
        bias=float(off.mean()),
    )


def range_warnings(data: Mapping[str, Array], names: Iterable[str]) -> list[str]:
    """Too few sizes, or too narrow a range of them."""
    found = []
    for name in names:
        column = data[name]
        distinct = len(np.unique(column))
        factor = column.max() / max(column.min(), 1.0 if name == "depth" else 0)
        if distinct < FEW_SIZES:
            found.append(
                f"There are only {distinct} different values of {name}: a curve through so few fits by "
                f"itself. Run at least {FEW_SIZES}, better six."
            )
        elif factor < NARROW:
            found.append(
                f"{name} spans a factor of {factor:.3g} only. What holds over less than one decade says "
                "little about the next: add smaller or larger runs."
            )
    return found


def interval_warnings(form: Form, constants: Mapping[str, FitEstimate]) -> list[str]:
    """Exponents whose interval is missing, or wider than they are."""
    found = []
    for name in form.exponents:
        one, sign = constants[name], symbol(name)
        # An s of the depth recursion is told from 1, where the power law ends.
        size, beyond = (abs(one.value - 1), f"{sign} − 1") if name == "s" else (abs(one.value), sign)
        if not np.isfinite(one.high - one.low):
            found.append(
                f"There is no interval for {sign}: the runs leave no residuals to estimate the noise from. "
                "Run more sizes."
            )
        elif not one.low <= one.value <= one.high:
            found.append(
                f"The interval of {sign}, {one.low:.3g} to {one.high:.3g}, does not hold its value "
                f"({one.value:.3g}): noise moves this fit to one side. Leave outliers out, or run more sizes."
            )
        elif one.high - one.low > size:
            found.append(
                f"The data do not determine {sign}: its interval, {one.low:.3g} to {one.high:.3g}, "
                f"is wider than {beyond} itself ({size:.3g}). Do not extrapolate with it."
            )
    return found


def _search_warnings(law: Law, minimum: Minimum, *, in_step: bool) -> list[str]:
    """What the optimum itself shows: bounds, terms that are not seen, directions that look alike."""
    theta = minimum.theta
    found = [
        f"The search ended on a bound of {symbol(name)}: the data push it as far as it may go, so its "
        "value is the bound's and not the data's."
        for place, name in law.bounded.items()
        if min(theta[place] - law.low[place], law.high[place] - theta[place]) < 1e-6
    ]
    derivative = law.evaluate(theta[None])[1][0]
    shares = theta[: len(law.terms), None] * derivative[: len(law.terms)]
    unseen = [name for name, share in zip(law.terms, shares, strict=True) if share.max() < FAINT]
    for name in unseen:
        what, add = f"The term of {symbol(name)} is nowhere more than {FAINT:.1%} of the loss", "it matters"
        if name == "E":
            what, add = "No irreducible loss is seen (E is next to nothing)", "the loss comes closer to it"
        found.append(f"{what}: the data cannot determine it. Add runs where {add}.")
    lengths = np.linalg.norm(derivative, axis=1, keepdims=True)
    unit = derivative / np.where(lengths > 0, lengths, 1.0)
    if in_step or (not unseen and np.linalg.eigvalsh(unit @ unit.T)[0] < ALIKE):
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


def _in_step(points: Mapping[str, Array], inputs: tuple[str, ...]) -> bool:
    """Is each input a power of the others?"""
    if len(inputs) < 2:
        return False
    logs = np.log([points[name] for name in inputs])
    return bool(np.linalg.eigvalsh(np.corrcoef(logs))[0] < ALIKE)


def _hold_out(
    form: Form,
    make_law: Callable[[Mapping[str, Array]], Law],
    points: Mapping[str, Array],
    num_constants: int,
) -> HeldOutRuns | None:
    """Fit without the largest points and predict them; None where too few would be left."""
    out = largest(points[form.scale])
    seen = {name: column[~out] for name, column in points.items()}
    if len(seen["loss"]) <= num_constants or any(len(np.unique(seen[n])) < 2 for n in form.predicts):
        return None
    law = make_law(seen)
    values = law.constants(minimize(law, np.log(seen["loss"])).theta)
    assert form.predict is not None
    predicted = form.predict(values, {name: points[name][out] for name in form.predicts})["loss"]
    return compare(form, "loss", points[form.scale][out], predicted, points["loss"][out])


def _refuse_too_few(form: str, data: Mapping[str, Array], names: tuple[str, ...], num_constants: int) -> None:
    """Refuse fewer points, or fewer distinct sizes, than there are constants to find."""
    num = len(data["loss"])
    if num <= num_constants:
        raise UseError(
            f"{form} has {num_constants} constants and there are {num} points: at least {num_constants + 1} "
            "are needed. Run more sizes, or fit a form with fewer constants"
        )
    for name in names:
        if len(np.unique(data[name])) < 2:
            raise UseError(
                f"{form}: {name} is {data[name][0]:g} at every point, so nothing can be said of how the loss "
                f"depends on it. Add runs with other {name}, or fit a form without it"
            )
