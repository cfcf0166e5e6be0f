"""One step of many matrices: what is made orthogonal together, where, and how the weights move by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from theodolite.core.exclusive import outside_autocast
from theodolite.optimizers.matrices import LINEAR, Layout
from theodolite.optimizers.sharding import (
    Cut,
    Replicas,
    gathered,
    is_sharded,
    local,
    scattered,
    sharded_results,
)
from theodolite.optimizers.stacking import Batch, Matter, batches

ROUNDED = (torch.bfloat16, torch.float16)
"""Weights of these are moved in float32, and rounded once."""


class Moving(NamedTuple):
    """One parameter in a step; of gradient and momentum what this process holds."""

    param: Tensor
    grad: Tensor
    buffer: Tensor
    group: dict[str, Any]
    lr: float

    @property
    def kept(self) -> float:
        """What decay leaves of the weight."""
        return 1 - self.lr * float(self.group["weight_decay"])


class Block(NamedTuple):
    """Matrices of one parameter, or of a block of its rows."""

    place: int
    """Of the parameter, among those that are arranged together."""
    block: int
    matter: Matter
    scale: float
    span: tuple[int, int] | None
    """The rows that are this matrix, where the parameter is (out, in) and they are in one piece."""


@dataclass(frozen=True)
class Arranged:
    """What can be told of a step before it is made: the same for all steps of the same parameters."""

    places: list[int]
    """Of the parameters, among all that move."""
    layouts: list[Layout]
    batches: list[tuple[list[Block], Batch]]
    costs: list[float]
    cuts: list[Cut]
    """Of each parameter, if they are cut over processes."""
    is_alone: bool
    """Has this process the parameters for itself?"""


Scales = Mapping[str, Callable[[int, int], float]]


def arranged(moving: Sequence[Moving], scales: Scales, *, replicated: bool) -> list[Arranged]:
    """Parameters that move in the same way, over the same processes, and their batches."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, one in enumerate(moving):
        cut = Cut.of(one.param)
        over = (id(cut.mesh), cut.over) if cut is not None else (is_sharded(one.param),)
        alike.setdefault((*over, one.param.device, one.param.dtype), []).append(place)
    return [_arranged(places, moving, scales, replicated) for places in alike.values()]


def _arranged(places: list[int], moving: Sequence[Moving], scales: Scales, replicated: bool) -> Arranged:
    some = [moving[place] for place in places]
    layouts = [Layout.of(one.group, one.param) for one in some]
    cuts = [cut for one in some if (cut := Cut.of(one.param)) is not None]
    blocks: list[Block] = []
    for place, (one, layout) in enumerate(zip(some, layouts, strict=True)):
        fans = layout.fans(one.param.shape)
        count = one.param.numel() // max(1, sum(math.prod(pair) for pair in fans))
        for block, (fan_in, fan_out) in enumerate(fans):
            options = one.param.dtype, one.param.device, one.group["steps"], one.group["eps"]
            matter = Matter(count, (fan_out, fan_in), *options)
            scale = scales[one.group["scale"]](fan_in, fan_out)
            blocks.append(Block(place, block, matter, scale, _span(layout, one.param, block)))
    costs = [0.0] * len(some)
    for each in blocks:
        costs[each.place] += each.matter.cost
    together = []
    for chosen in batches([one.matter for one in blocks]):
        mine = [blocks[place] for place in chosen]
        together.append((mine, Batch([each.matter for each in mine])))
    alone = not is_sharded(some[0].param) and not replicated
    return Arranged(places, layouts, together, costs, cuts, alone)


def _span(layout: Layout, param: Tensor, block: int) -> tuple[int, int] | None:
    if param.ndim != 2 or layout.axes != LINEAR:
        return None
    ranges = layout.rows[block] if layout.rows else ((0, len(param)),)
    return ranges[0] if len(ranges) == 1 else None


@outside_autocast()
def move(moving: Sequence[Moving], how: Arranged, replicas: Replicas | None) -> None:
    """The step of parameters that were arranged together. Momenta are averaged, exact weights decayed."""
    if how.is_alone:
        for blocks, batch in how.batches:
            made = batch(partial(_fill, moving=moving, how=how, blocks=blocks))
            _move_blocks(moving, how, blocks, made)
        return

    def work(places: list[int], wholes: list[Tensor]) -> list[Tensor]:
        return _worked(how, places, wholes)

    sent = [one.to(_travelling(moving[0].param)) for one in _aheads(moving)]
    if how.cuts:
        shapes = [one.param.shape for one in moving]
        pieces = sharded_results(how.cuts, shapes, sent, how.costs, work)
    else:
        wholes = [gathered(piece, one.param) for piece, one in zip(sent, moving, strict=True)]
        if replicas is None:
            results = work(list(range(len(moving))), wholes)
        else:
            results = replicas.results(wholes, how.costs, work)
        pieces = [scattered(result, one.param) for result, one in zip(results, moving, strict=True)]
    for one, piece in zip(moving, pieces, strict=True):
        _add([local(one.param)], [piece.to(one.param.dtype)], -one.lr, one.kept)


