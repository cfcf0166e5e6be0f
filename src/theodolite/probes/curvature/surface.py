"""The loss at many places near some weights: forward passes only, one after the other or many at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batch
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.probes.curvature.axes import Axes
from theodolite.probes.curvature.objective import Objective

BatchNorm = Literal["batch", "frozen"]

MOST_AT_ONCE = 32
"""Places that a GPU is given at a time; half as many when its memory is full."""


def losses(
    objective: Objective,
    axes: Axes,
    places: Tensor,
    *,
    progress: Callable[[float], None] | None = None,
) -> Tensor:
    """The loss at each place, a mean over all batches; (n, axes) → (n,), in float64 on the CPU.

    A place that gives nan or infinity has that value. Each batch is drawn once and seen from all places, so a
    loader that shuffles does not tell one place from another.
    """
    return objective.averaged(lambda: _own_losses(objective, axes, places, progress)).cpu()


def _own_losses(
    objective: Objective, axes: Axes, places: Tensor, progress: Callable[[float], None] | None
) -> Tensor:
    """Of this process's batches, on the device of the model."""
    total = torch.zeros(len(places), dtype=torch.float64)
    share_done = 0.0
    surface = _Surface(objective, axes)
    for batch, share in objective.draw():
        done = 0
        while done < len(places):
            some = places[done : done + surface.at_once]
            values = surface(some, batch)
            if values is None:
                continue  # again, with fewer at once
            total[done : done + len(some)] += share * values
            done += len(some)
            if progress is not None:
                progress(share_done + share * done / len(places))
        share_done += share
    return total.to(objective.device)


@contextmanager
def batch_norms(model: nn.Module, how: BatchNorm) -> Iterator[None]:
    """Let batch norms take the statistics of the batch (`batch`), or those they have stored (`frozen`).

    Stored ones are not changed by what happens inside.
    """
    if how not in get_args(BatchNorm):
        raise UseError(f"batch_norm is {how!r}: it is {' or '.join(map(repr, get_args(BatchNorm)))}")
    norms = with_statistics(model)
    before = [(norm.training, norm.track_running_stats) for norm in norms]
    try:
        for norm in norms:
            norm.training = how == "batch"
            if norm.training:
                norm.track_running_stats = False  # in training mode: use none, and store none
        yield
    finally:
        for norm, (training, tracks) in zip(norms, before, strict=True):
            norm.training, norm.track_running_stats = training, tracks


def with_statistics(model: nn.Module) -> list[nn.modules.batchnorm._NormBase]:
    """The modules that store statistics of the batches they have seen."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None
    ]


class _Surface:
    """The loss on one batch as a function of places."""

    def __init__(self, objective: Objective, axes: Axes) -> None:
        self._objective, self._axes = objective, axes.vectors
        self.at_once = _first_try(objective.device)

    def __call__(self, places: Tensor, batch: Batch) -> Tensor | None:
        """The loss at some places; None if they are to be fewer at once."""
        places = places.to(self._objective.device)
        if len(places) == 1:
            return self._one(places[0], batch)[None].double().cpu()
        try:
            with self._objective.conditions(), torch.no_grad():
                many = torch.func.vmap(lambda place: self._loss(place, batch), randomness="same")
                return many(places).double().cpu()
        except torch.OutOfMemoryError:
            self.at_once = min(self.at_once, len(places)) // 2
            torch.cuda.empty_cache()
        except Exception:  # not everything can be vectorised; what is really wrong shows one by one
            self.at_once = 1
        return None

    def _one(self, place: Tensor, batch: Batch) -> Tensor:
        with self._objective.conditions(), torch.no_grad():
            return self._loss(place, batch)

    def _loss(self, place: Tensor, batch: Batch) -> Tensor:
        moved = {
            name: sum((at * axis[name] for at, axis in zip(place, self._axes, strict=True)), tensor.detach())
            for name, tensor in self._objective.tensors.items()
        }
        chosen = {name: tensor.to(self._objective.dtype) for name, tensor in moved.items()}
        value = self._objective.loss(self._objective.forward(chosen, batch), batch[1])
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UseError(
                f"loss(logits, targets) returned {described(value)}, not one number. Reduce it, as with "
                ".mean()"
            )
        return value.reshape(())


def _first_try(device: torch.device) -> int:
    """On a CPU many at once take as long as one after the other, and more memory."""
    return 1 if device.type == "cpu" else MOST_AT_ONCE
