"""A forward pass with a fan of d tangents beside every value.

For directions `R = (r_1 … r_d)`, `u̇_i` is the derivative of a value u along r_i, and δ_u the derivative of
`⟨s, z⟩` by u, where s is the loss's derivative by the logits z. Then

    r_iᵀ G r_j = ż_iᵀ B ż_j,      r_iᵀ S r_j = Σ_f ⟨δ_f, D²f[u̇_i, u̇_j]⟩

where the sum is over the operations f that are not linear. One backward pass gives all δ; one forward pass
carries the tangents, and each operation adds its d × d matrix. This costs about a forward pass for each
direction, where a Hessian product costs two or three gradients. Several seeds s, of several temperatures,
cost little more than one.

The result is exact for every network whose operations have a rule (`fan_rules`, `fan_norms`). For any other
operation it raises `Unsupported`, and the caller multiplies one direction at a time instead.

Tangents are d times as large as the values, and most of their cost is memory traffic. So a batch is split: on
a CPU such that tangents stay in the cache, on a GPU such that they fit into memory. Splitting is allowed only
if it does not change the logits and gradients.
"""

# d directions, r seeds, B examples

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from theodolite.core.batches import Batch
from theodolite.core.building import in_one_line
from theodolite.probes.curvature.directions import Columns, Directions
from theodolite.probes.curvature.objective import Objective, own_functions
from theodolite.probes.curvature.operator import require_used

CACHED_BYTES = 2**24
"""Bytes that the tangents of one value may take on a CPU before the batch is split."""
WORKING_COPIES = 8
"""Copies of the largest value's tangents that one operation holds at a time."""

Rule = Callable[..., Any]
"""`rule(fan, function, *args, **kwargs)`: compute an operation's value and record its tangents."""


class Unsupported(Exception):
    """There is no rule for an operation."""


class Coupled(Exception):
    """The batch cannot be split: the logits of one example depend on other examples."""


