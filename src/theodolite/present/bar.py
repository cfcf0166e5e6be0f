"""The progress bar: a bar that moves where one can be drawn, else a line in the log from time to time."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from theodolite.core.files import plain_text
from theodolite.present.text import duration

if TYPE_CHECKING:  # rich is imported when something is drawn
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

LOG_EVERY = 30.0
"""Seconds between two lines in a log."""


class Bar:
    """A `Progress` on standard error, for every function that takes `progress=`.

    In a terminal and in a notebook it is a bar that moves; elsewhere a line every 30 seconds. It is drawn
    from the first call on, and removed by `close` or at the end of the `with` block.

    Args:
        console: where to draw; standard error if it is not given.
        clock: the time in seconds.

    >>> with Bar() as bar:
    ...     bar("measuring", 0.5)
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console

        self._console = console or Console(stderr=True)
        self._clock = clock
        self._start = self._logged = clock()
        self._state: Callable[[], tuple[str, float]] = lambda: ("", 0.0)
        self._live: Live | None = None

    def __call__(self, title: str, done: float) -> None:
        """Show what is being done and which fraction of it is done."""
        self.follow(lambda: (title, done))

    def follow(self, state: Callable[[], tuple[str, float]]) -> None:
        """Ask for title and fraction whenever the bar is drawn, as for a time left that changes by itself."""
        self._state = state
        if self._live is None and _can_move(self._console):
            from rich.live import Live

            self._live = Live(
                get_renderable=self._drawn, console=self._console, refresh_per_second=4, transient=True
            )
            self._live.start()
        elif self._live is None and self._clock() - self._logged >= LOG_EVERY:
            self._logged = self._clock()
            title, done = state()
            self.say(f"{done:.0%} {title}")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        from rich.text import Text

        self._console.print(Text(plain_text(line)), soft_wrap=True)

    def close(self) -> None:
        """Remove the bar. Another call draws it again."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _drawn(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        title, done = self._state()
        row = Table.grid(padding=(0, 1))
        elapsed = Text(duration(self._clock() - self._start), style="dim")
        row.add_row(ProgressBar(1.0, done, width=24), elapsed, Text(title, no_wrap=True, overflow="ellipsis"))
        return row

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _can_move(console: Console) -> bool:
    if console.is_jupyter:  # where rich draws with widgets, or warns
        return importlib.util.find_spec("ipywidgets") is not None
    return console.is_terminal and not console.is_dumb_terminal
