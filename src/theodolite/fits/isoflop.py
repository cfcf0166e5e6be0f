"""IsoFLOP: for each compute budget the best size, and how it grows with the budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from theodolite.core.errors import UseError
from theodolite.core.progress import Progress
from theodolite.fits import estimating, plots
from theodolite.fits.minimizing import Array, Indices
from theodolite.fits.parabolas import Polynomial, noise, polynomial
from theodolite.fits.result import Fit, Form, HeldOutRuns
from theodolite.present.figure import Figure, Panel

ALIKE = 1.1
"""Runs whose compute differs by less than this factor share a budget, where budgets are found."""
NEAR = 1.25
"""Runs within this factor of a budget that was given belong to it."""


def isoflop(
    *,
    loss: ArrayLike | None = None,
    parameters: ArrayLike | None = None,
    tokens: ArrayLike | None = None,
    compute: ArrayLike | None = None,
    budgets: Sequence[float] | None = None,
    drop_worst: int = 0,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Fit:
    """For each compute budget C a parabola of the loss in log N; through its lowest points `N* = k·C^p`.

    `D* = C/(6N*)`, so tokens grow with the exponent `q = 1 − p`. Runs whose compute agrees within 10 % share
    a budget; `budgets` names them instead, and takes the runs within 25 % of each. A budget counts if it has
    three sizes and its best lies among them.

    Intervals come from a bootstrap: residuals are resampled and all is fitted again, `draws` times. This is
    Approach 2 of Hoffmann et al., arXiv:2203.15556. A parabola is symmetric and the true curve is not, so
    sizes far from the best one bias it: stay within a factor of about four.

    >>> c, ratio = map(np.ravel, np.meshgrid([1e18, 1e19, 1e20, 1e21], [0.5, 0.7, 1, 1.4, 2]))
    >>> n = ratio * 0.1 * c**0.5
    >>> fit = isoflop(compute=c, parameters=n, loss=2 + 0.1 * np.log(ratio) ** 2, draws=20)
    >>> round(fit["k"].value, 4), round(fit["p"].value, 4)
    (0.1, 0.5)
    """
    data = estimating.sizes_and_loss(FORM.name, loss, parameters, tokens, compute)
    data = estimating.without_worst(data, drop_worst, draws, seed)
    profiles, left = _profiles(data, budgets)
    if len(profiles) < 2:
        raise UseError(
            f"isoflop: {len(profiles)} compute budgets have three sizes or more with the best in between; "
            "two are needed. Run more sizes at each budget, or name the budgets (budgets=[1e18, …])"
        )
    if progress is not None:
        progress("parabolas", 0.5)
    drawn = _drawn_sizes(profiles, draws, seed)
    at, best = np.log([one.budget for one in profiles]), np.array([one.best for one in profiles])
    return estimating.made_fit(
        FORM,
        _line(at, best),
        _line(at, drawn),
        _warnings(data, profiles, left, best, drawn),
        data={name: np.concatenate([data[name][one.members] for one in profiles]) for name in data},
        fitted=np.concatenate([profile.curve.fitted for profile in profiles]),
        held_out=_hold_out(at, best),
        num_dropped=drop_worst,
        seed=seed,
        optima=tuple(
            {
                "compute": one.budget,
                "parameters": float(size),
                "tokens": float(one.budget / (6 * size)),
                "loss": float(one.curve.at(np.array([one.best]))[0]),
                "runs": len(one.members),
            }
            for one, size in zip(profiles, np.exp(best), strict=True)
        ),
    )


@dataclass(frozen=True)
class _Profile:
    """The runs of one budget, the parabola through them, and log N where it is lowest."""

    budget: float
    members: Indices
    curve: Polynomial
    best: float
    low: float
    high: float
    """The range of log N that was run."""


def _profiles(data: Mapping[str, Array], budgets: Sequence[float] | None) -> tuple[list[_Profile], int]:
    """The budgets that count, and the number of those that do not."""
    if budgets is not None:
        estimating.checked(FORM.name, {"budgets": list(budgets)})
        groups = [
            (budget, np.flatnonzero(np.abs(np.log(data["compute"] / budget)) < np.log(NEAR)))
            for budget in sorted(budgets)
        ]
    else:
        groups = _found_budgets(data["compute"])
    profiles, left = [], 0
    for budget, members in groups:
        log_size = np.log(data["parameters"][members])
        if len(np.unique(log_size)) >= 3:
            curve = polynomial(log_size, data["loss"][members], degree=2)
            best = float(curve.lowest(curve.coefficients))
            low, high = float(log_size.min()), float(log_size.max())
            if low < best < high:
                profiles.append(_Profile(budget, members, curve, best, low, high))
                continue
        left += 1
    return profiles, left


def _found_budgets(compute: Array) -> list[tuple[float, Indices]]:
    """Runs in the order of their compute, cut wherever one lies more than a tenth above the group's first."""
    order = np.argsort(compute, kind="stable")
    groups: list[list[int]] = []
    for index in order:
        if groups and compute[index] <= ALIKE * compute[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return [(float(np.exp(np.log(compute[group]).mean())), np.array(group)) for group in groups]


def _drawn_sizes(profiles: Sequence[_Profile], draws: int, seed: int) -> Array:
    """log N* of every budget, with the parabolas' residuals drawn anew: (draws, budgets)."""
    found = []
    shaken_by = noise([profile.curve for profile in profiles], draws, seed)
    for profile, shaken in zip(profiles, shaken_by, strict=True):
        curve = profile.curve
        best = curve.lowest(curve.refit(curve.fitted * np.exp(shaken)))
        # With noise a parabola may turn nearly flat, and has its lowest point anywhere.
        found.append(np.clip(best, profile.low - 2, profile.high + 2))
    return np.stack(found, axis=-1)


def _line(log_budget: Array, log_size: Array) -> dict[str, Array]:
    """Least squares of log N* on log C, along the last axis."""
    centred = log_budget - log_budget.mean()
    p = (log_size * centred).sum(-1) / (centred**2).sum()
    return {"k": np.exp(log_size.mean(-1) - p * log_budget.mean()), "p": p}


def _hold_out(at: Array, best: Array) -> HeldOutRuns | None:
    if len(at) < 3:
        return None
    known = _line(at[:-1], best[:-1])
    predicted = np.array([known["k"] * np.exp(known["p"] * at[-1])])
    return estimating.compare(FORM, "best size", np.exp(at[-1:]), predicted, np.exp(best[-1:]))


def _warnings(
    data: Mapping[str, Array], profiles: Sequence[_Profile], left: int, best: Array, drawn: Array
) -> list[str]:
    at = np.log([profile.budget for profile in profiles])
    said = estimating.range_warnings({"compute budget": np.exp(at)}, ["compute budget"])
    if left:
        taken = sum(len(profile.members) for profile in profiles)
        said.append(
            f"{left} of {left + len(profiles)} budgets were left out: fewer than three sizes, or the best "
            f"one not among them. {taken} of {len(data['loss'])} runs count."
        )
    lost = 1 - np.isfinite(drawn).all(1).mean()
    if 0.05 < lost < 1:
        said.append(
            f"In {lost:.0%} of the draws some parabola had no lowest point: the noise is too large for these "
            "sizes, and the intervals, which leave those draws out, are too narrow."
        )
    line = _line(at, best)
    scatter = np.sqrt(((best - np.log(line["k"]) - line["p"] * at) ** 2).sum() / max(len(at) - 2, 1))
    if len(at) > 3 and lost < 1 and scatter > 3 * np.sqrt(np.nanvar(drawn, axis=0).mean()) + 0.01:
        said.append(
            f"The best sizes lie {np.expm1(scatter):.0%} off a power law, more than the noise of the losses "
            "explains: the intervals are too narrow, or the sizes lie too far from the best for a parabola."
        )
    return said


def _optimal(constants: Mapping[str, Any], at: Mapping[str, Any]) -> dict[str, Any]:
    size = constants["k"] * at["compute"] ** constants["p"]
    return {"parameters": size, "tokens": at["compute"] / (6 * size)}


def _draw(fit: Fit) -> Figure:
    budgets = np.array([row["compute"] for row in fit.optima])
    best = np.array([row["parameters"] for row in fit.optima])
    nearest = np.abs(np.log(fit.data["compute"][:, None] / budgets)).argmin(1)
    data: list[dict[str, Any]] = []
    for index in plots.spread(len(budgets)):
        here = np.flatnonzero(nearest == index)
        here = here[np.argsort(fit.data["parameters"][here])]
        x = fit.data["parameters"][here]
        log_x = np.log(x)
        bowl = np.polynomial.Polynomial.fit(log_x, fit.fitted[here], 2)
        at = np.linspace(log_x[0], log_x[-1], 40)
        data += [plots.points(x, fit.data["loss"][here], "parameters"), plots.line(np.exp(at), bowl(at))]
    at = np.geomspace(budgets.min(), 10 * budgets.max(), 20)
    grown = (plots.line(at, fit["k"].value * at ** fit["p"].value), plots.points(budgets, best, "compute"))
    panels = (
        Panel("loss by budget", tuple(data), plots.axes("parameters")),
        Panel("best size", grown, plots.axes("compute", log_y=True)),
    )
    caption = "Parabolas at each budget; their lowest points and the power law through them."
    alt = "Parabolas of the loss in size, one for each budget, and the best size against the budget."
    return Figure(caption, alt, panels)


FORM = Form(
    name="isoflop",
    equation="N* = k·C^p, D* = C/(6·N*)",
    exponents=("p",),
    scale="compute",
    draw=_draw,
    optimal_at="compute",
    optimal=_optimal,
    derived=lambda constants: {"q": 1 - constants["p"]},
)
