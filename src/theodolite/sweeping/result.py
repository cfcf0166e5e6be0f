"""A Sweep: what was run, where each size has its optimum, and what that says about transfer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from theodolite.core.arguments import did_you_mean
from theodolite.core.errors import UseError
from theodolite.core.files import frozen, plain
from theodolite.core.metric_names import metrics_in
from theodolite.core.size import Size
from theodolite.fleet.driver import RunReport
from theodolite.fleet.ledger import Ledger
from theodolite.optimizers.horizon import Horizon
from theodolite.present.figure import Figure
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Column, Table, cell
from theodolite.sweeping.curves import LOSS, Criterion, Row, setting, size_of
from theodolite.sweeping.families import Family, analyse, kind_of, movement_sentence
from theodolite.sweeping.figures import figures

ALWAYS = frozenset({"size", "seed", "optimizer", "parameterization"})
"""Axes of every sweep, which are arguments of their own."""


@dataclass(frozen=True, eq=False)
class Sweep(Result):
    """Runs over sizes and a swept quantity, and what they say. Made by `theodolite.sweep` or `Sweep.load`."""

    kind = "sweep"
    loads = True

    workload: str
    base: Size
    over: str
    """The swept quantity, by default the learning rate."""
    spec: Mapping[str, Any]
    """What all runs share, and the names of the axes."""
    rows: tuple[Row, ...]
    """Of the ledger, one for each run."""
    families: tuple[Family, ...]
    """One for each optimizer, parameterization and combination of further axes."""
    bests: tuple[Best, ...] = ()
    """By size, the best of all axes together; none where the swept quantity is the only one."""
    report: RunReport | None = field(default=None, repr=False)
    """What was run by this call; None for a sweep that was loaded."""
    metric: str | None = None
    """The metric of the workload by which runs are compared; None for the held-out loss."""

    @staticmethod
    def of(
        rows: Sequence[Row],
        spec: Mapping[str, Any],
        *,
        over: str = "lr",
        metric: str | None = None,
        report: RunReport | None = None,
    ) -> Sweep:
        """The sweep that the rows and the spec of a ledger describe."""
        if spec.get("study") != "sweep":
            raise UseError("this ledger is not that of a sweep: it was made by something else")
        axes = [name for name in spec["axes"] if name not in ALWAYS]
        if over not in axes:
            known = ", ".join(sorted(axes))
            raise UseError(f"over is {over!r}, which is no axis of this sweep: it has {known}")
        axes.remove(over)
        base, by = Size(*spec["base"]), Criterion.named(metric)
        if by.metric is not None and any(row["status"] == "finished" for row in rows):
            check_metric(by, metrics_in(rows), f"the sweep of {spec['workload']}")
        chosen = of_the_best(rows, base, axes, by) if spec["search"] else rows
        families = analyse(chosen, base=base, over=over, axes=axes, criterion=by) if chosen else ()
        found = bests(families) if axes else ()
        return Sweep(spec["workload"], base, over, spec, tuple(rows), families, found, report, by.metric)

    @classmethod
    def load(cls, path: str | Path, *, over: str | None = None, metric: str | None = None) -> Self:
        """Read a sweep from the folder of its ledger, or from the .json file that `save` wrote.

        `over` asks for the optimum of another axis than the learning rate, or than the one that was saved,
        `metric` for the optimum by a metric of the workload, or by the `held-out loss`.
        """
        path = Path(path).expanduser()
        if path.suffix == ".json" and path.is_file():
            found = super().load(path)
            asked = over or found.over, metric or found.metric
            if asked == (found.over, found.metric):
                return found
            return cls.from_dict({**found.to_dict(), "over": asked[0], "metric": asked[1]})
        with Ledger.read(path) as ledger:
            rows, spec = ledger.rows(), ledger.spec
        return cls.from_dict({"spec": spec, "rows": rows, "over": over or "lr", "metric": metric})

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """The sweep from its rows and its spec, which are analysed again."""
        try:
            rows = [frozen(row) for row in content["rows"]]
            found: Any = cls.of(rows, content["spec"], over=content["over"], metric=content.get("metric"))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, UseError):
                raise
            raise UseError(f"the sweep is not as it was written: {type(error).__name__}: {error}") from error
        return found

    def to_dict(self) -> dict[str, Any]:
        """The spec, the rows, and all that was found."""
        found = {"spec": self.spec, "over": self.over, "metric": self.metric, "verdict": self.verdict}
        return plain(found | {"rows": self.rows} | {"families": self.families, "bests": self.bests})

    @property
    def horizon(self) -> Horizon:
        """The measured rule for batch and tokens, for `theodolite.plan(…, horizon=sweep.horizon)`."""
        fits = [family.horizon for family in self.families if family.horizon is not None]
        planned = [one.horizon for one in self.families if one.horizon and one.parameterization == "plan"]
        if not fits:
            raise UseError(
                "batch and tokens were not varied: sweep over them too, by batches=[…] or tokens=[…]"
            )
        return (planned or fits)[0].horizon

    @property
    def verdict(self) -> str:
        """One sentence: does the optimum stay where it is?"""
        by = f" by {self.metric}" if self.metric else ""
        return movement_sentence(self.families, f"{self.over} of {self.workload}{by}", str(self.base))

    @property
    def title(self) -> str:
        """The verdict."""
        return self.verdict

    def figures(self) -> tuple[Figure, ...]:
        """Loss, or the metric, against the swept quantity, one curve for each size."""
        return figures(self.families)

    def table(self) -> Table:
        """The mean held-out loss, or metric, at every size and value."""
        others = list(self.families[0].others) if self.families else []
        sizes = [curve.size for each in self.families for curve in each.curves]
        said = [name for name in ("batch", "tokens") if any(getattr(size, name) for size in sizes)]
        of_size = ("width", "depth", *said)
        rows = [
            (each.optimizer, each.parameterization, *each.others.values(), *size, *point)
            for each in self.families
            for curve in each.curves
            for size in [[getattr(curve.size, name) for name in of_size]]
            for point in zip(curve.values, curve.means.tolist(), curve.num_seeds, strict=True)
        ]
        found = Criterion(self.metric).column
        return Table(("optimizer", "parameterization", *others, *of_size, self.over, found, "seeds"), rows)

    def blocks(self) -> Iterator[Block]:
        """For each family a table and what it says, then the best of all axes, then figures."""
        if not self.families:
            yield f"Sweep of {self.workload}: no run has a result yet."
            return
        for family in self.families:
            yield from family.blocks()
        if self.bests:
            yield Heading("The best of all axes")
            rows, by = [], Criterion(self.metric)
            for best in self.bests:
                chosen = ", ".join(f"{name} {cell(value) or value}" for name, value in best.settings.items())
                lost = "not run" if math.isnan(best.lost) else by.text(best.lost)
                kind = kind_of(best.optimizer, best.parameterization)
                rows.append((kind, str(best.size), chosen, best.loss, lost))
            loss = Column(self.metric or "loss", show=by.text)
            yield Table(("", "size", "best of all", loss, Column("lost with the base's", side="right")), rows)
        yield from self.figures()


@dataclass(frozen=True)
class Best:
    """The best of all values of all axes at one size, and what the base's best costs there."""

    optimizer: str
    parameterization: str
    size: Size
    settings: Mapping[str, Any]
    """By axis, the swept quantity among them."""
    loss: float
    lost: float
    """The loss here with the best settings of the base, less `loss`; nan where those were not run here."""