def ahead(grads: Sequence[Tensor], buffers: Sequence[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """What is made orthogonal: the momenta, with Nesterov's form once more averaged with the gradients."""
    if not group["nesterov"]:
        return list(buffers)
    return list(torch._foreach_lerp(list(grads), list(buffers), group["momentum"]))


def _move_blocks(moving: Sequence[Moving], how: Arranged, blocks: Sequence[Block], made: Tensor) -> None:
    """Move what this process has for itself by what one batch made."""
    matter = blocks[0].matter
    if not matter.is_large and matter.dtype not in ROUNDED:
        made = made.to(matter.dtype)
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
            stack = made[first : first + each.matter.count]
            for target, update in how.layouts[each.place].places(one.param, each.block, stack):
                targets.append(target)
                updates.append(update)
        first += each.matter.count
    for (alpha, kept), (targets, updates) in adding.items():
        _add(targets, updates, alpha, kept)


def _fill(slots: list[Tensor], moving: Sequence[Moving], how: Arranged, blocks: Sequence[Block]) -> None:
    """Bring what is made orthogonal into a batch."""
    if blocks[0].matter.is_large and all(each.span is not None for each in blocks):
        for slot, each in zip(slots, blocks, strict=True):
            one, span = moving[each.place], each.span or (0, 0)
            weight = one.group["momentum"] if one.group["nesterov"] else 1.0
            # Averaged and rounded at one go.
            torch.lerp(_rows(one.grad, span), _rows(one.buffer, span), weight, out=slot)
        return
    needed = list(dict.fromkeys(each.place for each in blocks))
    drawn = dict(zip(needed, _aheads([moving[place] for place in needed]), strict=True))
    _put(slots, [drawn[each.place] for each in blocks], how, blocks)


def _put(slots: list[Tensor], tensors: Sequence[Tensor], how: Arranged, blocks: Sequence[Block]) -> None:
    sources: list[Tensor] = []
    for tensor, each in zip(tensors, blocks, strict=True):
        if each.span is not None:
            sources.append(_rows(tensor, each.span))
        else:
            sources += how.layouts[each.place].matrices(tensor)[each.block].unbind()
    torch._foreach_copy_(slots, sources)


def _rows(tensor: Tensor, span: tuple[int, int]) -> Tensor:
    return tensor if span == (0, len(tensor)) else tensor[span[0] : span[1]]


def _aheads(moving: Sequence[Moving]) -> list[Tensor]:
    """`ahead` of parameters of several groups, a group at a time."""
    by_group: dict[int, list[int]] = {}
    for place, one in enumerate(moving):
        by_group.setdefault(id(one.group), []).append(place)
    found: list[Tensor] = [one.buffer for one in moving]
    for places in by_group.values():
        some = [moving[place] for place in places]
        made = ahead([one.grad for one in some], [one.buffer for one in some], some[0].group)
        for place, tensor in zip(places, made, strict=True):
            found[place] = tensor
    return found


def _worked(how: Arranged, places: list[int], wholes: list[Tensor]) -> list[Tensor]:
    """`s·NS` of whole tensors, in their shape."""
    whole = dict(zip(places, wholes, strict=True))
    results = {place: torch.empty_like(tensor) for place, tensor in whole.items()}
    for blocks, _ in how.batches:
        mine = [each for each in blocks if each.place in whole]
        if not mine:
            continue
        tensors = [whole[each.place] for each in mine]
        made = Batch([each.matter for each in mine])(partial(_put, tensors=tensors, how=how, blocks=mine))
        first = 0
        for each in mine:
            stack = made[first : first + each.matter.count].to(whole[each.place].dtype)
            for target, update in how.layouts[each.place].places(results[each.place], each.block, stack):
                torch.mul(update, each.scale, out=target)
            first += each.matter.count
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
    """What a matrix travels in: what Newton–Schulz computes in on an accelerator, and rounds to anyway."""
    return torch.bfloat16 if param.device.type != "cpu" and param.dtype != torch.float64 else param.dtype
