"""Which engine makes the runs."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterator, Sequence

import torch

from theodolite.core.errors import UseError
from theodolite.fleet.engine import Engine, Means, serial
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.run import Run
from theodolite.fleet.training import conditions, targets_in, workload_of

ENGINES = ("auto", "serial", "processes", "vectorised", "ray")

START = 4.0
"""Seconds until a process of its own has begun to work."""


def choose(engine: str, runs: Sequence[Run], means: Means) -> tuple[str, Engine]:
    """The engine of a name, with its name.

    `auto` is Ray where a cluster was named or this process is connected to one. Otherwise on a GPU it is
    `vectorised`, with processes for the runs that it cannot do; on a CPU it is processes, or `serial` where
    starting them would take longer than they save. With a time limit it is processes.

    >>> choose("serial", [], Means())[0]
    'serial'
    >>> choose("procesess", [], Means())
    Traceback (most recent call last):
    theodolite.UseError: there is no engine 'procesess'. Did you mean 'processes'? It is one of ...
    """
    if engine not in ENGINES:
        near = difflib.get_close_matches(str(engine), ENGINES, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise UseError(f"there is no engine {engine!r}.{guess} It is one of {', '.join(ENGINES)}")
    if means.timeout is not None:
        return _with_limit(engine, runs, means)
    if engine != "auto":
        return engine, _named(engine)
    if means.address or os.environ.get("RAY_ADDRESS") or _is_connected_to_ray():
        return "ray", _named("ray")
    if torch.device(means.device).type == "cuda":
        return _on_card(runs, means)
    name = _apart(runs, means)
    return name, _named(name)


def _with_limit(engine: str, runs: Sequence[Run], means: Means) -> tuple[str, Engine]:
    """Only a process can be ended that hangs."""
    limit = means.timeout
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 < limit < math.inf:
        raise UseError(f"timeout is {limit!r}: give the seconds that a run may take, such as 600")
    if engine not in ("auto", "processes") or means.address:
        other = "ray" if engine == "auto" else engine
        raise UseError(
            f"timeout is {limit:g} s, and the engine {other!r} cannot end a run that takes longer: take "
            "engine 'processes', or leave the timeout out"
        )
    from theodolite.fleet.processes import why_not

    if (reason := why_not(runs, means)) is not None:
        raise UseError(f"timeout is {limit:g} s, which needs runs in processes of their own: {reason}")
    return "processes", _named("processes")


def _named(engine: str) -> Engine:
    """Engines are imported when they are chosen: a cluster's packages may not be there."""
    if engine == "processes":
        from theodolite.fleet.processes import processes

        return processes
    if engine == "vectorised":
        from theodolite.fleet.vectorised import vectorised

        return vectorised
    if engine == "ray":
        from theodolite.fleet.ray_tasks import ray_tasks

        return ray_tasks
    return serial


def _is_connected_to_ray() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _on_card(runs: Sequence[Run], means: Means) -> tuple[str, Engine]:
    """Families of runs that can be made together are; the others after them, in processes."""
    from theodolite.fleet.stack import kin
    from theodolite.fleet.vectorised import why_not

    families: dict[str, list[Run]] = {}
    others: list[Run] = []
    for run in runs:
        try:
            with conditions(run, means.workloads):
                families.setdefault(kin(run, workload_of(run, means.workloads)), []).append(run)
        except Exception:  # whatever it is, the run itself will say it
            others.append(run)
    together: list[Run] = []
    for family in families.values():
        reason = why_not(family[0], means)
        if reason is not None:
            means.said(f"{len(family)} runs like {family[0]} are made one by one: {reason}")
        (together if reason is None else others).extend(family)
    rest = _apart(others, means)
    if not others or not together:
        name = "vectorised" if together else rest
        return name, _named(name)
    parts = {"vectorised": {run.identity for run in together}, rest: {run.identity for run in others}}

    def both(runs: Sequence[Run], means: Means) -> Iterator[Outcome]:
        for name, members in parts.items():
            yield from _named(name)([run for run in runs if run.identity in members], means)

    return f"vectorised, then {rest}", both


def _apart(runs: Sequence[Run], means: Means) -> str:
    """Processes, if they save more than they cost and the workloads can be sent to them."""
    workers = min(means.jobs, len(runs))
    if workers < 2 or sum(_seconds(run, means) for run in runs) * (1 - 1 / workers) < START:
        return "serial"
    from theodolite.fleet.processes import why_not

    reason = why_not(runs, means)
    if reason is not None:
        means.said(f"One run after the other: {reason}")
    return "serial" if reason else "processes"


def _seconds(run: Run, means: Means) -> float:
    """About how long a run takes on one core; within a factor of a few.

    Each block has some twelve width² weights, each weight takes six operations for each target, a core makes
    2·10¹⁰ of them in a second, and to call them takes half a millisecond a block.
    """
    try:
        with conditions(run, means.workloads):
            targets = targets_in(workload_of(run, means.workloads).draw(run.seed, 0))
    except Exception:  # whatever it is, the run itself will say it
        return 0.0
    return run.steps * run.size.depth * (6 * 12 * run.size.width**2 * targets / 2e10 + 5e-4)
