"""What a learning rate is sought for: a model, its optimizer and its batches, from whatever was given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.batches import Batch, on_device
from theodolite.core.building import build_model, in_one_line
from theodolite.core.calling import Loss, described, evaluate
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.lr_finder.data import read
from theodolite.optimizers import OPTIMIZERS
from theodolite.planning import Plan, plan
from theodolite.workloads import Workload
from theodolite.workloads import workload as look_up

Make = Callable[[nn.Module], Optimizer]
JUDGES = 8
"""Batches that a leg is judged by."""
PLAIN = "adamw", "sgd"
"""Rules that train every tensor alike, and so need no plan."""


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
    """The learning rate that the groups' own stand for."""

    def evaluate(self, batch: Batch) -> Tensor:
        """The loss on one batch."""
        return evaluate(self.loss, self.model, batch)

    def switch(self, mode: Literal["train", "eval"]) -> None:
        """For optimizers that train one set of weights and evaluate another, as schedule-free does."""
        to = getattr(self.optimizer, mode, None)
        if callable(to):
            to()

    @property
    def groups(self) -> dict[str, float]:
        """The learning rate of each group that holds any, under the name of its first tensor."""
        names = {id(tensor): name for name, tensor in canonical_parameters(self.model)}
        found = {}
        for group in _filled(self.optimizer):
            first, *others = (names.get(id(tensor), "?") for tensor in group["params"])
            label = f"{first} and {len(others)} more" if others else first
            found[label] = float(group["lr"])
        return found


@dataclass(frozen=True)
class Subjects:
    """What makes the Subject of a seed."""

    name: str
    optimizer: str
    make: Callable[[int], Subject]


def subjects(
    what: Workload | nn.Module | str,
    optimizer: str | Plan | Make | Optimizer,
    data: object,
    loss: Loss | None,
    *,
    size: Size | None,
    steps: int,
    device: str,
) -> Subjects:
    """What is meant by what was given, or an error of use that says what is missing."""
    if isinstance(what, str):
        what = look_up(what)
    if isinstance(what, Workload):
        if data is not None or loss is not None:
            raise UseError(f"workload {what.name!r} has its own data and loss: leave data and loss out")
        return _of_workload(what, optimizer, size, device)
    if not isinstance(what, nn.Module):
        raise UseError(
            f"a learning rate is found for a Workload, the name of one, or an nn.Module, not for "
            f"{described(what)}"
        )
    if size is not None:
        raise UseError(f"size is {size}: a module has the size it has. Leave size out, or give a Workload")
    if data is None or loss is None:
        missing = " and ".join(name for name, value in (("data", data), ("loss", loss)) if value is None)
        raise UseError(
            f"{missing} missing: a module needs data (a pair (inputs, targets), a list of pairs or a "
            "DataLoader) and loss(logits, targets)"
        )
    return _of_module(what, optimizer, read(data, steps + JUDGES), loss)


def check(subject: Subject) -> None:
    """Refuse what no learning rate can be found for."""
    optimizer = subject.optimizer
    _refuse_replicas(subject.model)
    _refuse_needy(optimizer)
    own = {id(tensor) for tensor in subject.model.parameters()}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in own:
                raise UseError(
                    f"the optimizer trains a tensor of shape {tuple(tensor.shape)} that the model does not "
                    "have. Make it from this model's parameters"
                )
    rates = [float(group["lr"]) for group in _filled(optimizer)]
    if not rates:
        raise UseError("the optimizer's groups hold no tensor. Make it from this model's parameters")
    if not all(map(math.isfinite, rates)) or min(rates) < 0 or max(rates) == 0:
        raise UseError(
            f"the learning rates of the optimizer's groups are {', '.join(f'{rate:g}' for rate in rates)}: "
            "their ratios are kept, so give each group a positive one"
        )


