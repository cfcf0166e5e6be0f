"""One step of many matrices: which are orthogonalised together, in which process, and how weights move."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.core.exclusive import outside_autocast
from theodolite.optimizers.matrices import LINEAR, MatrixLayout
from theodolite.optimizers.orthogonal import Matrices, NewtonSchulzBatch, batches
from theodolite.optimizers.sharding import (
    Replicas,
    Sharding,
    gathered,
    is_sharded,
    local,
    scattered,
    sharded_results,
)

ROUNDED = (torch.bfloat16, torch.float16)
"""Weights of these dtypes are moved in float32 and rounded once."""


class ParamStep(NamedTuple):
    """One parameter in a step, with this process's part of its gradient and momentum."""

    param: Tensor
    grad: Tensor
    buffer: Tensor
    group: dict[str, Any]
    lr: float

    @property
    def kept(self) -> float:
        """The fraction of the weight that weight decay leaves."""
        return 1 - self.lr * float(self.group.get("weight_decay", 0.0))


class MatrixBlock(NamedTuple):
    """The matrices of one parameter, or of a block of its rows."""

    place: int
    """Index of the parameter among those that are arranged together."""
    block: int
    matrices: Matrices
    scale: float
    span: tuple[int, int] | None
    """The rows of this matrix, if the parameter is (out, in) and they are contiguous."""


@dataclass(frozen=True)
class Arrangement:
    """The parts of a step that are the same for all steps of the same parameters."""

    places: list[int]
    """Indices of the parameters among all that move."""
    layouts: list[MatrixLayout]
    batches: list[tuple[list[MatrixBlock], NewtonSchulzBatch]]
    costs: list[float]
    cuts: list[Sharding]
    """How each parameter is cut over processes, if they are."""
    is_alone: bool
    """Does no other process hold or share the parameters?"""


Scale = Callable[[dict[str, Any], int, int], float]
"""From a group's options, fan-in and fan-out to the factor on an orthogonal update."""


def arrange(moving: Sequence[ParamStep], scale: Scale, *, replicated: bool) -> list[Arrangement]:
    """Parameters of one dtype and device that the same processes hold, and their batches."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, one in enumerate(moving):
        cut = Sharding.of(one.param)
        over = (id(cut.mesh), cut.over) if cut is not None else (is_sharded(one.param),)
        alike.setdefault((*over, one.param.device, one.param.dtype), []).append(place)
    return [_arranged(places, moving, scale, replicated) for places in alike.values()]


def _arranged(places: list[int], moving: Sequence[ParamStep], scale: Scale, replicated: bool) -> Arrangement:
    some = [moving[place] for place in places]
    layouts = [MatrixLayout.of(one.group, one.param) for one in some]
    cuts = [cut for one in some if (cut := Sharding.of(one.param)) is not None]
    blocks: list[MatrixBlock] = []
    for place, (one, layout) in enumerate(zip(some, layouts, strict=True)):
        fans = layout.fans(one.param.shape)
        count = one.param.numel() // max(1, sum(math.prod(pair) for pair in fans))
        for block, (fan_in, fan_out) in enumerate(fans):
            options = one.param.dtype, one.param.device, one.group["steps"], one.group["eps"]
            matrices = Matrices(count, (fan_out, fan_in), *options)
            factor = scale(one.group, fan_in, fan_out)
            blocks.append(MatrixBlock(place, block, matrices, factor, _span(layout, one.param, block)))
    costs = [0.0] * len(some)
    for each in blocks:
        costs[each.place] += each.matrices.cost
    together = []
    for chosen in batches([one.matrices for one in blocks]):
        mine = [blocks[place] for place in chosen]
        together.append((mine, NewtonSchulzBatch([each.matrices for each in mine])))
    alone = not is_sharded(some[0].param) and not replicated
    return Arrangement(places, layouts, together, costs, cuts, alone)


def _span(layout: MatrixLayout, param: Tensor, block: int) -> tuple[int, int] | None:
    if param.ndim != 2 or layout.axes != LINEAR:
        return None
    ranges = layout.rows[block] if layout.rows else ((0, len(param)),)
    return ranges[0] if len(ranges) == 1 else None


@outside_autocast()
def move(moving: Sequence[ParamStep], how: Arrangement, replicas: Replicas | None) -> None:
    """Move parameters that were arranged together: `W ← kept·W − lr·s·NS(M)`.

    Momenta have been averaged, and weights that are not rounded have decayed.
    """
    if not how.is_alone:
        for one, update in zip(moving, orthogonalised(moving, how, replicas), strict=True):
            _add([local(one.param)], [update.to(one.param.dtype)], -one.lr, one.kept)
        return
    for blocks, batch in how.batches:
        made = batch(partial(_fill, moving=moving, how=how, blocks=blocks))
        _move_blocks(moving, how, blocks, made)


@outside_autocast()
def orthogonalised(moving: Sequence[ParamStep], how: Arrangement, replicas: Replicas | None) -> list[Tensor]:
    """`s·NS(M)` of parameters that were arranged together: this process's part of each."""
    work, every = partial(_worked, how), list(range(len(moving)))
    if how.is_alone:
        return work(every, _aheads(moving))
    sent = [one.to(_travelling(moving[0].param)) for one in _aheads(moving)]
    if how.cuts:
        shapes = [one.param.shape for one in moving]
        return sharded_results(how.cuts, shapes, sent, how.costs, work)
    wholes = [gathered(piece, one.param) for piece, one in zip(sent, moving, strict=True)]
    results = work(every, wholes) if replicas is None else replicas.results(wholes, how.costs, work)
    return [scattered(result, one.param) for result, one in zip(results, moving, strict=True)]


