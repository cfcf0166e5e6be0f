"""The step of a borrowed optimizer: tensors by age, gradients left alone, sparse ones refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.core.exclusive import outside_autocast
from theodolite.optimizers.finite import names_of

Group = dict[str, Any]


class ByAge(Optimizer):
    """Put before an optimizer of pytorch_optimizer, among the bases of a class.

    pytorch_optimizer counts the steps of a group. A tensor whose first gradient comes at step 1000 (a block
    that was frozen, an expert that nobody asked) then gets no bias correction, and moves up to 30 times too
    far. Here each tensor has its own count, as in torch, and a step is made with those of one age as a group.
    """

    changes_gradients = False
    """Does the borrowed step write into them?"""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every tensor that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        cohorts = [pair for group in self.param_groups for pair in self._cohorts(group)]
        if not cohorts:
            return loss
        cohorts.sort(key=lambda pair: -pair[0]["age"])
        self._check(cohorts)
        whole = self.param_groups
        moving = [param for cohort, _ in cohorts for param in cohort["params"]]
        try:
            self.param_groups = [cohort for cohort, _ in cohorts]
            with outside_autocast(), _spared(moving if self.changes_gradients else []):
                _plain(super().step)()
        finally:
            self.param_groups = whole
        for cohort, _ in cohorts:
            for param in cohort["params"]:
                self.state[param]["step"] = torch.tensor(cohort["age"] + 1.0)
        for cohort, group in reversed(cohorts):  # a group goes by its oldest
            group.update({key: cohort[key] for key in group if key not in _OWN})
        return loss

    def __getstate__(self) -> dict[str, Any]:
        # torch keeps groups and state alone; options that are attributes would be lost in a copy.
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def _of_age(self, group: Mapping[str, Any], age: int) -> Group:
        """The options that differ for tensors which have made so many steps."""
        return {"step": age}

    def _check(self, cohorts: list[tuple[Group, Group]]) -> None:
        """Refuse what this optimizer cannot do."""

    def _cohorts(self, group: Group) -> list[tuple[Group, Group]]:
        """Groups of one age each, beside the one that they are from."""
        ages: dict[int, list[int]] = {}
        names = names_of(group)
        for place, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise UseError(
                    f"the gradient of {name} is sparse: {type(self).__name__} needs dense ones, so make its "
                    "layer with sparse=False"
                )
            if param.is_complex():
                raise UseError(f"{name} is complex: {type(self).__name__} trains real tensors")
            state = self.state.get(param)
            # A state of pytorch_optimizer's own has the count in its group.
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


_OWN = ("params", "param_names", "lr", "step", "eps")


def _plain(step: Any) -> Callable[[], Any]:
    """A method without what torch puts around it: hooks are called once, around ours."""
    if getattr(step, "hooked", False):  # somebody has made an optimizer of the borrowed class itself
        return functools.partial(step.__func__.__wrapped__, step.__self__)
    plain: Callable[[], Any] = step
    return plain


@contextmanager
def _spared(params: list[Tensor]) -> Iterator[None]:
    """Gradients that may be written into, for as long as it lasts."""
    grads = [param.grad for param in params]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
