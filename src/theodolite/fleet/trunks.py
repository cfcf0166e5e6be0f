"""Runs that share their beginning: of several lengths with a constant rate before the last decay, one trunk.

With warm-up–stable–decay, a short run makes the same steps as a long one until its own decay begins. So the
longest of them is made first and leaves its state where the shorter ones branch off; these make only their
decay. Runs with a constant rate are prefixes of each other. The numbers are those of runs made alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from theodolite.fleet.provenance import digest_of
from theodolite.fleet.run import Run
from theodolite.optimizers.horizon import Horizon
from theodolite.optimizers.schedule import LRFactor


def branch_step(run: Run) -> int | None:
    """The number of steps that a run shares with longer ones; None if it shares none.

    >>> from theodolite import Size
    >>> from dataclasses import replace
    >>> run = Run("gpt-sotu", Size(64, 2), 0.1, parameterization="standard", steps=100, schedule="wsd")
    >>> [branch_step(replace(run, schedule=name)) for name in ("wsd", "constant", "cosine")]
    [80, 100, None]
    """
    factor = LRFactor(run.schedule, run.steps, run.warmup, run.final)
    return factor.stable_until if factor.stable_until > run.warmup else None


def trunk_of(run: Run) -> str | None:
    """What runs have in common that differ only in length; None for those that share nothing."""
    if branch_step(run) is None:
        return None
    values = run.to_dict()
    del values["steps"]
    if run.size.tokens is not None and Horizon.of(run.horizon) == Horizon():
        values["size"] = [run.size.width, run.size.depth, run.size.batch]
    if run.schedule == "constant":  # has no last learning rate
        del values["final"]
    return digest_of(values)[:16]


@dataclass(frozen=True)
class Sharing:
    """Which runs share their beginning."""

    first: tuple[Run, ...]
    """Those to make first: the longest of each kind, and all that share nothing."""
    later: tuple[Run, ...]
    """Those that begin with what the first leave behind."""
    shorter: Mapping[str, tuple[Run, ...]]
    """By identity of a run, shorter ones that begin as it does."""

    @property
    def leave(self) -> dict[str, tuple[int, ...]]:
        """By identity of a run, the steps after which its state is kept for shorter ones."""
        return {
            identity: tuple(branch_step(run) or 0 for run in shorter)
            for identity, shorter in self.shorter.items()
        }


def sharing(runs: Sequence[Run]) -> Sharing:
    """Which of some runs share their beginning.

    >>> from theodolite import Size
    >>> from dataclasses import replace
    >>> run = Run("gpt-sotu", Size(64, 2), 0.1, parameterization="standard", steps=100, schedule="wsd")
    >>> found = sharing([run, replace(run, steps=200), replace(run, seed=1)])
    >>> [len(found.first), len(found.later)], [*found.leave.values()]
    ([2, 1], [(80,)])
    """
    trunks: dict[str, list[Run]] = {}
    for run in runs:
        if (name := trunk_of(run)) is not None:
            trunks.setdefault(name, []).append(run)
    shorter: dict[str, tuple[Run, ...]] = {}
    for alike in trunks.values():
        *others, longest = sorted(alike, key=lambda run: run.steps)
        if others:
            shorter[longest.identity] = tuple(others)
    later = {run.identity for others in shorter.values() for run in others}
    first = tuple(run for run in runs if run.identity not in later)
    return Sharing(first, tuple(run for run in runs if run.identity in later), shorter)
