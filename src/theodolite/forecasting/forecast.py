"""`forecast`: the loss of a run that was not made yet, from the finished runs of a ledger."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from theodolite.core.arguments import one_of, positive, whole
from theodolite.core.arguments import seed as check_seed
from theodolite.core.errors import UseError
from theodolite.core.progress import Progress, part
from theodolite.core.size import Size
from theodolite.fits.result import FitEstimate
from theodolite.fleet.ledger import Ledger
from theodolite.forecasting.law import (
    FEWEST_CELLS,
    FEWEST_FORECASTS,
    ONE_SIDED,
    SELDOM,
    Coverage,
    ScaleLaw,
    coverage_of,
    law_of,
    require_form,
    require_within,
)
from theodolite.forecasting.result import Alternative, CurvePoint, Forecast, rate_text
from theodolite.forecasting.runs import (
    Network,
    Row,
    SizedRun,
    at_own_best,
    at_rate,
    best_rate,
    better_rate_at_largest,
    checked_rate,
    columns,
    larger_half,
    network_of,
    of_smallest,
    recipe,
    rises,
    settings_of,
    sized,
)
from theodolite.present.text import counted, number

if TYPE_CHECKING:  # a forecast needs torch only to count FLOP
    from theodolite.workloads import Workload

PLAN, STANDARD = "plan", "standard"
CURVE = 40
"""Points of the curve in the figure."""


def forecast(
    ledger: str | Path | Ledger,
    target: Size,
    *,
    lr: float | None = None,
    optimizer: str | None = None,
    where: Mapping[str, Any] | None = None,
    workload: Workload | None = None,
    tflops: float | None = None,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> Forecast:
    """Forecast the loss of a planned run at another size from the finished runs of a ledger.

    A law is fitted to the runs of the parameterization `plan` at one base learning rate, the one that the
    target will be trained with: Chinchilla's form where parameters and tokens vary separately, else a power
    law in the one that varies, or in compute. Seeds are replicates. The interval is for the held-out loss of
    a single run; it is checked, and widened if need be, by forecasting the larger runs from the smaller.

    Args:
        ledger: its folder, its file, or an open one, such as that of `theodolite.sweep`.
        target: its width, depth and tokens. Tokens may be left out if all runs have seen the same number.
        lr: the base learning rate of the target; by default the one whose loss is the lowest, on average,
            over the larger half of the sizes.
        optimizer: which, if the ledger has several.
        where: by column, the value that runs must have, if the ledger holds several recipes.
        workload: by default looked up by its name in the ledger. It is built without memory, to count FLOP.
        tflops: achieved TFLOP/s of the machine, for the hours.
        draws, seed: of the bootstrap.

    >>> from theodolite import Size, forecast
    >>> made = forecast("sweep", Size(512, 4, tokens=10**8), tflops=40)     # doctest: +SKIP
    >>> made.loss.low, made.loss.high                                       # doctest: +SKIP
    """
    if not isinstance(target, Size):
        raise UseError(f"target is {target!r}: give a Size, for example Size(512, 4, tokens=10**8)")
    if tflops is not None:
        positive("tflops", tflops)
    whole("draws", draws, least=20)
    check_seed("seed", seed)
    rows = _rows(ledger)
    if optimizer is not None:
        one_of("optimizer", optimizer, sorted({row["optimizer"] for row in rows}))
    planned = recipe(rows, PLAN, optimizer=optimizer, where=where or {})
    if not planned:
        raise UseError(
            f"the ledger has no finished runs of the parameterization {PLAN!r}, which a forecast is made of. "
            "Make some: theodolite sweep WORKLOAD --widths 32:256 --lr 2^-10:2^-5 "
            "--axis steps=100,200,400,800 --warmup 0"
        )
    name = str(planned[0]["workload"])
    rate = best_rate(planned, larger_half(planned)) if lr is None else checked_rate(planned, lr)
    costs = _Costs(name, workload)
    runs = sized(at_rate(planned, rate), costs.of(map(network_of, planned)))
    form = require_form(runs, name)
    target = _with_tokens(target, runs)
    assert target.tokens is not None
    parameters, per_token = costs.at((target.width, target.depth))
    flop = per_token * target.tokens
    law = law_of(runs, form, draws=draws, seed=seed, progress=part(progress, 0.0, 0.3))
    require_within(law, parameters, target.tokens, name)
    coverage = coverage_of(runs, form, seed=seed, progress=part(progress, 0.3, 0.9))
    raw = law.forecast(parameters, target.tokens, flop)
    notes = [*costs.notes, *_notes(planned, law, rate, lr, flop, coverage, target)]
    at = _Target(parameters, target.tokens, flop, rate)
    alternatives: list[Alternative] = []
    more: list[str] = []
    split = _compute_optimal(law, at, coverage.factor)
    for found in (split, *_outside(split, runs), *_standard(rows, optimizer, where, costs, at)):
        if isinstance(found, str):
            more.append(found)
        else:
            alternatives.append(found)
    if progress is not None:
        progress("forecast", 1.0)
    return Forecast(
        workload=name,
        target=target,
        lr=rate,
        settings=settings_of(planned[0]),
        parameters=parameters,
        tokens=target.tokens,
        loss=raw.widened(coverage.factor),
        raw=raw,
        coverage=coverage,
        form=form,
        equation=law.fit.equation if form == "chinchilla" else law.fit.equation.replace("x", form),
        constants=dict(law.fit.constants),
        flop=flop,
        extrapolation=flop / max(run.flop for run in runs),
        tflops=tflops,
        alternatives=tuple(alternatives),
        notes=(*notes, *more),
        runs=runs,
        curve=_curve(law, at, coverage.factor),
        date=now(),
    ).sealed()


def now() -> str:
    """The time in UTC, as a ledger writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True)