def _refuse_replicas(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise UseError(
                f"{name or 'the model'} is a DistributedDataParallel, and its processes, which see other "
                "batches, would each make another number of steps and wait for one another. Give the module "
                "inside (model.module), in one process, with an optimizer of its own or of the same tensors"
            )


def _refuse_needy(optimizer: Optimizer) -> None:
    """Refuse a step that cannot be made without arguments."""
    # Of the class: schedulers put a counter around that of the object.
    _, *taken = inspect.signature(type(optimizer).step).parameters.values()
    needed = [
        each.name
        for each in taken
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    kind = type(optimizer).__name__
    if needed == ["closure"]:
        raise UseError(
            f"{kind} calls the loss several times in a step and sets its own step lengths, so that no "
            "learning rate is to be found. Give an optimizer whose step needs no closure"
        )
    if needed:
        raise UseError(
            f"a step of {kind} needs {' and '.join(needed)}, which is not given here. Give an optimizer "
            "whose step needs nothing: of a SafeStep the one inside, safe.optimizer"
        )


def _of_workload(
    workload: Workload, optimizer: str | Plan | Make | Optimizer, size: Size | None, device: str
) -> Subjects:
    if isinstance(optimizer, Optimizer):
        raise UseError(
            f"{type(optimizer).__name__} is made for a model, but each seed of a workload builds its own. "
            "Give the name of a rule, a Plan, or make(model) -> Optimizer"
        )
    if isinstance(optimizer, Plan):
        if size is not None and size != optimizer.size:
            raise UseError(f"size is {size}, and the plan is for {optimizer.size}: leave size out")
        size = optimizer.size
    size = workload.size if size is None else size
    if not isinstance(size, Size):
        raise UseError(f"size is {size!r}: give a Size, as in Size(256, 4)")
    if isinstance(optimizer, str) and optimizer in OPTIMIZERS and OPTIMIZERS[optimizer].second_order:
        raise UseError(
            f"{optimizer} differentiates gradients, which find_lr does not support. "
            f"Use th.sweep(…, optimizer={optimizer!r})"
        )
    planned = optimizer
    if isinstance(optimizer, str):
        inputs = _drawn(workload, 0, 0)[0]
        planned = plan(workload.build, inputs, size=size, base=size, optimizer=optimizer, lr=1.0)

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

    return Subjects(f"{workload.name}, {size}", _named(optimizer), make)


def _of_module(
    model: nn.Module, optimizer: str | Plan | Make | Optimizer, batches: Sequence[Batch], loss: Loss
) -> Subjects:
    if not any(tensor.requires_grad for tensor in model.parameters()):
        raise UseError(
            f"no parameter of {type(model).__name__} requires a gradient. Set it on what is trained"
        )
    made = _made(optimizer, model)
    device = str(next(model.parameters()).device)
    # The last ones judge, and are trained on only where there are too few for both.
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

    return Subjects(type(model).__name__, _named(optimizer), make)


def _drawn(workload: Workload, seed: int, step: int) -> Batch:
    """A batch; whatever goes wrong with it is an error of use."""
    try:
        return workload.draw(seed, step)
    except UseError:
        raise
    except Exception as error:
        called = f"workload {workload.name!r}: batch({seed}, {step})"
        raise UseError(f"{called} failed: {in_one_line(error)}") from error


def _made(optimizer: str | Plan | Make | Optimizer, model: nn.Module) -> Optimizer:
    if isinstance(optimizer, Plan):
        return optimizer.optimizer(model)
    if isinstance(optimizer, str):
        if optimizer not in PLAIN:
            raise UseError(
                f"optimizer is {optimizer!r}: of a module's tensors nothing is known, so only "
                f"{' and '.join(PLAIN)} go by name. Give a Plan, an optimizer or make(model) -> Optimizer"
            )
        trained = [tensor for tensor in model.parameters() if tensor.requires_grad]
        return OPTIMIZERS[optimizer].maker({})([{"params": trained, "lr": 1.0}])
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model)
    if not isinstance(made, Optimizer):
        raise UseError(f"make(model) returned {described(made)}, not a torch.optim.Optimizer")
    return made


def _highest(optimizer: Optimizer) -> float:
    return max((float(group["lr"]) for group in _filled(optimizer)), default=0.0)


def _filled(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups that hold a tensor."""
    return [group for group in optimizer.param_groups if group["params"]]


def _named(optimizer: str | Plan | Make | Optimizer) -> str:
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, Plan):
        return optimizer.optimizer_name
    return type(optimizer).__name__ if isinstance(optimizer, Optimizer) else "an optimizer of its own"
