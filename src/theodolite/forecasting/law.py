"""A law through runs: which form they can tell, what it forecasts, and how well it forecast larger runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite import fits
from theodolite.core.errors import UseError
from theodolite.core.progress import Progress
from theodolite.fits.minimizing import Array
from theodolite.fits.result import Fit
from theodolite.forecasting.runs import SizedRun, columns
from theodolite.present.text import counted, number

LEVEL = 0.95
"""Of every interval."""
FEWEST_OF_EACH = 3
"""Numbers of parameters, and of tokens, that a law in both needs; in one alone it needs one more."""
IN_STEP = 0.99
"""Correlation of log N and log D above which the runs cannot tell the two apart."""
SPARE = 2
"""Cells beyond its constants that a law needs before it is asked to forecast a held-out run."""
MOST_ORIGINS = 6
DRAWS_OF_ORIGIN = 100
FEWEST_FORECASTS = 20
"""Fewer held-out forecasts cannot tell 95 % from less."""
ONE_SIDED, SELDOM = 0.9, 0.85
"""If so many forecasts are all too high, or all too low, and fewer than the second share lie inside, the law
has another form. The first alone is not enough: forecasts of one law share its error."""
FEWEST_CELLS = 4
"""Held-out sizes; seeds of one size are missed together."""
OFF_RAY = 1.5
"""How far, as a factor, tokens may be from what goes with the parameters in runs that grow both in step."""
NARROWEST = 1e-6
"""Half an interval, as a share of the loss."""


@dataclass(frozen=True)
class LossInterval:
    """A forecast of one run's loss with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.value, 4)} ({number(self.low, 4)} to {number(self.high, 4)})"

    def widened(self, factor: float) -> LossInterval:
        """Both sides, in logarithms, times the factor."""
        return LossInterval(
            self.value,
            self.value * (self.low / self.value) ** factor,
            self.value * (self.high / self.value) ** factor,
        )

    def holds(self, loss: float) -> bool:
        """Is this loss inside?"""
        return self.low <= loss <= self.high

    def distance(self, loss: float) -> float:
        """How far off a loss is, in units of its side of the interval: 1 is on the edge."""
        off, above = math.log(loss / self.value), loss > self.value
        side = math.log(self.high / self.value) if above else math.log(self.value / self.low)
        return abs(off) / max(side, NARROWEST)


@dataclass(frozen=True)
class Coverage:
    """How often intervals held runs that their law had not seen, all larger than those it had seen."""

    num_forecasts: int
    num_cells: int
    """Networks and lengths of training that were forecast."""
    raw: float
    """Share of the forecasts whose interval held the run; nan without forecasts."""
    factor: float
    """By which intervals are widened."""
    calibrated: float
    """The same share with intervals widened by what the other sizes need."""
    reach: float
    """The largest factor in FLOP between a forecast run and the largest that its law had seen."""
    bias: float
    """The mean of log(forecast/actual): 0.01 is one per cent too high."""
    one_sided: float
    """The share of the forecasts that are off to the side of the bias."""

    @property
    def enough(self) -> bool:
        """Can so many forecasts tell whether 95 % are covered?"""
        return self.num_forecasts >= FEWEST_FORECASTS and self.num_cells >= FEWEST_CELLS