class _Target:
    parameters: int
    tokens: int
    flop: float
    rate: float


class _Costs:
    """Parameters and FLOP for each token of the networks of a workload."""

    def __init__(self, name: str, workload: Workload | None) -> None:
        self.notes: list[str] = []
        self._workload = workload
        self._name = name
        self.at = cache(self._at)

    def of(self, networks: Iterable[Network]) -> dict[Network, float]:
        """FLOP for each token by network."""
        return {network: self.at(network)[1] for network in set(networks)}

    def _at(self, network: Network) -> tuple[int, float]:
        from theodolite.anatomy.flop import flop
        from theodolite.core.batches import targets_in
        from theodolite.core.building import build_hollow
        from theodolite.workloads import workload

        if self._workload is None:
            try:
                self._workload = workload(self._name)
            except UseError as error:
                raise UseError(
                    f"the workload of the ledger cannot be looked up: {error}. Give it: workload=…"
                ) from error
        batch, size = self._workload.draw(0, 0), Size(*network)
        try:
            count = flop(self._workload.build, batch[0], size=size)
            return count.parameters, count.training / max(1, targets_in(batch))
        except UseError as error:
            num = sum(each.numel() for each in build_hollow(self._workload.build, size).parameters())
            note = f"FLOP could not be counted ({error}); 6 for each parameter and token are assumed."
            if not self.notes:
                self.notes.append(note)
            return num, 6.0 * num


def _rows(ledger: str | Path | Ledger) -> list[dict[str, Any]]:
    if isinstance(ledger, Ledger):
        return ledger.rows()
    with Ledger.read(ledger) as opened:
        return opened.rows()


def _with_tokens(target: Size, runs: Sequence[SizedRun]) -> Size:
    """The target with the number of tokens of the runs, if it has none and they share one."""
    if target.tokens is not None:
        return target
    seen = sorted({run.tokens for run in runs})
    if len(seen) > 1:
        raise UseError(
            f"the target has no tokens, and the runs have seen {seen[0]} to {seen[-1]}: say how long it is "
            "trained, as in Size(512, 4, tokens=10**8), or --tokens 1e8"
        )
    return target.at(tokens=seen[0])


def _notes(
    planned: Sequence[Row],
    law: ScaleLaw,
    rate: float,
    lr: float | None,
    flop: float,
    coverage: Coverage,
    target: Size,
) -> list[str]:
    """What the reader should know before believing it."""
    found = []
    if coverage.num_forecasts and not coverage.enough:
        found.append(
            f"{counted(coverage.num_forecasts, 'held-out forecast')} of "
            f"{counted(coverage.num_cells, 'size')} are too few to tell whether 95 % are covered: it takes "
            f"{FEWEST_FORECASTS} of {FEWEST_CELLS}. Add sizes or seeds."
        )
    if not coverage.num_forecasts:
        found.append("The coverage of the interval is not checked: it may be too narrow. Add sizes or seeds.")
    extrapolation = flop / max(run.flop for run in law.runs)
    if coverage.num_forecasts and extrapolation > 1.5 * coverage.reach:
        found.append(
            f"The target is {number(extrapolation)} times the largest run; the forecasts that were checked "
            f"reach {number(coverage.reach)} times."
        )
    missed = coverage.num_cells >= FEWEST_CELLS and coverage.raw < SELDOM
    if missed and coverage.one_sided >= ONE_SIDED:
        side, moves = ("high", "faster") if coverage.bias > 0 else ("low", "more slowly")
        found.append(
            f"{coverage.one_sided:.0%} of the held-out forecasts were too {side}, by "
            f"{abs(coverage.bias):.1%} on average: the loss falls {moves} than this form of law can. Expect "
            "the same of this forecast; longer or larger runs would tell."
        )
    better = better_rate_at_largest(planned, rate)
    if better is not None:
        found.append(
            f"At the largest network and length the base learning rate {rate_text(better[0])} is better by "
            f"{better[1]:.1%}; this forecast is for {rate_text(rate)}."
        )
    diverged = sum(row["status"] == "diverged" and float(row["lr"]) == rate for row in planned)
    if diverged:
        found.append(f"{counted(diverged, 'run')} at this learning rate diverged and are left out.")
    batches = {row.get("batch") for row in planned}
    if target.batch is not None and target.batch not in batches:
        found.append(f"No run had a batch of {target.batch}: the law is about the batches of the runs.")
    return [*found, *(line for line in law.fit.warnings if "determine" in line or "bound" in line)]


