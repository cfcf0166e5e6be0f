"""One run, step by step: what every engine has to agree with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from theodolite.anatomy import Anatomy, dissect
from theodolite.core.batches import Batch, on_device
from theodolite.core.building import untouched_randomness
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size
from theodolite.fleet.accuracy import accuracies
from theodolite.fleet.checkpoint import RunCheckpoint
from theodolite.fleet.isolation import Own, isolated
from theodolite.fleet.outcome import Outcome
from theodolite.fleet.run import Run
from theodolite.optimizers import OPTIMIZERS, Planned
from theodolite.optimizers.schedule import LRFactor
from theodolite.planning import Plan
from theodolite.planning.parameterization import plan_for
from theodolite.planning.rows import PlanRow
from theodolite.probes.scaling.first_steps import activation_sizes
from theodolite.workloads import Workload
from theodolite.workloads import workload as look_up
from theodolite.workloads.lookup import put_neighbours_first

LOOK_EVERY = 25
"""Steps between looks at the losses where looking means waiting for the device."""

TARGETS = "targets"
"""How many targets each step had, beside its loss."""

Workloads = Mapping[str, Workload]
"""By name, those that cannot be looked up because they were handed over as objects."""


@exclusive()
def train(
    run: Run,
    workload: Workload,
    *,
    device: str = "cpu",
    checkpoint: RunCheckpoint | None = None,
    plan: Plan | None = None,
) -> Outcome:
    """Make the run, one step after the other. A loss that is not finite ends it: it has diverged.

    The network is `plan.build(seed)`, the batches are `workload.batch(seed, step)`. No random number of the
    caller's is spent. With a checkpoint the run goes on from where that was left, and ends with the same
    numbers as if it had never been stopped. The run's plan may be handed over by who has it already.
    """
    start = time.perf_counter()
    plan = planned(run, workload) if plan is None else plan
    with untouched_randomness(run.seed), arithmetic(run, device):
        model = plan.build(run.seed, device=device).train()
        optimizer = plan.optimizer(model, check_gradients=False)  # a divergence is a result
        factor = LRFactor(run.schedule, run.steps, run.warmup, run.final)
        rates = [group["lr"] for group in optimizer.param_groups]
        log = Log(run, device)
        if checkpoint is not None:
            log.values = checkpoint.restore(model, optimizer)
        for step in range(log.steps, run.steps):
            batch = on_device(workload.draw(run.seed, step), device)
            optimizer.zero_grad()
            with precision_of(run, device), differentiable_twice(run):
                loss = workload.evaluate(model, batch, temperature=run.temperature)
                _go_back(run, loss, model)
            log.add(loss, model, targets_in(batch))
            if log.diverged_at is not None:
                break
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor(step)
            optimizer.step()
            if checkpoint is not None and log.complete:
                checkpoint.keep(model, optimizer, log.values)
        if isinstance(optimizer, Planned):
            optimizer.eval()
        outcome = log.outcome(model, workload)
    return dataclasses.replace(outcome, seconds=time.perf_counter() - start)


def attempt(
    run: Run,
    workloads: Workloads,
    *,
    device: str = "cpu",
    engine: str = "serial",
    checkpoint: RunCheckpoint | None = None,
    settings: Own | None = None,
) -> Outcome:
    """`train`, with any exception as a failed outcome. The engine's name is put on it.

    It begins with standard settings and leaves none behind, see `isolated`. If they are given, `settings` are
    those of the workload's file, else that is asked for them.
    """
    start = time.perf_counter()
    try:
        with conditions(run, workloads) if settings is None else isolated(settings):
            outcome = train(run, workload_of(run.workload, workloads), device=device, checkpoint=checkpoint)
    except (Exception, SystemExit):  # a workload that exits ends its run, not the others
        return failed(run, traceback.format_exc(), time.perf_counter() - start, device, engine)
    return dataclasses.replace(outcome, engine=engine)


def failed(run: Run, error: str, seconds: float, device: str, engine: str) -> Outcome:
    """The outcome of a run that could not be made."""
    return Outcome(run, "failed", 0, None, seconds=seconds, device=device, engine=engine, error=error)


def workload_of(name: str, workloads: Workloads) -> Workload:
    """The workload of a name: handed over, or looked up, once in a process."""
    return workloads[name] if name in workloads else _looked_up(name)[0]


@contextlib.contextmanager
def conditions(run: Run, workloads: Workloads) -> Iterator[None]:
    """Under which the code of a workload is called: standard settings, and those that its file has made."""
    if run.workload in workloads:
        with isolated():
            yield
    else:
        with isolated(settings_of(run.workload)):
            put_neighbours_first(run.workload)
            yield


def settings_of(workload: str) -> Own:
    """Those that the file of a workload makes when it is imported, such as another default dtype."""
    return _looked_up(workload)[1]


def check_plans(runs: Sequence[Run], workload: Workload) -> None:
    """Plan each size with each optimizer and parameterization, and check schedules and options.

    No network is built for it. Plans are kept: the runs themselves need not make them again.
    """
    for timing in dict.fromkeys((run.schedule, run.steps, run.warmup, run.final) for run in runs):
        LRFactor(*timing)
    for run in {(run.size, run.optimizer, run.parameterization): run for run in runs}.values():
        plan = planned(run, workload)
        for rule in {row.rule for row in plan.trained}:
            OPTIMIZERS[rule].maker(plan.options if rule == plan.optimizer_name else plan.vector_options)


def planned(run: Run, workload: Workload) -> Plan:
    """The plan of a run: of the standard parameterization, the network as it is; one for all seeds."""
    return _planned(dataclasses.replace(run, seed=0, steps=1, warmup=0, every=1), workload)


@functools.lru_cache(maxsize=4096)
def _planned(run: Run, workload: Workload) -> Plan:
    sizes = [run.size, run.base or run.size]
    matrix = OPTIMIZERS[run.optimizer].matrices_only
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
        anatomies={size: anatomy_of(workload, size) for size in sizes},
        **({"vector_lr": run.vector_lr, "vector_options": _tuples(run.vector_options)} if matrix else {}),
    )
    if run.init_scale == 1:
        return plan
    rows = {
        name: dataclasses.replace(row, init=row.init.scaled(run.init_scale)) if _is_drawn(row) else row
        for name, row in plan.rows.items()
    }
    return dataclasses.replace(plan, rows=rows)


def _is_drawn(row: PlanRow) -> bool:
    """Does a tensor start at random? A gain does not, and of a bias with a law of its own it is not known."""
    if not row.trained:
        return False
    if row.role == "bias":
        return row.init.kind not in ("constant", "own")
    return row.role != "gain" and row.init.kind != "constant"


@functools.lru_cache(maxsize=256)
def anatomy_of(workload: Workload, size: Size) -> Anatomy:
    """What is in the network of a size; found once in a process."""
    return dissect(workload.build, _first_inputs(workload), size=size)


@functools.lru_cache(maxsize=64)
def _looked_up(name: str) -> tuple[Workload, Own]:
    with isolated() as settings:
        workload = look_up(name)
    return workload, settings


@functools.lru_cache(maxsize=16)
def _first_inputs(workload: Workload) -> Any:
    return workload.draw(0, 0)[0]


class Log:
    """The losses of a run as they come, and where they stopped being finite."""

    def __init__(self, run: Run, device: str) -> None:
        self.run, self.device = run, device
        self.values: dict[str, list[float]] = {}
        """By name, a value for every step. What a checkpoint keeps."""
        self._waiting: dict[str, list[Tensor]] = {}
        self._looked = 0
        self._look_every = 1 if torch.device(device).type == "cpu" else LOOK_EVERY

    @property
    def steps(self) -> int:
        """How many losses are known."""
        return len(self.values.get("loss", ()))

    @property
    def complete(self) -> bool:
        """Is the loss of every step so far among them?"""
        return not self._waiting

    @property
    def diverged_at(self) -> int | None:
        """The first step whose loss is not finite, among those that are known."""
        losses = self.values.get("loss", [])
        for step in range(self._looked, len(losses)):  # each loss is looked at once
            if not math.isfinite(losses[step]):
                return step
            self._looked = step + 1
        return None

    def add(self, loss: Tensor, model: nn.Module, targets: int) -> None:
        """Note the loss of a step, how many targets it is of, and what its probes say."""
        waiting = self._waiting
        waiting.setdefault("loss", []).append(loss.detach())
        waiting.setdefault(TARGETS, []).append(torch.tensor(targets))
        if "gradient" in self.run.probes:
            waiting.setdefault("gradient", []).append(_gradient_norm(model))
        made = self.steps + len(waiting["loss"])
        if len(waiting["loss"]) >= self._look_every or made == self.run.steps:
            for name, tensors in waiting.items():
                self.values.setdefault(name, []).extend(torch.stack(tensors).double().tolist())
            waiting.clear()

    def outcome(self, model: nn.Module, workload: Workload) -> Outcome:
        """What came of it. The network is judged, unless it diverged."""
        held_out = None if self.diverged_at is not None else judged(model, workload, self.run, self.device)
        readings = readings_of(model, workload, self.run)
        outcome = outcome_of(self.run, self.values, held_out, self.device, readings)
        if outcome.status == "finished" and "accuracy" in self.run.probes:
            with precision_of(self.run, self.device):
                outcome = with_readings(outcome, accuracies(model, workload, self.run, self.device))
        return outcome


def outcome_of(
    run: Run, values: Mapping[str, list[float]], held_out: float | None, device: str, readings: dict[str, Any]
) -> Outcome:
    """An outcome from the values of every step: those of recorded steps are kept, up to a divergence."""
    losses = values["loss"]
    diverged_at = next((step for step, loss in enumerate(losses) if not math.isfinite(loss)), None)
    if diverged_at is None and held_out is not None and not math.isfinite(held_out):
        diverged_at = len(losses)
    stop = len(losses) if diverged_at is None else diverged_at
    kept = [step for step in range(stop) if step % run.every == 0 or step == run.steps - 1]
    return Outcome(
        run=run,
        status="finished" if diverged_at is None else "diverged",
        step=stop,
        held_out=held_out if diverged_at is None else None,
        metrics={
            name: tuple((step, series[step]) for step in kept)
            for name, series in values.items()
            if name != TARGETS
        },
        readings={**readings, "tokens": round(sum(values[TARGETS][:stop]))},
        device=device_name(device),
    )


def with_readings(outcome: Outcome, readings: Mapping[str, Any]) -> Outcome:
    """The outcome with more that was measured."""
    return dataclasses.replace(outcome, readings={**outcome.readings, **readings})


@torch.no_grad()
def judged(model: nn.Module, workload: Workload, run: Run, device: str) -> float:
    """The mean loss over the held-out batches."""
    was_training = model.training
    model.eval()
    losses = []
    for step in range(run.held_out):
        batch = on_device(workload.draw_held_out(step), device)
        with precision_of(run, device):
            losses.append(workload.evaluate(model, batch, temperature=run.temperature))
    model.train(was_training)
    return statistics.fmean(torch.stack(losses).double().tolist())


def readings_of(model: nn.Module, workload: Workload, run: Run) -> dict[str, Any]:
    """What is measured once: how many parameters there are, and what probes find."""
    device = str(next(model.parameters()).device)
    readings: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    if "sizes" in run.probes:
        readings["sizes"] = activation_sizes(model, on_device(workload.draw_held_out(0), device)[0])
    return readings


def targets_in(batch: Batch) -> int:
    """How many targets a batch has, by their first tensor: tokens of a text, images with a label.

    Tensors that follow, such as masks or weights of the targets, do not count.
    """
    return next((leaf.numel() for leaf in tree_leaves(batch[1]) if isinstance(leaf, Tensor)), 0)


@contextlib.contextmanager
def arithmetic(run: Run, device: str) -> Iterator[None]:
    """How a whole run multiplies matrices, backward too.

    On the CPU in one thread: sums come out the same whatever the number of cores, and runs side by side do
    not fight. On a GPU in float32 unless the run asks for TF32.
    """
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.set_float32_matmul_precision("high" if run.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = run.precision == "tf32"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if torch.device(device).type != "cpu":
            torch.set_float32_matmul_precision(precision)
            torch.backends.cudnn.allow_tf32 = convolutions


def precision_of(run: Run, device: str, *, cached: bool = True) -> torch.autocast:
    """Autocast where the run asks for bfloat16. It may keep the weights it has cast, if `cached`."""
    kind, half = torch.device(device).type, run.precision == "bfloat16"
    return torch.autocast(kind, dtype=torch.bfloat16, enabled=half, cache_enabled=cached)


def differentiable_twice(run: Run) -> contextlib.AbstractContextManager[object]:
    """Attention without fused kernels for optimizers that differentiate the gradient."""
    twice = OPTIMIZERS[run.optimizer].second_order
    return sdpa_kernel(SDPBackend.MATH) if twice else contextlib.nullcontext()


def _go_back(run: Run, loss: Tensor, model: nn.Module) -> None:
    if not OPTIMIZERS[run.optimizer].second_order:
        loss.backward()
        return
    # Not backward(create_graph=True), which leaves a cycle behind that holds on to memory.
    parameters = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def device_name(device: str) -> str:
    """What the ledger calls a device."""
    kind = torch.device(device).type
    return torch.cuda.get_device_name(device) if kind == "cuda" else kind


def _gradient_norm(model: nn.Module) -> Tensor:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.stack([grad.detach().square().sum() for grad in grads]).sum().sqrt()


def _tuples(options: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has lists where optimizers want tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
