"""Laws of the loss and their fits: Chinchilla's, a power law, depth expansion.

A `Law` gives `log L̂` as a function of free parameters θ, with its derivative. Sizes enter as logarithms
around their mean, so that a factor and its exponent do not pull at each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from theodolite.core.arguments import positive
from theodolite.core.progress import Progress
from theodolite.fits import plots
from theodolite.fits.estimating import checked, fit_law, sizes_and_loss
from theodolite.fits.minimizing import Array, Law
from theodolite.fits.result import Fit, Form
from theodolite.present.figure import Figure, Panel

STEEPEST = 10.0
"""Upper bound of an exponent."""
EXPONENTS = (0.05, 0.2, 0.5, 1.0, 2.0)
"""Where the search starts, in every combination; the factors that go with them are solved for."""
FAINTEST, LARGEST = 1e-6, 150.0
"""A factor, of the loss: it may fall until its term is as good as absent, and rise as far as this."""

Terms = Mapping[str, tuple[str, str]]
"""By input x_j: the names of A_j and α_j in `Σ_j A_j x_j^−α_j`; last, if there is one, `"": ("E", "")`."""
CONSTANT_TERM: Terms = {"": ("E", "")}
POWERS: Terms = {"x": ("A", "alpha")}
SIZES: Terms = {"parameters": ("A", "alpha"), "tokens": ("B", "beta")}


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

    Huber's loss (δ = 1e-3) of the log residuals is summed, and minimised by variable projection: A, B and E
    are solved for at each pair of a grid of exponents, and all five move together from there. Intervals are
    the 95 % percentiles of `draws` fits to points drawn with replacement. `drop_worst` leaves out the
    points of the highest loss. Hoffmann et al., arXiv:2203.15556; Besiroglu et al., arXiv:2404.10102.

    >>> n, d = map(np.ravel, np.meshgrid(np.logspace(7, 10, 6), np.logspace(9, 12, 6)))
    >>> fit = chinchilla(parameters=n, tokens=d, loss=1.8 + 480 * n**-0.35 + 2100 * d**-0.37, draws=20)
    >>> round(fit["alpha"].value, 4), round(fit["E"].value, 4)
    (0.35, 1.8)
    """
    data = sizes_and_loss("chinchilla", loss, parameters, tokens, compute)
    law = partial(sum_of_powers, {**SIZES, **CONSTANT_TERM})
    return fit_law(CHINCHILLA, law, data, drop_worst, draws, seed, progress)


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
    form, terms = (POWER, {**POWERS, **CONSTANT_TERM}) if offset else (POWER_WITHOUT_OFFSET, POWERS)
    return fit_law(form, partial(sum_of_powers, terms), data, drop_worst, draws, seed, progress)


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
    form = DEPTH_EXPANSION
    if growth is not None:
        positive("growth", growth, wanted="it is the r of depth = width^r; give a positive number")
        form = replace(form, derived=lambda known: {"gamma": growth / ((2 + growth) * (known["s"] - 1))})

    def law(points: Mapping[str, Array]) -> Law:
        return depth_recursion(points["depth"], points["loss"])

    return fit_law(form, law, data, drop_worst, draws, seed, progress)


def sum_of_powers(terms: Terms, points: Mapping[str, Array]) -> Law:
    """`L = Σ_j A_j x_j^−α_j + E`.

    θ = (c_1, …, c_k, [E], α_1, …, α_k), where c_j is the factor of x_j over its geometric mean.
    """
    factors = [factor for factor, _ in terms.values()]
    exponents = [exponent for _, exponent in terms.values() if exponent]
    num, k = len(factors), len(exponents)
    logs = np.log([points[name] for name in terms if name])
    centres = logs.mean(1)
    logs = logs - centres[:, None]

    def evaluate(theta: Array) -> tuple[Array, Array]:
        slopes = np.ones((*theta.shape, logs.shape[1]))
        slopes[:, :k] = np.exp(-theta[:, num:, None] * logs)
        total = (theta[:, :num, None] * slopes[:, :num]).sum(1)
        slopes[:, num:] = -theta[:, :k, None] * slopes[:, :k] * logs
        slopes /= total[:, None]
        return np.log(total), slopes

    def constants(theta: Array) -> dict[str, Array]:
        values, powers = theta[..., :num].copy(), theta[..., num:]
        values[..., :k] *= np.exp(powers * centres)
        found = np.concatenate([values, powers], axis=-1)
        return dict(zip((*factors, *exponents), np.moveaxis(found, -1, 0), strict=True))

    middle, lowest = _levels(points["loss"])
    offset = num - k
    return Law(
        evaluate,
        constants,
        starts=np.array(list(product(EXPONENTS, repeat=k))),
        low=np.array([middle * FAINTEST] * k + [lowest * FAINTEST] * offset + [0.0] * k),
        high=np.array([middle * LARGEST] * k + [lowest * 1.05] * offset + [STEEPEST] * k),
        terms=tuple(factors),
        bounded=dict(enumerate(exponents, num)),
    )


