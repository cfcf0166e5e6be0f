"""The vectorised engine: many models in one program, in chunks that fit into memory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.core.batches import Batch, on_device
from theodolite.core.building import build_hollow, in_one_line, untouched_randomness
from theodolite.core.calling import see_inside
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.metric_names import HELD_OUT_LOSS
from theodolite.fleet.engine import Outcomes, Resources
from theodolite.fleet.evaluation import Evaluations, metrics_of, with_readings
from theodolite.fleet.plans import planned
from theodolite.fleet.program import Program
from theodolite.fleet.run import Outcome, Run
from theodolite.fleet.stack import families_of, kin, stack, why_not_stacked
from theodolite.fleet.training import (
    LOOK_EVERY,
    TARGETS,
    arithmetic,
    conditions,
    failed,
    fault_of_data,
    outcome_of,
    precision_of,
    readings_of,
    train,
    workload_for,
)
from theodolite.fleet.trunks import branch_step, sharing
from theodolite.optimizers.schedule import LRFactor
from theodolite.workloads import Workload

ENGINE = "vectorised"
MEMORY_SHARE = 0.8
"""The share of a device's free memory that models may take."""
CHUNK_ON_CPU = 32
TRIED = 4
"""Steps that are made to compare models together and alone."""
RTOL = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 3e-2}
"""By precision, the difference of losses that is allowed, as sums are taken in another order."""
COMPILE_FROM = 250
"""Steps from which models are compiled on a GPU: a step of 24 small GPTs then takes 13 ms instead of 32."""
Evaluated = list[dict[str, float]]
"""For each model the held-out loss, and its accuracies if they are asked for."""
Shorter = Mapping[str, Sequence[Run]]
"""By identity of a run, shorter ones that begin as it does."""
KEPT_SHARE, KEPT_MOST = 0.25, 8 * 2**30
"""Batches are kept in this share of the free memory of the machine, in bytes at most this."""


def vectorised(runs: Sequence[Run], resources: Resources) -> Outcomes:
    """Runs of one shape in one program, as many at a time as memory holds; halve them on out-of-memory.

    Runs whose batched result differs from the single one fail, with the reason.
    """
    found = sharing(runs)
    families, failures = families_of(found.first, resources.workloads)
    kept: dict[tuple[str, int | None], KeptBatches] = {}
    for family in families:
        reason = why_not(family[0], resources)
        if reason is None:
            drawn = family[0].workload, family[0].size.batch
            if drawn not in kept:
                kept[drawn] = KeptBatches(workload_for(family[0], resources.workloads))
            yield from _family(family, resources, kept[drawn], found.shorter)
        else:
            failures += [(run, reason) for run in with_shorter(family, found.shorter)]
    for run, error in failures:
        yield failed(run, error, 0.0, resources.device, ENGINE)


class KeptBatches:
    """Batches of a workload that are drawn once for the networks of all sizes, as far as memory goes.

    Drawing images and noise on a CPU can take longer than a step of many small networks on a GPU.

    Args:
        workload: its batches are functions of seed and step alone.
        most: bytes to keep; by default a share of the memory that is free.
    """

    def __init__(self, workload: Workload, most: float | None = None) -> None:
        self._workload, self._left = workload, _free_bytes() if most is None else most
        self._kept: dict[tuple[int, int], Batch] = {}
        self._addresses: set[int] = set()

    def draw(self, seed: int, step: int) -> Batch:
        """The batch, drawn or kept."""
        if (seed, step) in self._kept:
            return self._kept[seed, step]
        batch = self._workload.draw(seed, step)
        if self._left > 0 or self._kept:
            self._keep((seed, step), batch)
        return batch

    def _keep(self, place: tuple[int, int], batch: Batch) -> None:
        tensors = [leaf for leaf in tree_leaves(see_inside(batch)) if isinstance(leaf, Tensor)]
        if any(tensor.device.type != "cpu" or tensor.layout is not torch.strided for tensor in tensors):
            self._left = 0
            return
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.numel()]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        if not self._addresses.isdisjoint(sizes):
            # The workload keeps its data itself, or fills one buffer again and again.
            self._kept.clear()
            self._left = 0
            return
        if self._left > 0:
            self._left -= sum(sizes.values())
        if self._left > 0:
            self._addresses.update(sizes)
            self._kept[place] = batch


