"""The launch sheet: what a person needs to know, and to type, before a large run is paid for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from theodolite.core.size import Size
from theodolite.forecasting import Forecast
from theodolite.launching.preparation import Preparation
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.horizon import Horizon, HorizonCase
from theodolite.planning import Plan
from theodolite.present.figure import Figure
from theodolite.present.result import Block, Code, Heading, Result
from theodolite.present.text import Table, duration, number
from theodolite.surveying import Survey
from theodolite.sweeping import Family, Sweep

MOVED = 0.5
"""Octaves by which the best learning rate may move to larger networks."""


@dataclass(frozen=True)
class Rate:
    """The learning rate of the base, and how well that of the target is known."""

    base: float
    octaves: float
    """Of the interval at the target, to either side; nan if not known."""
    exponents: str
    """How the best rate goes with tokens and batch."""

    @property
    def text(self) -> str:
        """The rate as a power of two, and in digits."""
        return f"2^{math.log2(self.base):g} = {self.base:.3g}"


@dataclass(frozen=True)
class LaunchSheet(Result):
    """Verdict, learning rate, forecast, plan, risks and commands. Made by `scale`."""

    kind: ClassVar[str] = "launch sheet"

    workload: str
    target: Size
    date: str
    preparation: Preparation
    spent: float
    """FLOP of all small runs."""
    rate: Rate
    horizon: str
    moved: float
    """Octaves by which the best learning rate moved to larger networks; nan if it cannot be told."""
    transfer: str
    """What the larger networks say, in a sentence."""
    survey: Survey
    forecast: Forecast | None
    unforeseen: str
    """Why there is no forecast."""
    plan: Plan
    risks: tuple[str, ...]
    commands: Mapping[str, str]
    """Lines to copy, by what they are for."""
    figures: tuple[Figure, ...] = field(repr=False)
    """Of the sweeps."""

    @staticmethod
    def of(
        *,
        preparation: Preparation,
        spent: float,
        survey: Survey,
        rate: Rate,
        horizon: Horizon,
        sweeps: tuple[Sweep, Sweep],
        forecast: Forecast | str,
        plan: Plan,
        risks: Sequence[str],
        commands: Mapping[str, str],
    ) -> LaunchSheet:
        """The sheet from what the stages found."""
        told = forecast if isinstance(forecast, Forecast) else None
        moved, said = _moved(sweeps[1].families[0])
        return LaunchSheet(
            workload=preparation.workload,
            target=preparation.target,
            date=datetime.now(UTC).date().isoformat(),
            preparation=preparation,
            spent=spent,
            rate=rate,
            horizon=str(horizon),
            moved=moved,
            transfer=said,
            survey=survey,
            forecast=told,
            unforeseen=forecast if isinstance(forecast, str) else "",
            plan=plan,
            risks=(*risks, *_risks(survey, moved, said, told, preparation)),
            commands=commands,
            figures=tuple(figure for one in sweeps for figure in one.figures()),
        )

    @property
    def verdict(self) -> str:
        """One sentence: may it be launched?"""
        what = f"{self.workload} at {self.target}"
        if fails := self.survey.at("fail"):
            return f"Do not launch {what}: {fails[0].title[0].lower()}{fails[0].title[1:]} ({fails[0].code})."
        loss = "" if self.forecast is None else f" The held-out loss is expected at {self.forecast.loss}."
        if self.risks:
            return f"{what} can be launched with care: read the risks.{loss}"
        return f"{what} can be launched.{loss}"

    title = verdict

    def blocks(self) -> Iterator[Block]:
        """The verdict, key figures, the forecast, risks, commands, the plan, and what was run."""
        yield self.verdict
        yield Table(("", ""), self._key_figures())
        if self.risks:
            yield Heading("Risks")
            yield "\n".join(f"• {risk}" for risk in self.risks)
        yield Heading("Commands")
        for purpose, lines in self.commands.items():
            yield purpose
            yield Code(lines)
        yield Heading("Forecast")
        if self.forecast is None:
            yield f"There is none: {self.unforeseen}"
        else:
            yield from self.forecast.blocks()
        yield Heading("Plan")
        yield from self.plan.blocks()
        yield Heading("Learning rate")
        yield from self.figures
        yield Heading("Survey")
        yield self.survey.verdict
        found = [one for one in self.survey.ranked if one.level != "ok"]
        yield Table(("level", "code", "finding"), [(one.level, one.code, one.sentence) for one in found])
        yield Heading("What was run")
        yield from self.preparation.blocks()

    def to_dict(self) -> dict[str, Any]:
        """All of it, and the verdict; the parts as they write themselves."""
        parts = {
            "preparation": self.preparation,
            "survey": self.survey,
            "plan": self.plan,
            "forecast": self.forecast,
        }
        own = {
            name: value
            for name, value in vars(self).items()
            if name not in (*parts, "target", "rate", "figures")
        }
        return {
            "verdict": self.verdict,
            **own,
            "target": {name: value for name, value in vars(self.target).items() if value is not None},
            "rate": {**vars(self.rate), "octaves": _finite(self.rate.octaves)},
            "moved": _finite(self.moved),
            **{name: None if one is None else one.to_dict() for name, one in parts.items()},
        }

    def _key_figures(self) -> list[tuple[str, str]]:
        around = f", known to ±{self.rate.octaves:.1f} octaves" if math.isfinite(self.rate.octaves) else ""
        rows = []
        if self.forecast is not None:
            cost = f"{number(self.forecast.flop)} FLOP"
            hours = self.forecast.hours
            if hours is not None and self.forecast.tflops is not None:
                cost += f", {duration(3600 * hours)} at {number(self.forecast.tflops)} TFLOP/s"
            rows += [("held-out loss", f"{self.forecast.loss}, with 95 %"), ("cost", cost)]
        factor = self._factor
        rows += [
            ("learning rate, base", f"{self.rate.text}, best at {self.preparation.base}"),
            (
                "learning rate, target",
                f"{self.rate.base * factor:.3g}{around}: × {number(factor)} by the rule {self.horizon}; the "
                "plan below has each tensor's",
            ),
            ("the best rate goes as", self.rate.exponents),
            ("larger networks", self.transfer),
        ]
        share = self.spent / self.preparation.target_flop
        rows.append(("small runs", f"{share:.1%} of the target's FLOP"))
        return rows

    @property
    def _factor(self) -> float:
        """What the rule for batch and tokens multiplies the learning rate by."""
        spec = OPTIMIZERS.get(self.plan.optimizer_name)
        case = HorizonCase(Horizon.of(self.horizon), self.plan.base, self.plan.size, spec, {})
        return case.factors(spec.degree if spec else 0, 1, independent=False).lr


def _moved(family: Family) -> tuple[float, str]:
    """How far the best learning rate moves over the networks that were tried, and in a sentence."""
    told = [drift for drift in family.drifts if drift.told]
    if not told:
        return math.nan, "how far the best learning rate moves cannot be told from these seeds"
    most = max(drift.movement for drift in told)
    least = "at least " if any(drift.bounded for drift in family.drifts) else ""
    sizes = ", ".join(str(optimum.size.network) for optimum in family.optima)
    return most, f"the best learning rate moves by {least}{most:.2f} octaves over {sizes}"


def _risks(
    survey: Survey, moved: float, transfer: str, forecast: Forecast | None, preparation: Preparation
) -> Iterator[str]:
    for finding in (*survey.at("fail"), *survey.at("warn")):
        yield f"{finding.sentence} ({finding.code})"
    if moved > MOVED:
        yield f"{transfer[0].upper()}{transfer[1:]}: more than the {MOVED} that a plan allows."
    if math.isnan(moved):
        yield "The transfer to larger networks is not proved: the seeds do not tell their best rates apart."
    if forecast is None:
        yield "There is no forecast of the loss."
        return
    if preparation.target.batch != preparation.base.batch:
        yield (
            f"The forecast is made from runs with a batch of {preparation.base.batch}, and the target has "
            f"{preparation.target.batch}."
        )
    if any("Do not extrapolate" in note for note in forecast.notes):
        yield "The law of the forecast is not determined by these runs: it may be far off."
    if any("No irreducible loss" in note for note in forecast.notes):
        yield (
            "The law sees no loss that cannot be learned: where targets are noisy, the forecast is too low, "
            "and its interval does not say so."
        )
    if not forecast.coverage.enough:
        yield (
            f"The interval of the forecast was checked on {forecast.coverage.num_forecasts} held-out runs "
            "alone."
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