@dataclass(frozen=True)
class ScaleLaw:
    """A fit to runs, in parameters and tokens, or in one quantity alone."""

    form: str
    """`chinchilla`, or what the power law is in: `parameters`, `tokens` or `compute`."""
    fit: Fit
    runs: tuple[SizedRun, ...]

    def inputs(self, parameters: Any, tokens: Any, flop: Any) -> dict[str, Any]:
        """The arguments of the fit."""
        if self.form == "chinchilla":
            return {"parameters": parameters, "tokens": tokens}
        return {"x": {"parameters": parameters, "tokens": tokens, "compute": flop}[self.form]}

    def forecast(self, parameters: float, tokens: float, flop: float) -> LossInterval:
        """The loss of a single run: the spread of the law's draws and that of runs around the law.

        Residuals are larger by `√(n/(n − p))` than in a fit with p constants to n runs.
        """
        predict, at = self.fit.form.predict, self.inputs(parameters, tokens, flop)
        assert predict is not None
        value = float(predict({name: one.value for name, one in self.fit.constants.items()}, at)["loss"])
        with np.errstate(all="ignore"):
            drawn = np.log(np.asarray(predict(self.fit.samples, at)["loss"], dtype=float))
        drawn = drawn[np.isfinite(drawn)]
        num = len(self.runs)
        noise = -self.fit.residuals * math.sqrt(num / max(num - NUM_CONSTANTS[self.form], 1))
        low, high = np.quantile(drawn[:, None] + noise, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        least = NARROWEST
        return LossInterval(
            value, min(math.exp(low), value * (1 - least)), max(math.exp(high), value * (1 + least))
        )


NUM_CONSTANTS = {"chinchilla": 5, "parameters": 3, "tokens": 3, "compute": 3}


def law_of(
    runs: Sequence[SizedRun],
    form: str,
    *,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> ScaleLaw:
    """Fit a form to the runs."""
    parameters, tokens, flop, loss = columns(runs)
    if form == "chinchilla":
        fit = fits.chinchilla(
            parameters=parameters, tokens=tokens, loss=loss, draws=draws, seed=seed, progress=progress
        )
    else:
        x = {"parameters": parameters, "tokens": tokens, "compute": flop}[form]
        fit = fits.power(x=x, loss=loss, draws=draws, seed=seed, progress=progress)
    return ScaleLaw(form, fit, tuple(runs))


def form_for(runs: Sequence[SizedRun]) -> str | None:
    """The form that the runs can tell; None if there are too few sizes for any.

    Both parameters and tokens, if each has three values that do not go in step; else the one that varies, or
    compute if they grow in step.
    """
    if not runs:
        return None
    parameters, tokens, _, _ = columns(runs)
    num, long = len(np.unique(parameters)), len(np.unique(tokens))
    cells = cells_of(runs)
    if num == 1 or long == 1:
        return ("tokens" if num == 1 else "parameters") if max(num, long) > FEWEST_OF_EACH else None
    if in_step(runs):
        return "compute" if cells > FEWEST_OF_EACH else None
    both = min(num, long) >= FEWEST_OF_EACH and cells > NUM_CONSTANTS["chinchilla"]
    return "chinchilla" if both else None


def cells_of(runs: Sequence[SizedRun]) -> int:
    """Different pairs of parameters and tokens."""
    return len({(run.parameters, run.tokens) for run in runs})


def in_step(runs: Sequence[SizedRun]) -> bool:
    """Do tokens grow with parameters in all runs, so that their effects cannot be told apart?"""
    parameters, tokens, _, _ = columns(runs)
    return bool(abs(np.corrcoef(np.log(parameters), np.log(tokens))[0, 1]) > IN_STEP)


def require_form(runs: Sequence[SizedRun], workload: str) -> str:
    """The form that the runs can tell; the error says what is missing and which command makes it."""
    form = form_for(runs)
    if form is not None:
        return form
    num = len({run.parameters for run in runs})
    long = len({run.tokens for run in runs})
    raise UseError(
        f"{counted(len(runs), 'run')} of {counted(num, 'size')} and {counted(long, 'length')} of training "
        f"cannot tell a law: it takes {FEWEST_OF_EACH} numbers of parameters on each of {FEWEST_OF_EACH} "
        f"numbers of tokens, or {FEWEST_OF_EACH + 1} of one alone. Run more, as in theodolite sweep "
        f"{workload} --widths 32:256 --axis steps=100,200,400,800 --warmup 0"
    )


def require_within(law: ScaleLaw, parameters: int, tokens: int, workload: str) -> None:
    """Refuse a target that differs in what no two runs differ in."""
    known, seen, _, _ = columns(law.runs)
    if law.form == "parameters" and abs(math.log(tokens / seen[0])) > 0.01:
        raise UseError(
            f"every run has seen {seen[0]:g} tokens, so nothing can be said of {tokens:g}. Give "
            f"tokens={seen[0]:.0f}, or run other lengths: theodolite sweep {workload} --axis steps=…"
        )
    if law.form == "tokens" and abs(math.log(parameters / known[0])) > 0.01:
        raise UseError(
            f"every run has {known[0]:g} parameters, so nothing can be said of {parameters:g}. Run other "
            f"widths: theodolite sweep {workload} --widths …"
        )
    if law.form == "compute":
        slope, level = np.polyfit(np.log(known), np.log(seen), 1)
        usual = math.exp(level + slope * math.log(parameters))
        if abs(math.log(tokens / usual)) > math.log(OFF_RAY):
            raise UseError(
                f"tokens grow with the parameters in all runs, so the two cannot be told apart, and "
                f"{tokens:g} tokens for {parameters:g} parameters are not in their step: give about "
                f"tokens={usual:.3g}, or run some sizes on other lengths: theodolite sweep {workload} "
                "--axis steps=…"
            )


@dataclass(frozen=True)
class _HeldOut:
    """A forecast of one run by a law through smaller ones."""

    cell: tuple[int, int]
    distance: float
    """See `LossInterval.distance`."""
    reach: float
    off: float
    """log(forecast/actual)."""


def coverage_of(
    runs: Sequence[SizedRun], form: str, *, seed: int = 0, progress: Progress | None = None
) -> Coverage:
    """Fit the smaller runs, forecast the larger ones, from several origins, and count.

    Intervals are widened by the quantile of the distances that would have covered 95 % of these forecasts
    (of n, the ⌈0.95(n+1)⌉-th, or the largest if n is less than 19), and never narrowed.
    """
    held_out = list(_rolling(runs, form, seed, progress))
    distances = np.array([one.distance for one in held_out])
    if not len(distances):
        return Coverage(0, 0, math.nan, 1.0, math.nan, math.nan, math.nan, math.nan)
    cells = {one.cell for one in held_out}
    inside = []
    for cell in cells:
        others = np.array([one.distance for one in held_out if one.cell != cell])
        factor = needed_factor(others) if len(others) else 1.0
        inside += [one.distance <= factor for one in held_out if one.cell == cell]
    off = np.array([one.off for one in held_out])
    return Coverage(
        len(held_out),
        len(cells),
        float((distances <= 1).mean()),
        needed_factor(distances),
        float(np.mean(inside)),
        float(max(one.reach for one in held_out)),
        float(off.mean()),
        float((np.sign(off) == np.sign(off.mean())).mean()),
    )


def needed_factor(distances: Array) -> float:
    """By what intervals have to be widened to hold 95 % of runs at these distances; at least 1.

    >>> needed_factor(np.linspace(0.1, 2.0, 20)), needed_factor(np.array([0.2, 0.4]))
    (2.0, 1.0)
    """
    place = math.ceil(LEVEL * (len(distances) + 1))
    return max(1.0, float(np.sort(distances)[min(place, len(distances)) - 1]))


def _rolling(runs: Sequence[SizedRun], form: str, seed: int, progress: Progress | None) -> Any:
    """Each run as forecast by laws through smaller ones."""
    budgets = sorted({round(run.flop, -int(math.log10(run.flop)) + 6) for run in runs})
    origins = []
    for budget in budgets[:-1]:
        seen = [run for run in runs if run.flop <= budget * (1 + 1e-5)]
        if form_for(seen) == form and cells_of(seen) >= NUM_CONSTANTS[form] + SPARE:
            origins.append(seen)
    places = np.unique(np.linspace(0, len(origins) - 1, min(len(origins), MOST_ORIGINS)).round().astype(int))
    for count, place in enumerate(places):
        seen = origins[place]
        if progress is not None:
            progress(f"held-out forecasts: {count} of {len(places)} origins", count / len(places))
        law, largest = law_of(seen, form, draws=DRAWS_OF_ORIGIN, seed=seed), max(run.flop for run in seen)
        known = {run.identity for run in seen}
        for run in runs:
            if run.identity not in known:
                told = law.forecast(run.parameters, run.tokens, run.flop)
                yield _HeldOut(
                    (run.parameters, run.tokens),
                    told.distance(run.loss),
                    run.flop / largest,
                    math.log(told.value / run.loss),
                )
