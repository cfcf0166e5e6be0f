"""All directions through a network at once, a few examples at a time.

Tangents are d times as large as the values, and what is done to them is mostly reading and writing memory. On
a CPU as many examples are taken at a time as keep them in its caches, on a GPU as many as memory has room
for. Whether examples may be taken apart at all is seen from the logits, which must not change by it.
"""

# d directions, r seeds, B examples

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.probes.curvature.directions import Directions
from theodolite.probes.curvature.fan import Fan, Unsupported
from theodolite.probes.curvature.fan_norms import RULES
from theodolite.probes.curvature.graph import own_functions
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import unused

CACHED_BYTES = 2**24
"""That the tangents of one value may take on a CPU, if there are several examples to take apart."""
WORKING_COPIES = 8
"""Of the largest value's tangents, that are alive at a time in one operation."""


@dataclass(frozen=True)
class Outlook:
    """What a network's forward pass will ask of tangents. Made by `scout`."""

    logits: Tensor
    largest: int
    """Entries of the largest value."""
    multilinear: bool
    """Are the logits piecewise linear in each weight by itself?"""
    separable: bool
    """Do all inputs have the examples along the first dimension, as the logits have?"""


@dataclass(frozen=True)
class Sweep:
    """What one pass with tangents gave."""

    logits: Tensor
    tangents: Tensor
    """ż, (d, *logits.shape)."""
    residual: Tensor
    """`RᵀSR` for each seed, (r, d, d)."""
    slopes: Tensor
    """`Rᵀg` for the gradient of the trial seed, (d,)."""


def sweeps(
    objective: Objective, batch: Batch, directions: Directions, outlook: Outlook, seeds: Sequence[Tensor]
) -> Iterator[tuple[slice, Sweep]]:
    """The sweeps over parts of a batch, and which of its examples each has; their residuals add up.

    Raises Coupled, at last after all of them, if examples may not be taken apart.
    """
    count = len(outlook.logits) if outlook.logits.ndim else 1
    most = _at_a_time(outlook, directions.num, count)
    # Any seed will do to see whether gradients agree; that of the loss may be zero.
    trial = torch.randn(outlook.logits.shape, generator=torch.Generator().manual_seed(0)).to(outlook.logits)
    if most >= count:
        yield slice(0, count), project(objective, batch, directions, seeds, trial)
        return
    slopes = torch.zeros(directions.num, dtype=torch.float64, device=trial.device)
    size = slopes.new_zeros(())
    for start in range(0, count, most):
        part = slice(start, min(start + most, count))
        try:
            sweep = project(
                objective, _cut(batch, part), directions, [one[part] for one in seeds], trial[part]
            )
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise Coupled from error
        if not _alike(sweep.logits, outlook.logits[part]):
            raise Coupled
        slopes += sweep.slopes
        size = size + _size(sweep.tangents, trial[part])
        yield part, sweep
    # Equal logits are not enough: what couples the examples may be multiplied by a zero.
    chosen = objective.stand_ins(grad=True)
    logits = objective.forward(chosen, batch)
    found = torch.autograd.grad(logits, list(chosen.values()), trial, materialize_grads=True)
    whole = directions.pulled(dict(zip(chosen, found, strict=True)))
    if not _near(slopes, whole, size, trial.dtype):
        raise Coupled


class Coupled(Exception):
    """Examples cannot be taken apart: each one's logits depend on the others."""


def scout(objective: Objective, batch: Batch, directions: Directions) -> Outlook:
    """Run the network once and see whether there is a rule for all that it does; else Unsupported.

    This and what follows is done under `objective.conditions()`.
    """
    fan = Fan(RULES, directions.num)
    with torch.no_grad():
        logits = _forward(objective, batch, directions, fan, objective.stand_ins(grad=False))
    tensors = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    lengths = {one.shape[0] if one.ndim else 0 for one in (*tensors, logits)}
    return Outlook(logits, fan.largest, fan.multilinear, separable=len(lengths) == 1)


