"""`scale`: everything between a small network and the launch of a large one, in one call."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from theodolite.core.arguments import number, one_of, positive
from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite.core.progress import Progress, part
from theodolite.core.size import Size
from theodolite.fleet.driver import check_engine
from theodolite.fleet.engine import Resources
from theodolite.forecasting import Forecast, forecast
from theodolite.launching.preparation import Preparation, prepare
from theodolite.launching.sheet import LaunchSheet, Rate
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.horizon import Horizon
from theodolite.planning import Plan, plan
from theodolite.surveying import Survey, survey
from theodolite.sweeping import Family, Sweep, sweep
from theodolite.sweeping.sweep import SHARED
from theodolite.workloads import Workload
from theodolite.workloads import workload as look_up

RATES = tuple(2.0**exponent for exponent in range(-9, -3))
"""Learning rates that are tried for optimizers with updates of entries of about one."""
LOOSE = 0.25
"""Exponents that are not known better than this are not used."""
SHARES = {"survey": 0.1, "rate": 0.45, "transfer": 0.6, "law": 0.95, "sheet": 1.0}
"""About where each stage ends."""


def scale(
    workload: Workload | str,
    to: Size,
    *,
    budget: float = 0.03,
    base: Size | None = None,
    optimizer: str = "adamw",
    lr: Sequence[float] | None = None,
    weight_decay: float = 0.0,
    schedule: str = "wsd",
    out: str | Path = "scale",
    tflops: float | None = None,
    engine: str = "auto",
    device: str = "cpu",
    jobs: int | None = None,
    prepared: Preparation | None = None,
    progress: Progress | None = None,
) -> LaunchSheet:
    """Survey a network, find its learning rate, check the transfer, measure the horizon, forecast, plan.

    Everything is kept in the folder `out`, and the same call goes on where it was stopped: the ledgers of
    three sweeps (`rate`, `transfer`, `law`), `survey.json`, `forecast.json`, `plan.json` with its exports,
    and the launch sheet.

    Args:
        workload: a `Workload`, or the name of one.
        to: the target: width, depth, and its batch and tokens.
        budget: the part of the target's FLOP that the small runs may use.
        base: the smallest network; by default up to 8 times narrower and 4 times shallower than the target.
        optimizer: a name in `theodolite.optimizers.OPTIMIZERS`.
        lr: learning rates to try at the base; by default 2^-9 to 2^-4. Two octaves are added where the best
            is the last, as long as the budget lasts.
        weight_decay: at the base. Where there is some, the target's keeps the same timescale.
        schedule: of all runs. With `wsd` runs of several lengths share their beginning.
        out: the folder.
        tflops: achieved TFLOP/s of the machine that the target will be trained on, for the hours.
        engine: `auto`, `serial`, `processes` or `vectorised`.
        device: `cpu` or `cuda`.
        jobs: processes at a time.
        prepared: what to run, if `prepare` has been asked already.
        progress: called with what is being done and the fraction done.
    """
    one_of("optimizer", optimizer, tuple(OPTIMIZERS))
    number("weight_decay", weight_decay, least=0)
    if tflops is not None:
        positive("tflops", tflops)
    check_engine(engine, Resources(device=device))
    chosen = look_up(workload) if isinstance(workload, str) else workload
    rates = tuple(RATES if lr is None else lr)
    todo = prepared or prepare(
        chosen, to, budget=budget, base=base, rates=rates, schedule=schedule, device=device
    )
    folder = Path(out).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    runs = _Runs(workload, todo, folder, progress)
    runs.fields = {"optimizer": optimizer, "weight_decay": weight_decay, "schedule": schedule}
    runs.fields |= {"engine": engine, "device": device, "jobs": jobs}
    found = runs.survey(chosen)
    tuned = runs.tuned()
    rate, horizon, risks = _rate_of(tuned.families[0], todo, weight_decay > 0)
    transfer = runs.transfer(rate)
    told = runs.forecast(chosen, rate, horizon, tflops)
    made = runs.plan(chosen, optimizer, rate, weight_decay, horizon)
    sheet = LaunchSheet.of(
        preparation=todo,
        spent=runs.spent,
        survey=found,
        rate=rate,
        horizon=horizon,
        sweeps=(tuned, transfer),
        forecast=told,
        plan=made,
        risks=risks,
        commands=_commands(
            chosen,
            repr(workload) if isinstance(workload, str) else None,
            todo,
            str(out),
            forecast=isinstance(told, Forecast),
            lr=rate.base,
            fields={"optimizer": optimizer, "weight_decay": weight_decay, "schedule": schedule},
            horizon=horizon,
        ),
    )
    sheet.save(folder / "launch.json")
    sheet.save(folder / "launch.html")
    return sheet


class _Runs:
    """The stages, each with its files in the folder."""

    fields: Mapping[str, Any]

    def __init__(
        self,
        workload: Workload | str,
        todo: Preparation,
        folder: Path,
        progress: Progress | None,
    ) -> None:
        self._workload, self._todo, self._folder, self._progress = workload, todo, folder, progress
        self._rates = [*todo.rates]

    @property
    def spent(self) -> float:
        """FLOP of all runs."""
        return self._todo.flop + self._todo.further(len(self._rates) - len(self._todo.rates))

    def survey(self, workload: Workload) -> Survey:
        """Can it be scaled?"""
        path = self._folder / "survey.json"
        if path.exists():
            return Survey.load(path)
        planned = replace(workload, optimizer=None, schedule=None)  # the plan's are launched, not the user's
        made = survey(planned, progress=self._part("survey"))
        made.save(self._folder / "survey.html")
        made.save(path)
        return made

    def tuned(self) -> Sweep:
        """The losses at the base; two more octaves where the best is the last, while the budget lasts."""
        stage = self._todo.stage("rate")
        while True:
            made = self._sweep("rate", stage.sizes, self._rates, stage.seeds)
            low, high = min(self._rates), max(self._rates)
            there = {row["lr"] for row in made.rows}
            begun = {edge for edge, out in (("low", min(there) < low), ("high", max(there) > high)) if out}
            edges = begun or {optimum.edge for optimum in made.families[0].optima}
            beyond = {"low": [low / 4, low / 2], "high": [2 * high, 4 * high]}
            wanted = [rate for edge, rates in beyond.items() if edge in edges for rate in rates]
            paid = self.spent + self._todo.further(len(wanted)) <= self._todo.allowed
            if not wanted or not (begun or paid):
                return made
            self._rates = sorted([*self._rates, *wanted])

    def transfer(self, rate: Rate) -> Sweep:
        """Is the rate of the base that of larger networks?"""
        stage = self._todo.stage("transfer")
        near = sorted(self._rates, key=lambda one: abs(math.log2(one / rate.base)))[: stage.num_rates]
        return self._sweep("transfer", stage.sizes, sorted(near), stage.seeds)

    def forecast(
        self, workload: Workload, rate: Rate, horizon: Horizon, tflops: float | None
    ) -> Forecast | str:
        """The loss of the target; why there is no forecast, if there is none. Made once for the same runs."""
        stage, path = self._todo.stage("law"), self._folder / "forecast.json"
        # Another rule, measured with more runs, has other runs.
        folder = f"law-{re.sub('[^a-z0-9.]+', '-', str(horizon)).strip('-')}"
        self._sweep("law", stage.sizes, [rate.base], stage.seeds, folder=folder, horizon=str(horizon))
        try:
            made = forecast(
                self._folder / folder,
                self._todo.target,
                lr=rate.base,
                workload=workload,
                tflops=tflops,
                progress=self._part("sheet"),
            )
        except UseError as error:
            return str(error)
        if path.exists() and _but_date(older := Forecast.load(path)) == _but_date(made):
            return older  # its date stays
        made.save(path)
        return made

    def plan(
        self, workload: Workload, optimizer: str, rate: Rate, weight_decay: float, horizon: Horizon
    ) -> Plan:
        """The plan of the target, with its exports."""
        made = plan(
            workload.build,
            workload.draw(0, 0)[0],
            base=self._todo.base,
            size=self._todo.target,
            optimizer=optimizer,
            lr=rate.base,
            weight_decay=weight_decay,
            roles=workload.roles_with(None),
            horizon=horizon,
        )
        made.save(self._folder / "plan.json")
        for kind, name in (("torch", "plan_torch.py"), ("csv", "plan.csv")):
            try:
                write_whole(self._folder / name, made.export(kind).text)
            except UseError:  # the optimizer is not torch's
                continue
        return made

    def _sweep(
        self,
        name: str,
        sizes: Sequence[Size],
        rates: Sequence[float],
        seeds: int,
        *,
        folder: str | None = None,
        **fields: Any,
    ) -> Sweep:
        made = sweep(
            self._workload,
            sizes=sizes,
            base=self._todo.base,
            lr=rates,
            seeds=seeds,
            parameterization="plan",
            out=self._folder / (folder or name),
            progress=self._part(name),
            **self.fields,
            **fields,
        )
        assert made.report is not None
        if made.report.stopped:
            raise KeyboardInterrupt
        if made.report.failed:
            run, error = made.report.failed[0]
            raise UseError(
                f"{len(made.report.failed)} runs of the stage {name} failed, the first of them {run}: {error}"
            )
        made.save(self._folder / f"{name}.html")
        return made

    def _part(self, name: str) -> Progress:
        names = [*SHARES]
        start = SHARES[names[names.index(name) - 1]] if name != names[0] else 0.0
        return part(self._progress, start, SHARES[name])


def _rate_of(family: Family, todo: Preparation, decays: bool) -> tuple[Rate, Horizon, list[str]]:
    """From the sweep at the base to the rate, the rule for batch and tokens, and what is uncertain."""
    optimum, base, target = family.optimum(todo.base), todo.base, todo.target
    if not math.isfinite(optimum.value):
        raise UseError(
            f"no learning rate tried at {base} ends with a finite loss: give smaller ones, as lr=[…]"
        )
    risks = []
    if not optimum.found:
        risks.append(
            f"The best learning rate at {base} is not known: it is "
            + (
                "the last that was tried. Try further ones, or give a larger budget."
                if optimum.edge
                else "lost in the noise of the seeds."
            )
        )
    fit = family.horizon
    known = fit is not None and all(math.isfinite(one.value) for one in fit.exponents)
    named = {"tokens"} | ({"batch"} if target.batch != base.batch else set())
    loose = [one for one in fit.exponents if not one.interval.high - one.value < LOOSE] if fit else []
    if fit is not None and known and not loose and named <= {one.along for one in fit.exponents}:
        horizon = Horizon(fit.horizon.rates, fit.horizon.tokens, fit.horizon.batch, timescale=decays)
        reach = [
            (one.interval.high - one.value)
            * abs(math.log2(getattr(target, one.along) / getattr(base, one.along)))
            for one in fit.exponents
            if one.along in named
        ]
        said = ", ".join(str(one) for one in fit.exponents)
    else:
        found = ", ".join(str(one) for one in fit.exponents) if fit is not None and known else "unknown"
        horizon, reach, said = Horizon("sde", timescale=decays), [math.nan], f"{found}, taken as √(m_B/m_D)"
        risks.append(
            f"How the best rate follows tokens and batch is not known well ({found}): the plan takes the "
            "rule sde, which is derived and not measured. A larger budget adds lengths and seeds."
        )
    spread = optimum.interval.high / optimum.value if optimum.interval.known else math.nan
    octaves = math.sqrt(sum(one**2 for one in [math.log2(spread), *reach])) if spread > 0 else math.nan
    if not octaves < 1:
        by = f"±{octaves:.1f} octaves" if math.isfinite(octaves) else "an unknown factor"
        risks.append(f"The learning rate at the target is uncertain by {by}: try two beside it at first.")
    return Rate(base=_rounded(optimum.value), octaves=octaves, exponents=said), horizon, risks


def _commands(
    workload: Workload,
    name: str | None,
    todo: Preparation,
    folder: str,
    *,
    forecast: bool,
    lr: float,
    fields: Mapping[str, Any],
    horizon: Horizon,
) -> dict[str, str]:
    """How to launch, and how to check the forecast: lines to copy, by what they are for."""
    target, base, schedule = todo.target, todo.base, fields["schedule"]
    per_step = workload.tokens_in(1, target.batch)
    shared = schedule in SHARED  # then all small runs have the warmup of the shortest
    warmup = workload.steps_for(base if shared else target) // 10
    warmup_tokens = workload.tokens_in(warmup, base.batch if shared else target.batch)
    find = (
        [f"workload = th.workload({name})"] if name else ["# workload: the Workload that th.scale was given"]
    )
    given = {
        "sizes": f"[th.{target!r}]",
        "base": f"th.{base!r}",
        "lr": f"2**{math.log2(lr):g}",
        "parameterization": repr("plan"),
        **{key: repr(value) for key, value in fields.items()},
        "horizon": repr(str(horizon)),
        **({"warmup": str(warmup)} if shared else {}),
        "seeds": "1",
        "out": repr(f"{folder}/target"),
    }
    own_loop = [
        "import theodolite as th",
        *find,
        f"plan = th.Plan.load({f'{folder}/plan.json'!r}, workload.build)",
        "model = plan.build(seed=0)",
        "optimizer = plan.optimizer(model)",
        f"scheduler = plan.schedule(optimizer, {schedule!r}, tokens_per_step={per_step}, "
        f"warmup={warmup_tokens})",
    ]
    here = [
        "import theodolite as th",
        *([] if name else find),
        "th.sweep(",
        f"    {name or 'workload'},",
        *(f"    {key}={value}," for key, value in given.items()),
        ")",
    ]
    found = {
        "In your own training loop (Python; plan_torch.py is the plan without Theodolite):": own_loop,
        "Or as a run of Theodolite (Python):": here,
    }
    if forecast:
        check = f"theodolite forecast check {folder}/forecast.json {folder}/target"
        found["After that run, to see whether the forecast was right (shell):"] = [check]
    return {title: "\n".join(lines) for title, lines in found.items()}


def _but_date(forecast: Forecast) -> dict[str, str]:
    return {name: digest for name, digest in forecast.digests.items() if name != "date"}


def _rounded(rate: float) -> float:
    """To a quarter of an octave: the seeds know no more."""
    return float(2.0 ** (round(4 * math.log2(rate)) / 4))
