"""A Fit: constants with intervals, what they predict, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from theodolite.core.errors import UseError
from theodolite.fits import plots
from theodolite.fits.minimizing import Array
from theodolite.present.figure import Figure, Panel, guide
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, number

Predict = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
"""From constants by name and inputs by name, which broadcast, to predictions by name."""

LEVEL = 0.95
"""Of every interval."""
_GREEK = {"alpha": "α", "beta": "β", "delta_0": "δ₀", "gamma": "γ"}


@dataclass(frozen=True)
class FitEstimate:
    """A number, its bootstrap interval (95 %) and its standard error; nan where there is no interval."""

    value: float
    low: float
    high: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Form:
    """What is fitted: its equation, what can be predicted from them, and its figure."""

    name: str
    equation: str
    exponents: tuple[str, ...]
    """Constants that must be known to go from one scale to the next."""
    scale: str
    """The column that says how large a run is."""
    draw: Callable[[Fit], Figure]
    predicts: tuple[str, ...] = ()
    """Arguments of `Fit.predict`."""
    predict: Predict | None = None
    optimal_at: str = ""
    """The argument of `Fit.optimal`."""
    optimal: Predict | None = None
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Further numbers that follow from the constants, and are shown with them."""

    def __post_init__(self) -> None:
        _FORMS.setdefault(self.equation, self)


_FORMS: dict[str, Form] = {}
"""By equation, so that a fit that was loaded finds its functions."""


@dataclass(frozen=True)
class HeldOutRuns:
    """How well the largest runs are predicted by a fit that has not seen them."""

    what: str
    """What was predicted: the loss, or the best size."""
    num_points: int
    scale: str
    above: float
    """What has at least this much of `scale` was held out."""
    error: float
    """Mean of |predicted/measured − 1|."""
    worst: float
    bias: float
    """Mean of predicted/measured − 1."""

    def __str__(self) -> str:
        if self.what != "loss":
            at = f"at {self.scale} {number(self.above, 4)}"
            return f"the {self.what} {at}, predicted from the smaller: {self.worst:+.1%}"
        runs = "run" if self.num_points == 1 else f"{self.num_points} runs"
        return (
            f"the largest {runs} ({self.scale} ≥ {number(self.above, 4)}), predicted from the others: off by "
            f"{self.error:.2%} on average, {self.worst:+.2%} at worst, bias {self.bias:+.2%}"
        )


