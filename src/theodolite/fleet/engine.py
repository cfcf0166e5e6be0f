"""What an engine is: runs go in, outcomes come out as they are ready."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from theodolite.fleet.checkpoint import Checkpoint
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.run import Run
from theodolite.fleet.training import Workloads, attempt

RETRIES = 2
"""How often a run is tried again whose worker was lost."""


@dataclass(frozen=True)
class Means:
    """With what runs are made; nothing here changes what a run gives.

    Args:
        workloads: those that were handed over as objects, by name.
        device: `cpu`, `cuda` or `cuda:1`.
        jobs: processes, or Ray tasks at a time.
        chunk: most models in one program of the vectorised engine; None for as many as memory holds.
        checkpoints: the folder in which long runs keep their state; None for no checkpoints.
        checkpoint_seconds: between two of them.
        address: of a Ray cluster; None for one on this machine, or the one Ray finds.
        resources: of one run on a Ray cluster, such as {"CPU": 1, "GPU": 0.1}.
        begun: called when work on a run begins.
        said: called with a line that is worth telling, such as a worker that was lost.
    """

    workloads: Workloads = field(default_factory=dict)
    device: str = "cpu"
    jobs: int = field(default_factory=lambda: os.cpu_count() or 1)
    chunk: int | None = None
    checkpoints: Path | None = None
    checkpoint_seconds: float = 60.0
    address: str | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    begun: Callable[[Run], None] = field(default=lambda run: None)
    said: Callable[[str], None] = field(default=lambda line: None)

    def checkpoint(self, run: Run) -> Checkpoint | None:
        """Where a run keeps its state."""
        if self.checkpoints is None:
            return None
        return Checkpoint(self.checkpoints / f"{run.identity}.safetensors", self.checkpoint_seconds)


Engine = Callable[[Sequence[Run], Means], Iterator[Outcome]]
"""Outcomes in any order, one for each run. Closing the iterator stops all work and leaves no process."""


def serial(runs: Sequence[Run], means: Means) -> Iterator[Outcome]:
    """One run after the other, in this process."""
    for run in runs:
        means.begun(run)
        yield attempt(run, means.workloads, device=means.device, checkpoint=means.checkpoint(run))
