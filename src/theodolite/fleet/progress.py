"""How far the runs are: in a terminal, in a notebook, in a log file."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from theodolite.core.files import plain_text
from theodolite.fleet.engine import cost
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.run import Run

EVERY = 30.0
"""Seconds between two lines in a log."""


class Progress:
    """What the driver tells. This one passes nothing on."""

    def opened(self, runs: Sequence[Run], before: int) -> None:
        """These are to be made; so many were there before."""

    def working(self, engine: str, jobs: int) -> None:
        """The engine that was chosen, and how many processes it may use."""

    def begun(self, run: Run) -> None:
        """Work on a run has begun, for the first time or again."""

    def ended(self, outcome: Outcome) -> None:
        """An outcome has been written down."""

    def said(self, line: str) -> None:
        """Something is worth telling."""

    def closed(self) -> None:
        """There is no more to come."""


class Shown(Progress):
    """A bar that moves, where that can be drawn; else a line from time to time.

    Args:
        console: where to; standard error if it is not given.
        clock: the time in seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._tally = Tally(clock)
        self._live: Live | None = None
        self._last_line = clock()

    def opened(self, runs: Sequence[Run], before: int) -> None:
        """Begin to draw."""
        self._tally = Tally(self._clock, runs, before)
        if runs and _can_move(self._console):
            self._live = Live(
                get_renderable=self._drawn, console=self._console, refresh_per_second=2, transient=True
            )
            self._live.start()

    def working(self, engine: str, jobs: int) -> None:
        """How many are made at a time: those of a vectorised engine take their time together."""
        self._tally.workers = jobs if engine in ("processes", "ray") else 1

    def begun(self, run: Run) -> None:
        """One more is running."""
        self._tally.begun(run)
        self._line_if_time()

    def ended(self, outcome: Outcome) -> None:
        """One more is over. A failure is told at once."""
        self._tally.ended(outcome)
        if outcome.error:
            self.said(f"failed: {outcome.run}: {outcome.reason}")
        self._line_if_time()

    def said(self, line: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(Text(plain_text(line)), soft_wrap=True)

    def closed(self) -> None:
        """The last state stays."""
        if self._live is not None:
            self._live.stop()
        if self._tally.total:
            self.said(self._tally.line(is_over=True))

    def _line_if_time(self) -> None:
        if self._live is None and self._clock() - self._last_line >= EVERY:
            self._last_line = self._clock()
            self.said(self._tally.line())

    def _drawn(self) -> Table:
        tally = self._tally
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(tally.total_cost or 1, tally.done_cost, width=24)
        row.add_row(bar, Text(tally.line(), no_wrap=True, overflow="ellipsis"))
        return row


class Tally:
    """Counts, and the time left.

    A run's cost is known before it is made. What a unit of cost takes is seen from the runs that are over,
    so that one long run does not count as one short one.
    """

    def __init__(self, clock: Callable[[], float], runs: Sequence[Run] = (), before: int = 0) -> None:
        self.total, self.before = len(runs), before
        self.total_cost = sum(map(cost, runs))
        self.workers = 1
        self.done_cost = 0.0
        self._clock, self._opened = clock, clock()
        self._running: dict[str, tuple[float, float]] = {}
        self._counts = {"finished": 0, "diverged": 0, "failed": 0}
        self._seconds, self._measured_cost = 0.0, 0.0

    def begun(self, run: Run) -> None:
        """Work on it has begun, maybe again."""
        self._running[run.identity] = cost(run), self._clock()

    def ended(self, outcome: Outcome) -> None:
        """Take it from the running ones."""
        run = outcome.run
        self._running.pop(run.identity, None)
        self._counts[outcome.status] += 1
        self.done_cost += cost(run)
        self._seconds += outcome.seconds
        self._measured_cost += cost(run) * outcome.step / run.steps

    def seconds_left(self) -> float | None:
        """An estimate; None until a step was made by a run that is over."""
        if not self._measured_cost:
            return None
        pace = self._seconds / self._measured_cost
        work = pace * (self.total_cost - self.done_cost)
        now, running = self._clock(), list(self._running.values())
        longest = sorted((now - start for _, start in running), reverse=True)[: self.workers]
        work -= min(sum(longest), sum(pace * each for each, _ in running))
        waiting = self.total - sum(self._counts.values())
        return max(work, 0.0) / max(min(self.workers, waiting), 1)

    def line(self, *, is_over: bool = False) -> str:
        """Counts, and the time: what is left of it, or at the end what it took."""
        counts, done = self._counts, sum(self._counts.values())
        parts = [f"{self.before + done} of {self.before + self.total} runs done"]
        if self._running and not is_over:
            parts.append(f"{len(self._running)} running")
        parts += [f"{counts[name]} {name}" for name in ("diverged", "failed") if counts[name]]
        left = self.seconds_left()
        if is_over:
            parts.append(f"{duration(self._clock() - self._opened)} taken")
        elif left is not None:
            parts.append(f"about {duration(left)} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """A time in the units one would say it in.

    >>> [duration(seconds) for seconds in (0.42, 59.6, 754, 7261, 200_000)]
    ['0.4 s', '1 min', '13 min', '2 h 1 min', '2 d 7 h']
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def _can_move(console: Console) -> bool:
    if console.is_jupyter:  # where rich draws with widgets, or warns
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal
