"""Many models in one program, chunk by chunk."""

from __future__ import annotations

import dataclasses
import gc
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from theodolite.building import build_hollow, in_one_line, untouched_randomness
from theodolite.fleet.engine import Means
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.program import Program
from theodolite.fleet.run import Run
from theodolite.fleet.stack import Stack, kin, stack, why_not_stacked
from theodolite.fleet.training import (
    LOOK_EVERY,
    TARGETS,
    arithmetic,
    failed,
    outcome_of,
    planned,
    precision_of,
    readings_of,
    workload_of,
)
from theodolite.probes.course import on_device
from theodolite.workloads import Workload

ENGINE = "vectorised"
MEMORY_SHARE = 0.8
"""Of the free memory of a device, what models may take."""
CHUNK_ON_CPU = 32
COMPILE_FROM = 250
"""Steps from which compiling pays on a GPU: it takes 7 s, and a step of 24 small GPTs 13 ms instead of 31."""


def vectorised(runs: Sequence[Run], means: Means) -> Iterator[Outcome]:
    """Runs of one shape together, as many at a time as memory holds; half as many if it did not."""
    families: dict[str, list[Run]] = {}
    for run in runs:
        try:
            families.setdefault(kin(run, workload_of(run, means.workloads)), []).append(run)
        except Exception:
            yield failed(run, traceback.format_exc(), 0.0, means.device, ENGINE)
    for family in families.values():
        # Not by another optimizer than was asked for, nor with other random numbers, without a word.
        reason = _refusal(family[0], workload_of(family[0], means.workloads))
        if reason is None:
            yield from _family(family, means)
        else:
            yield from (failed(run, reason, 0.0, means.device, ENGINE) for run in family)


def why_not(run: Run, means: Means) -> str | None:
    """Why a run and its kin cannot be made together; None if they can. Tries one loss of two models."""
    workload = workload_of(run, means.workloads)
    try:
        reason = _refusal(run, workload)
        if reason is not None:
            return reason
        with untouched_randomness(run.seed), arithmetic(run, means.device), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*batching rule.*")
            pair = stack([run, dataclasses.replace(run, seed=run.seed + 1)], workload, means.device)
            program = Program(pair, workload, means.device)
            together = program.try_losses()
            alone = [_loss(each, workload, means.device) for each in pair.runs]
    except Exception as error:
        return in_one_line(error)
    for mine, other in zip(together, alone, strict=True):
        if not abs(mine - other) <= TOLERANCE[run.precision] * max(1.0, abs(other)):
            return f"the loss of two models together is {mine:.6g} and {other:.6g} of one alone"
    return None


TOLERANCE = {"float32": 1e-3, "tf32": 1e-2, "bfloat16": 3e-2}


def _family(runs: Sequence[Run], means: Means) -> Iterator[Outcome]:
    # Runs of one seed side by side: a chunk then has few batches to draw.
    waiting = deque(sorted(runs, key=lambda run: run.seed))
    chunk = means.chunk or _room(waiting[0], means)
    compiled = torch.device(means.device).type == "cuda" and runs[0].steps >= COMPILE_FROM
    while waiting:
        some = [waiting.popleft() for _ in range(min(chunk, len(waiting)))]
        for run in some:
            means.begun(run)
        start = time.perf_counter()
        try:
            outcomes = _together(some, means, compiled=compiled)
        except Exception as error:
            trace, outcomes = traceback.format_exc(), []
            if _is_out_of_memory(error) and len(some) > 1:
                chunk = (len(some) + 1) // 2
                means.said(f"{len(some)} models of {some[0].size} are too many for memory: now {chunk}")
                waiting.extendleft(reversed(some))
            elif compiled:
                compiled = False
                means.said(f"{some[0].size} could not be compiled, and goes on without: {in_one_line(error)}")
                waiting.extendleft(reversed(some))
            else:
                share = (time.perf_counter() - start) / len(some)
                outcomes = [failed(run, trace, share, means.device, ENGINE) for run in some]
        _free(means.device)
        yield from outcomes


def _together(runs: Sequence[Run], means: Means, *, compiled: bool) -> list[Outcome]:
    """All steps of some models in one program."""
    start = time.perf_counter()
    workload, device = workload_of(runs[0], means.workloads), means.device
    if compiled:
        torch.compiler.reset()  # it gives up after eight networks; what it has on the disk is found again
    with untouched_randomness(runs[0].seed), arithmetic(runs[0], device), warnings.catch_warnings():
        # Of operations that vmap takes model by model: slower, but right.
        warnings.filterwarnings("ignore", message=".*batching rule.*")
        models = stack(runs, workload, device)
        program = Program(models, workload, device, compiled=compiled)
        for step in range(runs[0].steps):
            program.step()
            if step % LOOK_EVERY == LOOK_EVERY - 1 and not program.alive():
                break
        held_out = program.judge()
        series = {name: values.double().T.tolist() for name, values in program.series.items()}
        readings = [readings_of(_single(models, place), workload, run) for place, run in enumerate(runs)]
    seconds = (time.perf_counter() - start) / len(runs)
    outcomes = []
    for place, run in enumerate(runs):
        values = {name: rows[place] for name, rows in series.items()} | {TARGETS: program.targets}
        outcome = outcome_of(run, values, held_out[place], device, readings[place])
        outcomes.append(dataclasses.replace(outcome, seconds=seconds, engine=ENGINE))
    return outcomes


def _single(models: Stack, place: int) -> nn.Module:
    """One of the models, its values in the network that all of them share."""
    with torch.no_grad():
        own = dict(models.model.named_parameters())
        for one in models.tensors:
            own[one.name].copy_(one.values[place])
        for name, buffer in models.model.named_buffers():
            buffer.copy_(models.buffers[name][place])
    return models.model


def _loss(run: Run, workload: Workload, device: str) -> float:
    model = planned(run, workload).build(run.seed, device=device).train()
    batch = on_device(workload.draw(run.seed, 0), device)
    with torch.no_grad(), precision_of(run, device):
        return workload.evaluate(model, batch, temperature=run.temperature).item()


def _refusal(run: Run, workload: Workload) -> str | None:
    """What is not done for many models at once: some optimizers and options, and dropout."""
    reason = why_not_stacked(run, workload)
    if reason is not None:
        return reason
    for name, module in build_hollow(workload.build, run.size).named_modules():
        probability = getattr(module, "p", None)
        if isinstance(module, nn.modules.dropout._DropoutNd) and probability:
            return f"{name} drops values at random ({module}), which comes out otherwise for many at once"
    return None


def _room(run: Run, means: Means) -> int:
    """How many models of this shape fit into memory, from what one step of one takes."""
    if torch.device(means.device).type != "cuda":
        return CHUNK_ON_CPU
    workload = workload_of(run, means.workloads)
    try:
        _free(means.device)
        torch.cuda.reset_peak_memory_stats(means.device)
        before = torch.cuda.memory_allocated(means.device)
        with untouched_randomness(run.seed), arithmetic(run, means.device):
            program = Program(stack([run], workload, means.device), workload, means.device)
            program.step()
        torch.cuda.synchronize(means.device)
        taken = torch.cuda.max_memory_allocated(means.device) - before
        del program
        _free(means.device)
        free, _ = torch.cuda.mem_get_info(means.device)
        return max(1, int(MEMORY_SHARE * free / max(taken, 1)))
    except Exception:  # whatever it is, the run itself will say it
        return 1


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def _free(device: str) -> None:
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
