"""The base of optimizers whose parameters are matrices, in some layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from theodolite.core.errors import UseError
from theodolite.core.exclusive import outside_autocast
from theodolite.optimizers.matrices import MatrixLayout, check_matrices
from theodolite.optimizers.matrix_step import Arrangement, ParamStep, Scale, arrange
from theodolite.optimizers.saved_state import refuse_other_shapes
from theodolite.optimizers.sharding import Replicas, gathered, is_sharded, local, scattered
from theodolite.optimizers.step_checks import Group, check_step, evaluated, names_of

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
        loss = evaluated(closure)
        check_step(
            self.param_groups,
            {type(self).__name__: self.param_groups},
            defaults=lambda group: self.defaults,
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
        """As torch does it, but moments of other shapes are refused."""
        refuse_other_shapes(self.param_groups, state_dict)
        super().load_state_dict(state_dict)

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

    def _arranged(self, moving: Moving, scale: Scale) -> Iterator[tuple[list[ParamStep], Arrangement]]:
        """Parameters that are orthogonalised together, with averaged momenta.

        Arrangements are made anew when parameters or options have changed.
        """
        steps, key = [], []
        for group, params in moving:
            for pair in zip(params, *averaged(params, self.state, group["momentum"]), strict=True):
                steps.append(ParamStep(*pair, group, float(group["lr"])))
            kinds = [(id(param), param.shape, param.dtype, param.device) for param in params]
            key.append((id(group), kinds, [group.get(option) for option in _ARRANGING]))
        if self._last is None or self._last[0] != key:
            self._last = key, arrange(steps, scale, replicated=self._replicas is not None)
        for how in self._last[1]:
            yield [steps[place] for place in how.places], how


_ARRANGING = ("scale", "axes", "rows", "steps", "eps")
"""Options that what goes together in a step depends on."""


class SphereOptimizer(MatrixOptimizer):
    """Steps along a sphere: every matrix, experts and blocks of rows too, keeps a norm, its radius."""

    _instead: ClassVar[str] = "another optimizer"
    """What to give to a weight of zeros."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does it, but a radius keeps the dtype it was saved in, and other shapes are refused."""
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        own = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(saved, own, strict=True):
            if "radius" in state_dict["state"].get(key, {}):
                self.state[param]["radius"] = state_dict["state"][key]["radius"].to(param.device, copy=True)

    def _updates(self, moving: Moving) -> Iterator[tuple[Group, Tensor, Tensor]]:
        """Groups, parameters, and this process's part of the update of each."""
        raise NotImplementedError

    def _norms(self, group: Group, matrices: Tensor) -> Tensor:
        """The norms to keep, (stack, 1, 1)."""
        raise NotImplementedError

    def _moved(self, group: Group, weight: Tensor, update: Tensor, radius: Tensor) -> Tensor:
        """Matrices (stack, out, in) after a step, on the sphere."""
        raise NotImplementedError

    def _move(self, moving: Moving) -> None:
        for group, params in moving:  # before anything has moved: a weight of zero is refused
            names = dict(zip(group["params"], names_of(group), strict=True))
            for param in params:
                if "radius" not in self.state[param]:
                    self.state[param]["radius"] = self._radius(group, param, names[param])
        for group, param, update in self._updates(moving):
            if float(group["lr"]):
                self._move_one(group, param, update)

    @outside_autocast()
    def _radius(self, group: Group, param: Tensor, name: str) -> Tensor:
        """(blocks, stack, 1, 1)."""
        blocks = MatrixLayout.of(group, param).matrices(_whole(local(param), param))
        radius = torch.stack([self._norms(group, matrices) for matrices in blocks])
        if not bool((radius > 0).all()):
            raise UseError(
                f"{name}, of shape {tuple(param.shape)}, has a matrix of zeros, and no norm to keep. Give it "
                f"initial values that are not zero, or {self._instead}"
            )
        return radius

    @outside_autocast()
    def _move_one(self, group: Group, param: Tensor, update: Tensor) -> None:
        radii = iter(self.state[param]["radius"])
        made = MatrixLayout.of(group, param).mapped(
            lambda weight, direction: self._moved(group, weight, direction, next(radii)),
            _whole(local(param), param),
            _whole(update, param),
        )
        local(param).copy_(scattered(made.to(param.dtype), param))


def _whole(piece: Tensor, param: Tensor) -> Tensor:
    """The whole tensor, in a dtype that has the digits of a norm."""
    return gathered(piece, param).to(torch.promote_types(param.dtype, torch.float32))


def averaged(params: Sequence[Tensor], state: Any, momentum: float) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, and the momenta they have been averaged into: this process's part of each."""
    grads, buffers = local_gradients(params), kept_locally(params, state, "momentum_buffer")
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


def kept_locally(params: Sequence[Tensor], state: Any, name: str) -> list[Tensor]:
    """This process's part of tensors of the state, which start at zero."""
    for param in params:
        if name not in state[param]:
            state[param][name] = torch.zeros_like(param)
    return [local(state[param][name]) for param in params]
