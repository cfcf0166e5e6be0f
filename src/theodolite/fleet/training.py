"""Train one run, step by step: the reference that every engine has to agree with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from theodolite.core.batches import device_of, on_device, targets_in
from theodolite.core.building import evaluated, one_thread, untouched_randomness
from theodolite.core.calling import call, logits
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.finite import spoilt_part
from theodolite.core.metric_names import ACCURACY, HELD_OUT_LOSS, OWN_DIGEST, TRAIN_ACCURACY
from theodolite.fleet.checkpoint import RunCheckpoint
from theodolite.fleet.evaluation import (
    AFTER,
    Evaluations,
    aside,
    averaged,
    averages,
    metrics_of,
    share_right,
    with_readings,
)
from theodolite.fleet.isolation import OwnSettings, isolated
from theodolite.fleet.plans import own_digest, planned
from theodolite.fleet.run import OWN, Outcome, Run
from theodolite.optimizers.schedule import LRFactor
from theodolite.planning import Plan
from theodolite.probes.scaling.first_steps import activation_sizes
from theodolite.workloads import Workload
from theodolite.workloads import workload as look_up
from theodolite.workloads.lookup import put_neighbours_first

LOOK_EVERY = 25
"""Steps between checks for divergence where a check waits for the device."""
TARGETS = "targets"
"""The series of numbers of targets, beside that of losses."""

Workloads = Mapping[str, Workload]
"""By name, workloads that were given as objects and cannot be looked up."""


@exclusive()
def train(
    run: Run,
    workload: Workload,
    *,
    device: str = "cpu",
    checkpoint: RunCheckpoint | None = None,
    plan: Plan | None = None,
    metrics: bool = True,
) -> Outcome:
    """Train a run. A loss that is not finite ends it: it has diverged, unless the batch is not finite.

    The network is `plan.build(seed)`, the batches are `workload.batch(seed, step)`. The caller's random
    numbers stay as they are. With a checkpoint the run resumes where it was stopped, and ends with the same
    numbers as if it had not been. `plan` is the run's plan, if it is there already. `metrics=False` leaves
    out the metrics of the workload.
    """
    start = time.perf_counter()
    plan = planned(run, workload) if plan is None else plan
    twice = any(spec.second_order for spec in plan.specs)
    with untouched_randomness(run.seed), arithmetic(run, device):
        model = plan.build(run.seed, device=device).train()
        optimizer = plan.optimizer(model, check_gradients=False)  # a divergence is a result
        factor = LRFactor(run.schedule, run.steps, run.warmup, run.final)
        rates = [group["lr"] for group in optimizer.param_groups]
        log = Log(run, device, Evaluations.of(run, workload, metrics=metrics))
        if checkpoint is not None:
            log.values = checkpoint.restore(model, optimizer, fit=log.evaluations.fit)
        for step in range(log.steps, run.steps):
            if checkpoint is not None and step in checkpoint.leaves:
                log.flush()
                checkpoint.leave(step, model, optimizer, log.values)
            if log.evaluations.due(step):
                with averaged(plan, model, optimizer):
                    log.evaluate(step, model, workload)
            batch = on_device(workload.draw(run.seed, step), device)
            optimizer.zero_grad()
            with precision_of(run, device), differentiable_twice(twice):
                loss = workload.evaluate(model, batch, temperature=run.temperature)
                _backward(loss, model, twice=twice)
            log.add(loss, model, targets_in(batch))
            if log.has_diverged:
                break
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor(step)
            optimizer.step()
            if checkpoint is not None and log.complete:
                checkpoint.keep(model, optimizer, log.values)
        if averages(plan):
            optimizer.eval()  # type: ignore[attr-defined]
        outcome = log.outcome(model, workload)
        if why := fault_of_data(outcome, workload, device):
            raise UseError(why)
        if metrics and outcome.status == "finished":
            outcome = with_readings(outcome, metrics_of(model, workload, outcome))
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start)


def attempt(
    run: Run,
    workloads: Workloads,
    *,
    device: str = "cpu",
    engine: str = "serial",
    checkpoint: RunCheckpoint | None = None,
    settings: OwnSettings | None = None,
) -> Outcome:
    """`train` in standard settings (see `isolated`), with any exception as a failed outcome.

    `settings` are those of the workload's file, which is asked for them if they are not given.
    """
    start = time.perf_counter()
    try:
        with conditions(run.workload, workloads) if settings is None else isolated(settings):
            outcome = train(run, workload_for(run, workloads), device=device, checkpoint=checkpoint)
    except (Exception, SystemExit):  # a workload that exits ends its run, not the others
        return failed(run, traceback.format_exc(), time.perf_counter() - start, device, engine)
    return dataclasses.replace(outcome, engine=engine)


def failed(run: Run, error: str, seconds: float, device: str, engine: str) -> Outcome:
    """The outcome of a run that raised an error."""
    return Outcome(run, "failed", 0, None, seconds=seconds, device=device, engine=engine, error=error)


def workload_of(name: str, workloads: Workloads) -> Workload:
    """The workload of a name: given as an object, or looked up once in a process."""
    return workloads[name] if name in workloads else _looked_up(name)[0]


def workload_for(run: Run, workloads: Workloads) -> Workload:
    """The workload of a run, in batches of its size."""
    return workload_of(run.workload, workloads).with_batch(run.size.batch)


@contextlib.contextmanager
def conditions(workload: str, workloads: Workloads) -> Iterator[None]:
    """Standard settings, and those made by the workload's file: in here its code is called."""
    looked_up = workload not in workloads
    with isolated(settings_of(workload) if looked_up else None):
        if looked_up:
            put_neighbours_first(workload)
        yield


def settings_of(workload: str) -> OwnSettings:
    """The settings that a workload's file makes when it is imported, such as another default dtype."""
    return _looked_up(workload)[1]


@functools.lru_cache(maxsize=64)
def _looked_up(name: str) -> tuple[Workload, OwnSettings]:
    with isolated() as settings:
        workload = look_up(name)
    return workload, settings


class Log:
    """The losses of a run as they come, and the step at which they stopped being finite."""

    def __init__(self, run: Run, device: str, evaluations: Evaluations) -> None:
        self.run, self.device, self.evaluations = run, device, evaluations
        self.values: dict[str, list[float]] = {}
        """By name, a value for every step, or for every evaluation; a checkpoint keeps them."""
        self._waiting: dict[str, list[Tensor]] = {}
        self._looked = 0
        self._look_every = 1 if torch.device(device).type == "cpu" else LOOK_EVERY

    @property
    def steps(self) -> int:
        """How many losses are known."""
        return len(self.values.get("loss", ()))

    @property
    def complete(self) -> bool:
        """Are the losses of all steps so far known?"""
        return not self._waiting

    @property
    def has_diverged(self) -> bool:
        """Is a known loss not finite?"""
        new = self.values.get("loss", [])[self._looked :]  # each loss is looked at once
        if all(map(math.isfinite, new)):
            self._looked += len(new)
            return False
        return True

    def add(self, loss: Tensor, model: nn.Module, targets: int) -> None:
        """Record the loss of a step, its number of targets and the values of probes."""
        waiting = self._waiting
        waiting.setdefault("loss", []).append(loss.detach())
        waiting.setdefault(TARGETS, []).append(torch.tensor(targets))
        if "gradient" in self.run.probes:
            waiting.setdefault("gradient", []).append(_gradient_norm(model))
        made = self.steps + len(waiting["loss"])
        if len(waiting["loss"]) >= self._look_every or made == self.run.steps:
            self.flush()

    def flush(self) -> None:
        """Wait for the device, so that the values of all steps so far are known."""
        for name, tensors in self._waiting.items():
            self.values.setdefault(name, []).extend(torch.stack(tensors).double().tolist())
        self._waiting.clear()

    def evaluate(self, step: int, model: nn.Module, workload: Workload) -> None:
        """Record an evaluation along training, which leaves the network and random numbers as they were."""
        with aside(model, self.run.seed):
            found = {HELD_OUT_LOSS: held_out_loss(model, workload, self.run, self.device)}
            if self.evaluations.accuracy:
                found |= accuracies(model, workload, self.run, self.device, after=step)
        self._record(step, found)

    def outcome(self, model: nn.Module, workload: Workload) -> Outcome:
        """The outcome; the network is evaluated unless it diverged."""
        held_out, right = None, {}
        if not self.has_diverged:
            held_out = held_out_loss(model, workload, self.run, self.device)
            if self.evaluations.accuracy and math.isfinite(held_out):
                right = accuracies(model, workload, self.run, self.device, after=self.run.steps)
            self._record(self.run.steps, {HELD_OUT_LOSS: held_out, **right})
        readings = readings_of(model, workload, self.run) | right
        return outcome_of(self.run, self.values, held_out, self.device, readings, self.evaluations)

    def _record(self, step: int, found: Mapping[str, float]) -> None:
        if names := self.evaluations.names:
            for name, value in {AFTER: step, **found}.items():
                if name in (AFTER, *names):
                    self.values.setdefault(name, []).append(value)


def outcome_of(
    run: Run,
    values: Mapping[str, list[float]],
    held_out: float | None,
    device: str,
    readings: dict[str, Any],
    evaluations: Evaluations,
) -> Outcome:
    """An outcome from the values of all steps; those of recorded steps before a divergence are kept."""
    losses = values["loss"]
    diverged_at = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if diverged_at is None and held_out is not None and not math.isfinite(held_out):
        diverged_at = len(losses)
    stop = len(losses) if diverged_at is None else diverged_at
    kept = [step for step in range(stop) if step % run.every == 0 or step == run.steps - 1]
    series = {name: each for name, each in values.items() if name not in (TARGETS, AFTER, *evaluations.names)}
    along = evaluations.series(values, before=stop + (diverged_at is None))
    return Outcome(
        run=run,
        status="finished" if diverged_at is None else "diverged",
        step=stop,
        held_out=held_out if diverged_at is None else None,
        metrics={name: tuple((step, each[step]) for step in kept) for name, each in series.items()} | along,
        readings={**readings, "tokens": round(sum(values[TARGETS][:stop]))},
        device=device_name(device),
    )


