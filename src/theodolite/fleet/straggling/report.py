"""`StragglerReport`: what waiting for everybody costs, what each scheme would take, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from theodolite.core.errors import UseError
from theodolite.present.figure import ACCENT, INK, QUIET, Figure, Panel, bars, frame, guide, line
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Column, Table, counted, number

WAIT, LEAVE, BACKUP = "wait for all", "leave out", "backup workers"
FEW = 20
"""Judged rounds below which an interval says little."""


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
        """The scheme to use: the best by the first half if it helps on the second, else waiting for all.

        Backup workers are left out, as their gradient is another one. `models` limits how many are trained
        in turn.
        """
        most = self.models if models is None else models
        able = [one for one in self.schemes if one.same_gradient and one.models <= most]
        found = min(able, key=lambda one: one.chosen_at)
        return found if found.helps else self[WAIT]

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
            Column("s per round", lambda seconds: number(seconds, 4), "right"),
            Column("of waiting for all", _interval, "right"),
        )
        rows = [
            (one.scheme, one.setting, one.models, one.load, one.seconds, (one.ratio, one.low, one.high))
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


def _interval(value: SchemeTime | tuple[float, float, float]) -> str:
    """A ratio with its interval; 1 has none."""
    ratio, low, high = (value.ratio, value.low, value.high) if isinstance(value, SchemeTime) else value
    return f"{ratio:.2f}" if low == ratio == high else f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def _saves(one: SchemeTime) -> str:
    saved = f"{1 - one.ratio:.0%} ({1 - one.high:.0%} to {1 - one.low:.0%})"
    return f"{one.name} would have saved {saved} of the time of the second half."
