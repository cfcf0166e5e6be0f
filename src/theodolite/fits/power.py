"""A power law in one variable: the loss against parameters, tokens, compute, steps, width, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from theodolite.core.progress import Progress
from theodolite.fits.estimating import fit_law
from theodolite.fits.laws import Law, sum_of_powers
from theodolite.fits.points import checked
from theodolite.fits.result import Array, Fit, Form


def power(
    *,
    loss: ArrayLike | None = None,
    x: ArrayLike | None = None,
    offset: bool = True,
    drop_worst: int = 0,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """Fit `L = E + A·x^−α`, or `L = A·x^−α` with `offset=False`.

    The search and the intervals are those of `chinchilla`. An offset makes α larger: where the runs are far
    from E, a law without one fits them as well and says something else of the next decade.

    >>> fit = power(x=[1, 2, 4, 8, 16, 32], loss=[4.0, 3.0, 2.5, 2.25, 2.125, 2.0625], draws=20)
    >>> round(fit["alpha"].value, 3), round(fit.predict(x=64).value, 3)
    (1.0, 2.031)
    """
    data = checked("power", {"x": x, "loss": loss})
    return fit_law(
        WITH_OFFSET if offset else WITHOUT_OFFSET,
        _with_offset if offset else _without_offset,
        data,
        inputs=("x",),
        drop_worst=drop_worst,
        draws=draws,
        seed=seed,
        progress=progress,
    )


def _with_offset(points: Mapping[str, Array]) -> Law:
    return sum_of_powers(points, points["loss"], {"x": ("A", "alpha"), "": ("E", "")})


def _without_offset(points: Mapping[str, Array]) -> Law:
    return sum_of_powers(points, points["loss"], {"x": ("A", "alpha")})


def _predict(constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss": constants.get("E", 0.0) + constants["A"] * at["x"] ** -constants["alpha"]}


WITH_OFFSET = Form(
    name="power",
    equation="L = E + A·x^−α",
    constants=("A", "E", "alpha"),
    exponents=("alpha",),
    scale="x",
    predicts=("x",),
    predict=_predict,
)
WITHOUT_OFFSET = Form(
    name="power",
    equation="L = A·x^−α",
    constants=("A", "alpha"),
    exponents=("alpha",),
    scale="x",
    predicts=("x",),
    predict=_predict,
)
