"""`stragglers`: from measured step times, what each scheme would have taken, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from scipy.special import stdtrit

from theodolite.core.arguments import number as checked_number
from theodolite.core.arguments import whole
from theodolite.core.errors import UseError
from theodolite.core.progress import Progress, silent
from theodolite.fleet.straggling.simulation import BACKUP, WAIT, Seconds, TimedScheme, timed_schemes
from theodolite.fleet.straggling.times import read_times
from theodolite.present.figure import ACCENT, INK, QUIET, Figure, Panel, bars, frame, guide, line
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Column, Table, counted, number

PATIENCE = (0.0, 0.1, 0.25, 0.5, 1.0)
"""The μ that are tried: a worker is late after (1 + μ) times the fastest one's time."""
MOST_MODELS = 64
STEPS = 100
"""Steps of the overhead, from none to all, at which the best scheme is looked for."""
SHOWN = 20
"""Steps of it that are drawn."""
LEVEL = 0.95
FEW = 20
"""Judged rounds below which an interval says little."""


def stragglers(
    times: Any,
    *,
    overhead: float = 0.0,
    sending: float = 0.0,
    models: int = 4,
    mu: float | Sequence[float] = PATIENCE,
    missing: float | None = None,
    progress: Progress | None = None,
) -> StragglerReport:
    """Would backup workers or gradient coding have saved time, and which?

    The parameters of each scheme are those that would have taken the least time on the first half of the
    rounds; it is judged on the second half, against waiting for all, with a 95 % interval.
    A worker with k times as many examples that sends m gradients is taken to need
    `overhead + m·sending + k·(1 − overhead − sending)` times as long.

    Args:
        times: seconds, rounds × workers, measured with an equal share of the batch on each worker: a CSV, an
            array, a tensor or a data frame.
        overhead: share of a step that does not grow with a worker's examples. With 0, the default, coding
            looks worst. `overhead_share` finds it from a second measurement.
        sending: share of a step that grows with the gradients that a worker sends: M-SGC sends several.
        models: models that can be trained in turn, of which SR-SGC and M-SGC need several.
        mu: a worker may be late only after (1 + μ) times the fastest one's time; the values to choose from.
        missing: seconds that stand for times that are not there; without it they are an error.
        progress: called while it works.

    >>> from theodolite import fleet
    >>> times = [[1.0, 1.0, 1.0, 4.0 if turn % 3 == 0 else 1.0] for turn in range(60)]
    >>> fleet.stragglers(times, overhead=0.9)["GC"].setting
    's = 1'
    """
    found, names = read_times(times, missing)
    checked_number("overhead", overhead, least=0, most=1)
    checked_number("sending", sending, least=0, most=1)
    if overhead + sending > 1:
        raise UseError(
            f"overhead and sending are {overhead + sending:g} together: shares of one step, at most 1"
        )
    whole("models", models, least=1, most=MOST_MODELS)
    patience = [checked_number("mu", one, least=0) for one in (mu if isinstance(mu, Iterable) else [mu])]
    if not patience:
        raise UseError("mu is empty: give at least one value, such as 0")
    half = len(found) // 2
    shares = np.append(np.linspace(0, 1 - sending, STEPS + 1), overhead)
    kept: dict[str, list[TimedScheme]] = {}
    for one in timed_schemes(found, half, names, models, patience, progress or silent):
        kept[one.scheme] = _useful([*kept.get(one.scheme, ()), one], half, shares, sending)
    chosen = {name: _chosen(some, half, overhead, sending) for name, some in kept.items()}
    schemes = _judged(list(chosen.values()), half, overhead, sending)
    base = float(kept[WAIT][0].seconds[half:].mean())
    least = {name: _least(some, half, shares[:-1], sending, base) for name, some in kept.items()}
    slowest = np.bincount(found.argmax(1), minlength=len(names))
    return StragglerReport(
        workers=len(names),
        rounds=len(found),
        judged=len(found) - half,
        overhead=float(overhead),
        sending=float(sending),
        models=int(models),
        waiting=float(found.max(1).sum() / np.median(found, axis=1).sum()),
        slowest=names[int(slowest.argmax())],
        slowest_share=float(slowest.max() / len(found)),
        schemes=schemes,
        by_overhead=_ranges({name: times for name, (times, _) in least.items() if name != BACKUP}, sending),
        curves={
            name: tuple(ratios[:: STEPS // SHOWN].tolist())
            for name, (_, ratios) in least.items()
            if name != WAIT
        },
    )


@dataclass(frozen=True)
class SchemeTime:
    """What a scheme would have taken, with the parameters that were best on the first half of the rounds."""

    scheme: str
    """`wait for all`, `leave out`, `backup workers`, `GC`, `SR-SGC` or `M-SGC`."""
    setting: str
    """Its parameters, in words."""
    models: int
    """How many models have to be trained in turn."""
    load: float
    """Examples for each worker and round, in multiples of what it has without a code."""
    sends: int
    """Gradients that a worker sends in a round, each of the size of the model."""
    same_gradient: bool
    """Is it the gradient of the whole batch? Backup workers leave out who is late."""
    chosen_at: float
    """Seconds of a round on the first half."""
    seconds: float
    """Seconds of a round on the second half."""
    ratio: float
    """Time of the second half over that of waiting for all."""
    low: float
    high: float

    @property
    def name(self) -> str:
        """The scheme with its parameters."""
        return f"{self.scheme} ({self.setting})" if self.setting else self.scheme

    @property
    def helps(self) -> bool:
        """Is the whole interval below 1?"""
        return self.high < 1


@dataclass(frozen=True)
class OverheadRange:
    """Where a scheme is the best by the first half, as the fixed share of a step changes."""

    low: float
    high: float
    scheme: str


@dataclass(frozen=True)
class StragglerReport(Result):
    """What stragglers cost, and what each scheme would have taken. Made by `th.fleet.stragglers`."""

    kind: ClassVar[str] = "straggler report"
    loads: ClassVar[bool] = True

    workers: int
    rounds: int
    judged: int
    """Rounds of the second half."""
    overhead: float
    """Share of a step that does not grow with the examples of a worker."""
    sending: float
    """Share of a step that grows with the gradients that a worker sends."""
    models: int
    """Models that may be trained in turn."""
    waiting: float
    """The slowest worker's time over the median worker's, both summed over the rounds."""
    slowest: str
    """The worker that was the slowest most often."""
    slowest_share: float
    """In which share of the rounds it was."""
    schemes: tuple[SchemeTime, ...]
    by_overhead: tuple[OverheadRange, ...]
    curves: Mapping[str, tuple[float, ...]]
    """By scheme, the ratio on the second half at equally spaced overheads, from 0 to the largest possible."""

    def __getitem__(self, scheme: str) -> SchemeTime:
        for one in self.schemes:
            if one.scheme == scheme:
                return one
        raise UseError(f"there is no {scheme!r}; there are {', '.join(one.scheme for one in self.schemes)}")

    def best(self, models: int | None = None) -> SchemeTime:
        """The scheme to use: by the first half the best of waiting and of those that help on the second.

        Backup workers are left out, as their gradient is another one. `models` limits how many are trained
        in turn.
        """
        most = self.models if models is None else models
        able = [one for one in self.schemes if one.same_gradient and one.models <= most]
        return min((one for one in able if one.helps or one.scheme == WAIT), key=lambda one: one.chosen_at)

    @property
    def advice(self) -> tuple[str, ...]:
        """What to do, in sentences."""
        return tuple(self._advice())

    def table(self) -> Table:
        """A row for each scheme."""
        columns = (
            Column("scheme"),
            Column("parameters"),
            Column("models"),
            Column("load", lambda load: f"{load:.2f}", "right"),
            Column("seconds", lambda seconds: number(seconds, 4), "right"),
            *(Column(name, "{:.2f}".format, "right") for name in ("of waiting", "low", "high")),
        )
        rows = [
            (one.scheme, one.setting, one.models, one.load, one.seconds, one.ratio, one.low, one.high)
            for one in self.schemes
        ]
        return Table(columns, rows)

    def blocks(self) -> Iterator[Block]:
        """What waiting costs, what to do, the schemes, and where the answer changes."""
        yield (
            f"{self.workers} workers, {self.rounds} rounds; parameters chosen on the first "
            f"{self.rounds - self.judged}, judged on the other {self.judged}\n"
            f"Waiting for the slowest worker takes {self.waiting:.2f} times as long as the median worker."
        )
        yield "\n".join(self.advice)
        yield self.table()
        yield (
            f"Assumed: {self.overhead:.0%} of a step does not grow with a worker's examples, "
            f"{self.sending:.0%} grows with the gradients that it sends, and the rest grows with its "
            "examples. Late answers are dropped: every worker is free when a round begins."
        )
        yield Heading("The best by the fixed share of a step")
        columns = (Column("fixed share", side="right"), Column("best on the first half"))
        yield Table(columns, [(f"{one.low:.0%} to {one.high:.0%}", one.scheme) for one in self.by_overhead])
        yield self.figure()

    def figure(self) -> Figure:
        """The schemes beside each other, and over the fixed share of a step."""
        shown = self.schemes[1:]
        heights = bars(
            [one.scheme for one in shown],
            [round(one.ratio, 4) for one in shown],
            hover="%{x}: %{y:.3f} of waiting for all",
        )
        reach = {
            "type": "data",
            "symmetric": False,
            "array": [round(one.high - one.ratio, 4) for one in shown],
            "arrayminus": [round(one.ratio - one.low, 4) for one in shown],
            "color": INK,
            "thickness": 1,
        }
        layout = frame(height=240)
        layout["shapes"] = [guide(y=1)]
        layout["yaxis"] |= {"rangemode": "tozero", "nticks": 5}
        beside = Panel("time on the second half", (heights | {"error_y": reach},), layout)
        over = frame(height=240, x="fixed share of a step")
        over["shapes"] = [guide(y=1), guide(x=self.overhead)]
        over["yaxis"] |= {"rangemode": "tozero", "nticks": 5}
        top = 1 - self.sending
        drawn = []
        for name, values in self.curves.items():
            x = [round(top * place / (len(values) - 1), 4) for place in range(len(values))]
            color = ACCENT if name == self.best().scheme else QUIET
            style = {"line": {"color": color, "width": 2 if color == ACCENT else 1.2}, "name": name}
            y = [round(value, 4) for value in values]
            drawn.append(line(x, y, hover=f"{name} at %{{x}}: %{{y:.3f}}") | style)
        over["annotations"] = _names_at_the_end(drawn)
        over["margin"] |= {"r": 105}
        best = self.best()
        return Figure(
            "Time over that of waiting for all, with 95 % intervals; and the same as more of a step is "
            "fixed, with the parameters that are best there on the first half.",
            f"{best.name}: {best.ratio:.2f} of waiting for all.",
            (beside, Panel("over the fixed share", tuple(drawn), over)),
        )

    def _advice(self) -> Iterator[str]:
        best, single = self.best(), self.best(1)
        if best.scheme == WAIT:
            others = [one for one in self.schemes if one.same_gradient and one.scheme != WAIT]
            nearest = min(others, key=lambda one: one.chosen_at)
            yield (
                f"None of them helps: wait for all workers. On the first half the best besides that was "
                f"{nearest.name}; on the second it would have taken {_interval(nearest)} times as long."
            )
        elif best == single:
            yield _saves(best)
        else:
            yield f"With {best.models} models trained in turn: {_saves(best)}"
            without = "none of them helps: wait for all workers." if single.scheme == WAIT else _saves(single)
            yield f"With one model: {without}"
        if self.slowest_share > 0.5:
            yield (
                f"Worker {self.slowest} is the slowest in {self.slowest_share:.0%} of the rounds: repair or "
                "replace it first."
            )
        backup = self[BACKUP]
        if backup.helps and backup.high < best.low:
            yield (
                f"Backup workers ({backup.setting}) would take {_interval(backup)} of the time, but each of "
                "their gradients leaves out the examples of whoever is late."
            )
        if self.judged < FEW:
            yield f"Only {counted(self.judged, 'round')} could be judged: measure more for a sure answer."


def _useful(some: list[TimedScheme], half: int, shares: Seconds, sending: float) -> list[TimedScheme]:
    """Those that are the best on the first half at one overhead at least: the others need no memory."""
    first = np.array([one.seconds[:half].mean() * one.factor(shares, sending) for one in some])
    return [some[place] for place in sorted(set(first.argmin(0).tolist()))]


def _chosen(some: list[TimedScheme], half: int, overhead: float, sending: float) -> TimedScheme:
    return min(some, key=lambda one: one.seconds[:half].mean() * one.factor(overhead, sending))


def _judged(
    chosen: Sequence[TimedScheme], half: int, overhead: float, sending: float
) -> tuple[SchemeTime, ...]:
    """On the second half, against the first of the schemes, which waits for all."""
    base, rows = chosen[0].seconds[half:], []
    for one in chosen:
        factor = float(one.factor(overhead, sending))
        own = one.seconds[half:] * factor
        ratio, reach = _ratio(own, base)
        rows.append(
            SchemeTime(
                one.scheme,
                one.setting,
                one.models,
                float(one.load),
                one.sends,
                one.scheme != BACKUP,
                float(one.seconds[:half].mean() * factor),
                float(own.mean()),
                ratio,
                max(ratio - reach, 0.0),
                ratio + reach,
            )
        )
    return tuple(rows)


def _ratio(own: Seconds, base: Seconds) -> tuple[float, float]:
    """The ratio of two means over the same m rounds, and half of its 95 % interval.

    Late steps come in bursts: the variance is that of sums over blocks of √m rounds, which begin with every
    round and go on from the first round after the last. Student's t has as many degrees of freedom as blocks
    fit, less one.
    """
    num = len(own)
    length = max(1, math.isqrt(num))
    blocks = num / length
    ratio = own.mean() / base.mean()
    sums = np.cumsum(np.concatenate([[0.0], np.resize(own - ratio * base, num + length)]))
    spread = np.std(sums[length : num + length] - sums[:num]) / math.sqrt(blocks - 1) / length
    reach = stdtrit(blocks - 1, (1 + LEVEL) / 2) * spread / base.mean()
    return float(ratio), float(reach)


def _least(
    some: list[TimedScheme], half: int, shares: Seconds, sending: float, base: float
) -> tuple[Seconds, Seconds]:
    """By overhead: the least time on the first half, and what it is on the second, in units of `base`."""
    factors = np.array([one.factor(shares, sending) for one in some])
    first = np.array([one.seconds[:half].mean() for one in some])[:, None] * factors
    second = np.array([one.seconds[half:].mean() for one in some])[:, None] * factors
    best, columns = first.argmin(0), np.arange(len(shares))
    return first[best, columns], second[best, columns] / base


def _ranges(least: dict[str, Seconds], sending: float) -> tuple[OverheadRange, ...]:
    """Overheads in a row with the same best scheme; the first of those that are equal."""
    names = list(least)
    best = np.array([least[name] for name in names]).argmin(0)
    found: list[OverheadRange] = []
    for place, index in enumerate(best):
        share = round(place / STEPS * (1 - sending), 6)
        if found and found[-1].scheme == names[index]:
            found[-1] = OverheadRange(found[-1].low, share, names[index])
        else:
            found.append(OverheadRange(share, share, names[index]))
    return tuple(found)


def _names_at_the_end(drawn: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The name of each line to the right of its end; names that would overlap are moved apart."""
    room = 0.09 * max(max(one["y"]) for one in drawn)
    groups: list[list[Mapping[str, Any]]] = []

    def lowest(group: Sequence[Mapping[str, Any]]) -> float:
        return sum(one["y"][-1] for one in group) / len(group) - room * (len(group) - 1) / 2

    for one in sorted(drawn, key=lambda one: one["y"][-1]):
        groups.append([one])
        while len(groups) > 1 and lowest(groups[-1]) < lowest(groups[-2]) + room * len(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    return [
        {
            **{"xref": "paper", "x": 1.01, "xanchor": "left", "showarrow": False},
            **{"y": round(lowest(group) + room * place, 4), "yanchor": "middle"},
            **{"text": one["name"], "font": {"size": 11, "color": one["line"]["color"]}},
        }
        for group in groups
        for place, one in enumerate(group)
    ]


def _interval(one: SchemeTime) -> str:
    return f"{one.ratio:.2f} ({one.low:.2f} to {one.high:.2f})"


def _saves(one: SchemeTime) -> str:
    saved = f"{1 - one.ratio:.0%} ({1 - one.high:.0%} to {1 - one.low:.0%})"
    return f"{one.name} would have saved {saved} of the time of the second half."
