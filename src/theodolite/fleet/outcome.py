"""What came of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from theodolite.core.files import plain_text
from theodolite.fleet.run import Run

Status = Literal["finished", "diverged", "failed"]


@dataclass(frozen=True)
class Outcome:
    """What came of one attempt at a run. All of it is JSON but for the run.

    `finished` and `diverged` are results; `failed` is an exception, which may be tried again.
    """

    run: Run
    status: Status
    step: int
    """How many steps were made; of a diverged run the step whose loss was not finite, counted from 0."""
    held_out: float | None
    """The mean loss over the held-out batches after training; None unless it is finite."""
    metrics: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    """By name (`loss`, `gradient`): (step, value), the steps that were recorded."""
    readings: Mapping[str, Any] = field(default_factory=dict)
    """What was measured once: `parameters`, `tokens` seen, and what the probes found."""
    seconds: float = 0.0
    """Of this run; of runs that were made together, each one's share."""
    device: str = "cpu"
    engine: str = "serial"
    error: str | None = None
    """The traceback of a failed run."""

    @property
    def reason(self) -> str:
        """Of a failed run, the last line of its error, as a terminal can show it."""
        lines = plain_text(self.error or "").strip().splitlines()
        return lines[-1].strip() if lines else "no reason was given"

    @property
    def settled(self) -> bool:
        """Is there nothing to be run again?"""
        return self.status != "failed"
