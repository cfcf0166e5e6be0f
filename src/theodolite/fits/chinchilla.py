"""Chinchilla's law: the loss against parameters and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

from theodolite.core.progress import Progress
from theodolite.fits.estimating import fit_law
from theodolite.fits.laws import Law, sum_of_powers
from theodolite.fits.points import checked, compute_split
from theodolite.fits.result import Array, Fit, Form


def chinchilla(
    *,
    loss: ArrayLike | None = None,
    parameters: ArrayLike | None = None,
    tokens: ArrayLike | None = None,
    compute: ArrayLike | None = None,
    drop_worst: int = 0,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """Fit `L = E + A·N^−α + B·D^−β` to runs of several sizes N on several amounts of data D.

    Two of parameters (N), tokens (D) and compute (`C = 6ND`) are needed. `Fit.predict(parameters=, tokens=)`
    gives the loss, `Fit.optimal(compute=)` the split with the lowest loss, `N* = G(C/6)^{β/(α+β)}` and
    `D* = (C/6)^{α/(α+β)}/G` with `G = (αA/βB)^{1/(α+β)}`; `p = β/(α+β)` is shown with the constants.

    Huber's loss (δ = 1e-3) of the log residuals is summed and minimised by BFGS from 72 starts; intervals
    are the 95 % percentiles of `draws` fits to points drawn with replacement. `drop_worst` leaves out the
    points of the highest loss. Hoffmann et al., arXiv:2203.15556; Besiroglu et al., arXiv:2404.10102.

    >>> import numpy as np
    >>> n, d = map(np.ravel, np.meshgrid(np.logspace(7, 10, 6), np.logspace(9, 12, 6)))
    >>> fit = chinchilla(parameters=n, tokens=d, loss=1.8 + 480 * n**-0.35 + 2100 * d**-0.37, draws=20)
    >>> round(fit["alpha"].value, 4), round(fit["E"].value, 4)
    (0.35, 1.8)
    """
    split = compute_split("chinchilla", parameters, tokens, compute)
    data = checked("chinchilla", {**split, "loss": loss})
    data["compute"] = 6 * data["parameters"] * data["tokens"]
    return fit_law(
        FORM,
        _law,
        data,
        inputs=("parameters", "tokens"),
        drop_worst=drop_worst,
        draws=draws,
        seed=seed,
        progress=progress,
    )


def _law(points: Mapping[str, Array]) -> Law:
    terms = {"parameters": ("A", "alpha"), "tokens": ("B", "beta"), "": ("E", "")}
    return sum_of_powers(points, points["loss"], terms)


def _predict(constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    of_size = constants["A"] * at["parameters"] ** -constants["alpha"]
    of_data = constants["B"] * at["tokens"] ** -constants["beta"]
    return {"loss": constants["E"] + of_size + of_data}


def _optimal(constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    alpha, beta = constants["alpha"], constants["beta"]
    product = at["compute"] / 6
    balance = (alpha * constants["A"] / (beta * constants["B"])) ** (1 / (alpha + beta))
    best = {
        "parameters": balance * product ** (beta / (alpha + beta)),
        "tokens": product ** (alpha / (alpha + beta)) / balance,
    }
    return best | _predict(constants, best)


FORM = Form(
    name="chinchilla",
    equation="L = E + A·N^−α + B·D^−β",
    constants=("A", "B", "E", "alpha", "beta"),
    exponents=("alpha", "beta"),
    scale="compute",
    predicts=("parameters", "tokens"),
    predict=_predict,
    optimal_at="compute",
    optimal=_optimal,
    derived=lambda constants: {"p": constants["beta"] / (constants["alpha"] + constants["beta"])},
)