def project(
    objective: Objective, batch: Batch, directions: Directions, seeds: Sequence[Tensor], trial: Tensor
) -> Sweep:
    """Carry all directions through the network, for each of the seeds s of its logits.

    The gradient of one more seed, `trial`, is taken both ways, by autograd and by the tangents of the logits:
    where they differ, something in the network was not followed.
    """
    fan = Fan(RULES, directions.num)
    chosen = objective.stand_ins(grad=True)
    logits = _forward(objective, batch, directions, fan, chosen)
    if own := own_functions(logits):
        # What its forward pass computes need not be what its backward pass differentiates.
        raise Unsupported(f"{type(own[0]).__name__.removesuffix('Backward')} is an autograd.Function")
    assert fan.curved is not None
    if not all(value.requires_grad for value in fan.curved):
        raise Unsupported("a part of the forward pass is without gradients")
    adjoints = _adjoints(logits, fan.curved, seeds)
    gradient = torch.autograd.grad(logits, list(chosen.values()), trial, allow_unused=True)
    slopes = directions.pulled(_used(chosen, gradient))
    del logits
    fan.carry(adjoints)
    with torch.no_grad():
        logits = _forward(objective, batch, directions, fan, objective.stand_ins(grad=False))
        tangents = fan.tangents(logits)
    found = (tangents.flatten(1) @ trial.flatten()).double()
    if not _near(found, slopes, _size(tangents, trial), trial.dtype):
        raise Unsupported("something in the network is not followed by tangents")
    total = fan.total
    if total is None:
        total = tangents.new_zeros((len(seeds), fan.num, fan.num), dtype=torch.float64)
    return Sweep(logits, tangents, total, slopes)


def _near(one: Tensor, other: Tensor, size: Tensor, dtype: torch.dtype) -> bool:
    close = {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.1)
    return bool((one - other).norm() <= close * (other.norm() + size))


def _size(tangents: Tensor, seed: Tensor) -> Tensor:
    """How large `⟨s, ż⟩` would be if nothing in it cancelled, in parts of which rounding is small."""
    return tangents.flatten(1).double().norm() * seed.double().norm() * 1e-3


def _used(chosen: dict[str, Tensor], gradient: Sequence[Tensor | None]) -> dict[str, Tensor]:
    for name, one in zip(chosen, gradient, strict=True):
        if one is None:
            raise UseError(unused(name))
    return {name: one for name, one in zip(chosen, gradient, strict=True) if one is not None}


def _at_a_time(outlook: Outlook, num: int, count: int) -> int:
    """How many examples are taken together."""
    if not outlook.separable:
        return count
    logits = outlook.logits
    each = max(1, num * outlook.largest * logits.element_size() // count)
    if logits.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(logits.device)
        free += torch.cuda.memory_reserved(logits.device) - torch.cuda.memory_allocated(logits.device)
        return max(1, min(count, int(free / (2 * WORKING_COPIES * each))))
    return max(1, min(count, CACHED_BYTES // each))


def _cut(batch: Batch, part: slice) -> Batch:
    inputs = tree_map(lambda leaf: leaf[part] if isinstance(leaf, Tensor) else leaf, batch[0])
    return inputs, None


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    close = 1e-3 if one.dtype in (torch.float16, torch.bfloat16) else 1e3 * torch.finfo(one.dtype).eps
    return bool((one - other).abs().max() <= close * other.abs().max())


def _forward(
    objective: Objective, batch: Batch, directions: Directions, fan: Fan, chosen: dict[str, Tensor]
) -> Tensor:
    for name, tensor in chosen.items():
        fan.plant(tensor, directions.columns[name])
    with fan:
        logits = objective.forward(chosen, batch)
    if not fan.active(logits):
        raise Unsupported("the logits are made in a way that cannot be followed")
    return logits


def _adjoints(logits: Tensor, curved: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor]:
    """By operation: δ of each seed, (r, …)."""
    if not curved:
        return []
    by_seed = [
        torch.autograd.grad(logits, list(curved), one, retain_graph=True, allow_unused=True) for one in seeds
    ]
    return [
        torch.stack([torch.zeros_like(value) if one is None else one for one in column]).detach()
        for value, column in zip(curved, zip(*by_seed, strict=True), strict=True)
    ]
