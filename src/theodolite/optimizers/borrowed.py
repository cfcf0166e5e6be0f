"""Optimizers of pytorch_optimizer with their faults fixed: what is wrong in all of them.

Faults of a single optimizer are fixed in its module; docs/optimizers.md says how each one was seen.
pytorch_optimizer is optional and takes seconds to import, so classes are made when they are first needed.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.core.exclusive import outside_autocast
from theodolite.optimizers.step_checks import Group, evaluated, names_of, refuse_sparse

NEGATED = {"maximize": "pytorch_optimizer negates the gradients in place; minimise the negative instead"}
"""Why an option of all of them is refused."""
DECOUPLED = {"weight_decouple": True, "fixed_decay": False}
"""The options of those that can couple weight decay to the gradient."""


class ByAge(Optimizer):
    """A step that groups tensors by age. A base class that comes before one of pytorch_optimizer.

    pytorch_optimizer counts the steps of a group. A tensor whose first gradient comes at step 1000 (a block
    that was frozen, an expert that got no token) then gets no bias correction and moves up to 30 times too
    far. Here each tensor has its own count, as in torch, and the tensors of one age are stepped as a group.
    """

    changes_gradients = False
    """Does the step of pytorch_optimizer write into the gradients?"""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every tensor that has a gradient."""
        loss = evaluated(closure)
        cohorts = [pair for group in self.param_groups for pair in self._cohorts(group)]
        if not cohorts:
            return loss
        cohorts.sort(key=lambda pair: -pair[0]["age"])
        self._check(cohorts)
        whole = self.param_groups
        moving = [param for cohort, _ in cohorts for param in cohort["params"]]
        try:
            self.param_groups = [cohort for cohort, _ in cohorts]
            with outside_autocast(), _gradients_kept(moving if self.changes_gradients else []):
                _without_hooks(super().step)()
        finally:
            self.param_groups = whole
        for cohort, _ in cohorts:
            for param in cohort["params"]:
                self.state[param]["step"] = torch.tensor(cohort["age"] + 1.0)
        for cohort, group in reversed(cohorts):  # a group takes the options of its oldest tensors
            group.update({key: cohort[key] for key in group if key not in _PER_COHORT})
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # torch copies groups and state only, and would lose options that are attributes.
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def _of_age(self, group: Mapping[str, Any], age: int) -> Group:
        """Options that depend on how many steps a tensor has made."""
        return {"step": age}

    def _check(self, cohorts: list[tuple[Group, Group]]) -> None:
        """Raise UseError if this optimizer cannot make the step."""

    def _cohorts(self, group: Group) -> list[tuple[Group, Group]]:
        """Groups of one age each, with the group they come from."""
        refuse_sparse(type(self).__name__, [group])
        ages: dict[int, list[int]] = {}
        names = names_of(group)
        for place, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            if param.grad is None:
                continue
            if param.is_complex():
                raise UseError(f"{name} is complex: {type(self).__name__} trains real tensors")
            state = self.state.get(param)
            # A state saved by pytorch_optimizer itself has the count in its group.
            age = int(state.get("step", group.get("step", 0))) if state else 0
            ages.setdefault(age, []).append(place)
        found = []
        for age, places in ages.items():
            own = {
                "params": [group["params"][place] for place in places],
                "param_names": [names[place] for place in places],
                "age": age,
            }
            found.append(({**group, **own, **self._of_age(group, age)}, group))
        return found


class NoHiddenEps:
    """Divides by √v + eps; pytorch_optimizer divides by `√(v + 1e-15) + eps`, at least 3·10⁻⁸."""

    @staticmethod
    def apply_ams_bound(
        ams_bound: bool, exp_avg_sq: Tensor, max_exp_avg_sq: Tensor | None, eps: float
    ) -> Tensor:
        """The denominator of one tensor."""
        if ams_bound and max_exp_avg_sq is not None:
            exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        return exp_avg_sq.sqrt().add_(eps)

    @staticmethod
    def apply_ams_bound_foreach(
        ams_bound: bool, exp_avg_sqs: list[Tensor], max_exp_avg_sqs: list[Tensor], eps: float
    ) -> tuple[Tensor, ...]:
        """The denominators of several."""
        if ams_bound:
            torch._foreach_maximum_(max_exp_avg_sqs, exp_avg_sqs)
            exp_avg_sqs = max_exp_avg_sqs
        denominators = torch._foreach_sqrt(exp_avg_sqs)
        torch._foreach_add_(denominators, eps)
        return denominators


def corrected_eps(group: Mapping[str, Any], steps: int) -> float:
    """The eps to add before the bias correction of √v, so that it is `group["eps"]` after it."""
    eps: float = group["eps"] * math.sqrt(1 - group["betas"][1] ** steps)
    return eps


_BORROWED: dict[str, Borrowed] = {}
_PER_COHORT = ("params", "param_names", "lr", "step", "eps")


@dataclass(frozen=True)
class Borrowed:
    """An optimizer of pytorch_optimizer, and classes that fix it."""

    name: str
    """Of the class in pytorch_optimizer, and of ours."""
    fixes: tuple[type, ...] = (ByAge,)
    """Base classes that come before it."""

    def __post_init__(self) -> None:
        _BORROWED[self.name] = self

    def load(self, rule: str) -> type[Optimizer]:
        """The fixed class, the same one at every call."""
        try:
            source = importlib.import_module("pytorch_optimizer")
        except ModuleNotFoundError as error:
            if error.name != "pytorch_optimizer":
                raise
            raise UseError(
                f"{rule} comes from pytorch_optimizer, which is not installed: "
                "pip install 'theodolite[optim]'"
            ) from None
        return _fixed(getattr(source, self.name), self.fixes)


@functools.cache
def _fixed(original: type[Optimizer], fixes: tuple[type, ...]) -> type[Optimizer]:
    return type(original.__name__, (*fixes, original), {"__module__": __name__, "__doc__": fixes[0].__doc__})


def __getattr__(name: str) -> Any:
    """The fixed classes by name, which is how pickle finds them."""
    if name not in _BORROWED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _BORROWED[name].load(name)


def _without_hooks(step: Any) -> Callable[[], Any]:
    """A step without the hooks that torch puts around it: they are called once, around ours."""
    if getattr(step, "hooked", False):  # somebody has made an optimizer of the original class
        return functools.partial(step.__func__.__wrapped__, step.__self__)
    plain: Callable[[], Any] = step
    return plain


@contextmanager
def _gradients_kept(params: list[Tensor]) -> Iterator[None]:
    """Give parameters copies of their gradients, and put the originals back."""
    grads = [param.grad for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
