"""The plans of runs: one for each size, optimizer and parameterization, made once in a process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from theodolite.anatomy import Anatomy, dissect
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet.evaluation import averages
from theodolite.fleet.run import Run
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.schedule import LRFactor
from theodolite.planning import Plan
from theodolite.planning.factory import check_pure, options_digest
from theodolite.planning.own import Own, own
from theodolite.planning.parameterization import plan_for
from theodolite.planning.rows import PlanRow
from theodolite.workloads import Workload


def check_plans(runs: Sequence[Run], workload: Workload) -> tuple[str, ...]:
    """Plan each size with each optimizer and parameterization, and check schedules and options.

    No network is built. Plans are cached: runs in this process do not make them again. Returns notes on the
    workload's own optimizer, such as the tensors that it leaves out.
    """
    notes: dict[str, str] = {}
    for num in dict.fromkeys(run.size.batch for run in runs):
        _check_batches(workload, num)
    for timing in dict.fromkeys((run.schedule, run.steps, run.warmup, run.final) for run in runs):
        LRFactor(*timing)
    for run in {(run.size, run.steps, run.optimizer, run.parameterization): run for run in runs}.values():
        _check_tokens(run, workload)
        plan = planned(run, workload)
        if run.parameterization == "own":
            _check_own(run, plan, workload)
            for note in plan.notes:  # at several sizes they are often the same
                notes.setdefault(note, f"{plan.title}: {note}")
            continue
        for rule in {row.rule for row in plan.trained}:
            OPTIMIZERS[rule].maker(plan.options if rule == plan.optimizer_name else plan.vector_options)
    return tuple(notes.values())


def _check_batches(workload: Workload, num: int | None) -> None:
    """Refuse batches that cannot be cut or joined, as far as the workload's first two show."""
    resized, usual = workload.with_batch(num), workload.source.usual_batch
    if num is not None and num != usual:
        for step in (0, -(-usual // num)):
            resized.draw(0, step)


def _check_tokens(run: Run, workload: Workload) -> None:
    """Refuse a number of steps in which a run does not see the tokens of its size."""
    if run.size.tokens is not None and (steps := workload.steps_for(run.size)) != run.steps:
        raise UseError(
            f"steps is {run.steps}, and training at {run.size} takes {steps}: give {steps}, or leave out the "
            "tokens of the size"
        )


def _check_own(run: Run, plan: Plan, workload: Workload) -> None:
    """Refuse a factory that makes something else at every call, and a schedule that it replaces."""
    if workload.optimizer is not None:
        check_pure(workload.optimizer, workload.build, run.size)
    if run.schedule != "constant" and averages(plan):
        raise UseError(
            f"schedule is {run.schedule!r}: {plan.optimizer_name}, the optimizer of {workload.name}, "
            "replaces one. Give schedule='constant'"
        )


def planned(run: Run, workload: Workload) -> Plan:
    """The plan of a run, one for all seeds; under `standard` and `own` it leaves the network as it is."""
    alike = dataclasses.replace(run, seed=0, steps=1, warmup=0, every=1, evaluate_every=0)
    return _planned(alike, workload.source)  # networks do not depend on the batch


@functools.lru_cache(maxsize=4096)
def _planned(run: Run, workload: Workload) -> Plan:
    if run.parameterization == "own":
        return _own(workload, run.size.network).at(run.lr)
    sizes = [run.size.network, (run.base or run.size).network]
    vectors: dict[str, Any] = {}
    if OPTIMIZERS[run.optimizer].matrices_only:
        vectors = {"vector_lr": run.vector_lr, "vector_options": _tuples(run.vector_options)}
    plan = plan_for(
        workload.build,
        _first_inputs(workload),
        run.size,
        parameterization=run.parameterization,
        base=run.base or run.size,
        optimizer=run.optimizer,
        lr=run.lr,
        weight_decay=run.weight_decay,
        eps=run.eps,
        decay=run.decay,
        options=_tuples(run.options),
        horizon=run.horizon,
        anatomies={size: anatomy_of(workload, size) for size in sizes},
        **vectors,
    )
    if run.init_scale == 1:
        return plan
    rows = {
        name: dataclasses.replace(row, init=row.init.scaled(run.init_scale)) if _is_drawn(row) else row
        for name, row in plan.rows.items()
    }
    return dataclasses.replace(plan, rows=rows)


@functools.lru_cache(maxsize=256)
def _own(workload: Workload, size: Size) -> Own:
    """The network and the optimizer that a workload has at a size, with the learning rates that it has."""
    inputs, anatomy = _first_inputs(workload), anatomy_of(workload, size)
    return own(workload.build, inputs, workload.optimizer, size=size, anatomy=anatomy)


@functools.lru_cache(maxsize=256)
def own_digest(workload: Workload, size: Size) -> str | None:
    """A hash of what the workload's own optimizer does with each tensor at a size; None if it has none."""
    make = workload.optimizer
    return None if make is None else options_digest(make, workload.build, size)


def _is_drawn(row: PlanRow) -> bool:
    """Does a tensor start at random? A gain does not, and of a bias that draws itself it is not known."""
    fixed = ("constant", "own") if row.role == "bias" else ("constant",)
    return row.trained and row.role != "gain" and row.init.kind not in fixed


@functools.lru_cache(maxsize=256)
def anatomy_of(workload: Workload, size: Size) -> Anatomy:
    """The anatomy of the network at a size, found once in a process."""
    return dissect(workload.build, _first_inputs(workload), size=size, roles=workload.roles_with(None))


@functools.lru_cache(maxsize=16)
def _first_inputs(workload: Workload) -> Any:
    return workload.draw(0, 0)[0]


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """Lists, which JSON has, as the tuples that optimizers take."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
