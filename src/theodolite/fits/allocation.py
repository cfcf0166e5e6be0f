"""The allocation form: the best depth and width of a network of given size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from theodolite.core.errors import UseError
from theodolite.core.progress import Progress
from theodolite.fits import estimating, plots
from theodolite.fits.minimizing import Array, Flags, Indices
from theodolite.fits.parabolas import Polynomial, noise, polynomial
from theodolite.fits.result import Fit, Form, HeldOutRuns
from theodolite.present.figure import Figure, Panel

NUM_BUDGETS = 9
SLACK = 1.1
"""The factor by which a depth's curve may be extrapolated."""
STEEPEST = 2.0
"""Upper bound of b, reached by draws in which the best depth does not grow."""
TRANSFORMER = 12.0
"""Parameters of a block over width²: 4 of attention, 8 of a feed-forward part of four times the width."""


def allocation(
    *,
    loss: ArrayLike | None = None,
    width: ArrayLike | None = None,
    depth: ArrayLike | None = None,
    parameters: ArrayLike | None = None,
    drop_worst: int = 0,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """Levine's form: at its best depth L a network has the width w with `log w = a + b·L`.

    First, for each depth, the log loss as a polynomial in log N; where three depths or more have been run,
    their curves are read off at budgets N, and a parabola in log L around the lowest gives the best depth
    L*(N). Then a and b, so that `c·L·e^{2(a+bL)} = N` has its root at L*. `c = N/(L·w²)` comes from the runs;
    without `parameters` it is a transformer's, 12. `Fit.optimal(parameters=)` gives depth and width.

    Levine et al., arXiv:2006.12467, come to a width of 30 000 for a language model of 10¹² parameters.

    Intervals come from a bootstrap: residuals are resampled and everything is fitted again, `draws` times.
    """
    data = estimating.checked(FORM.name, {"width": width, "depth": depth, "loss": loss})
    if parameters is None:
        data["parameters"] = TRANSFORMER * data["depth"] * data["width"] ** 2
    else:
        data = estimating.checked(FORM.name, {**data, "parameters": parameters})
    data = estimating.without_worst(data, drop_worst, draws, seed)
    if progress is not None:
        progress("curves by depth", 0.5)
    surface = _surface(data)
    known, budgets, best = _optima(surface)
    shaken = zip(surface.curves, noise(surface.curves, draws, seed), strict=True)
    drawn = _best_depths(surface, [curve.refit(curve.fitted + moved) for curve, moved in shaken])[:, known]
    values = _line(budgets, best[None], surface.c)
    warnings = estimating.range_warnings(data, ["parameters"])
    if (num := len(np.unique(data["depth"]))) < estimating.FEW_SIZES:
        warnings.append(f"There are only {num} depths: a parabola through three fits by itself. Run more.")
    return estimating.made_fit(
        FORM,
        {name: value[0] for name, value in values.items()},
        _line(budgets, drawn, surface.c),
        warnings,
        data={name: np.concatenate([data[name][m] for m in surface.members]) for name in data},
        fitted=np.exp(np.concatenate([curve.fitted for curve in surface.curves])),
        held_out=_hold_out(data, budgets[-1], best[-1]),
        num_dropped=drop_worst,
        seed=seed,
        optima=tuple(
            {"parameters": float(n), "depth": float(d), "width": float(np.sqrt(n / (surface.c * d)))}
            for n, d in zip(budgets, best, strict=True)
        ),
    )


@dataclass(frozen=True)
class _Surface:
    """The log loss against log N at each depth, and the budgets at which the depths are compared."""

    depths: Array
    members: tuple[Indices, ...]
    curves: tuple[Polynomial, ...]
    covers: Flags
    """(depths, budgets): has this depth been run around this budget?"""
    budgets: Array
    c: float


def _surface(data: Mapping[str, Array]) -> _Surface:
    depths, members, curves, spans = [], [], [], []
    for depth in np.unique(data["depth"]):
        at = np.flatnonzero(data["depth"] == depth)
        log_size = np.log(data["parameters"][at])
        num = len(np.unique(log_size))
        if num >= 2:
            depths.append(depth)
            members.append(at)
            # One size more than the curve needs, so that there is a residual.
            degree = 1 if num < 4 else 2 if num < 6 else 3
            curves.append(polynomial(log_size, np.log(data["loss"][at]), degree=degree))
            spans.append((log_size.min() - np.log(SLACK), log_size.max() + np.log(SLACK)))
    if len(depths) < 3:
        raise UseError(
            f"allocation: {len(depths)} depths have been run at two sizes or more; three are needed to find "
            "a best one between them. Run more widths at each of three depths"
        )
    low, high = np.array(spans).T
    # Between the third lowest start and the third highest end, three curves may overlap.
    edges = np.sort(low)[2], np.sort(high)[-3]
    if edges[0] >= edges[1]:
        raise UseError(
            "allocation: no three depths have been run at the same number of parameters. Run narrow deep and "
            "wide shallow networks of equal size"
        )
    budgets = np.linspace(*edges, NUM_BUDGETS)
    covers = (low[:, None] <= budgets + 1e-9) & (budgets <= high[:, None] + 1e-9)
    c = float(np.exp(np.log(data["parameters"] / (data["depth"] * data["width"] ** 2)).mean()))
    return _Surface(np.array(depths), tuple(members), tuple(curves), covers, np.exp(budgets), c)


def _best_depths(surface: _Surface, coefficients: Sequence[Array]) -> Array:
    """The best depth at each budget, for drawn coefficients of each depth's curve: (draws, budgets).

    A parabola in log depth through the lowest depth and its two neighbours; nan where the lowest is the
    first or the last that was run.
    """
    at, logs = np.log(surface.budgets), np.log(surface.depths)
    heights = np.stack([curve.at(at) for curve in surface.curves])  # (depths, budgets)
    pairs = zip(surface.curves, coefficients, strict=True)
    drawn = np.stack([curve.at(at, moved) for curve, moved in pairs], axis=-1)  # (draws, budgets, depths)
    found = np.full(drawn.shape[:-1], np.nan)
    for budget in range(len(at)):
        run = np.flatnonzero(surface.covers[:, budget])
        place = int(np.argmin(heights[run, budget]))
        if 0 < place < len(run) - 1:
            near = run[place - 1 : place + 2]
            bowl = polynomial(logs[near], heights[near, budget], degree=2)
            best = bowl.lowest(bowl.refit(drawn[:, budget, near]))
            # With noise a bowl may turn nearly flat, and has its lowest point anywhere.
            found[:, budget] = np.exp(np.clip(best, logs[near[0]] - 2, logs[near[-1]] + 2))
    return found


def _optima(surface: _Surface) -> tuple[Flags, Array, Array]:
    """The budgets whose best depth lies between those that were run: which, their sizes, the best depths."""
    (found,) = _best_depths(surface, [curve.coefficients[None] for curve in surface.curves])
    known = np.isfinite(found)
    if known.sum() < 2:
        shallow, deep = surface.depths[[0, -1]]
        raise UseError(
            f"allocation: at {known.sum()} of {len(found)} sizes the best depth lies between those that were "
            f"run ({shallow:g} to {deep:g}); two are needed. Run deeper or shallower ones of equal size"
        )
    return known, surface.budgets[known], found[known]


def _line(budgets: Array, depths: Array, c: float) -> dict[str, Array]:
    """a and b for each row of best depths (draws, budgets), by Gauss–Newton on log depth.

    On depth, not on width: the budget is exact and the depth is noisy, so a regression of width on depth is
    biased. From `log L + 2a + 2bL = log(N/c)`: `∂ log L/∂a = −2/(1+2bL)`, `∂ log L/∂b = L·∂a`.
    """
    size = np.log(budgets / c)
    known = np.isfinite(depths)
    depths = np.where(known, depths, 1.0)
    log_width = (size - np.log(depths)) / 2
    num = known.sum(1, keepdims=True)
    usable = num[:, 0] >= 2
    centre = (known * depths).sum(1, keepdims=True) / np.maximum(num, 1)
    spread = (known * (depths - centre) ** 2).sum(1)
    b = (known * (depths - centre) * log_width).sum(1) / np.where(spread > 0, spread, 1.0)
    b = np.maximum(b, 1e-4)
    a = (known * (log_width - b[:, None] * depths)).sum(1) / np.maximum(num[:, 0], 1)
    for _ in range(50):
        predicted = np.exp(_log_depth(size, a[:, None], b[:, None]))
        slope = known * -2 / (1 + 2 * b[:, None] * predicted)
        off = known * (np.log(depths) - np.log(predicted))
        aa, ab, bb = (slope**2).sum(1), (slope**2 * predicted).sum(1), (slope**2 * predicted**2).sum(1)
        to_a, to_b = (slope * off).sum(1), (slope * predicted * off).sum(1)
        determinant = np.maximum(aa * bb - ab**2, 1e-12 * aa * bb + 1e-300)
        step_a = (bb * to_a - ab * to_b) / determinant
        step_b = (aa * to_b - ab * to_a) / determinant
        # b stays above zero, where deeper and wider still go together.
        shrink = np.minimum(1.0, 0.5 * b / np.maximum(-step_b, 1e-300))
        a, b = a + shrink * step_a, b + shrink * step_b
        steep = b > STEEPEST
        level = (known * (log_width - STEEPEST * depths)).sum(1) / np.maximum(num[:, 0], 1)
        a, b = np.where(steep, level, a), np.where(steep, STEEPEST, b)
    return {"a": np.where(usable, a, np.nan), "b": np.where(usable, b, np.nan), "c": np.full_like(a, c)}


def _log_depth(size: Any, a: Any, b: Any) -> Any:
    """The root of `log L + 2a + 2bL = size`: `L = W(2b·e^{size−2a})/(2b)` with Lambert's W."""
    from scipy.special import lambertw

    twice = 2 * np.asarray(b)
    argument = np.minimum(np.log(twice) + size - 2 * np.asarray(a), 700.0)
    return np.log(np.real(lambertw(np.exp(argument))) / twice)


def _hold_out(data: Mapping[str, Array], budget: float, depth: float) -> HeldOutRuns | None:
    """The best depth at the largest budget, predicted without the largest runs."""
    out = estimating.largest(data["parameters"])
    seen = {name: column[~out] for name, column in data.items()}
    try:
        surface = _surface(seen)
        _, budgets, best = _optima(surface)
    except UseError:
        return None
    if budgets.max() > 0.95 * budget:
        return None  # that would be no prediction
    line = _line(budgets, best[None], surface.c)
    predicted = np.exp(_log_depth(np.log(budget / surface.c), line["a"], line["b"]))
    return estimating.compare(FORM, "best depth", np.array([budget]), predicted, np.array([depth]))


def _optimal(constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    size = np.log(at["parameters"] / constants["c"])
    depth = np.exp(_log_depth(size, constants["a"], constants["b"]))
    return {"depth": depth, "width": np.exp(constants["a"] + constants["b"] * depth)}


def _draw(fit: Fit) -> Figure:
    depth = np.array([row["depth"] for row in fit.optima])
    width = np.array([row["width"] for row in fit.optima])
    at = np.linspace(depth.min() / 1.2, depth.max() * 1.2, 40)
    curve = np.exp(fit["a"].value + fit["b"].value * at)
    best = (plots.line(at, curve), plots.points(depth, width, "depth"))
    data: list[dict[str, Any]] = []
    depths = np.unique(fit.data["depth"])
    for index in plots.spread(len(depths)):
        here = np.flatnonzero(fit.data["depth"] == depths[index])
        here = here[np.argsort(fit.data["parameters"][here])]
        x = fit.data["parameters"][here]
        name = f"depth {depths[index]:g}"
        data += [plots.line(x, fit.fitted[here]), plots.points(x, fit.data["loss"][here], name)]
    panels = (
        Panel("best width", best, plots.axes("depth", log=False, log_y=True)),
        Panel("loss by depth", tuple(data), plots.axes("parameters")),
    )
    alt = "The best width against depth, and the loss against parameters for each depth."
    return Figure("The best shapes and the line through them; the curves they come from.", alt, panels)


FORM = Form(
    name="allocation",
    equation="log w = a + b·L at the best depth L; N = c·L·w²",
    exponents=("b",),
    scale="parameters",
    draw=_draw,
    optimal_at="parameters",
    optimal=_optimal,
)
