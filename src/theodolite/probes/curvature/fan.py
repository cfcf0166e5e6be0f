"""A network's forward pass with a fan of d tangents beside every value.

For directions `R = (r_1 … r_d)`, `u̇_i` is the derivative of a value u along r_i, and δ_u that of `⟨s, z⟩` by
u, where s is the loss's derivative by the logits z. Then

    r_iᵀ G r_j = ż_iᵀ B ż_j,      r_iᵀ S r_j = Σ_f ⟨δ_f, D²f[u̇_i, u̇_j]⟩

where the sum runs over the operations f that are not linear. One backward pass gives all δ; one forward pass
carries the tangents, and each operation adds its own d × d matrix as it goes by. That is about a forward pass
for each direction, where a Hessian product is two or three gradients, and all directions go through the same
matrix products together. Several seeds s, of several temperatures, cost little more than one.

It is exact for every network that is made of operations with a rule (`fan_rules`, `fan_norms`). On any other
it stops with `Unsupported`, and products have to serve.
"""

# d directions, r seeds

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from theodolite.core.building import in_one_line
from theodolite.probes.curvature.directions import Columns

Rule = Callable[..., Any]
"""`rule(fan, function, *args, **kwargs)`: the value of an operation, with its tangents spread on."""


class Unsupported(Exception):
    """There is no rule for an operation, or no memory for its tangents."""


class Fan(TorchFunctionMode):
    """Watches a forward pass: first to note which operations curve, then to carry tangents through it."""

    def __init__(self, rules: Mapping[str, Rule], num: int) -> None:
        super().__init__()
        self._rules, self.num = rules, num
        self.curved: list[Tensor] | None = []
        """Outputs of the operations that are not linear, while they are being noted."""
        self.multilinear = True
        """Is every parameter met once, and everything else piecewise linear? Then `Tr(S) = 0`."""
        self.largest = 0
        """Entries of the largest value that depends on the parameters."""
        self._met: set[int] = set()
        self._adjoints: Iterator[Tensor] = iter(())
        self._tangents = WeakTensorKeyDictionary()
        self.total: Tensor | None = None
        """Σ_f ⟨δ_f, D²f[u̇_i, u̇_j]⟩, (r, d, d)."""

    def carry(self, adjoints: Sequence[Tensor]) -> None:
        """From now on carry tangents; `adjoints` are the δ (r, …) of what was noted."""
        self.curved = None
        self._adjoints = iter(adjoints)
        self._tangents = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(self.active(leaf) for leaf in tree_leaves((args, dict(kwargs)))):
            return func(*args, **kwargs)
        name = _name(func)
        rule = self._rules.get(name)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Unsupported(f"{name} inside of torch.func has no rule")
        if rule is not None:
            try:
                return rule(self, func, *args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
                # Called in a way that the rule does not know; a fault of the model shows in its products too.
                raise Unsupported(f"{name} has no rule for this: {in_one_line(error)}") from error
        found = func(*args, **kwargs)
        # What has no derivative, autograd holds constant too: shapes, comparisons, indices. What returns
        # nothing may have changed a tensor.
        if name != "detach" and (found is None or any(map(_is_differentiable, tree_leaves(found)))):
            raise Unsupported(f"{name} has no rule")
        return found

    def active(self, value: Any) -> bool:
        """Does it depend on the parameters?"""
        return isinstance(value, Tensor) and value in self._tangents

    def tangents(self, value: Tensor) -> Tensor:
        """(d, *value.shape)."""
        found = self._tangents[value]
        return found.dense if isinstance(found, Columns) else found

    def columns(self, value: Tensor) -> Columns | None:
        """The tangents of a parameter in sparse form; None if it is none, or no matrix."""
        found = self._tangents.get(value)
        return found if isinstance(found, Columns) else None

    def plant(self, parameter: Tensor, columns: Columns) -> None:
        """Say how a parameter moves."""
        self._tangents[parameter] = columns

    def spread(self, value: Tensor, tangents: Callable[[], Tensor]) -> Tensor:
        """Put tangents beside a value; while operations are noted, only that it has some."""
        self.largest = max(self.largest, value.numel())
        self._tangents[value] = None if self.curved is not None else tangents()
        return value

    def bend(
        self, value: Tensor, second: Callable[[Tensor], Tensor], *, weight: Tensor | None = None
    ) -> None:
        """Note an operation that is not linear; or add `second(δ) = ⟨δ, D²f⟩`, (d, d) for one seed.

        `weight` is the parameter that a value is multiplied by, if the operation does nothing else.
        """
        if self.curved is not None:
            self.curved.append(value)
            self.multilinear &= weight is not None and id(weight) not in self._met
            self._met.add(id(weight))
            return
        found = torch.stack([second(adjoint) for adjoint in next(self._adjoints)]).double()
        self.total = found if self.total is None else self.total + found


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _name(function: Any) -> str:
    """A function's name: `add` for `torch.add`, `Tensor.add` and `+`; `mT` for the property."""
    name: str = getattr(function, "__name__", "")
    if name == "__get__":
        return str(getattr(function.__self__, "__name__", name))
    return name.strip("_") if name.startswith("__") else name
