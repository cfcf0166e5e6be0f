"""The model, the optimizer and the batches that a learning rate is sought for, from the given arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from theodolite.core.batches import Batch, Batches, device_of, on_device
from theodolite.core.building import build_model, in_one_line, untouched_randomness
from theodolite.core.calling import Loss, described, evaluate
from theodolite.core.errors import UseError
from theodolite.core.examples import each_batch
from theodolite.core.size import Size
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.step_checks import required_arguments
from theodolite.planning import Plan, plan
from theodolite.planning.factory import MakeOptimizer, check_pure, made_as_one
from theodolite.planning.own import own
from theodolite.probes.steps.update import parameter_names
from theodolite.workloads import Workload
from theodolite.workloads import workload as look_up

JUDGES = 8
"""Batches that judge a trial."""
PLAIN = "adamw", "sgd"
"""Rules that treat all tensors alike, and so need no plan."""


@dataclass(frozen=True)
class Subject:
    """One model with one optimizer and the batches of one seed."""

    model: nn.Module
    optimizer: Optimizer
    loss: Loss
    batches: Callable[[int], Batch]
    """By step."""
    judges: tuple[Batch, ...]
    base: float
    """The learning rate that those of the groups stand for."""

    def evaluate(self, batch: Batch) -> Tensor:
        """The loss on one batch."""
        return evaluate(self.loss, self.model, batch)

    def switch(self, mode: Literal["train", "eval"]) -> None:
        """Switch an optimizer that has other weights for evaluation, such as schedule-free."""
        to = getattr(self.optimizer, mode, None)
        if callable(to):
            to()

    @property
    def groups(self) -> dict[str, float]:
        """The learning rate of each group with tensors, under the name of its first tensor."""
        names = parameter_names(self.optimizer, self.model)
        found = {}
        for group in _filled(self.optimizer):
            first, *others = group["params"]
            label = f"{names[first]} and {len(others)} more" if others else names[first]
            found[label] = float(group["lr"])
        return found


def subjects(
    workload: Workload | nn.Module | str,
    loss: Loss | None,
    batches: Batches | None,
    optimizer: str | Plan | MakeOptimizer | Optimizer,
    *,
    size: Size | None,
    steps: int,
    device: str,
) -> tuple[str, str, Callable[[int], Subject]]:
    """The names of the model and of the optimizer, and a function that makes the Subject of a seed."""
    if isinstance(workload, str):
        workload = look_up(workload)
    if isinstance(workload, Workload):
        if batches is not None or loss is not None:
            raise UseError(
                f"workload {workload.name!r} has its own loss and batches: leave loss and batches out"
            )
        return _of_workload(workload, optimizer, size, device)
    if not isinstance(workload, nn.Module):
        raise UseError(
            f"workload is {described(workload)}: give a Workload, the name of one, or an nn.Module with loss "
            "and batches"
        )
    if size is not None:
        raise UseError(f"size is {size}: a module has the size it has. Leave size out, or give a Workload")
    if batches is None or loss is None:
        missing = " and ".join(
            name for name, value in (("loss", loss), ("batches", batches)) if value is None
        )
        raise UseError(
            f"{missing} missing: a module needs loss(logits, targets) and batches (a pair (inputs, targets), "
            "a list of pairs or a DataLoader)"
        )
    return _of_module(workload, loss, _read(batches, steps + JUDGES), optimizer)


def check(subject: Subject) -> None:
    """Refuse models and optimizers that no learning rate can be found for."""
    optimizer = subject.optimizer
    for name, module in subject.model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UseError(
                f"{name or 'the model'} is a DistributedDataParallel: its processes see other batches, so "
                "they would make different numbers of steps and wait for one another. Give the module inside "
                "(model.module), in one process, with an optimizer of its own or of the same tensors"
            )
    kind, needed = type(optimizer).__name__, required_arguments(optimizer)
    if needed == ["closure"]:
        raise UseError(
            f"{kind} calls the loss several times in a step and sets its own step lengths, so it has no "
            "learning rate to find. Give an optimizer whose step needs no closure"
        )
    if needed:
        raise UseError(
            f"a step of {kind} needs {' and '.join(needed)}, which is not given here. Give an optimizer "
            "whose step needs no arguments: for a SafeStep the one inside, safe.optimizer"
        )
    parameter_names(optimizer, subject.model)
    filled = _filled(optimizer)
    if not filled:
        raise UseError("the optimizer's groups hold no tensor. Make it from this model's parameters")
    if any(group.get("lr") is None for group in filled):
        raise UseError(f"{kind} has a group without a learning rate: give each group an lr to multiply")
    rates = [float(group["lr"]) for group in filled]
    if not all(map(math.isfinite, rates)) or min(rates) < 0 or max(rates) == 0:
        raise UseError(
            f"the learning rates of the optimizer's groups are {', '.join(f'{rate:g}' for rate in rates)}: "
            "their ratios are kept, so give each group a positive one"
        )


def _of_workload(
    workload: Workload, optimizer: str | Plan | MakeOptimizer | Optimizer, size: Size | None, device: str
) -> tuple[str, str, Callable[[int], Subject]]:
    if isinstance(optimizer, Optimizer):
        raise UseError(
            f"{type(optimizer).__name__} belongs to one model, but each seed of a workload builds its own. "
            "Give the name of a rule, a Plan, or make(model) -> Optimizer"
        )
    if isinstance(optimizer, Plan):
        if size is not None and size != optimizer.size:
            raise UseError(f"size is {size}, and the plan is for {optimizer.size}: leave size out")
        size = optimizer.size
    size = workload.size.network if size is None else size
    if not isinstance(size, Size):
        raise UseError(f"size is {size!r}: give a Size, as in Size(256, 4)")
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS and OPTIMIZERS[optimizer].second_order:
        raise UseError(
            f"{optimizer} differentiates gradients, which find_lr does not support. "
            f"Use th.sweep(…, optimizer={optimizer!r})"
        )
    planned, roles = optimizer, workload.roles_with(None)
    if isinstance(optimizer, str):
        inputs = _drawn(workload, 0, 0)[0]
    if optimizer == "own":
        if workload.optimizer is not None:
            check_pure(workload.optimizer, workload.build, size)
        planned = own(workload.build, inputs, workload.optimizer, size=size, lr=1.0, roles=roles)
    elif isinstance(optimizer, str):
        planned = plan(workload.build, inputs, size=size, base=size, optimizer=optimizer, lr=1.0, roles=roles)

    def make(seed: int) -> Subject:
        if isinstance(planned, Plan):
            model = planned.build(seed, device=device)
            made = planned.optimizer(model)
        else:
            model = build_model(workload.build, size, seed=seed, device=device)
            made = _made(planned, model)
        return Subject(
            model,
            made,
            workload.loss,
            lambda step: on_device(_drawn(workload, seed, step), device),
            tuple(on_device(workload.draw_held_out(step), device) for step in range(JUDGES)),
            planned.lr if isinstance(planned, Plan) else _highest(made),
        )

    return f"{workload.name}, {size}", _named(optimizer), make


def _of_module(
    model: nn.Module, loss: Loss, batches: Sequence[Batch], optimizer: str | Plan | MakeOptimizer | Optimizer
) -> tuple[str, str, Callable[[int], Subject]]:
    if not any(tensor.requires_grad for tensor in model.parameters()):
        raise UseError(
            f"no parameter of {type(model).__name__} requires a gradient. Set requires_grad on those to train"
        )
    made = _made(optimizer, model)
    device = str(device_of(model))
    # The last ones judge; they are trained on only if there are too few for both.
    num = min(JUDGES, max(1, len(batches) // 2))
    trained, judges = batches[:-num] or batches, batches[-num:]

    def make(seed: int) -> Subject:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(trained), generator=generator).tolist()
        return Subject(
            model,
            made,
            loss,
            lambda step: on_device(trained[order[step % len(order)]], device),
            tuple(on_device(batch, device) for batch in judges),
            optimizer.lr if isinstance(optimizer, Plan) else _highest(made),
        )

    return type(model).__name__, _named(optimizer), make


def _drawn(workload: Workload, seed: int, step: int) -> Batch:
    """A batch; any error in drawing it becomes a UseError."""
    try:
        return workload.draw(seed, step)
    except UseError:
        raise
    except Exception as error:
        called = f"workload {workload.name!r}: batch({seed}, {step})"
        raise UseError(f"{called} failed: {in_one_line(error)}") from error


def _made(optimizer: str | Plan | MakeOptimizer | Optimizer, model: nn.Module) -> Optimizer:
    if isinstance(optimizer, Plan):
        return optimizer.optimizer(model)
    if isinstance(optimizer, str):
        if optimizer not in PLAIN:
            raise UseError(
                f"optimizer is {optimizer!r}: for a module only {' and '.join(PLAIN)} go by name, as the "
                "roles of its tensors are not known. Give a Plan, an optimizer or make(model) -> Optimizer"
            )
        trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
        return OPTIMIZERS[optimizer].maker({})([{"params": trained, "lr": 1.0}])
    return optimizer if isinstance(optimizer, Optimizer) else made_as_one(optimizer, model)


def _highest(optimizer: Optimizer) -> float:
    return max((float(group.get("lr") or 0) for group in _filled(optimizer)), default=0.0)


def _filled(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups with tensors."""
    return [group for group in optimizer.param_groups if group["params"]]


def _named(optimizer: str | Plan | MakeOptimizer | Optimizer) -> str:
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, Plan):
        return optimizer.optimizer_name
    return type(optimizer).__name__ if isinstance(optimizer, Optimizer) else "a custom optimizer"


def _read(batches: Batches, most: int) -> tuple[Batch, ...]:
    """The first batches; the state of a loader is restored."""
    if isinstance(getattr(batches, "dataset", batches), IterableDataset):
        raise UseError(
            f"batches is {described(batches)}, and an IterableDataset may continue where it was: batches "
            f"read here would be missing later. Give its first batches: list(itertools.islice(data, {most}))"
        )
    # A seed, so that a loader that shuffles gives the same order each time.
    with untouched_randomness(0), closing(each_batch(batches)) as each:
        return tuple(itertools.islice(each, most))
