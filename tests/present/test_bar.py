"""The bar moves in a terminal, and writes a line now and then where there is none."""

from __future__ import annotations

import io

from rich.console import Console

from theodolite.present.bar import Bar


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_log_has_a_line_every_thirty_seconds() -> None:
    clock, file = Clock(), io.StringIO()
    with Bar(Console(file=file, width=60), clock) as bar:
        for second in range(100):
            clock.now = float(second)
            bar("measuring [1]", second / 100)
    assert file.getvalue() == "30% measuring [1]\n60% measuring [1]\n90% measuring [1]\n"


def test_a_terminal_has_one_line_that_is_drawn_again_and_removed() -> None:
    file = io.StringIO()
    with Bar(Console(file=file, width=80, force_terminal=True, legacy_windows=False), Clock()) as bar:
        bar("measuring", 0.5)
        bar._live.refresh()
        drawn = file.getvalue()
        bar.say("a line above it")
    assert "measuring" in drawn
    assert "━" in drawn
    assert drawn.count("\n") == 0
    assert "a line above it\n" in file.getvalue()
    assert "\x1b[2K" in file.getvalue().rpartition("measuring")[2]  # erased
