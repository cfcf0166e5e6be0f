"""The loss of every example by itself: `loss(logits[i:i+1], targets[i:i+1])`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from theodolite.anatomy.names import unwrap
from theodolite.core.batches import Batch, Batches, device_of, on_device
from theodolite.core.building import in_one_line
from theodolite.core.calling import Loss, call, described, logits, require_logits
from theodolite.core.errors import UseError
from theodolite.core.examples import batches_of, each_batch, num_examples
from theodolite.core.progress import Progress, silent
from theodolite.probes.eval_mode import at_rest

HALVES = (torch.float16, torch.bfloat16)

AGREEMENT = 1e-3
"""How far the loss of a batch may be from the mean over its examples, relative to their mean size."""


def example_losses(loss: Loss, found: Tensor, targets: Any) -> Tensor:
    """The loss of every example by itself, (B,), with its graph.

    >>> found, targets = torch.tensor([[0.0, 0.0], [0.0, 30.0]]), torch.tensor([1, 1])
    >>> example_losses(nn.functional.cross_entropy, found, targets)
    tensor([0.6931, 0.0000])
    """
    require_logits(loss, "A loss for each example")
    if not isinstance(found, Tensor) or not found.ndim:
        raise UseError(f"the logits are {described(found)}: their dimension 0 has to be the examples")
    number = found.shape[0]
    leaves, shape = tree_flatten(targets)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for index in tensors:
        if not leaves[index].ndim or leaves[index].shape[0] != number:
            raise UseError(
                f"the targets hold {described(leaves[index])} beside logits of shape {tuple(found.shape)}: "
                f"dimension 0 has to be the {number} examples in both, so that each has a loss of its own"
            )
    if found.dtype in HALVES:
        found = found.float()

    def one(row: Tensor, *rows: Tensor) -> Tensor:
        own = list(leaves)
        for index, target in zip(tensors, rows, strict=True):
            own[index] = target[None]
        return scalar_loss(loss(row[None], tree_unflatten(own, shape)))

    columns = [found, *(leaves[index] for index in tensors)]
    if number > 1:
        try:
            with warnings.catch_warnings(action="ignore"):
                together: Tensor = torch.func.vmap(one)(*columns)
            return together
        except UseError:
            raise
        except Exception:  # the loss branches on values or draws random numbers: run one by one
            pass
    try:
        # unbind, not found[i]: the gradient of each of those would be as large as all logits
        return torch.stack(
            [one(*rows) for rows in zip(*(column.unbind() for column in columns), strict=True)]
        )
    except UseError:
        raise
    except Exception as error:
        raise UseError(
            f"the loss of one example, loss(logits[i:i+1], targets[i:i+1]), failed: {in_one_line(error)}. "
            "Give a loss that accepts a batch of one"
        ) from error


def losses_of(
    model: nn.Module, loss: Loss, batches: Batches, progress: Progress | None = None, *, finite: bool = True
) -> Tensor:
    """The loss of every example, (n,) in float64 on the CPU, in eval mode; the model is left as it was.

    Args:
        model: any module, on any device, wrapped or not.
        loss: `loss(logits, targets) -> scalar`. A loss that `disagreement` refuses is refused.
        batches: a pair (inputs, targets), a list of pairs or a DataLoader.
        progress: called with a title and the fraction done.
        finite: refuse losses that are not finite.

    >>> class Doubling(nn.Module):
    ...     def forward(self, x):
    ...         return 2 * x
    >>> batch = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [4.0]])
    >>> losses_of(Doubling(), nn.functional.mse_loss, [batch, batch])
    tensor([0., 4., 0., 4.], dtype=torch.float64)
    """
    require_logits(loss, "A loss for each example")
    model = unwrap(model)
    device = device_of(model)
    tell = progress or silent
    parts = []
    with at_rest(model):
        for index, batch in enumerate(each_batch(batches)):
            inputs, targets = on_device(batch, str(device))
            found = checked_logits(call(model, inputs), batch)
            parts.append(example_losses(loss, found, targets).double())
            if not index:
                disagreement(loss, found, targets, parts[0])
            if finite:
                refuse_infinite(parts[-1], index)
            if isinstance(batches, Sized):
                tell("losses", (index + 1) / len(batches_of(batches)))
    return torch.cat(parts).cpu()


@torch.no_grad()
def disagreement(loss: Loss, found: Tensor, targets: Any, own: Tensor | None = None) -> str | None:
    """How the loss of a batch differs from those of its examples, as a sentence; None if it does not.

    They agree if the mean or the sum over examples is the loss of the batch. A loss that is something else
    for an example alone is refused: class weights that cancel in a batch of one, or a comparison between
    examples. `own` are the examples' losses, if they are known.

    >>> found, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    >>> disagreement(nn.functional.cross_entropy, found, targets)
    >>> disagreement(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 9.0])), found, targets)
    Traceback (most recent call last):
    theodolite.UseError: ...
    """
    own = (example_losses(loss, found, targets) if own is None else own).double()
    if len(own) < 2 or not bool(own.isfinite().all()):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            together = float(loss(found.float() if found.dtype in HALVES else found, targets))
    except Exception:  # a loss that takes one example at a time has no batch loss to compare with
        return None
    mean, total = float(own.mean()), float(own.sum())
    # Losses may have both signs, so rounding is relative to their sizes, not to their mean.
    close = AGREEMENT * float(own.abs().mean())
    agree = abs(together - mean) <= close or abs(together - total) <= len(own) * close
    if agree or not math.isfinite(together):
        return None
    if isinstance(getattr(loss, "weight", None), Tensor):
        raise UseError(
            f"{type(loss).__name__}(weight=…) divides by the weights of the batch, so they cancel for an "
            f"example alone: the mean over the examples' own losses is {mean:.3g}, the loss of the batch "
            f"{together:.3g}. Give loss = lambda logits, y: (w[y] * cross_entropy(logits, y, "
            "reduction='none')).mean(), or reduction='sum'"
        )
    if float(own.abs().max()) <= AGREEMENT * abs(together):
        raise UseError(
            f"the loss of an example alone is 0, that of {len(own)} together {together:.3g}: the loss "
            "compares the examples of a batch, so none has a loss of its own. Put what is compared into one "
            "example, as a pair in one row, or use another loss"
        )
    return (
        f"the mean over the examples' own losses, {mean:.3g}, differs from the loss of the batch, "
        f"{together:.3g}: results are about the former, in which every example counts the same"
    )


def checked_logits(output: Any, batch: Batch) -> Tensor:
    """The logits of a batch; refused if dimension 0 is not the examples."""
    found = logits(output)
    if not found.ndim or found.shape[0] != num_examples(batch):
        raise UseError(
            f"the model made logits of shape {tuple(found.shape)} of {num_examples(batch)} examples: "
            "dimension 0 has to be the examples, so that each has a loss of its own"
        )
    return found


def refuse_infinite(losses: Tensor, index: int) -> None:
    """Raise if a loss is not finite, naming the batch and the example."""
    bad = (~losses.detach().isfinite()).nonzero().flatten().tolist()
    if bad:
        raise UseError(
            f"the loss of example {bad[0]} of batch {index} is {float(losses.detach()[bad[0]])} "
            f"({len(bad)} of its {len(losses)} examples have such a loss). Check its inputs and targets, and "
            "the weights"
        )


def scalar_loss(value: Any) -> Tensor:
    """What a loss returned, as a tensor without dimensions."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UseError(
            f"loss(logits, targets) returned {described(value)}, not one number. Reduce it, as with .mean()"
        )
    return value.reshape(())
