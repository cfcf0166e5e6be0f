"""What a learning rate is sought for: a model, its optimizer and its batches, from whatever was given."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from theodolite.anatomy.names import canonical_parameters
from theodolite.building import build_model, in_one_line
from theodolite.calling import call, described, logits
from theodolite.errors import UseError
from theodolite.optim.choosing import maker
from theodolite.planning import Plan, plan
from theodolite.probes.course import on_device
from theodolite.size import Size
from theodolite.stepping.keeping import kept_data
from theodolite.workloads import Batch, Workload
from theodolite.workloads import workload as look_up

Make = Callable[[nn.Module], Optimizer]
Loss = Callable[[Tensor, Any], Tensor]
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
        return self.loss(logits(call(self.model, batch[0])), batch[1])

    @property
    def groups(self) -> dict[str, float]:
        """The learning rate of each group, under the name of its first tensor."""
        names = {id(tensor): name for name, tensor in canonical_parameters(self.model)}
        found = {}
        for group in self.optimizer.param_groups:
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
    return _of_module(what, optimizer, _read(data, steps + JUDGES), loss)


def check(subject: Subject) -> None:
    """Refuse what no learning rate can be found for."""
    optimizer = subject.optimizer
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UseError(
            f"{type(optimizer).__name__} calls the loss several times in a step and sets its own step "
            "lengths, so that no learning rate is to be found. Give an optimizer whose step needs no closure"
        )
    own = {id(tensor) for tensor in subject.model.parameters()}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in own:
                raise UseError(
                    f"the optimizer trains a tensor of shape {tuple(tensor.shape)} that the model does not "
                    "have. Make it from this model's parameters"
                )
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if not all(map(math.isfinite, rates)) or min(rates) < 0 or max(rates) == 0:
        raise UseError(
            f"the learning rates of the optimizer's groups are {', '.join(f'{rate:g}' for rate in rates)}: "
            "their ratios are kept, so give each group a positive one"
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
    if optimizer == "sophia":
        raise UseError(
            "sophia differentiates gradients, which is not done here. Use th.sweep(…, optimizer='sophia')"
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
        return maker(optimizer, {})([{"params": trained, "lr": 1.0}])
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model)
    if not isinstance(made, Optimizer):
        raise UseError(f"make(model) returned {described(made)}, not a torch.optim.Optimizer")
    return made


def _highest(optimizer: Optimizer) -> float:
    return max(float(group["lr"]) for group in optimizer.param_groups)


def _named(optimizer: str | Plan | Make | Optimizer) -> str:
    if isinstance(optimizer, str):
        return optimizer
    if isinstance(optimizer, Plan):
        return optimizer.optimizer_name
    return type(optimizer).__name__ if isinstance(optimizer, Optimizer) else "an optimizer of its own"


def _read(data: object, most: int) -> tuple[Batch, ...]:
    """The first batches. What gives them is left as it was."""
    if isinstance(data, tuple):
        return (_pair(data, "data"),)
    if isinstance(data, Iterator):
        raise UseError(
            f"data is {described(data)}, which reading would use up. Give a pair, a list of pairs or a "
            "DataLoader"
        )
    if not isinstance(data, Iterable) or isinstance(data, Tensor | str | dict):
        raise UseError(
            f"data is {described(data)}: give a pair (inputs, targets), a list of pairs or a DataLoader"
        )
    with kept_data(data):
        torch.manual_seed(0)  # the order of a loader that shuffles is the same each time
        read = list(itertools.islice(data, most))
    if not read:
        raise UseError("data is empty: give at least one batch, a pair (inputs, targets)")
    return tuple(_pair(batch, f"batch {index} of data") for index, batch in enumerate(read))


def _pair(batch: Any, what: str) -> Batch:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UseError(f"{what} is {described(batch)}, not a pair (inputs, targets)")
    tensors = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.numel() == 0 for tensor in tensors):
        raise UseError(f"{what} is empty: its inputs are {described(batch[0])}. Give at least one example")
    return batch[0], batch[1]
