"""From points to a Fit, for laws of the loss: search, bootstrap, hold out, doubt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from theodolite.core.errors import UseError
from theodolite.core.progress import Progress
from theodolite.fits import diagnostics
from theodolite.fits.laws import Law
from theodolite.fits.minimizing import bootstrap, minimize
from theodolite.fits.points import enough, without_worst
from theodolite.fits.result import Array, Estimate, Fit, Flags, Form, HeldOut, estimate

HELD_OUT_SHARE = 0.1
"""Of the points, the largest; with them all that are as large as the smallest of these."""


def fit_law(
    form: Form,
    make_law: Callable[[Mapping[str, Array]], Law],
    data: Mapping[str, Array],
    *,
    inputs: tuple[str, ...],
    drop_worst: int,
    draws: int,
    seed: int,
    progress: Progress | None,
) -> Fit:
    """Fit a law to points; `inputs` are the columns it depends on."""
    check_draws(form.name, draws)
    points = without_worst(form.name, data, drop_worst)
    law = make_law(points)
    enough(form.name, points, inputs, law.starts.shape[1])
    log_loss = np.log(points["loss"])
    if progress is not None:
        progress(f"search from {len(law.starts)} starts", 0.0)
    minimum = minimize(law, log_loss)
    _, distinct = np.unique(np.stack([points[name] for name in inputs]), axis=1, return_inverse=True)
    drawn = bootstrap(
        law,
        log_loss,
        minimum.theta,
        distinct=distinct.reshape(-1),
        draws=draws,
        seed=seed,
        progress=progress,
    )
    constants, samples = estimates(form, law.constants(minimum.theta), law.constants(drawn))
    said = diagnostics.of_search(law, minimum)
    said += diagnostics.of_intervals(form, constants) + diagnostics.of_ranges(points, inputs)
    return Fit(
        form=form,
        constants=constants,
        samples=samples,
        data=points,
        fitted=np.exp(law.evaluate(minimum.theta[None])[0][0]),
        num_starts=minimum.num_starts,
        num_reached=minimum.num_reached,
        held_out=_hold_out(form, make_law, points, inputs),
        warnings=tuple(said),
        num_dropped=drop_worst,
        seed=seed,
    )


def estimates(
    form: Form, values: Mapping[str, Any], samples: Mapping[str, Array]
) -> tuple[dict[str, Estimate], dict[str, Array]]:
    """The constants with their intervals, and all their draws; with them what is derived from them."""
    drawn = {name: samples[name] for name in form.constants}
    at = {name: values[name] for name in form.constants}
    if form.derived is not None:
        drawn, at = drawn | form.derived(drawn), at | form.derived(at)
    return {name: estimate(float(value), drawn[name]) for name, value in at.items()}, drawn


def check_draws(form: str, draws: int) -> None:
    """Refuse a bootstrap too small for an interval."""
    if draws < 20:
        raise UseError(
            f"{form}: {draws} draws of the bootstrap give no interval. Give at least 20, better 1000"
        )


def largest(scale: Array) -> Flags:
    """Which points are the largest: a tenth of them, and all that are as large as the smallest of these.

    >>> largest(np.array([1.0, 2.0, 4.0, 4.0])).tolist()
    [False, False, True, True]
    """
    num = int(np.ceil(HELD_OUT_SHARE * len(scale)))
    return scale >= np.sort(scale)[-num]


def compare(form: Form, what: str, scale: Array, predicted: Array, measured: Array) -> HeldOut:
    """What was foretold of the largest points beside what was measured."""
    off = predicted / measured - 1
    return HeldOut(
        what=what,
        num_points=len(off),
        scale=form.scale,
        above=float(scale.min()),
        error=float(np.abs(off).mean()),
        worst=float(off[np.abs(off).argmax()]),
        bias=float(off.mean()),
    )


def _hold_out(
    form: Form,
    make_law: Callable[[Mapping[str, Array]], Law],
    points: Mapping[str, Array],
    inputs: tuple[str, ...],
) -> HeldOut | None:
    """Fit without the largest points and foretell them; None where too few would be left."""
    out = largest(points[form.scale])
    seen = {name: column[~out] for name, column in points.items()}
    if not seen["loss"].size:
        return None
    law = make_law(seen)
    if len(seen["loss"]) <= law.starts.shape[1] or any(len(np.unique(seen[name])) < 2 for name in inputs):
        return None
    values = law.constants(minimize(law, np.log(seen["loss"])).theta)
    assert form.predict is not None
    at = {name: points[name][out] for name in form.predicts}
    return compare(
        form, "loss", points[form.scale][out], form.predict(values, at)["loss"], points["loss"][out]
    )