def bests(families: Sequence[Family]) -> tuple[Best, ...]:
    """By size, the best of all families and values."""
    found: dict[tuple[str, str, Size], tuple[float, Family, float]] = {}
    for family in families:
        for optimum in family.optima:
            key = (family.optimizer, family.parameterization, optimum.size)
            if math.isfinite(optimum.loss) and (key not in found or optimum.loss < found[key][0]):
                found[key] = (optimum.loss, family, optimum.best)
    made = []
    for (optimizer, parameterization, size), (loss, family, best) in found.items():
        source = found.get((optimizer, parameterization, family.base))
        lost = math.nan if source is None else _loss_at(source[1], size, source[2]) - loss
        settings = {family.scale.name: best, **family.others}
        made.append(Best(optimizer, parameterization, size, settings, loss, lost))
    return tuple(made)


def check_metric(criterion: Criterion, known: Sequence[str], whose: str) -> None:
    """Refuse a metric that there is not; the error names those there are.

    >>> check_metric(Criterion("itertions"), ["iterations"], "poisson")
    Traceback (most recent call last):
    theodolite.UseError: poisson has no metric 'itertions'. Did you mean 'iterations'? It has iterations
    """
    if criterion.metric is not None and criterion.metric not in known:
        near = did_you_mean(criterion.metric, known)
        has = f"It has {', '.join(known)}" if known else "It has none: see Workload(…, metrics=…)"
        raise UseError(f"{whose} has no metric {criterion.metric!r}.{near} {has}")


def of_the_best(
    rows: Sequence[Row], base: Size, axes: Sequence[str], criterion: Criterion = LOSS
) -> list[Row]:
    """The rows with the best settings of their optimizer and parameterization, apart from the learning rate.

    They are what a search found: those with the least mean loss, or metric, over seeds at the base.

    >>> row = {"optimizer": "adamw", "parameterization": "plan", "width": 64, "depth": 4, "lr": 0.1}
    >>> losses = {1e-8: 3.0, 1e-6: 2.0}
    >>> rows = [{**row, "eps": eps, "status": "finished", "held_out": losses[eps]} for eps in losses]
    >>> [row["eps"] for row in of_the_best(rows, Size(64, 4), ["eps"])]
    [1e-06]
    """
    losses: dict[tuple[str, str], dict[tuple[str, float], list[float]]] = {}
    for row in rows:
        if size_of(row) == base and criterion.knows(row):
            mine = losses.setdefault((row["optimizer"], row["parameterization"]), {})
            mine.setdefault((_settings(row, axes), row["lr"]), []).append(criterion.of(row))
    best = {key: min(mine, key=lambda each: fmean(mine[each]))[0] for key, mine in losses.items()}
    return [
        row for row in rows if best.get((row["optimizer"], row["parameterization"])) == _settings(row, axes)
    ]


def _settings(row: Row, axes: Sequence[str]) -> str:
    return json.dumps({name: setting(row, name) for name in axes})


def _loss_at(family: Family, size: Size, value: float) -> float:
    for curve in family.curves:
        if curve.size == size and value in curve.values:
            return float(curve.means[curve.values.index(value)])
    return math.nan
