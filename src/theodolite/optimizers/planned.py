"""The optimizer of a plan: one object for several rules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.optimizers.saved_state import restored, shapes_of
from theodolite.optimizers.spec import Make, find_optimizers
from theodolite.optimizers.step_checks import check_step, evaluated


class BrokenRatiosWarning(UserWarning):
    """The learning rates of a plan were changed by different factors (TH205)."""


class Planned(Optimizer):
    """One torch optimizer whose groups are trained by several optimizers. Made by `plan.optimizer(model)`.

    The `rule` of a group names its optimizer. All optimizers share the groups and the state of this object,
    which schedulers, scalers and checkpoints see. State is loaded by the names of the parameters, and keeps
    its dtype.

    Args:
        groups: parameter groups with the keys `param_names`, `rule` and `planned_lr`, as
            `plan.param_groups(model)` gives them.
        makes: by rule, a function from its groups to the optimizer.
        defaults: options at base size, for groups that do not set them: some schedulers read the learning
            rate in `optimizer.defaults`.
        check_gradients: refuse gradients that are not finite? A step waits for the device then.

    >>> import torch
    >>> weight, bias = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    >>> slow = {"params": [weight], "param_names": ["w"], "rule": "sgd", "lr": 0.1, "planned_lr": 0.1}
    >>> fast = {"params": [bias], "param_names": ["b"], "rule": "adamw", "lr": 0.2, "planned_lr": 0.2}
    >>> optimizer = Planned([slow, fast], {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW})
    >>> optimizer
    Planned(
        sgd: 1 tensor, lr 0.1, weight decay 0
        adamw: 1 tensor, lr 0.2, weight decay 0.01
    )
    >>> (weight.sum() + bias.sum()).backward()
    >>> optimizer.step()
    >>> weight.tolist(), [round(value, 3) for value in bias.tolist()]
    ([0.8999..., 0.8999...], [0.798, 0.798])
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        makes: Mapping[str, Make],
        *,
        defaults: Mapping[str, Any] | None = None,
        check_gradients: bool = True,
    ) -> None:
        self._makes = dict(makes)
        self._planned = dict(defaults or {})
        self._refuses = check_gradients
        self._warned = False
        for group in groups:
            self._check_group(group)
            group["shapes"] = shapes_of(group)
        inner = self._made(groups)
        # Only options that all of them have: OneCycleLR expects a default in every group.
        first, *others = (one.defaults for one in inner.values())
        common = {key: first[key] for key in first if all(key in other for other in others)}
        self._inner: dict[str, Optimizer] = {}
        super().__init__(groups, {**common, **self._planned})
        self._inner = inner

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of every group. A closure is called once, unless a single optimizer calls it more often.

        Raises, with nothing moved, if a gradient (NonFiniteError) or an option of a group is not finite.
        """
        inner = list(self._inner.items())
        loss = None
        if closure is not None and len(inner) > 1:
            loss, closure = evaluated(closure), None
        if closure is None:
            self._check_gradients()
        if not self._warned:
            self._check_ratios()
        for rule, one in inner:
            self._share(rule, one)
            own_loss = one.step() if closure is None else one.step(self._checked(closure))
            loss = own_loss if len(inner) == 1 else loss
        return loss

    def train(self) -> None:
        """Switch to the parameters at which gradients are taken (schedule-free; else nothing changes)."""
        self._switch("train")

    def eval(self) -> None:
        """Switch to the parameters to evaluate: averages for schedule-free; else nothing changes."""
        self._switch("eval")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with `param_names` and a `rule`, as `plan.param_groups(model)` gives them."""
        if self._inner:
            self._check_group(param_group)
            spec = find_optimizers().get(param_group["rule"])
            for option, value in self._planned.items():
                lacks = option == "weight_decay" and spec is not None and not spec.decays
                param_group.setdefault(option, 0.0 if lacks else value)
            param_group["shapes"] = shapes_of(param_group)
            made = self._made([param_group])
            self._inner = {**made, **self._inner}
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, matched by the names of the parameters; their shapes have to agree.

        Learning rates become those of the state, as with any torch optimizer. Moments go to the device of
        their parameter and keep their dtype. A state without names is matched by position if counts and the
        shapes of its moments agree.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        state, options = restored(self.param_groups, state_dict)
        self.state.clear()
        self.state.update(state)
        for group, saved in zip(self.param_groups, options, strict=True):
            group.update(saved)
        for rule, one in self._inner.items():
            # Optimizers update states of older versions here.
            one.__setstate__({"state": self.state, "param_groups": _of(rule, self.param_groups)})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_makes", "_planned", "_warned", "_refuses")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._inner = self._made(self.param_groups)

    def __repr__(self) -> str:
        lines = []
        for group in self.param_groups:
            count = len(group["params"])
            lines.append(
                f"    {group['rule']}: {count} tensor{'s' * (count != 1)}, lr {float(group['lr']):.4g}, "
                f"weight decay {group['weight_decay']:.4g}\n"
            )
        return f"Planned(\n{''.join(lines)})"

    def _made(self, groups: list[dict[str, Any]]) -> dict[str, Optimizer]:
        """The optimizers of some groups, by rule; groups get the options that they do not set."""
        inner = {}
        for rule in dict.fromkeys(group["rule"] for group in groups):
            own = _of(rule, groups)
            inner[rule] = one = self._makes[rule](own)
            one.check_gradients = False  # type: ignore[attr-defined]  # checked here, all together
            if len(one.param_groups) != len(own):
                raise UseError(f"make gave {type(one).__name__} other groups than it was given")
            for group, filled in zip(own, one.param_groups, strict=True):
                group.update({key: value for key, value in filled.items() if key not in group})
                group.setdefault("planned_lr", group["lr"])
        return inner

    def _share(self, rule: str, one: Optimizer) -> None:
        """Give an optimizer its groups: a checkpoint or a wrapper may have replaced the lists."""
        one.state = self.state
        one.param_groups = _of(rule, self.param_groups)

    def _checked(self, closure: Callable[[], float]) -> Callable[[], float]:
        """The closure, with a check of its gradients."""

        def checked() -> float:
            loss = closure()
            self._check_gradients()
            return loss

        return checked

    def _check_gradients(self) -> None:
        shared = [getattr(one, "_replicas", None) for one in self._inner.values()]
        specs = {rule: spec for rule, spec in find_optimizers().items() if rule in self._inner}
        sparse = {rule for rule, spec in specs.items() if spec.takes_sparse}
        squared = {rule for rule, spec in specs.items() if spec.keeps_squares}
        check_step(
            self.param_groups,
            {rule: _of(rule, self.param_groups) for rule in self._inner if rule not in sparse},
            defaults=lambda group: self._inner[group["rule"]].defaults,
            squared=[group for group in self.param_groups if group["rule"] in squared],
            look=self._refuses,
            over=[replicas.group for replicas in shared if replicas is not None],
        )

    def _switch(self, mode: str) -> None:
        for rule, one in self._inner.items():
            if hasattr(one, mode):
                self._share(rule, one)
                getattr(one, mode)()

    def _check_group(self, group: dict[str, Any]) -> None:
        if group.get("rule") not in self._makes:
            raise UseError(
                f"the group's rule is {group.get('rule')!r}: say which optimizer trains it, "
                f"{' or '.join(map(repr, self._makes))}"
            )
        names, params = group.get("param_names"), group["params"]
        if names is None or isinstance(params, Tensor) or len(names) != len(params):
            raise UseError("a group of a planned optimizer needs lists params and param_names of one length")

    def _check_ratios(self) -> None:
        def factor(group: dict[str, Any]) -> float:
            return float(group["lr"] / group["planned_lr"])

        # Reading a tensor would wait for the device; a group that was planned not to move has no ratio.
        moving = [group for group in self.param_groups if group["planned_lr"]]
        if not moving or any(isinstance(group["lr"], Tensor) for group in self.param_groups):
            return
        slow, fast = min(moving, key=factor), max(moving, key=factor)
        if factor(fast) - factor(slow) <= 1e-6 * abs(factor(fast)):
            return
        self._warned = True
        warnings.warn(
            f"TH205: learning rates no longer have their planned ratios. {slow['param_names'][0]} and "
            f"{fast['param_names'][0]} were planned at {slow['planned_lr']:.4g} and {fast['planned_lr']:.4g} "
            f"(ratio {slow['planned_lr'] / fast['planned_lr']:.4g}) and are at {slow['lr']:.4g} and "
            f"{fast['lr']:.4g} (ratio {slow['lr'] / fast['lr'] if fast['lr'] else float('nan'):.4g}). "
            "Schedulers with an absolute minimum or maximum do this: use "
            "theodolite.optimizers.schedule(optimizer, …)",
            BrokenRatiosWarning,
            stacklevel=3,
        )


def set_lr(group: dict[str, Any], lr: float) -> None:
    """Set the learning rate of a group; a tensor keeps its place, as a captured graph reads it."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _of(rule: str, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [group for group in groups if group["rule"] == rule]