def ahead(grads: Sequence[Tensor], buffers: Sequence[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """What is orthogonalised: the momenta, or with Nesterov's form their averages with the gradients."""
    if not group["nesterov"]:
        return list(buffers)
    return list(torch._foreach_lerp(list(grads), list(buffers), group["momentum"]))


def _move_blocks(
    moving: Sequence[ParamStep], how: Arrangement, blocks: Sequence[MatrixBlock], made: Tensor
) -> None:
    """Move the blocks of one batch."""
    alike = blocks[0].matrices
    if not alike.is_large and alike.dtype not in ROUNDED:
        made = made.to(alike.dtype)
    matrices = made.unbind()
    adding: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = {}
    first = 0
    for each in blocks:
        one = moving[each.place]
        targets, updates = adding.setdefault((-one.lr * each.scale, one.kept), ([], []))
        if each.span is not None:
            targets.append(_rows(one.param, each.span))
            updates.append(matrices[first])
        else:
            stack = made[first : first + each.matrices.count]
            for target, update in how.layouts[each.place].places(one.param, each.block, stack):
                targets.append(target)
                updates.append(update)
        first += each.matrices.count
    for (alpha, kept), (targets, updates) in adding.items():
        _add(targets, updates, alpha, kept)


def _fill(
    slots: list[Tensor], moving: Sequence[ParamStep], how: Arrangement, blocks: Sequence[MatrixBlock]
) -> None:
    """Copy what is orthogonalised into a batch."""
    if blocks[0].matrices.is_large and all(each.span is not None for each in blocks):
        for slot, each in zip(slots, blocks, strict=True):
            one, span = moving[each.place], each.span or (0, 0)
            weight = one.group["momentum"] if one.group["nesterov"] else 1.0
            # Averages and rounds at once.
            torch.lerp(_rows(one.grad, span), _rows(one.buffer, span), weight, out=slot)
        return
    needed = list(dict.fromkeys(each.place for each in blocks))
    drawn = dict(zip(needed, _aheads([moving[place] for place in needed]), strict=True))
    _put(slots, [drawn[each.place] for each in blocks], how, blocks)


def _put(
    slots: list[Tensor], tensors: Sequence[Tensor], how: Arrangement, blocks: Sequence[MatrixBlock]
) -> None:
    sources: list[Tensor] = []
    for tensor, each in zip(tensors, blocks, strict=True):
        if each.span is not None:
            sources.append(_rows(tensor, each.span))
        else:
            sources += how.layouts[each.place].matrices(tensor)[each.block].unbind()
    torch._foreach_copy_(slots, sources)


def _rows(tensor: Tensor, span: tuple[int, int]) -> Tensor:
    return tensor if span == (0, len(tensor)) else tensor[span[0] : span[1]]


def _aheads(moving: Sequence[ParamStep]) -> list[Tensor]:
    """`ahead` for parameters of several groups."""
    found = []
    for _, steps in itertools.groupby(moving, key=lambda one: id(one.group)):
        some = list(steps)
        found += ahead([one.grad for one in some], [one.buffer for one in some], some[0].group)
    return found


def _worked(how: Arrangement, places: list[int], wholes: list[Tensor]) -> list[Tensor]:
    """`s·NS` of whole tensors, in their shapes."""
    whole = dict(zip(places, wholes, strict=True))
    results = {place: torch.empty_like(tensor) for place, tensor in whole.items()}
    for blocks, batch in how.batches:
        mine = [each for each in blocks if each.place in whole]
        if not mine:
            continue
        if len(mine) < len(blocks):
            batch = NewtonSchulzBatch([each.matrices for each in mine])
        tensors = [whole[each.place] for each in mine]
        made = batch(partial(_put, tensors=tensors, how=how, blocks=mine))
        for each, stack in zip(mine, made.split([each.matrices.count for each in mine]), strict=True):
            update = stack.to(whole[each.place].dtype)
            for target, part in how.layouts[each.place].places(results[each.place], each.block, update):
                torch.mul(part, each.scale, out=target)
    return [results[place] for place in places]


def _add(targets: list[Tensor], updates: list[Tensor], alpha: float, kept: float) -> None:
    """`W ← W + alpha·A`; where W is rounded `W ← kept·W + alpha·A`, with one rounding."""
    if targets[0].dtype in ROUNDED:
        exact = [target.float() for target in targets]
        torch._foreach_mul_(exact, kept)
        torch._foreach_add_(exact, [update.float() for update in updates], alpha=alpha)
        torch._foreach_copy_(targets, exact)
    elif targets[0].dtype == updates[0].dtype:
        torch._foreach_add_(targets, updates, alpha=alpha)
    else:
        for target, update in zip(targets, updates, strict=True):
            target.add_(update, alpha=alpha)


def _travelling(param: Tensor) -> torch.dtype:
    """The dtype in which matrices are sent: on an accelerator Newton–Schulz rounds to bfloat16 anyway."""
    return torch.bfloat16 if param.device.type != "cpu" and param.dtype != torch.float64 else param.dtype
