"""Figures of a Fit: the points with the fitted curves, and what is left over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from theodolite.fits.result import Array, Fit
from theodolite.present.figure import ACCENT, QUIET, Figure, Panel, frame

NUM_CURVES = 6
"""Curves drawn where there are many: at quantiles of what sets them apart."""


def figures(fit: Fit) -> tuple[Figure, ...]:
    """The law with the points it was fitted to, and the residuals."""
    law = {
        "chinchilla": _chinchilla,
        "power": _one_variable,
        "depth-expansion": _one_variable,
        "isoflop": _isoflop,
        "allocation": _allocation,
    }[fit.form.name](fit)
    return law, _residuals(fit)


def _one_variable(fit: Fit) -> Figure:
    (name,) = fit.form.predicts
    x = fit.data[name]
    at = np.geomspace(max(x.min(), 0.5), 4 * x.max(), 80)
    assert fit.form.predict is not None
    drawn = np.stack([fit.form.predict(fit.samples, {name: value})["loss"] for value in at])
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=1)
    values = {key: one.value for key, one in fit.constants.items()}
    data = (
        _band(at, low, high),
        _line(at, fit.form.predict(values, {name: at})["loss"]),
        _points(x, fit.data["loss"], name),
    )
    caption = "Points, the fitted law and its 95 % interval, drawn on to four times the largest run."
    alt = f"The loss against {name}: {len(x)} points and the curve {fit.form.equation}."
    return Figure(caption, alt, (Panel("loss", data, _axes(name, "", log=x.min() > 0)),))


def _chinchilla(fit: Fit) -> Figure:
    """Slices: the loss against each of the inputs, with the term of the other one taken away."""
    values = {key: one.value for key, one in fit.constants.items()}
    panels = []
    for name, other, factor, exponent in (
        ("parameters", "tokens", "B", "beta"),
        ("tokens", "parameters", "A", "alpha"),
    ):
        rest = values[factor] * fit.data[other] ** -values[exponent]
        own = ("A", "alpha") if name == "parameters" else ("B", "beta")
        x = fit.data[name]
        at = np.geomspace(x.min(), x.max(), 60)
        curve = values["E"] + values[own[0]] * at ** -values[own[1]]
        data = (_line(at, curve), _points(x, fit.data["loss"] - rest, name))
        panels.append(Panel(f"loss − term of {other}", data, _axes(name, "")))
    caption = "The loss less what the law gives to the other input, and the curve of this one."
    return Figure(caption, "Two panels: the loss against parameters and against tokens.", tuple(panels))


def _isoflop(fit: Fit) -> Figure:
    budgets = np.array([row["compute"] for row in fit.optima])
    best = np.array([row["parameters"] for row in fit.optima])
    nearest = np.abs(np.log(fit.data["compute"][:, None] / budgets)).argmin(1)
    data: list[dict[str, Any]] = []
    for index in _spread(len(budgets)):
        here = nearest == index
        order = np.argsort(fit.data["parameters"][here])
        x = fit.data["parameters"][here][order]
        data.append(_points(x, fit.data["loss"][here][order], "parameters"))
        log_x = np.log(x)
        bowl = np.polynomial.Polynomial.fit(log_x, fit.fitted[here][order], 2)
        at = np.linspace(log_x[0], log_x[-1], 40)
        data.append(_line(np.exp(at), bowl(at)))
    at = np.geomspace(budgets.min(), 10 * budgets.max(), 20)
    law = fit["k"].value * at ** fit["p"].value
    grown = (_line(at, law), _points(budgets, best, "compute"))
    panels = (
        Panel("loss by budget", tuple(data), _axes("parameters", "")),
        Panel("best size", grown, _axes("compute", "") | {"yaxis": _log_axis("")}),
    )
    alt = "Parabolas of the loss in size, one for each budget, and the best size against the budget."
    return Figure(
        "Parabolas at each budget; their lowest points and the power law through them.", alt, panels
    )


def _allocation(fit: Fit) -> Figure:
    depth = np.array([row["depth"] for row in fit.optima])
    width = np.array([row["width"] for row in fit.optima])
    at = np.linspace(depth.min() / 1.2, depth.max() * 1.2, 40)
    best = (_line(at, np.exp(fit["a"].value + fit["b"].value * at)), _points(depth, width, "depth"))
    layout = _axes("depth", "", log=False) | {"yaxis": _log_axis("")}
    data: list[dict[str, Any]] = []
    depths = np.unique(fit.data["depth"])
    for index in _spread(len(depths)):
        here = np.flatnonzero(fit.data["depth"] == depths[index])
        here = here[np.argsort(fit.data["parameters"][here])]
        x = fit.data["parameters"][here]
        data += [_line(x, fit.fitted[here]), _points(x, fit.data["loss"][here], f"depth {depths[index]:g}")]
    panels = (
        Panel("best width", best, layout),
        Panel("loss by depth", tuple(data), _axes("parameters", "")),
    )
    alt = "The best width against depth, and the loss against parameters for each depth."
    return Figure("The best shapes and the line through them; the curves they come from.", alt, panels)


def _residuals(fit: Fit) -> Figure:
    x, y = fit.data[fit.form.scale], 100 * fit.residuals
    layout = _axes(fit.form.scale, "%", log=x.min() > 0)
    layout["shapes"] = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": 0,
            "y1": 0,
            "line": {"color": QUIET, "width": 1},
        }
    ]
    caption = "Fitted over measured, less one, in per cent. A trend means that the law has another shape."
    alt = f"Residuals against {fit.form.scale}: at most {np.abs(y).max():.2f} per cent."
    return Figure(caption, alt, (Panel("residuals", (_points(x, y, fit.form.scale),), layout),))


def _spread(num: int) -> list[int]:
    return sorted({round(place) for place in np.linspace(0, num - 1, min(num, NUM_CURVES))})


def _axes(x_title: str, y_title: str, *, log: bool = True) -> dict[str, Any]:
    layout = frame(height=260)
    layout["xaxis"] |= {"title": {"text": x_title, "standoff": 6}}
    if log:
        layout["xaxis"] |= {"type": "log", "exponentformat": "power"}
    layout["yaxis"] |= {"title": {"text": y_title, "standoff": 6}, "nticks": 6}
    return layout


def _log_axis(title: str) -> dict[str, Any]:
    return {**_axes("", title)["yaxis"], "type": "log", "exponentformat": "power"}


def _points(x: Array, y: Array, name: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": _rounded(x),
        "y": _rounded(y),
        "marker": {"color": ACCENT, "size": 5, "opacity": 0.7},
        "hovertemplate": f"{name} %{{x:.4g}}: %{{y:.4g}}<extra></extra>",
    }


def _line(x: Array, y: Array) -> dict[str, Any]:
    line = {"color": "var(--ink)", "width": 1.5}
    base = {"type": "scatter", "mode": "lines", "line": line, "hoverinfo": "skip"}
    return {**base, "x": _rounded(x), "y": _rounded(y)}


def _band(x: Array, low: Array, high: Array) -> dict[str, Any]:
    around, edge = np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]])
    fill = {"fill": "toself", "fillcolor": "rgba(128,128,128,0.2)", "line": {"width": 0}, "hoverinfo": "skip"}
    return {"type": "scatter", "mode": "lines", "x": _rounded(around), "y": _rounded(edge), **fill}


def _rounded(values: Sequence[float] | Array) -> list[float | None]:
    """Six digits; None for what JSON has no word for."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]
