"""The independent units of a sample: sequences, images; each index of dimension 0 of a batch is one.

Tokens of one sequence know of each other, and so do their losses. What is claimed of a mean with a standard
error is claimed over units, and the loss of a unit is that of the unit alone: `loss(logits[u:u+1],
targets[u:u+1])`.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from theodolite.anatomy.names import unwrap
from theodolite.core.batches import Batch, Batches, on_device
from theodolite.core.building import in_one_line, kept_generators, untouched_randomness
from theodolite.core.calling import Loss, call, described, logits, require_logits
from theodolite.core.errors import UseError
from theodolite.probes.curvature.products import Progress
from theodolite.probes.eval_mode import at_rest

HALVES = (torch.float16, torch.bfloat16)

AGREEMENT = 1e-3
"""How far a batch's loss may be from the mean of its units', over the mean size of theirs."""


def unit_losses(loss: Loss, found: Tensor, targets: Any) -> Tensor:
    """The loss of every unit by itself, (B,), with its graph.

    >>> found, targets = torch.tensor([[0.0, 0.0], [0.0, 30.0]]), torch.tensor([1, 1])
    >>> unit_losses(nn.functional.cross_entropy, found, targets)
    tensor([0.6931, 0.0000])
    """
    require_logits(loss, "A loss for each unit")
    if not isinstance(found, Tensor) or not found.ndim:
        raise UseError(f"the logits are {described(found)}: their dimension 0 has to be the units")
    number = found.shape[0]
    leaves, shape = tree_flatten(targets)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for index in tensors:
        if not leaves[index].ndim or leaves[index].shape[0] != number:
            raise UseError(
                f"the targets hold {described(leaves[index])} beside logits of shape {tuple(found.shape)}: "
                f"dimension 0 has to be the {number} units in both, so that each has a loss of its own"
            )
    if found.dtype in HALVES:
        found = found.float()

    def one(row: Tensor, *rows: Tensor) -> Tensor:
        own = list(leaves)
        for index, target in zip(tensors, rows, strict=True):
            own[index] = target[None]
        return _number(loss(row[None], tree_unflatten(own, shape)))

    columns = [found, *(leaves[index] for index in tensors)]
    if number > 1:
        try:
            with warnings.catch_warnings(action="ignore"):
                together: Tensor = torch.func.vmap(one)(*columns)
            return together
        except UseError:
            raise
        except Exception:  # it looks at values, or draws: each by itself then
            pass
    try:
        # unbind, not found[u]: the gradient of each of those would be as large as all logits
        return torch.stack(
            [one(*rows) for rows in zip(*(column.unbind() for column in columns), strict=True)]
        )
    except UseError:
        raise
    except Exception as error:
        raise UseError(
            f"the loss of one unit, loss(logits[u:u+1], targets[u:u+1]), failed: {in_one_line(error)}. Give "
            "a loss that can be taken of each unit by itself"
        ) from error


def disagreement(loss: Loss, found: Tensor, targets: Any) -> str | None:
    """What the units' own losses leave out of the loss of their batch, in words; None if they make it up.

    They do if their mean or their sum is the loss of the batch. Where they are another loss altogether it is
    refused: class weights that cancel in a batch of one, or units that are only compared with each other.

    >>> found, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    >>> disagreement(nn.functional.cross_entropy, found, targets)
    >>> disagreement(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 9.0])), found, targets)
    Traceback (most recent call last):
    theodolite.UseError: ...
    """
    with torch.no_grad():
        return _disagreement(loss, found, targets, unit_losses(loss, found, targets))


def losses_of(
    model: nn.Module, loss: Loss, batches: Batches, progress: Progress | None = None, *, finite: bool = True
) -> Tensor:
    """The loss of every unit, (n,) in float64 on the CPU, in eval mode; the model is left as it was.

    Args:
        model: any module, on any device, wrapped or not.
        loss: `loss(logits, targets) -> scalar`. A loss that `disagreement` refuses is refused.
        batches: a pair (inputs, targets), a list of pairs or a DataLoader.
        progress: is told which share of the work is done.
        finite: refuse losses that are no finite numbers.

    >>> class Doubling(nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x
    >>> batch = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [4.0]])
    >>> losses_of(Doubling(), nn.functional.mse_loss, [batch, batch])
    tensor([0., 4., 0., 4.], dtype=torch.float64)
    """
    require_logits(loss, "A loss for each unit")
    model = unwrap(model)
    device = device_of(model)
    parts = []
    with at_rest(model):
        for index, batch in enumerate(each(batches)):
            inputs, targets = on_device(batch, str(device))
            found = checked_logits(call(model, inputs), batch)
            parts.append(unit_losses(loss, found, targets).double())
            if not index:
                _disagreement(loss, found, targets, parts[0])
            if finite:
                refuse_infinite(parts[-1], index)
            if progress is not None and isinstance(batches, Sized):
                progress((index + 1) / len(batches_of(batches)))
    return torch.cat(parts).cpu()


def count(batches: Batches) -> int:
    """How many units there are.

    >>> count([(torch.zeros(3, 8), torch.zeros(3)), (torch.zeros(2, 8), torch.zeros(2))])
    5
    """
    return sum(units_in(batch) for batch in each(batches))


def fingerprints(batches: Batches) -> list[bytes]:
    """A hash of the inputs of every unit: two units with the same one have the same inputs.

    Numbers count, not how they are stored. Copies that differ in one number are not seen to be copies.

    >>> first, second = fingerprints((torch.tensor([[1, 2], [1, 2]]), torch.tensor([0, 1])))
    >>> first == second
    True
    """
    found: list[bytes] = []
    for batch in each(batches):
        number = units_in(batch)
        leaves = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
        columns = [_plain(leaf) for leaf in leaves if leaf.ndim and leaf.shape[0] == number]
        for unit in range(number):
            made = hashlib.blake2b(digest_size=16)
            for column in columns:
                made.update(f"{column.dtype}{tuple(column.shape[1:])}".encode())
                made.update(column[unit].numpy().tobytes())
            found.append(made.digest())
    return found


def take(batch: Batch, units: Sequence[int] | slice) -> Batch:
    """Some units of a batch. Tensors that are not one for each unit, as positions, stay whole.

    >>> take((torch.tensor([[1], [2], [3]]), torch.tensor([4, 5, 6])), [0, 2])
    (tensor([[1],
            [3]]), tensor([4, 6]))
    """
    number = units_in(batch)
    chosen = units if isinstance(units, slice) else list(units)

    def cut(leaf: Any) -> Any:
        return leaf[chosen] if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == number else leaf

    taken: Batch = tree_map(cut, batch)
    return taken


def units_in(batch: Batch) -> int:
    """How many units a batch has: the length of its first input."""
    tensors = [leaf for leaf in tree_leaves(batch[0]) if isinstance(leaf, Tensor)]
    if not tensors or not tensors[0].ndim:
        raise UseError(f"the inputs are {described(batch[0])}: their dimension 0 has to be the units")
    return tensors[0].shape[0]


def each(batches: Batches) -> Iterator[Batch]:
    """The batches, one by one, the same in every pass: random numbers that are drawn for them are given back.

    A batch without units is left out.
    """
    pairs = batches_of(batches)
    empty = True
    with kept_generators(pairs):
        with untouched_randomness():
            waiting = iter(pairs)
        while True:
            with untouched_randomness():
                try:
                    pair = next(waiting)
                except StopIteration:
                    break
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
                raise UseError(f"the batches hold {described(pair)}, not pairs (inputs, targets)")
            batch = _opened(pair[0]), _opened(pair[1])
            if units_in(batch):
                empty = False
                yield batch
    if empty:
        raise UseError("the batches are empty: there is not one unit in them")


def batches_of(batches: Batches) -> Any:
    """What can be asked for its batches again and again: of a single pair a list of one.

    Two pairs are two batches, not inputs and targets of two tensors each.
    """
    if _is_pair(batches) and not all(map(_is_pair, batches)):
        return [batches]
    if isinstance(batches, Iterator) or not isinstance(batches, Iterable):
        raise UseError(
            f"the batches are {described(batches)}: give a pair (inputs, targets), a list of pairs or a "
            "DataLoader, which can be asked for them more than once"
        )
    return batches


def checked_logits(output: Any, batch: Batch) -> Tensor:
    """The logits of a batch; refused if they are not one for each unit."""
    found = logits(output)
    if not found.ndim or found.shape[0] != units_in(batch):
        raise UseError(
            f"the model made logits of shape {tuple(found.shape)} of {units_in(batch)} units: dimension 0 "
            "has to be the units, so that each has a loss of its own"
        )
    return found


def refuse_infinite(losses: Tensor, index: int) -> None:
    """Raise if a loss is no finite number, naming the batch and the unit."""
    bad = (~losses.detach().isfinite()).nonzero().flatten().tolist()
    if bad:
        raise UseError(
            f"the loss of unit {bad[0]} of batch {index} is {float(losses.detach()[bad[0]])} "
            f"({len(bad)} of its {len(losses)} units have such a loss). Look at its inputs and targets, or "
            "at the weights"
        )


def device_of(model: nn.Module) -> torch.device:
    """Where a model is."""
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _disagreement(loss: Loss, found: Tensor, targets: Any, own: Tensor) -> str | None:
    if len(own) < 2 or not bool(own.isfinite().all()):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            together = float(loss(found.float() if found.dtype in HALVES else found, targets))
    except Exception:  # a loss that takes one unit at a time has no other loss to disagree with
        return None
    own = own.detach().double()
    mean, total = float(own.mean()), float(own.sum())
    # Losses may have both signs: what rounding does is told from their sizes, not from their mean.
    close = AGREEMENT * float(own.abs().mean())
    if (
        not math.isfinite(together)
        or abs(together - mean) <= close
        or abs(together - total) <= len(own) * close
    ):
        return None
    if isinstance(getattr(loss, "weight", None), Tensor):
        raise UseError(
            f"{type(loss).__name__}(weight=…) divides by the weights of the batch, so that they cancel where "
            f"a unit is alone: the mean of the units' own losses is {mean:.3g}, the loss of the batch "
            f"{together:.3g}. Give loss = lambda logits, y: (w[y] * cross_entropy(logits, y, "
            "reduction='none')).mean(), or reduction='sum'"
        )
    if float(own.abs().max()) <= AGREEMENT * abs(together):
        raise UseError(
            f"the loss of a unit alone is 0, that of {len(own)} together {together:.3g}: the loss compares "
            "the units of a batch with each other, so none has a loss of its own. Make what is compared one "
            "unit, as a pair in one row, or take another loss"
        )
    return (
        f"the mean of the units' own losses, {mean:.3g}, is not the loss of the batch, {together:.3g}: "
        "all that is said is about the first, in which every unit counts the same"
    )


def _opened(part: Any) -> Any:
    """A mapping as a dict: another kind, as of a tokenizer, is a leaf to all that looks for tensors."""
    return dict(part) if isinstance(part, Mapping) else part


def _number(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UseError(
            f"loss(logits, targets) returned {described(value)}, not one number. Reduce it, as with .mean()"
        )
    return value.reshape(())


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _plain(leaf: Tensor) -> Tensor:
    """The same numbers in one dtype for each kind, on the CPU."""
    leaf = leaf.detach().cpu()
    if leaf.is_complex():
        return leaf.to(torch.complex128).contiguous()
    return (leaf.double() + 0.0 if leaf.is_floating_point() else leaf.long()).contiguous()