class Fan(TorchFunctionMode):
    """Runs rules during a forward pass: first to list the nonlinear operations, then to carry tangents."""

    def __init__(self, rules: Mapping[str, Rule], directions: Directions) -> None:
        super().__init__()
        self._rules, self._directions, self.num = rules, directions, directions.num
        self.curved: list[Tensor] | None = []
        """Outputs of the nonlinear operations, while they are being listed; None afterwards."""
        self.multilinear = True
        """Is every parameter used once, and everything else piecewise linear? Then `Tr(S) = 0`."""
        self.largest = 0
        """Entries of the largest value that depends on the parameters."""
        self._met: set[int] = set()
        self._adjoints: Iterator[Tensor] = iter(())
        self._tangents = WeakTensorKeyDictionary()
        self.total: Tensor | None = None
        """Σ_f ⟨δ_f, D²f[u̇_i, u̇_j]⟩, (r, d, d)."""

    def carry(self, adjoints: Sequence[Tensor]) -> None:
        """Carry tangents from now on; `adjoints` are the δ (r, …) of the listed operations."""
        self.curved = None
        self._adjoints = iter(adjoints)
        self._tangents = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(self.active(leaf) for leaf in tree_leaves((args, dict(kwargs)))):
            return func(*args, **kwargs)
        name = operation_name(func)
        rule = self._rules.get(name)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Unsupported(f"{name} inside of torch.func has no rule")
        if rule is not None:
            try:
                return rule(self, func, *args, **kwargs)
            except torch.OutOfMemoryError:
                raise
            except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
                # Called in a way that the rule does not know. An error of the model itself comes up again.
                raise Unsupported(f"{name} has no rule for this: {in_one_line(error)}") from error
        found = func(*args, **kwargs)
        # Autograd holds shapes, comparisons and indices constant too. What returns None may have changed a
        # tensor in place.
        moving = (
            leaf.is_floating_point() or leaf.is_complex()
            for leaf in tree_leaves(found)
            if isinstance(leaf, Tensor)
        )
        if name != "detach" and (found is None or any(moving)):
            raise Unsupported(f"{name} has no rule")
        return found

    def active(self, value: Any) -> bool:
        """Does the value depend on the parameters?"""
        return isinstance(value, Tensor) and value in self._tangents

    def tangents(self, value: Tensor) -> Tensor:
        """(d, *value.shape)."""
        found = self._tangents[value]
        return found.dense if isinstance(found, Columns) else found

    def columns(self, value: Tensor) -> Columns | None:
        """The tangents of a parameter in sparse form; None for other values."""
        found = self._tangents.get(value)
        return found if isinstance(found, Columns) else None

    def forward(self, objective: Objective, batch: Batch, chosen: dict[str, Tensor]) -> Tensor:
        """The logits, with the chosen parameters replaced."""
        for name, tensor in chosen.items():
            self._tangents[tensor] = self._directions.columns[name]
        with self:
            logits = objective.forward(chosen, batch)
        if not self.active(logits):
            raise Unsupported("the logits are made in a way that cannot be followed")
        return logits

    def record(
        self,
        value: Tensor,
        tangents: Callable[[], Tensor | Columns],
        second: Callable[[Tensor], Tensor] | None = None,
        *,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Record the result of an operation: its tangents and, if it is not linear, `second(δ) = ⟨δ, D²f⟩`.

        While operations are listed, neither is computed. `weight` is the parameter, if the operation is a
        product of a parameter and a value.
        """
        self.largest = max(self.largest, value.numel())
        if self.curved is None:
            if second is not None:
                found = torch.stack([second(adjoint) for adjoint in next(self._adjoints)]).double()
                self.total = found if self.total is None else self.total + found
        elif second is not None:
            self.curved.append(value)
            self.multilinear &= weight is not None and id(weight) not in self._met
            self._met.add(id(weight))
        self._tangents[value] = None if self.curved is not None else tangents()
        return value


@dataclass(frozen=True)
class DryRun:
    """What a forward pass demands of tangents. Made by `dry_run`."""

    rules: Mapping[str, Rule]
    logits: Tensor
    largest: int
    """Entries of the largest value."""
    multilinear: bool
    """Are the logits piecewise linear in each weight?"""
    separable: bool
    """Do all inputs and the logits have the examples along the first dimension?"""


@dataclass(frozen=True)
class TangentPass:
    """Result of one pass with tangents."""

    logits: Tensor
    tangents: Tensor
    """ż, (d, *logits.shape)."""
    residual: Tensor
    """`RᵀSR` for each seed, (r, d, d)."""
    slopes: Tensor
    """`Rᵀg` for the gradient of the trial seed, (d,)."""


def dry_run(objective: Objective, batch: Batch, directions: Directions, rules: Mapping[str, Rule]) -> DryRun:
    """Run the network once to see whether all its operations have rules; raises Unsupported if not.

    Call this and `tangent_passes` under `objective.conditions()`.
    """
    fan = Fan(rules, directions)
    with torch.no_grad():
        logits = fan.forward(objective, batch, objective.stand_ins(grad=False))
    tensors = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    lengths = {one.shape[0] if one.ndim else 0 for one in (*tensors, logits)}
    return DryRun(rules, logits, fan.largest, fan.multilinear, separable=len(lengths) == 1)


def tangent_passes(
    objective: Objective, batch: Batch, directions: Directions, dry: DryRun, seeds: Sequence[Tensor]
) -> Iterator[tuple[slice, TangentPass]]:
    """Passes over parts of a batch, each with the slice of its examples; their residuals add up.

    Raises Coupled, at the latest after the last part, if the batch must not be split.
    """
    count = len(dry.logits) if dry.logits.ndim else 1
    most = _examples_at_once(dry, directions.num, count)
    # Gradients are compared for a random seed, as that of the loss may be zero.
    trial = torch.randn(dry.logits.shape, generator=torch.Generator().manual_seed(0)).to(dry.logits)
    if most >= count:
        yield slice(0, count), _project(objective, batch, directions, dry.rules, seeds, trial)
        return
    slopes = torch.zeros(directions.num, dtype=torch.float64, device=trial.device)
    size = slopes.new_zeros(())
    for start in range(0, count, most):
        part = slice(start, min(start + most, count))
        inputs = tree_map(lambda leaf: leaf[part] if isinstance(leaf, Tensor) else leaf, batch[0])  # noqa: B023
        some = [one[part] for one in seeds]
        try:
            found = _project(objective, (inputs, None), directions, dry.rules, some, trial[part])
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise Coupled from error
        if not _same_logits(found.logits, dry.logits[part]):
            raise Coupled
        slopes += found.slopes
        size = size + _rounding(found.tangents, trial[part])
        yield part, found
    # Equal logits are not enough: what couples the examples may be multiplied by zero.
    chosen = objective.stand_ins(grad=True)
    logits = objective.forward(chosen, batch)
    gradient = torch.autograd.grad(logits, list(chosen.values()), trial, materialize_grads=True)
    if not _near(slopes, directions.pulled(dict(zip(chosen, gradient, strict=True))), size, trial.dtype):
        raise Coupled


def _project(
    objective: Objective,
    batch: Batch,
    directions: Directions,
    rules: Mapping[str, Rule],
    seeds: Sequence[Tensor],
    trial: Tensor,
) -> TangentPass:
    """Carry all directions through the network, for each seed s of its logits.

    The gradient of one more seed, `trial`, is taken by autograd and from the tangents of the logits: where
    the two differ, the tangents missed something in the network.
    """
    fan = Fan(rules, directions)
    chosen = objective.stand_ins(grad=True)
    logits = fan.forward(objective, batch, chosen)
    if own := own_functions(logits):
        # Its backward pass need not be the derivative of its forward pass.
        raise Unsupported(f"{type(own[0]).__name__.removesuffix('Backward')} is an autograd.Function")
    assert fan.curved is not None
    if not all(value.requires_grad for value in fan.curved):
        raise Unsupported("a part of the forward pass is without gradients")
    adjoints: list[Tensor] = []  # by operation: δ of each seed, (r, …)
    if curved := list(fan.curved):
        by_seed = [
            torch.autograd.grad(logits, curved, one, retain_graph=True, materialize_grads=True)
            for one in seeds
        ]
        adjoints = [torch.stack(column).detach() for column in zip(*by_seed, strict=True)]
    gradient = torch.autograd.grad(logits, list(chosen.values()), trial, allow_unused=True)
    slopes = directions.pulled(dict(zip(chosen, require_used(chosen, gradient), strict=True)))
    del logits
    fan.carry(adjoints)
    with torch.no_grad():
        logits = fan.forward(objective, batch, objective.stand_ins(grad=False))
        tangents = fan.tangents(logits)
    found = (tangents.reshape(fan.num, -1) @ trial.flatten()).double()
    if not _near(found, slopes, _rounding(tangents, trial), trial.dtype):
        raise Unsupported("something in the network is not followed by tangents")
    total = fan.total
    if total is None:
        total = tangents.new_zeros((len(seeds), fan.num, fan.num), dtype=torch.float64)
    return TangentPass(logits, tangents, total, slopes)


def _near(one: Tensor, other: Tensor, size: Tensor, dtype: torch.dtype) -> bool:
    close = {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.1)
    return bool((one - other).norm() <= close * (other.norm() + size))


def _rounding(tangents: Tensor, seed: Tensor) -> Tensor:
    """A scale for the rounding error of `⟨s, ż⟩`: its size if nothing cancelled, times 1e-3."""
    return tangents.double().norm() * seed.double().norm() * 1e-3


def _examples_at_once(dry: DryRun, num: int, count: int) -> int:
    if not dry.separable:
        return count
    logits = dry.logits
    each = max(1, num * dry.largest * logits.element_size() // count)
    if logits.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(logits.device)
        free += torch.cuda.memory_reserved(logits.device) - torch.cuda.memory_allocated(logits.device)
        return max(1, min(count, int(free / (2 * WORKING_COPIES * each))))
    return max(1, min(count, CACHED_BYTES // each))


def _same_logits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    close = 1e-3 if one.dtype in (torch.float16, torch.bfloat16) else 1e3 * torch.finfo(one.dtype).eps
    return bool((one - other).abs().max() <= close * other.abs().max())


def operation_name(function: Any) -> str:
    """A function's name: `add` for `torch.add`, `Tensor.add` and `+`; `mT` for the property."""
    name: str = getattr(function, "__name__", "")
    if name == "__get__":
        return str(getattr(function.__self__, "__name__", name))
    return name.strip("_") if name.startswith("__") else name