@dataclass(frozen=True)
class Fit(Result):
    """A scaling law through measured runs.

    `fit["alpha"]` is a constant with its interval, `fit.predict(…)` a prediction with its interval,
    `fit.optimal(…)` the best split of a budget, `fit.warnings` what the data cannot tell.
    """

    kind = "scaling-law fit"
    loads = True

    name: str
    """Of the form: `chinchilla`, `power`, …"""
    equation: str
    constants: Mapping[str, FitEstimate]
    samples: Mapping[str, Array] = field(repr=False)
    """Every constant, as each draw of the bootstrap has it."""
    data: Mapping[str, Array] = field(repr=False)
    """The points, by column; `loss` among them."""
    fitted: Array = field(repr=False)
    """The loss that the fit gives at each point."""
    held_out: HeldOutRuns | None
    warnings: tuple[str, ...]
    num_starts: int = 1
    """Starting points of the search; 1 where the optimum has a closed form."""
    num_reached: int = 1
    """How many of them ended in the optimum."""
    num_dropped: int = 0
    """Points of the highest loss that were left out on request."""
    seed: int = 0
    optima: tuple[Mapping[str, float], ...] = ()
    """For forms in two stages: what the first one found, budget by budget."""

    def __post_init__(self) -> None:
        if self.equation not in _FORMS:
            raise UseError(f"no form of theodolite.fits has the equation {self.equation!r}")

    def __getitem__(self, name: str) -> FitEstimate:
        if name not in self.constants:
            raise UseError(f"{self.name} has no constant {name!r}; it has {', '.join(self.constants)}")
        return self.constants[name]

    @property
    def form(self) -> Form:
        """What was fitted."""
        return _FORMS[self.equation]

    @property
    def residuals(self) -> Array:
        """`log(fitted/measured)` at each point: 0.01 is one per cent too high."""
        return np.log(self.fitted / self.data["loss"])

    @property
    def title(self) -> str:
        """The equation."""
        return self.equation

    def predict(self, **inputs: float) -> FitEstimate:
        """The loss at other sizes: `fit.predict(parameters=7e10, tokens=1.4e12)`.

        The interval is that of the law; the noise of a single run comes on top.
        """
        if self.form.predict is None:
            raise UseError(f"{self.name} predicts no loss; it knows optimal({self.form.optimal_at}=…)")
        return self._predicted(self.form.predict, self.form.predicts, "predict", inputs)["loss"]

    def optimal(self, **inputs: float) -> dict[str, FitEstimate]:
        """The best split of a budget: `fit.optimal(compute=1e24)["parameters"]`."""
        if self.form.optimal is None:
            known = ", ".join(f"{name}=…" for name in self.form.predicts)
            raise UseError(f"{self.name} knows no optimum; it knows predict({known})")
        return self._predicted(self.form.optimal, (self.form.optimal_at,), "optimal", inputs)

    def table(self) -> Table:
        """The constants with their intervals."""
        return estimates_table(self.constants)

    def figures(self) -> tuple[Figure, ...]:
        """The points with the fitted curve, and the residuals."""
        return self.form.draw(self), self._residuals_figure()

    def blocks(self) -> Iterator[Block]:
        """The equation, the constants, how good the fit is, what the data cannot tell."""
        dropped = f" ({self.num_dropped} of the highest loss left out)" if self.num_dropped else ""
        yield f"{self.name}: {self.equation}\n{len(self.data['loss'])} points{dropped}"
        yield self.table()
        if self.optima:
            yield Table(list(self.optima[0]), [list(row.values()) for row in self.optima])
        remarks = []
        if self.num_starts > 1:
            remarks.append(f"search: {self.num_reached} of {self.num_starts} starts reached this optimum")
        off = np.abs(self.residuals)
        remarks.append(f"residuals: {off.mean():.2%} of the loss on average, {off.max():.2%} at most")
        too_few = "nothing: without the largest runs too little would be left to fit"
        remarks.append(f"held out: {self.held_out or too_few}")
        yield "\n".join(remarks)
        for line in self.warnings:
            yield f"! {line}"
        yield from self.figures()

    def _predicted(
        self, function: Predict, names: tuple[str, ...], called: str, inputs: Mapping[str, float]
    ) -> dict[str, FitEstimate]:
        if set(inputs) != set(names):
            wanted = ", ".join(f"{name}=…" for name in names)
            given = ", ".join(f"{name}={value:g}" for name, value in inputs.items()) or "nothing"
            raise UseError(f"{self.name} was asked at {given}; write {called}({wanted})")
        for name, size in inputs.items():
            if not np.isfinite(size) or size <= 0:
                raise UseError(f"{called}({name}={size:g}): a size must be a positive number")
        value = function({name: one.value for name, one in self.constants.items()}, inputs)
        with np.errstate(all="ignore"):  # of draws that lead nowhere
            drawn = function(self.samples, inputs)
        return {name: estimate(float(value[name]), np.asarray(drawn[name])) for name in value}

    def _residuals_figure(self) -> Figure:
        scale = self.form.scale
        x, y = self.data[scale], 100 * self.residuals
        layout = plots.axes(scale, "%", log=x.min() > 0)
        layout["shapes"] = [guide(y=0)]
        caption = "Fitted over measured, less one, in per cent. A trend means that the law has another shape."
        alt = f"Residuals against {scale}: at most {np.abs(y).max():.2f} per cent."
        return Figure(caption, alt, (Panel("residuals", (plots.points(x, y, scale),), layout),))


def estimates_table(estimates: Mapping[str, FitEstimate], head: str = "constant") -> Table:
    """A row for each number: its value, its interval and its standard error."""
    tail = 100 * (1 - LEVEL) / 2
    heads = (Column(head, show=symbol), "value", f"{tail:g} %", f"{100 - tail:g} %", "error")
    return Table(heads, [(name, one.value, one.low, one.high, one.error) for name, one in estimates.items()])


def symbol(name: str) -> str:
    """A constant as a reader knows it.

    >>> symbol("alpha"), symbol("A")
    ('α', 'A')
    """
    return _GREEK.get(name, name)


def estimate(value: float, drawn: Array) -> FitEstimate:
    """The value with the percentile interval of its bootstrap draws; draws that are not finite are left out.

    >>> print(estimate(3.0, np.arange(101.0)))
    3 (2.5 to 97.5)
    """
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < 2:
        return FitEstimate(value, float("nan"), float("nan"), float("nan"))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return FitEstimate(value, float(low), float(high), float(drawn.std(ddof=1)))
