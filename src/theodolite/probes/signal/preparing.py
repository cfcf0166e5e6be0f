"""What the signal needs before it runs: the network, the points, two samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch import nn

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.batches import Batch, Batches, on_device
from theodolite.core.building import evaluated, untouched_randomness
from theodolite.core.calling import call, logits
from theodolite.core.errors import UseError
from theodolite.core.examples import batches_of, count_examples, each_batch, num_examples, take
from theodolite.core.finite import among, not_finite
from theodolite.probes.curvature.products import Progress
from theodolite.surgery import Point, Points, find_points


def checked(model: nn.Module, ridge: float, delta: float) -> nn.Module:
    """The bare network; refused if nothing could be measured on it."""
    if not isinstance(model, nn.Module):
        raise UseError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if not (math.isfinite(ridge) and ridge > 0):
        raise UseError(f"ridge is {ridge!r}: it has to be a finite number above 0, as 0.01")
    if not 0 < delta < 1:
        raise UseError(f"delta is {delta!r}: it lies between 0 and 1, as 0.05")
    for name, tensor in model.named_parameters():
        if type(tensor).__name__ in ("DTensor", "FlatParameter"):
            raise UseError(f"{name} is sharded ({type(tensor).__name__}): measure an unsharded copy")
    return unwrap(model)


def points_of(
    model: nn.Module,
    batch: Batch,
    device: torch.device,
    points: Points | Iterable[Point | str | int] | None,
) -> Points:
    """The points that are meant; found on two units if they are not known."""
    if isinstance(points, Points):
        known = points
    else:
        inputs = on_device(take(batch, slice(0, 2)), str(device))[0]
        known = find_points(model, inputs)
        if not known.found:
            _refuse_not_finite(model, inputs)
        if points is not None:
            known = Points(tuple(known.at(one) for one in points), known.left)
    if not known.found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in known.left.items())
        raise UseError(f"there is no point where a block could be inserted. {reasons or 'None was given'}")
    return known


def samples(batches: Batches, held_out: Batches | None) -> tuple[Iterator[Batch], Iterator[Batch]]:
    """The batches that directions are estimated on, and those that judge them."""
    judges = batches_of(batches if held_out is None else held_out)
    if isinstance(judges, (list, tuple)):  # to count the units of a loader takes a pass over it
        refuse_few(count_examples(judges) // (2 if held_out is None else 1))
    if held_out is None:
        number = count_examples(batches)
        middle = (number + 1) // 2
        return _between(batches, 0, middle), _between(batches, middle, number)
    return each_batch(batches), each_batch(held_out)


def refuse_few(units: int) -> None:
    """Raise if too few units judge."""
    if units < 2:
        raise UseError(
            f"the held-out units are {units}: it takes at least 2 to know how far a gain may be off. Give "
            "more batches, or held_out"
        )


class Steps:
    """Tells which share of the batches was run."""

    def __init__(self, progress: Progress | None, batches: Batches, held_out: Batches | None) -> None:
        samples = [batches_of(batches), *([] if held_out is None else [batches_of(held_out)])]
        self.total = sum(len(one) for one in samples if isinstance(one, Sized))
        self.tell = progress if all(isinstance(one, Sized) for one in samples) else None
        self.done = 0

    def took_one(self) -> None:
        """One more batch."""
        self.done += 1
        if self.tell is not None:
            self.tell(min(1.0, self.done / self.total))


def freeze(model: nn.Module) -> None:
    """No weight has a gradient: stand-ins, which `at_rest` takes away again."""
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None:
                plain = tensor.detach().clone() if tensor.is_inference() else tensor.detach()
                module._parameters[name] = plain  # type: ignore[assignment]


def _refuse_not_finite(model: nn.Module, inputs: Any) -> None:
    """Raise if there are no points because numbers are not finite: what is nan is never what it was."""
    weights = dict(canonical_parameters(model))
    if bad := not_finite(weights):
        raise UseError(
            f"weights are not finite, in {among(bad, len(weights))}: there is no signal to measure"
        )
    with torch.no_grad(), evaluated(model), untouched_randomness(0):
        found = logits(call(model, inputs))
    if not bool(found.isfinite().all()):
        raise UseError("the logits are not finite: there is no signal to measure. Look for what overflows")


def _between(batches: Batches, start: int, stop: int) -> Iterator[Batch]:
    """Some units that follow each other, counted through all batches."""
    for batch in each_batch(batches):
        if stop <= 0:
            return
        number = num_examples(batch)
        if start < number:
            yield take(batch, slice(max(start, 0), min(stop, number)))
        start, stop = start - number, stop - number