def _free_bytes() -> float:
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 0.0
    return min(KEPT_SHARE * free, KEPT_MOST)


_reasons: dict[tuple[Workload, str, str], str | None] = {}


def why_not(run: Run, resources: Resources) -> str | None:
    """Why a run and its kin cannot share a program; None if they can.

    Two of them are trained for a few steps, together and alone, and have to agree.
    """
    try:
        with conditions(run.workload, resources.workloads):
            workload = workload_for(run, resources.workloads)
            key = workload, kin(run, workload), resources.device
            if key not in _reasons:
                _reasons[key] = _why_not(run, workload, resources)
            return _reasons[key]
    except Exception as error:
        return in_one_line(error)


def _why_not(run: Run, workload: Workload, resources: Resources) -> str | None:
    reason = why_not_stacked(run, workload)
    if reason is not None:
        return reason
    for name, module in build_hollow(workload.build, run.size).named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            return f"{name} drops values at random ({module}), which differs for many models at once"
    # By SGD: Adam turns rounding into whole steps where the gradient is zero, as in a bias before a norm.
    descent: dict[str, Any] = {"optimizer": "sgd", "options": {}, "vector_lr": None, "vector_options": {}}
    descent |= {"steps": min(TRIED, run.steps), "lr": min(run.lr, 0.01), "warmup": 0}
    short = dataclasses.replace(run, **descent, every=1, held_out=1, probes=(), evaluate_every=0)
    pair = [short, dataclasses.replace(short, seed=run.seed + 1)]
    try:
        alone = [train(each, workload, device=resources.device, metrics=False) for each in pair]
    except Exception:  # the run itself will say it, and its kin may be good
        return None
    try:
        together = _together(pair, resources, KeptBatches(workload, most=0), compiled=False, metrics=False)
    except Exception as error:
        return None if _is_out_of_memory(error) else in_one_line(error)
    for mine, other in zip(map(_losses, together), map(_losses, alone), strict=True):
        if not _alike(mine, other, run):
            said, wanted = (", ".join(f"{loss:.6g}" for loss in losses) for losses in (mine, other))
            return f"together the losses of its first steps are {said}, and alone {wanted}"
    return None


def _losses(outcome: Outcome) -> list[float]:
    """Of every step, and of the held-out batch."""
    held_out = math.nan if outcome.held_out is None else outcome.held_out
    return [*(loss for _, loss in outcome.metrics["loss"]), held_out]


def _alike(mine: Sequence[float], others: Sequence[float], run: Run) -> bool:
    close = RTOL[run.precision]
    return len(mine) == len(others) and all(
        math.isclose(one, other, rel_tol=close, abs_tol=close)
        or not (math.isfinite(one) or math.isfinite(other))
        for one, other in zip(mine, others, strict=True)
    )


