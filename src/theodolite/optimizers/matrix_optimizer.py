"""The base of optimizers whose parameters are matrices, in some layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.optimizers.matrices import check_matrices
from theodolite.optimizers.matrix_step import Arrangement, ParamStep, arrange
from theodolite.optimizers.saved_state import refuse_other_shapes
from theodolite.optimizers.sharding import Replicas, is_sharded, local
from theodolite.optimizers.step_checks import check_step

Group = dict[str, Any]
Moving = list[tuple[Group, list[Tensor]]]
"""Groups, each with its parameters that have a gradient."""


class MatrixOptimizer(Optimizer):
    """What they share: a step that moves everything or, if it must raise, nothing; state; options."""

    # Attributes of the class, as torch copies the groups and the state of an optimizer and nothing else.
    check_gradients = True
    """Refuse gradients that are not finite? False where somebody else has checked them."""
    _keeps_squares: ClassVar[bool] = False
    """Are squares of gradients kept? These must be finite too."""
    _replicas: Replicas | None = None
    _last: tuple[object, list[Arrangement]] | None = None

    def add_param_group(self, param_group: Group) -> None:
        """Add matrices; options that are not given are the optimizer's."""
        super().add_param_group(param_group)
        try:
            self._check_options(param_group)
            check_matrices(type(self).__name__, param_group)
        except UseError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for every matrix that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_step(
            self.param_groups,
            {type(self).__name__: self.param_groups},
            squared=self.param_groups if self._keeps_squares else (),
            look=self.check_gradients,
            over=[] if self._replicas is None else [self._replicas.group],
        )
        moving = [
            (group, [param for param in group["params"] if param.grad is not None and param.numel()])
            for group in self.param_groups
        ]
        self._move([(group, params) for group, params in moving if params])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does it, but a radius keeps the dtype it was saved in, and other shapes are refused."""
        refuse_other_shapes(self.param_groups, state_dict)
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(saved, own, strict=True):
            if "radius" in state_dict["state"].get(key, {}):
                self.state[param]["radius"] = state_dict["state"][key]["radius"].to(param.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        own = {"check_gradients": self.check_gradients, "_replicas": self._replicas}
        return {**super().__getstate__(), **own}

    def _check_options(self, group: Group) -> None:
        """Raise UseError for an option that no step can be made with."""
        for option in ("lr", "weight_decay", "eps"):
            if not float(group.get(option, 0.0)) >= 0:
                raise UseError(f"{option} is {group[option]!r}: it has to be 0 or more")
        if not 0 <= group.get("momentum", 0.0) < 1:
            raise UseError(f"momentum is {group['momentum']!r}: it has to be in [0, 1)")
        if group.get("steps", 1) < 1:
            raise UseError(f"steps is {group['steps']!r}: Newton–Schulz takes at least one")

    def _move(self, moving: Moving) -> None:
        """Move the parameters."""
        raise NotImplementedError

    def _arranged(
        self, params: Sequence[ParamStep], scale: Callable[[Group, int, int], float]
    ) -> list[Arrangement]:
        """What goes together in a step; found again when parameters or options have changed."""
        groups = {id(one.group): one.group for one in params}
        options = [[group.get(key) for key in _ARRANGING] for group in groups.values()]
        kinds = [(one.param.shape, one.param.dtype, one.param.device) for one in params]
        found = [(id(one.param), id(one.group)) for one in params], kinds, options
        if self._last is None or self._last[0] != found:
            self._last = found, arrange(params, scale, replicated=self._replicas is not None)
        return self._last[1]


_ARRANGING = ("scale", "axes", "rows", "steps", "eps")
"""Options that what goes together in a step depends on."""


def averaged(params: Sequence[Tensor], state: Any, momentum: float) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, and the momenta they have been averaged into: this process's part of each."""
    grads = local_gradients(params)
    buffers = [kept_locally(param, state, "momentum_buffer") for param in params]
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    return grads, buffers


def local_gradients(params: Sequence[Any]) -> list[Tensor]:
    """This process's part of gradients, cut over processes as their parameters are."""
    found = []
    for param in params:
        grad = param.grad
        if is_sharded(param) and grad.placements != param.placements:
            grad = grad.redistribute(placements=param.placements)
        found.append(local(grad))
    return found


def kept_locally(param: Tensor, state: Any, name: str) -> Tensor:
    """This process's part of a tensor of the state, which starts at zero."""
    if name not in state[param]:
        state[param][name] = torch.zeros_like(param)
    return local(state[param][name])
