"""Was a forecast right? The target's later runs against its interval."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from theodolite.core.errors import UseError
from theodolite.fleet.ledger import Ledger
from theodolite.forecasting.law import LossInterval
from theodolite.forecasting.result import Forecast, rate_text
from theodolite.forecasting.runs import Row, network_of, settings_of, tokens_of
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted, number

SAME_LENGTH = 0.01
"""Tokens may differ by this share: a run sees whole batches."""


@dataclass(frozen=True)
class CheckedRun:
    """A run of the target that ended after the forecast was made."""

    identity: str
    seed: int
    ended: str
    loss: float
    """nan if it diverged."""
    inside: bool


@dataclass(frozen=True)
class ForecastCheck(Result):
    """A forecast beside what came out. Made by `check`."""

    kind: ClassVar[str] = "check of a forecast"

    what: str
    date: str
    """When the forecast was made."""
    digest: str
    predicted: LossInterval
    runs: tuple[CheckedRun, ...]
    notes: tuple[str, ...] = ()

    @property
    def actual(self) -> float:
        """The mean loss of the runs; nan if one diverged."""
        return fmean(run.loss for run in self.runs)

    @property
    def error(self) -> float:
        """Forecast over actual, less one."""
        return self.predicted.value / self.actual - 1

    @property
    def inside(self) -> bool:
        """Is the mean loss of the runs inside the interval?"""
        return math.isfinite(self.actual) and self.predicted.holds(self.actual)

    @property
    def verdict(self) -> str:
        """What was forecast, what came out."""
        if not math.isfinite(self.actual):
            return f"Outside: {self.what} diverged, and {self.predicted} was forecast."
        return (
            f"{'Inside' if self.inside else 'Outside'}: {self.what} came out at {number(self.actual, 4)}; "
            f"{self.predicted} was forecast, {self.error:+.2%} off."
        )

    @property
    def title(self) -> str:
        """The verdict."""
        return self.verdict

    def table(self) -> Table:
        """A row for each run."""
        heads = "run", "seed", "forecast", "2.5 %", "97.5 %", "actual", Column("error", show=_share), ""
        told = self.predicted
        rows = [
            (
                *(run.identity, run.seed, told.value, told.low, told.high, run.loss),
                *(told.value / run.loss - 1, "inside" if run.inside else "outside"),
            )
            for run in self.runs
        ]
        return Table(heads, rows)

    def blocks(self) -> Iterator[Block]:
        """The verdict, the runs, when the forecast was made."""
        yield self.verdict
        yield self.table()
        yield from (f"! {note}" for note in self.notes)
        first = min(run.ended for run in self.runs)
        yield (
            f"Forecast made {self.date}, not edited since (sha256 {self.digest[:16]}).\n"
            f"The first of these runs ended {first}."
        )


def check(forecast: Forecast | str | Path, ledger: str | Path | Ledger) -> ForecastCheck:
    """Compare a forecast with the runs of its target that ended after it was made.

    A forecast that was edited is refused. Runs of the target are those of the same workload, size, tokens
    (within 1 %), base learning rate and settings, under the plan; earlier ones do not count.
    """
    made = forecast if isinstance(forecast, Forecast) else Forecast.load(forecast)
    if isinstance(ledger, Ledger):
        rows = ledger.rows()
    else:
        with Ledger.read(ledger) as opened:
            rows = opened.rows()
    alike = [row for row in rows if row["status"] != "failed" and _is_target(made, row)]
    before = [row for row in alike if not _after(row, made.date)]
    counting = [row for row in alike if _after(row, made.date)]
    if not counting:
        raise UseError(_missing(made, rows, before))
    notes = []
    if before:
        notes.append(f"{counted(len(before), 'run')} of the target ended before the forecast: not counted.")
    return ForecastCheck(
        f"{made.workload} at {made.target}",
        made.date,
        made.digest,
        made.loss,
        tuple(_checked(made, row) for row in counting),
        tuple(notes),
    )


def _is_target(made: Forecast, row: Row) -> bool:
    tokens = tokens_of(row)
    return (
        row["parameterization"] == "plan"
        and network_of(row) == (made.target.width, made.target.depth)
        and math.isclose(float(row["lr"]), made.lr, rel_tol=1e-9)
        and _plain(settings_of(row)) == _plain(made.settings)
        and (made.target.batch is None or row.get("batch", made.target.batch) == made.target.batch)
        and (row["status"] == "diverged" or abs(tokens / made.tokens - 1) <= SAME_LENGTH)
    )


def _plain(settings: Any) -> dict[str, str]:
    """Settings from a file have lists where a ledger has tuples."""
    return {name: repr(value).replace("(", "[").replace(")", "]") for name, value in settings.items()}


def _after(row: Row, date: str) -> bool:
    return datetime.fromisoformat(row["ended"]) > datetime.fromisoformat(date)


def _checked(made: Forecast, row: Row) -> CheckedRun:
    loss = float(row["held_out"]) if row["status"] == "finished" else math.nan
    inside = math.isfinite(loss) and made.loss.holds(loss)
    return CheckedRun(row["identity"], int(row["seed"]), row["ended"], loss, inside)


def _missing(made: Forecast, rows: Sequence[Row], before: Sequence[Row]) -> str:
    asked = (
        f"{made.target} of {made.workload} under the plan, at base learning rate {rate_text(made.lr)}, with "
        f"the settings of the forecast"
    )
    if before:
        return (
            f"{counted(len(before), 'run')} of the target ended before the forecast of {made.date}, and none "
            "after it: it foretold nothing. Forecast before you run"
        )
    here = [row for row in rows if network_of(row) == (made.target.width, made.target.depth)]
    seen = sorted({tokens_of(row) for row in here})
    near = f"; at this size the ledger has runs of {seen} tokens" if seen else ""
    return f"the ledger has no settled run of {asked}{near}. Run it, then check again"


def _share(value: float) -> str:
    return "" if math.isnan(value) else f"{value:+.2%}"