def _family(
    runs: Sequence[Run], resources: Resources, batches: KeptBatches, shorter: Shorter
) -> Iterator[Outcome]:
    # Sorted by seed, so that a chunk has few batches to draw.
    order = sorted(runs, key=lambda run: run.seed)
    waiting = _chunks(order, resources.chunk or _room(order[0], resources))
    compiled = torch.device(resources.device).type == "cuda" and runs[0].steps >= COMPILE_FROM
    while waiting:
        some = waiting.popleft()
        for run in with_shorter(some, shorter):
            resources.begun(run)
        start = time.perf_counter()
        try:
            outcomes = _together(some, resources, batches, compiled=compiled, shorter=shorter)
        except Exception as error:
            trace, outcomes = traceback.format_exc(), []
            if compiled and not _is_out_of_memory(error):
                compiled = False
                resources.said(f"{some[0].size} goes on without being compiled: {in_one_line(error)}")
                waiting.appendleft(some)
            elif len(some) == 1:
                seconds = time.perf_counter() - start
                both = with_shorter(some, shorter)
                outcomes = [failed(run, trace, seconds / len(both), resources.device, ENGINE) for run in both]
            elif _is_out_of_memory(error):
                half = (len(some) + 1) // 2
                resources.said(f"{len(some)} models of {some[0].size} are too many for memory: now {half}")
                waiting = _chunks([run for chunk in (some, *waiting) for run in chunk], half)
            else:  # one of them may be the cause: bisect
                half = len(some) // 2
                waiting.extendleft((some[half:], some[:half]))
        _free(resources.device)
        yield from outcomes


def with_shorter(runs: Sequence[Run], shorter: Shorter) -> list[Run]:
    """The runs, and those that begin as they do."""
    return [one for run in runs for one in (run, *shorter.get(run.identity, ()))]


def _chunks(runs: Sequence[Run], most: int) -> deque[Sequence[Run]]:
    return deque(runs[start : start + most] for start in range(0, len(runs), most))


@exclusive()
def _together(
    runs: Sequence[Run],
    resources: Resources,
    batches: KeptBatches,
    *,
    compiled: bool,
    metrics: bool = True,
    shorter: Shorter | None = None,
) -> list[Outcome]:
    """All steps of some models in one program, and of shorter runs that begin as they do."""
    start = time.perf_counter()
    workload, device = workload_for(runs[0], resources.workloads), resources.device
    if compiled:
        torch.compiler.reset()  # it gives up after eight networks; its cache on disk remains
    evaluations = Evaluations.of(runs[0], workload, metrics=metrics)
    leaving: dict[int, dict[int, dict[int, Run]]] = {}  # by step, length and place of the model
    for place, run in enumerate(runs):
        for one in (shorter or {}).get(run.identity, ()):
            leaving.setdefault(branch_step(one) or 0, {}).setdefault(one.steps, {})[place] = one
    along: list[Evaluated] = []
    outcomes: list[Outcome] = []
    with _settings(runs[0], resources):
        models = stack(runs, workload, device)
        program = Program(models, workload, device, compiled=compiled, draw=batches.draw)
        finish = functools.partial(_outcomes, program, workload, metrics=metrics)
        for step in range(runs[0].steps):
            for length, some in sorted(leaving.pop(step, {}).items()):
                with program.branch({place: _factors(run) for place, run in some.items()}):
                    outcomes += finish(some, _branch(program, range(step, length), evaluations, along))
            if evaluations.due(step):
                with program.aside():
                    along.append(_evaluated(program, evaluations))
            program.step()
            if compiled and step == 0:
                _check_compiled(program, workload, device)
            if step % LOOK_EVERY == LOOK_EVERY - 1 and not program.alive():
                break
        along.append(_evaluated(program, evaluations))
        diverged = [some for lengths in leaving.values() for some in lengths.values()]
        for some in (dict(enumerate(runs)), *diverged):
            outcomes += finish(some, along)
    seconds = (time.perf_counter() - start) / len(outcomes)
    return [dataclasses.replace(outcome, seconds=seconds, engine=ENGINE) for outcome in outcomes]


def _factors(run: Run) -> LRFactor:
    return LRFactor(run.schedule, run.steps, run.warmup, run.final)


def _branch(
    program: Program, steps: range, evaluations: Evaluations, along: Sequence[Evaluated]
) -> list[Evaluated]:
    """Make the last steps of shorter runs; all their evaluations."""
    found = [*along]
    for step in steps:
        if evaluations.due(step):
            with program.aside():
                found.append(_evaluated(program, evaluations))
        program.step()
    return [*found, _evaluated(program, evaluations)]


