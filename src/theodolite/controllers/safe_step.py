"""An optimizer whose steps are shortened if they leave the radius of convergence of the loss."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.arguments import positive, whole
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss, described
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import together
from theodolite.optimizers import OPTIMIZERS, Planned
from theodolite.optimizers.step_checks import check_step
from theodolite.present.result import Block, Result
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.steps.direction import norm
from theodolite.probes.steps.radius import RowBounds, least_of_all
from theodolite.probes.steps.update import Closure, Snapshot, parameter_names, take

_KEY = "safe_step"


@dataclass(frozen=True)
class SafeStepReport(Result):
    """What a `SafeStep` has done so far."""

    kind: ClassVar[str] = "safe-step report"
    loads: ClassVar[bool] = True
    steps: int = 0
    measured: int = 0
    """Steps whose radius was measured."""
    acted: int = 0
    """Steps that were shortened."""
    largest_before: float = 0.0
    """The largest r of the measured steps of the optimizer."""
    largest_after: float = 0.0
    """The largest r of the measured steps as they were made."""

    @property
    def share(self) -> float:
        """The fraction of steps that were shortened."""
        return self.acted / max(1, self.steps)

    def blocks(self) -> Iterator[Block]:
        """One sentence."""
        yield (
            f"{self.acted} of {self.steps} steps were shortened ({self.share:.1%}); r was at most "
            f"{self.largest_before:.3g} before and {self.largest_after:.3g} after; {self.measured} measured"
        )


class SafeStep(Optimizer):
    """Any torch optimizer, with the length of its steps limited to `limit·ρ_a`.

    The optimizer makes its step and updates its state. With Δ its update, including weight decay, and ρ_a the
    ghost radius along it (see `th.probes.radius`), the weights become

        θ ← θ + s Δ,    s = min(1, limit·ρ_a/‖Δ‖)

    With s = 1 they are the plain optimizer's, bit by bit. r = ‖Δ‖/ρ_a comes from a Taylor series: a step
    within the radius is cautious, but need not lower the loss.

    Args:
        optimizer: any torch optimizer of parameters of the model, except those with other weights for
            evaluation (schedule-free), which would not be shortened.
        model: what is trained; wrapped or not.
        loss: `loss(logits, targets) -> scalar`, a cross-entropy of the softmax of the logits.
        limit: of r.
        every: measure the radius every so many steps. In between, a step within the limit by the last radius
            is made, and any other is measured: no step is shortened by an old radius.

    A measured step costs one additional pass in forward mode. A step needs memory for up to four more copies
    of the weights, one of the gradients and one of the optimizer's state: after an error all of them are
    restored. The pass runs in the weights' own precision, also inside autocast, with one fixed dropout mask.
    Under DDP the smallest radius of all ranks counts, and an error on one rank is raised on all.

    A scheduler may hold this object or the optimizer inside. With a GradScaler: `scaler.step(safe, batch)`.

    >>> torch.manual_seed(0)
    <torch._C.Generator object at ...>
    >>> layer, batch = nn.Linear(4, 3), (torch.randn(8, 4), torch.arange(8) % 3)
    >>> safe = SafeStep(torch.optim.SGD(layer.parameters(), lr=1e4), layer, nn.functional.cross_entropy)
    >>> nn.functional.cross_entropy(layer(batch[0]), batch[1]).backward()
    >>> safe.step(batch)
    >>> print(safe.report)
    1 of 1 steps were shortened (100.0%); r was at most ... before and 1 after; 1 measured
    """

    def __init__(
        self, optimizer: Optimizer, model: nn.Module, loss: Loss, *, limit: float = 1.0, every: int = 1
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise UseError(f"optimizer is {described(optimizer)}, not a torch.optim.Optimizer")
        _refuse_averages(optimizer)
        positive("limit", limit)
        whole("every", every, least=1)
        self.optimizer = optimizer
        """The wrapped optimizer."""
        self.limit, self.every = float(limit), every
        self.report = SafeStepReport()
        self._model, self._names = model, parameter_names(optimizer, model)
        self._bounds = RowBounds(loss)
        self._radius, self._age = math.inf, every
        # What torch's own __init__ sets; groups and state are those of the optimizer inside.
        for kind in ("step", "state_dict", "load_state_dict"):
            for place in ("pre", "post"):
                setattr(self, f"_optimizer_{kind}_{place}_hooks", OrderedDict())
        self._patch_step_function()
        self.register_step_pre_hook(_require_batch)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the optimizer inside."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the optimizer inside."""
        return self.optimizer.defaults

    @exclusive()
    def step(self, batch: Batches, closure: Closure | None = None) -> Any:  # type: ignore[override]
        """One step of the optimizer, not longer than the limit allows on this batch.

        Args:
            batch: the batch of the gradients: a pair (inputs, targets), or a list of pairs if gradients were
                accumulated. The worst row of all counts.
            closure: for optimizers that compute gradients themselves.

        Gradients that are not finite are refused. After any error the weights and the state are restored.
        """
        objective = together(self._model, lambda: self._checked(batch, closure))
        # Only a closure may change buffers of the model, by its forward passes.
        before = Snapshot(self.optimizer, None if closure is None else self._model)
        try:
            return self._stepped(objective, before, closure)
        except BaseException:
            before.restore()
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the optimizer inside."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the optimizer inside."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside, and under `safe_step` the report and the last radius."""
        own = {**asdict(self.report), "radius": self._radius, "age": self._age}
        return {**self.optimizer.state_dict(), _KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, also one of the optimizer inside alone."""
        own = dict(state_dict.get(_KEY) or {})
        self.optimizer.load_state_dict({key: value for key, value in state_dict.items() if key != _KEY})
        self.report, self._radius, self._age = SafeStepReport(), math.inf, self.every
        if own:
            self._radius, self._age = own.pop("radius"), own.pop("age")
            self.report = SafeStepReport(**own)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "step"}

    def __repr__(self) -> str:
        return f"SafeStep({type(self.optimizer).__name__}, limit={self.limit:g}, every={self.every})"

    def _checked(self, batch: Batches, closure: Closure | None) -> Objective:
        """The objective to measure, after all checks that are possible before a step."""
        self._names = parameter_names(self.optimizer, self._model)  # groups may have been added inside
        _refuse_mixtures(self._names)
        trained = {id(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
        own = {id(parameter) for parameter in self._names}
        names = None if own == trained else list(self._names.values())
        objective = Objective(self._model, self._bounds.loss, batch, parameters=names)
        self._bounds.check(objective)
        if closure is None:
            check_step([{"params": list(self._names), "param_names": list(self._names.values())}], {})
        return objective

    @torch.no_grad()
    def _stepped(self, objective: Objective, before: Snapshot, closure: Closure | None) -> Any:
        tried = together(self._model, lambda: self._tried(objective, before, closure))
        if tried.radius is not None:
            self._radius, self._age = least_of_all(objective, tried.radius), 0
        self._age += 1
        share = min(1.0, self.limit * self._radius / tried.length) if tried.length > 0 else 1.0
        for parameter, name in self._names.items():
            if share < 1:
                parameter.add_(tried.update[name], alpha=share)
            else:
                parameter.copy_(tried.ends[parameter])
        measured = tried.radius is not None
        r = tried.length / self._radius if measured else 0.0
        self.report = replace(
            self.report,
            steps=self.report.steps + 1,
            measured=self.report.measured + measured,
            acted=self.report.acted + (share < 1),
            largest_before=max(self.report.largest_before, r),
            largest_after=max(self.report.largest_after, r * share),
        )
        return tried.returned

    def _tried(self, objective: Objective, before: Snapshot, closure: Closure | None) -> _Tried:
        """The optimizer's own step, measured if it is due; the weights are put back."""
        with torch.enable_grad():
            returned = take(self.optimizer, self.optimizer.step, closure)
        ends = {parameter: parameter.detach().clone() for parameter in self._names}
        for parameter in self._names:
            parameter.copy_(before.copies[parameter])
        update = {name: ends[one] - before.copies[one] for one, name in self._names.items()}
        length = norm(update)
        if not math.isfinite(length):
            odd = next(name for name, tensor in update.items() if not bool(tensor.isfinite().all()))
            raise UseError(
                f"the step of {type(self.optimizer).__name__} is not finite in {odd}, so it was not made. "
                "Check the learning rate and the optimizer's state for very large numbers"
            )
        radius = None
        if length > 0 and (self._age >= self.every or length > self.limit * self._radius):
            unit = {name: (tensor.double() / length).to(tensor.dtype) for name, tensor in update.items()}
            radius = self._bounds.least(objective, unit)
        return _Tried(returned, ends, update, length, radius)


@dataclass(frozen=True)
class _Tried:
    """The step of the optimizer, before it is shortened."""

    returned: Any
    ends: dict[Tensor, Tensor]
    """The parameters after it."""
    update: dict[str, Tensor]
    length: float
    radius: float | None
    """Along it, on this rank; None if the last one is used."""


def _require_batch(safe: Optimizer, given: tuple[Any, ...], named: dict[str, Any]) -> None:
    """A hook before each step: a default for the batch would make it look optional to schedulers."""
    if len(given) < 2 and "batch" not in named:
        raise UseError(
            "SafeStep's step has no batch to measure the radius on. Give the batch of the gradients: "
            "safe.step((inputs, targets)), or scaler.step(safe, (inputs, targets))"
        )


def _refuse_averages(optimizer: Optimizer) -> None:
    """Refuse optimizers that keep averaged weights for evaluation."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, Planned):
        rules = {group["rule"] for group in optimizer.param_groups}
        kind = next((rule for rule in rules & OPTIMIZERS.keys() if OPTIMIZERS[rule].averages), "")
        averages = bool(kind)
    else:
        averages = all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
    if averages:
        raise UseError(
            f"{kind} keeps weights for evaluation in its state, which would not be shortened with the step. "
            "Give another optimizer"
        )


def _refuse_mixtures(names: dict[Tensor, str]) -> None:
    kinds = {name: f"{tensor.dtype} on {tensor.device}" for tensor, name in names.items()}
    first = next(iter(kinds), "")
    for name, kind in kinds.items():
        if kind != kinds[first]:
            raise UseError(
                f"{first} is {kinds[first]} and {name} {kind}: SafeStep measures in one dtype on one device. "
                "Keep all trained weights in one, and compute in another under torch.autocast"
            )
