"""The depth-expansion law: what each further block still takes from the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from theodolite.core.errors import UseError
from theodolite.core.progress import Progress
from theodolite.fits.estimating import fit_law
from theodolite.fits.laws import Law, depth_recursion
from theodolite.fits.points import checked
from theodolite.fits.result import Array, Fit, Form


def depth_expansion(
    *,
    loss: ArrayLike | None = None,
    depth: ArrayLike | None = None,
    growth: float | None = None,
    drop_worst: int = 0,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """Fit `L = E + δ_k`, where each block takes `aδ^s` from the excess loss δ: `δ_{k+1} = δ_k − aδ_k^s`.

    `δ_k = [δ_0^{1−s} + (s−1)ak]^{−1/(s−1)}` at depth k; s near 1 is exponential, s > 1 a power law with
    exponent 1/(s−1) in depth. With `growth` r, for networks whose depth grows as width^r, the constants have
    the exponent in parameters too: `gamma = r/((2+r)(s−1))`, as there are `d²·d^r` parameters at width d.

    >>> depth = np.array([1, 2, 4, 8, 16, 32, 64, 128])
    >>> fit = depth_expansion(depth=depth, loss=2 + 1 / (1 + 0.5 * depth), growth=1, draws=20)
    >>> [round(fit[name].value, 3) for name in ("s", "a", "gamma")]
    [2.0, 0.5, 0.333]
    """
    data = checked("depth-expansion", {"depth": depth, "loss": loss}, zero_allowed=("depth",))
    form = FORM
    if growth is not None:
        if not growth > 0:
            raise UseError(
                f"growth is {growth:g}: it is the r of depth = width^r, and must be above 0 for depth to grow"
            )
        form = replace(FORM, derived=lambda known: {"gamma": growth / ((2 + growth) * (known["s"] - 1))})
    return fit_law(
        form,
        _law,
        data,
        inputs=("depth",),
        drop_worst=drop_worst,
        draws=draws,
        seed=seed,
        progress=progress,
    )


def _law(points: Mapping[str, Array]) -> Law:
    return depth_recursion(points["depth"], points["loss"])


def _predict(constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    u = constants["s"] - 1
    grown = u * constants["a"] * constants["delta_0"] ** u * at["depth"]
    return {"loss": constants["E"] + constants["delta_0"] * np.exp(-np.log1p(grown) / u)}


FORM = Form(
    name="depth-expansion",
    equation="L = E + δ_k, δ_k = [δ₀^(1−s) + (s−1)·a·k]^(−1/(s−1))",
    constants=("delta_0", "E", "a", "s"),
    exponents=("s",),
    scale="depth",
    predicts=("depth",),
    predict=_predict,
)
