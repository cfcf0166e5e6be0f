"""A Fit: constants with intervals, what they predict, and how far they can be trusted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite.core.errors import UseError
from theodolite.present.figure import Figure

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Flags = NDArray[np.bool_]
"""Told what is going on, and which share of it is done."""
Predict = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
"""From constants by name and inputs by name, which broadcast, to predictions by name."""

LEVEL = 0.95
"""Of every interval."""


@dataclass(frozen=True)
class Estimate:
    """A number, its bootstrap interval (95 %) and its standard error."""

    value: float
    low: float
    high: float
    error: float

    def to_dict(self) -> dict[str, float | None]:
        """As values that JSON knows: None where there is no interval."""
        return {name: value if np.isfinite(value) else None for name, value in vars(self).items()}

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class Form:
    """What is fitted: its equation, its constants, and what can be predicted from them."""

    name: str
    equation: str
    constants: tuple[str, ...]
    exponents: tuple[str, ...]
    """Constants that must be known to go from one scale to the next."""
    scale: str
    """The column that says how large a run is."""
    predicts: tuple[str, ...] = ()
    """What `Fit.predict` must be told."""
    predict: Predict | None = None
    optimal_at: str = ""
    """What `Fit.optimal` must be told."""
    optimal: Predict | None = None
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    """Further numbers that follow from the constants, and are shown with them."""


@dataclass(frozen=True)
class HeldOut:
    """How well the largest runs are foretold by a fit that has not seen them."""

    what: str
    """What was foretold: the loss, or the best size."""
    num_points: int
    scale: str
    above: float
    """What has at least this much of `scale` was held out."""
    error: float
    """Mean of |predicted/measured − 1|."""
    worst: float
    bias: float
    """Mean of predicted/measured − 1."""


@dataclass(frozen=True)
class Fit:
    """A scaling law through measured runs.

    `fit["alpha"]` is a constant with its interval, `fit.predict(…)` a prediction with its interval,
    `fit.optimal(…)` the best split of a budget, `fit.warnings` what the data cannot tell.
    """

    form: Form
    constants: Mapping[str, Estimate]
    samples: Mapping[str, Array] = field(repr=False)
    """Every constant, as each draw of the bootstrap has it."""
    data: Mapping[str, Array] = field(repr=False)
    """The points, by column; `loss` among them."""
    fitted: Array = field(repr=False)
    """The loss that the fit gives at each point."""
    num_starts: int
    """Places the search began at; 1 where the optimum has a closed form."""
    num_reached: int
    """How many of them ended in the optimum."""
    held_out: HeldOut | None
    warnings: tuple[str, ...]
    num_dropped: int = 0
    """Points of the highest loss that were left out on request."""
    seed: int = 0
    optima: tuple[Mapping[str, float], ...] = ()
    """For forms in two stages: what the first one found, budget by budget."""

    def __getitem__(self, name: str) -> Estimate:
        if name not in self.constants:
            raise UseError(f"{self.form.name} has no constant {name!r}; it has {', '.join(self.constants)}")
        return self.constants[name]

    @property
    def residuals(self) -> Array:
        """`log(fitted/measured)` at each point: 0.01 is one per cent too high."""
        return np.log(self.fitted / self.data["loss"])

    def predict(self, **inputs: float) -> Estimate:
        """The loss at other sizes: `fit.predict(parameters=7e10, tokens=1.4e12)`.

        The interval speaks of the law's uncertainty, not of the noise of a single run around it.
        """
        if self.form.predict is None:
            raise UseError(f"{self.form.name} predicts no loss; it knows optimal({self.form.optimal_at}=…)")
        return self._tell(self.form.predict, self.form.predicts, "predict", inputs)["loss"]

    def optimal(self, **inputs: float) -> dict[str, Estimate]:
        """The best split of a budget: `fit.optimal(compute=1e24)["parameters"]`."""
        if self.form.optimal is None:
            known = ", ".join(f"{name}=…" for name in self.form.predicts)
            raise UseError(f"{self.form.name} knows no optimum; it knows predict({known})")
        return self._tell(self.form.optimal, (self.form.optimal_at,), "optimal", inputs)

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON knows."""
        return {
            "form": self.form.name,
            "equation": self.form.equation,
            "level": LEVEL,
            "constants": {name: estimate.to_dict() for name, estimate in self.constants.items()},
            "num_points": len(self.data["loss"]),
            "num_dropped": self.num_dropped,
            "num_draws": len(next(iter(self.samples.values()))),
            "num_starts": self.num_starts,
            "num_reached": self.num_reached,
            "held_out": None if self.held_out is None else vars(self.held_out),
            "warnings": list(self.warnings),
            "optima": [dict(row) for row in self.optima],
            "points": {name: column.tolist() for name, column in self.data.items()},
            "residuals": self.residuals.tolist(),
            "seed": self.seed,
        }

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"

    def figures(self) -> tuple[Figure, ...]:
        """The points with the fitted curve, and what is left over."""
        from theodolite.fits.drawing import figures

        return figures(self)

    def save(self, path: str | Path) -> Path:
        """Write a page that carries everything it needs (`fit.html`)."""
        from theodolite.core.files import write_whole
        from theodolite.fits.page import page, page_path

        path = page_path(path)
        write_whole(path, page(self))
        return path

    def __str__(self) -> str:
        from theodolite.fits.table import table

        return table(self)

    def _tell(
        self, function: Predict, names: tuple[str, ...], called: str, inputs: Mapping[str, float]
    ) -> dict[str, Estimate]:
        if set(inputs) != set(names):
            wanted = ", ".join(f"{name}=…" for name in names)
            given = ", ".join(f"{name}={value:g}" for name, value in inputs.items()) or "nothing"
            raise UseError(f"{self.form.name} was asked at {given}; write {called}({wanted})")
        for name, size in inputs.items():
            if not np.isfinite(size) or size <= 0:
                raise UseError(f"{called}({name}={size:g}): a size must be a positive number")
        value = function({name: one.value for name, one in self.constants.items()}, inputs)
        with np.errstate(all="ignore"):  # of draws that lead nowhere
            drawn = function(self.samples, inputs)
        return {name: estimate(float(value[name]), np.asarray(drawn[name])) for name in value}


def estimate(value: float, drawn: Array) -> Estimate:
    """The value with the percentile interval of its bootstrap draws; draws that are not finite are left out.

    >>> print(estimate(3.0, np.arange(101.0)))
    3 (2.5 to 97.5)
    """
    drawn = drawn[np.isfinite(drawn)]
    if len(drawn) < 2:
        return Estimate(value, float("nan"), float("nan"), float("nan"))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, float(low), float(high), float(drawn.std(ddof=1)))