def fault_of_data(outcome: Outcome, workload: Workload, device: str) -> str | None:
    """Why a run that seems to have diverged has not: its batch is not finite; None if it has.

    The batch is the cause if a new network has no finite loss on it either: some networks take nan.
    """
    run = outcome.run
    if outcome.status != "diverged":
        return None
    drawn = [(f"batch({run.seed}, {outcome.step})", partial(workload.draw, run.seed, outcome.step))]
    if outcome.step == run.steps:
        held_out = range(run.held_out)
        drawn = [(f"held-out batch {step}", partial(workload.draw_held_out, step)) for step in held_out]
    for name, draw in drawn:
        batch = on_device(draw(), device)
        if (part := spoilt_part(batch)) is None:
            continue
        model = planned(run, workload).build(run.seed, device=device).train()
        with precision_of(run, device):
            loss = float(workload.evaluate(model, batch, temperature=run.temperature).detach())
        if not math.isfinite(loss):
            return (
                f"workload {workload.name!r}: {name} has {part} that are not finite, and the loss of a new "
                f"network on it is {loss:g}. Repair the data, or leave out such examples"
            )
    return None


@torch.no_grad()
def held_out_loss(model: nn.Module, workload: Workload, run: Run, device: str) -> float:
    """The mean loss over the held-out batches."""
    losses = []
    with evaluated(model):
        for step in range(run.held_out):
            batch = on_device(workload.draw_held_out(step), device)
            with precision_of(run, device):
                losses.append(workload.evaluate(model, batch, temperature=run.temperature))
    return statistics.fmean(torch.stack(losses).double().tolist())


def readings_of(model: nn.Module, workload: Workload, run: Run) -> dict[str, Any]:
    """What is measured once: the number of parameters, and probes after training."""
    readings: dict[str, Any] = {"parameters": sum(each.numel() for each in model.parameters())}
    if run.parameterization == OWN:
        readings[OWN_DIGEST] = own_digest(workload.source, run.size.network)
    if "sizes" in run.probes:
        inputs, _ = on_device(workload.draw_held_out(0), str(device_of(model)))
        readings["sizes"] = activation_sizes(model, inputs)
    return readings


@contextlib.contextmanager
def arithmetic(run: Run, device: str) -> Iterator[None]:
    """How a run multiplies matrices: on a CPU in one thread, on a GPU in float32 unless it asks for TF32.

    With one thread sums are the same on any number of cores, and runs side by side do not compete.
    """
    if torch.device(device).type == "cpu":
        with one_thread():
            yield
        return
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if run.precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = run.precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions


def precision_of(run: Run, device: str, *, cached: bool = True) -> torch.autocast:
    """Autocast if the run asks for bfloat16; `cached`: may it keep the weights it has cast?"""
    kind, half = torch.device(device).type, run.precision == "bfloat16"
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=half, cache_enabled=cached)


def differentiable_twice(twice: bool) -> contextlib.AbstractContextManager[object]:
    """Attention without fused kernels, if the optimizer differentiates the gradient."""
    return sdpa_kernel(SDPBackend.MATH) if twice else contextlib.nullcontext()


def _backward(loss: Tensor, model: nn.Module, *, twice: bool) -> None:
    if not twice:
        loss.backward()
        return
    # Not backward(create_graph=True), which leaves a reference cycle that keeps memory.
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def device_name(device: str) -> str:
    """The name of a device in the ledger."""
    kind = torch.device(device).type
    return torch.cuda.get_device_name(device) if kind == "cuda" else kind


def _gradient_norm(model: nn.Module) -> Tensor:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack([grad.detach().square().sum() for grad in grads]).sum().sqrt()


@torch.no_grad()
def accuracies(
    model: nn.Module, workload: Workload, run: Run, device: str, *, after: int
) -> dict[str, float]:
    """The accuracy after some steps, in eval mode: over the held-out batches, and over the last batch."""

    def right(batch: Any) -> float:
        inputs, targets = on_device(batch, device)
        return share_right(logits(call(model, inputs)), targets).item()

    with evaluated(model), precision_of(run, device):
        return {
            ACCURACY: statistics.fmean(right(workload.draw_held_out(step)) for step in range(run.held_out)),
            TRAIN_ACCURACY: right(workload.draw(run.seed, max(after - 1, 0))),
        }
