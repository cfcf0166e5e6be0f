"""What an engine is: runs go in, outcomes come out as they are ready."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from theodolite.fleet.checkpoint import Checkpoint
from theodolite.fleet.environment import environment
from theodolite.fleet.isolation import Own
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.run import Run
from theodolite.fleet.training import Workloads, attempt


def _unheard(_: object) -> None:
    pass


@dataclass(frozen=True)
class Means:
    """With what runs are made; nothing here changes what a run gives.

    Args:
        workloads: those that were handed over as objects, by name.
        device: `cpu`, `cuda` or `cuda:1`.
        jobs: processes at a time; Ray tasks too, unless the cluster has room for more.
        chunk: most models in one program of the vectorised engine; None for as many as memory holds.
        checkpoints: the folder in which long runs keep their state; None for no checkpoints.
        checkpoint_seconds: between two of them.
        address: of a Ray cluster; None for one on this machine, or the one Ray finds.
        resources: of one run on a Ray cluster, such as {"CPU": 1, "GPU": 0.1}.
        timeout: seconds that a run may take; one that takes longer has failed. Only processes can be ended.
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
    timeout: float | None = None
    begun: Callable[[Run], None] = _unheard
    said: Callable[[str], None] = _unheard

    def checkpoint(self, run: Run) -> Checkpoint | None:
        """Where a run keeps its state."""
        if self.checkpoints is None:
            return None
        # A run that was begun with another version of its workload's file is not gone on with.
        source = environment(run.workload)["workload_source"]
        path = self.checkpoints.absolute() / f"{run.identity}{f'-{source}' if source else ''}.safetensors"
        return Checkpoint(path, self.checkpoint_seconds, self.said)

    def for_worker(self) -> Means:
        """What a worker needs that is told the workload apart: nothing there hears what is said here."""
        return dataclasses.replace(self, workloads={}, begun=_unheard, said=_unheard)


Engine = Callable[[Sequence[Run], Means], Iterator[Outcome]]
"""Outcomes in any order, one for each run. Closing the iterator stops all work and leaves no process."""


def cost(run: Run) -> float:
    """About how long a run takes, in no unit: steps × depth × width², with a floor for narrow networks.

    >>> from theodolite import Size
    >>> a, b = (Run("gpt-sotu", Size(width, 4), 0.1, parameterization="standard") for width in (512, 1024))
    >>> round(cost(b) / cost(a), 2)
    3.95
    """
    return run.steps * run.size.depth * (run.size.width**2 + _NARROW**2)


_NARROW = 64
"""Below about this width a step takes as long as it takes to launch its operations."""


def serial(runs: Sequence[Run], means: Means) -> Iterator[Outcome]:
    """One run after the other, in this process."""
    for run in runs:
        means.begun(run)
        yield attempt(run, means.workloads, device=means.device, checkpoint=means.checkpoint(run))


def attempt_in_worker(
    run: Run, workloads: Workloads, means: Means, engine: str, settings: Own | None = None
) -> tuple[Outcome, tuple[str, ...]]:
    """The outcome, and what there is to tell of it where the driver is."""
    lines: list[str] = []
    checkpoint = dataclasses.replace(means, said=lines.append).checkpoint(run)
    outcome = attempt(
        run, workloads, device=means.device, engine=engine, checkpoint=checkpoint, settings=settings
    )
    return outcome, tuple(lines)