def _compute_optimal(law: ScaleLaw, at: _Target, factor: float) -> Alternative | str:
    """The best split of the target's FLOP; FLOP for each parameter and token are taken from the target."""
    if law.form != "chinchilla":
        return (
            "The best split of the budget is not known: that takes runs that vary parameters and tokens "
            "separately (--widths and --axis steps=…)."
        )
    best = law.fit.optimal(compute=6.0 * at.parameters * at.tokens)
    parameters, tokens = best["parameters"], best["tokens"]
    if not (math.isfinite(parameters.value) and parameters.value > 0 and tokens.value > 0):
        return "The best split of the budget is not known: one of the two terms of the law is not seen."
    loss = law.forecast(parameters.value, tokens.value, at.flop).widened(factor)
    return Alternative("best split of the FLOP", parameters, tokens, loss)


def _outside(split: Alternative | str, runs: Sequence[SizedRun]) -> list[str]:
    """Says so if the best split is smaller or shorter than any run, where the law was never seen."""
    if isinstance(split, str):
        return []
    small, short = min(run.parameters for run in runs), min(run.tokens for run in runs)
    if split.parameters.value >= small and split.tokens.value >= short:
        return []
    return [
        f"The best split has fewer parameters or tokens than any run ({small:,} and {short:,} at least): the "
        "law was never seen there. Add smaller or shorter runs."
    ]


def _standard(
    rows: Sequence[Row],
    optimizer: str | None,
    where: Mapping[str, Any] | None,
    costs: _Costs,
    at: _Target,
) -> list[Alternative | str]:
    """What the standard parameterization would lose, tuned at the smallest network or at each size."""
    where = {name: value for name, value in (where or {}).items() if not name.startswith("base_")}
    standard = recipe(rows, STANDARD, optimizer=optimizer, where=where)
    if not standard:
        return [
            "The standard parameterization is left out: the ledger has no runs of it "
            "(--parameterization plan,standard)."
        ]
    tuned = best_rate(standard, of_smallest(standard))
    diverged = sum(row["status"] == "diverged" and float(row["lr"]) == tuned for row in standard)
    ways = (
        (f"standard, {rate_text(tuned)}, best at the smallest", at_rate(standard, tuned), diverged),
        ("standard, best rate of each size", at_own_best(standard), 0),
    )
    found: list[Alternative | str] = []
    for what, chosen, num in ways:
        if num:
            found.append(f"{what}: {counted(num, 'run')} diverged, so there is no law of it.")
            continue
        try:
            runs = sized(chosen, costs.of(map(network_of, chosen)))
            found.append(_standard_law(what, runs, str(standard[0]["workload"]), at))
        except UseError as error:
            found.append(f"{what}: {error}.")
    return found


def _standard_law(what: str, runs: Sequence[SizedRun], workload: str, at: _Target) -> Alternative:
    """What these runs foretell at the target."""
    form = require_form(runs, workload)
    if reason := rises(runs):
        raise UseError(reason)
    law = law_of(runs, form, draws=200)
    require_within(law, at.parameters, at.tokens, workload)
    loss = law.forecast(at.parameters, at.tokens, at.flop).widened(coverage_of(runs, form).factor)
    parameters, tokens = (
        FitEstimate(float(one), float(one), float(one), 0.0) for one in (at.parameters, at.tokens)
    )
    return Alternative(what, parameters, tokens, loss)


def _curve(law: ScaleLaw, at: _Target, factor: float) -> tuple[CurvePoint, ...]:
    """The law along the straight way, in logarithms, from the smallest run to the target."""
    parameters, tokens, flop, _ = columns(law.runs)
    first = int(flop.argmin())
    ends = np.log([(parameters[first], at.parameters), (tokens[first], at.tokens), (flop[first], at.flop)])
    way = [np.geomspace(np.exp(low), np.exp(high), CURVE) for low, high in ends]
    return tuple(
        CurvePoint(float(c), law.forecast(float(n), float(d), float(c)).widened(factor))
        for n, d, c in zip(*way, strict=True)
    )