def depth_recursion(steps: Array, loss: Array) -> Law:
    """`L_k = E + δ_k` where each step of depth takes `aδ^s` from the excess δ (formulas of depth growth).

    `δ_k = [δ_0^{1−s} + (s−1)ak]^{−1/(s−1)}`, written with u = s − 1 and c = aδ_0^u as
    `δ_k = δ_0 (1 + uck)^{−1/u}`, which has the exponential `δ_0 e^{−ck}` as its limit for u → 0.

    θ = (δ_0, E, log c, log u).
    """
    middle, lowest = _levels(loss)

    def evaluate(theta: Array) -> tuple[Array, Array]:
        start, e, log_c, log_u = theta.T[:, :, None]
        u = np.exp(log_u)
        grown = u * np.exp(log_c) * steps
        curve = np.log1p(grown) / u
        slope = grown / (1 + grown) / u
        falling = np.exp(-curve)
        total = start * falling + e
        excess = start * falling
        slopes = np.stack([falling, np.ones_like(falling), -excess * slope, excess * (curve - slope)], axis=1)
        return np.log(total), slopes / total[:, None]

    def constants(theta: Array) -> dict[str, Array]:
        u = np.exp(theta[..., 3])
        return {
            "delta_0": theta[..., 0],
            "E": theta[..., 1],
            "a": np.exp(theta[..., 2]) * theta[..., 0] ** -u,
            "s": 1 + u,
        }

    longest = float(np.log(steps.max()))
    grid = np.array([-1.0, 1.0, 3.0]) - longest, np.log([0.1, 0.3, 1.0, 3.0])
    return Law(
        evaluate,
        constants,
        starts=np.array(list(product(*grid))),
        low=np.array([middle * FAINTEST, lowest * FAINTEST, -7.0 - longest, np.log(1e-3)]),
        high=np.array([middle * 1e3, lowest * 1.05, 12.0, np.log(STEEPEST)]),
        terms=("delta_0", "E"),
        bounded={3: "s"},
    )


def _levels(loss: Array) -> tuple[float, float]:
    """The geometric mean and the least of the losses."""
    return float(np.exp(np.log(loss).mean())), float(loss.min())


def _predict_sum(terms: Terms, constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    powers = [
        constants[factor] * at[name] ** -constants[exponent] for name, (factor, exponent) in terms.items()
    ]
    return {"loss": constants.get("E", 0.0) + sum(powers)}


def _optimal_chinchilla(constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    alpha, beta = np.asarray(constants["alpha"], float), np.asarray(constants["beta"], float)
    product = at["compute"] / 6
    with np.errstate(all="ignore"):  # where a term vanishes there is no best split: it is nan or infinite
        balance = (alpha * constants["A"] / (beta * constants["B"])) ** (1 / (alpha + beta))
        best = {
            "parameters": balance * product ** (beta / (alpha + beta)),
            "tokens": product ** (alpha / (alpha + beta)) / balance,
        }
        return best | _predict_sum(SIZES, constants, best)


def _share_of_parameters(constants: Mapping[str, Any]) -> dict[str, Any]:
    with np.errstate(all="ignore"):  # nan without exponents
        return {"p": np.asarray(constants["beta"], float) / (constants["alpha"] + constants["beta"])}


def _draw_chinchilla(fit: Fit) -> Figure:
    """The loss against each of the inputs, with the term of the other one taken away."""
    values = {key: one.value for key, one in fit.constants.items()}
    panels = []
    for name, other in permutations(SIZES):
        (factor, exponent), (rest, rest_exponent) = SIZES[name], SIZES[other]
        x = fit.data[name]
        at = np.geomspace(x.min(), x.max(), 60)
        curve = values["E"] + values[factor] * at ** -values[exponent]
        own = fit.data["loss"] - values[rest] * fit.data[other] ** -values[rest_exponent]
        data = (plots.line(at, curve), plots.points(x, own, name))
        panels.append(Panel(f"loss − term of {other}", data, plots.axes(name)))
    caption = "The loss without the term of the other input, and the curve of this one."
    return Figure(caption, "Two panels: the loss against parameters and against tokens.", tuple(panels))


def _draw_one_variable(fit: Fit) -> Figure:
    (name,), predict = fit.form.predicts, fit.form.predict
    assert predict is not None
    x = fit.data[name]
    at = np.geomspace(max(x.min(), 0.5), 4 * x.max(), 80)
    drawn = np.stack([predict(fit.samples, {name: value})["loss"] for value in at])
    values = {key: one.value for key, one in fit.constants.items()}
    data = (
        plots.band(at, *np.nanquantile(drawn, [0.025, 0.975], axis=1)),
        plots.line(at, predict(values, {name: at})["loss"]),
        plots.points(x, fit.data["loss"], name),
    )
    caption = "Points, the fitted law and its 95 % interval, drawn on to four times the largest run."
    alt = f"The loss against {name}: {len(x)} points and the curve {fit.equation}."
    return Figure(caption, alt, (Panel("loss", data, plots.axes(name, log=x.min() > 0)),))


def _predict_depth(constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    u = constants["s"] - 1
    grown = u * constants["a"] * constants["delta_0"] ** u * at["depth"]
    return {"loss": constants["E"] + constants["delta_0"] * np.exp(-np.log1p(grown) / u)}


CHINCHILLA = Form(
    name="chinchilla",
    equation="L = E + A·N^−α + B·D^−β",
    exponents=("alpha", "beta"),
    scale="compute",
    draw=_draw_chinchilla,
    predicts=("parameters", "tokens"),
    predict=partial(_predict_sum, SIZES),
    optimal_at="compute",
    optimal=_optimal_chinchilla,
    derived=_share_of_parameters,
)
POWER = Form(
    name="power",
    equation="L = E + A·x^−α",
    exponents=("alpha",),
    scale="x",
    draw=_draw_one_variable,
    predicts=("x",),
    predict=partial(_predict_sum, POWERS),
)
POWER_WITHOUT_OFFSET = replace(POWER, equation="L = A·x^−α")
DEPTH_EXPANSION = Form(
    name="depth-expansion",
    equation="L = E + δ_k, δ_k = [δ₀^(1−s) + (s−1)·a·k]^(−1/(s−1))",
    exponents=("s",),
    scale="depth",
    draw=_draw_one_variable,
    predicts=("depth",),
    predict=_predict_depth,
)