def _outcomes(
    program: Program,
    workload: Workload,
    runs: Mapping[int, Run],
    along: Sequence[Evaluated],
    *,
    metrics: bool,
) -> list[Outcome]:
    """The outcomes of runs by the places of their models, all of one length."""
    outcomes, device = [], str(program.device)
    for place, run in runs.items():
        evaluations = Evaluations.of(run, workload, metrics=metrics)
        model = program.stack.single(place)
        mine = [dict(each[place]) for each in along]
        values = {name: rows[: run.steps, place].double().tolist() for name, rows in program.series.items()}
        values |= {TARGETS: program.targets}
        values |= {name: [each[name] for each in mine] for name in evaluations.names}
        loss = mine[-1].pop(HELD_OUT_LOSS)
        outcome = outcome_of(run, values, loss, device, readings_of(model, workload, run), evaluations)
        if outcome.status == "finished":
            outcome = with_readings(outcome, mine[-1])
            if metrics and workload.metrics:
                outcome = _judged(outcome, model, workload, device)
        elif why := fault_of_data(outcome, workload, device):
            outcome = failed(run, f"theodolite.UseError: {why}", 0.0, device, ENGINE)
        outcomes.append(outcome)
    return outcomes


def _evaluated(program: Program, evaluations: Evaluations) -> Evaluated:
    """For each model its held-out loss, and its accuracies if they are asked for."""
    found = [{HELD_OUT_LOSS: loss} for loss in program.held_out_losses()]
    if evaluations.accuracy:
        found = [one | more for one, more in zip(found, program.accuracies(), strict=True)]
    return found


def _judged(outcome: Outcome, model: nn.Module, workload: Workload, device: str) -> Outcome:
    """With the metrics of the workload. If one of them fails, so has this run, and not those beside it."""
    try:
        return with_readings(outcome, metrics_of(model, workload, outcome))
    except UseError:
        return failed(outcome.run, traceback.format_exc(), 0.0, device, ENGINE)


@contextlib.contextmanager
def _settings(run: Run, resources: Resources) -> Iterator[None]:
    """In here models are trained together."""
    with (
        conditions(run.workload, resources.workloads),
        untouched_randomness(run.seed),
        arithmetic(run, resources.device),
        warnings.catch_warnings(),
    ):
        # About operations that vmap runs model by model: slower, but right.
        warnings.filterwarnings("ignore", message=".*batching rule.*")
        yield


def _check_compiled(program: Program, workload: Workload, device: str) -> None:
    """Compare the first loss of one model with that of the network that is not compiled."""
    run = program.stack.runs[0]
    model = planned(run, workload).build(run.seed, device=device).train()
    batch = on_device(workload.draw(run.seed, 0), device)
    with torch.no_grad(), precision_of(run, device):
        alone = workload.evaluate(model, batch, temperature=run.temperature).item()
    compiled = program.series["loss"][0, 0].item()
    if not _alike([compiled], [alone], run):
        raise RuntimeError(f"compiled its first loss is {compiled:.6g}, and otherwise {alone:.6g}")


@exclusive()
def _room(run: Run, resources: Resources) -> int:
    """How many models of this shape fit into memory, by one step of one."""
    if torch.device(resources.device).type != "cuda":
        return CHUNK_ON_CPU
    workload = workload_for(run, resources.workloads)
    try:
        _free(resources.device)
        torch.cuda.reset_peak_memory_stats(resources.device)
        before = torch.cuda.memory_allocated(resources.device)
        with _settings(run, resources):
            program = Program(stack([run], workload, resources.device), workload, resources.device)
            program.step()
        torch.cuda.synchronize(resources.device)
        taken = torch.cuda.max_memory_allocated(resources.device) - before
        del program
        _free(resources.device)
        free, _ = torch.cuda.mem_get_info(resources.device)
        return max(1, int(MEMORY_SHARE * free / max(taken, 1)))
    except Exception:  # whatever it is, the run itself will say it
        return 1


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _free(device: str) -> None:
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
