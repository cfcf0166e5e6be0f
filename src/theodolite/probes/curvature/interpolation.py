"""The networks on the straight line between two networks: their tensors, and their losses.

Parameters and floating-point buffers are interpolated, `(1 − t)·a + t·b`. Tensors of integers cannot be: a
network in between has those of the nearer end. At 0 and at 1 are the given networks, bit by bit.

Where activations of two networks are not correlated, those of the network half-way vary less than those of
either. So interpolated statistics of batch norms are wrong between the ends, more in every further layer, and
the loss has a barrier that goes away with the network's own statistics.

References:
    Jordan et al., REPAIR: REnormalizing Permuted Activations for Interpolation Repair, 2023.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from theodolite.anatomy.names import canonical_modules, unwrap
from theodolite.core.arguments import one_of
from theodolite.core.batches import Batch, Batches, device_of, on_device
from theodolite.core.building import in_one_line, seed_generators
from theodolite.core.calling import Loss, ModelLoss, call, described, evaluate, with_tensors
from theodolite.core.errors import UseError
from theodolite.core.examples import batches_of, each_batch, num_examples
from theodolite.core.finite import not_finite
from theodolite.probes.example_losses import checked_logits, disagreement, example_losses, scalar_loss

Statistics = Literal["reestimated", "batch", "frozen"]
Unit = Literal["example", "batch"]
Named = Mapping[str, Tensor]


class Interpolation:
    """The networks between `first`, at 0, and `second`, at 1."""

    def __init__(self, first: nn.Module, second: nn.Module | Named) -> None:
        if not isinstance(first, nn.Module):
            raise UseError(f"model_a is {described(first)}, not a torch.nn.Module")
        self.model = unwrap(first)
        there = _paired(first, second)
        counters = {id(norm.num_batches_tracked) for norm in norms_with_statistics(self.model).values()}
        self._ends: dict[str, tuple[Tensor, Tensor]] = {}
        """By the model's own name: both tensors, on the device and in the dtype of the first."""
        self.of_first: set[str] = set()
        """Buffers that the second network does not have."""
        self.kept: list[str] = []
        """Tensors of integers that differ, except for the counters of batch norms."""
        squares, sizes = [], []
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            a = tensor.detach()
            if id(tensor) not in there:
                self.of_first.add(name)
                continue
            b = there[id(tensor)].detach().to(a.device, a.dtype)
            self._ends[name] = a, b
            if not _can_be_mixed(a):
                if id(tensor) not in counters and not torch.equal(a, b):
                    self.kept.append(name)
            elif isinstance(tensor, nn.Parameter):
                for which, end in (("model_a", a), ("model_b", b)):
                    if not_finite({name: end}):
                        raise UseError(
                            f"{name} of {which} holds nan or infinity. Give a checkpoint from before "
                            "training diverged"
                        )
                squares.append(_square(_wide(b) - _wide(a)))
                sizes.append((_square(a), _square(b)))
        self.distance = math.sqrt(math.fsum(squares))
        """The Euclidean distance between the parameters."""
        if self.distance == 0:
            raise UseError(
                "both networks have the same weights, so there is no line between them. If one is a "
                "state_dict() of the other, its tensors are the model's own: keep copy.deepcopy(model."
                "state_dict()) before training goes on"
            )
        self.norms = tuple(math.sqrt(math.fsum(column)) for column in zip(*sizes, strict=True))
        """The Euclidean norms of the parameters of both."""

    def at(self, place: float) -> dict[str, Tensor]:
        """New tensors, by the model's own names, of the network at a place from 0 to 1."""
        return {name: _mixed(a, b, place) for name, (a, b) in self._ends.items()}


class Losses:
    """The losses of the networks of a line on all batches, example by example where that is possible.

    Where the loss of an example alone is not defined, or the examples of a batch share statistics, there is
    one number for each batch. To be used inside `at_rest`.
    """

    def __init__(self, line: Interpolation, loss: Loss, batches: Batches, statistics: Statistics) -> None:
        one_of("batch_norm", statistics, get_args(Statistics))
        self._line, self._batches = line, batches
        has_buffers = isinstance(loss, nn.Module) and next(loss.buffers(), None) is not None
        self._loss: Loss = copy.deepcopy(loss) if has_buffers else loss
        self._norms = norms_with_statistics(line.model)
        self.statistics: Statistics | None = statistics if self._norms else None
        for name in self._norms:
            if statistics == "frozen" and f"{name}.running_mean" in line.of_first:
                raise UseError(
                    f"model_b has no {name}.running_mean, which batch_norm='frozen' interpolates. Give its "
                    "whole state_dict(), or take batch_norm='reestimated'"
                )
        self.unit: Unit
        """What a loss is known for: each example, or each batch only."""
        self.note: str | None
        """Why there is one for each batch only; or how the loss of an example differs from a batch's."""
        self.unit, self.note = self._units()
        self.weights = torch.empty(0, dtype=torch.float64)
        """How much each number counts, after the first call of `at`: 1, or the examples of the batch."""

    def at(self, places: Sequence[float], report: Callable[[float], None]) -> Tensor:
        """The loss at each place of each unit, (places, units) in float64 on the CPU."""
        own: list[dict[str, Tensor]] = [{} for _ in places]
        start = 0.0
        if self.statistics == "reestimated":
            own, start = self._estimated(places, lambda done: report(done / 2)), 0.5
        self._switch(training=self.statistics == "batch")
        columns, weights = [], []
        for index, (batch, done) in enumerate(self._drawn()):
            pairs = zip(places, own, strict=True)
            found = [self._of_batch(self._line.at(place) | more, batch, index) for place, more in pairs]
            columns.append(torch.stack(found))
            weight = 1 if self.unit == "example" else num_examples(batch)
            weights.append(torch.full((len(found[0]),), weight, dtype=torch.float64))
            report(start + (1 - start) * done)
        self.weights = torch.cat(weights)
        return torch.cat(columns, dim=1)

    def _units(self) -> tuple[Unit, str | None]:
        if self.statistics == "batch":
            return "batch", "the examples of a batch share its statistics"
        batch, _ = next(self._drawn())
        try:
            found = checked_logits(self._run(self._line.at(0.0), call, batch[0]), batch)
            own = example_losses(self._loss, found, batch[1])
            return "example", disagreement(self._loss, found, batch[1], own)
        except UseError as error:
            return "batch", str(error)

    def _of_batch(self, tensors: Named, batch: Batch, seed: int) -> Tensor:
        """The losses of a batch, with the same random numbers at each place."""
        seed_generators(seed)
        if self.unit == "example":
            found = checked_logits(self._run(tensors, call, batch[0]), batch)
            return example_losses(self._loss, found, batch[1]).double().cpu()
        value = self._run(tensors, partial(evaluate, self._loss), batch)
        return scalar_loss(value).detach().double().cpu()[None]

    def _estimated(self, places: Sequence[float], report: Callable[[float], None]) -> list[dict[str, Tensor]]:
        """The statistics of each network: averages over batches, in which all examples count the same."""
        found = [
            {
                f"{name}.{kind}": torch.zeros_like(getattr(norm, kind))
                for name, norm in self._norms.items()
                for kind in ("running_mean", "running_var")
            }
            for _ in places
        ]
        seen = 0
        for index, (batch, done) in enumerate(self._drawn()):
            seen += num_examples(batch)
            self._switch(training=True, track_running_stats=True, momentum=num_examples(batch) / seen)
            for place, own in zip(places, found, strict=True):
                seed_generators(index)
                try:
                    self._run(self._line.at(place) | own, self._pass, batch)
                except ValueError as error:  # torch's batch norm refuses one value per channel
                    raise UseError(
                        f"batch norms cannot take statistics of batch {index}: {in_one_line(error)}. Give "
                        "larger batches, or batch_norm='frozen'"
                    ) from error
            report(done)
        return found

    def _pass(self, model: nn.Module, batch: Batch) -> object:
        """A forward pass, for what it does to statistics."""
        if isinstance(self._loss, ModelLoss):
            return evaluate(self._loss, model, batch)
        return call(model, batch[0])

    def _run(self, tensors: Named, act: Callable[..., object], *given: object) -> object:
        return with_tensors(self._line.model, tensors, act, *given)

    def _switch(self, **attributes: object) -> None:
        for norm in self._norms.values():
            for name, value in attributes.items():
                setattr(norm, name, value)

    def _drawn(self) -> Iterator[tuple[Batch, float]]:
        """The batches on the model's device, each with the share of them that is done then."""
        count = len(batches_of(self._batches)) if isinstance(self._batches, Sized) else None
        device = str(device_of(self._line.model))
        for index, batch in enumerate(each_batch(self._batches)):
            yield on_device(batch, device), 0.0 if count is None else (index + 1) / count


def norms_with_statistics(model: nn.Module) -> dict[str, _NormBase]:
    """The modules that store statistics of batches, by the model's own names."""
    norms = {name: one for name, one in model.named_modules() if isinstance(one, _NormBase)}
    return {name: norm for name, norm in norms.items() if norm.running_mean is not None}


def _paired(first: nn.Module, second: nn.Module | Named) -> dict[int, Tensor]:
    """By id of a parameter or persistent buffer of the first network: that of the second."""
    canonical = dict(_canonical_tensors(first))
    namings: list[dict[str, Tensor]] = [canonical]
    if isinstance(second, nn.Module):
        _require_same_layers(first, second)
        states: list[dict[str, Tensor]] = [dict(_canonical_tensors(second))]
    elif isinstance(second, Mapping):
        held = {str(name): value for name, value in second.items() if isinstance(value, Tensor)}
        states = [held]
        if len({name.partition(".")[0] for name in held}) == 1:  # one prefix, as of a wrapped model
            states.append({name.partition(".")[2]: value for name, value in held.items()})
        namings += [_own_tensors(first, canonical), _own_tensors(unwrap(first), canonical)]
    else:
        raise UseError(f"model_b is {described(second)}: give a torch.nn.Module or a state dict")
    pairs = [(naming, state) for state in states for naming in namings]
    naming, state = max(pairs, key=lambda pair: len(pair[0].keys() & pair[1].keys()))
    if isinstance(second, Mapping) and not naming.keys() & state.keys():
        raise UseError(
            f"model_b is {described(second)}, in which no tensor has the name of one of model_a. Give the "
            "state dict of the same network; of a checkpoint, the entry that holds it"
        )
    return _matched(naming, state)


def _matched(naming: Mapping[str, Tensor], state: Named) -> dict[int, Tensor]:
    """Tensors of a state by those of the same name, all of which have to be there, buffers aside."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in naming.items():
        if name not in state:
            if isinstance(tensor, nn.Parameter):
                raise UseError(f"model_b has no {name}, which model_a has. Both have to be the same network")
            continue
        other = state[name]
        if other.shape != tensor.shape:
            raise UseError(
                f"{name} has the shape {tuple(tensor.shape)} in model_a and {tuple(other.shape)} in model_b. "
                "Both have to be the same network"
            )
        before, tied = found.setdefault(id(tensor), (name, other))
        if tied is not other and not torch.equal(tied, other):
            raise UseError(
                f"{before} and {name} are one tensor in model_a and two different ones in model_b. Give the "
                "network whose tensors are not tied as model_a, or tie them in both"
            )
    if strange := [name for name in state if name not in naming]:
        raise UseError(
            f"model_b has a {strange[0]}, which model_a does not have. Both have to be the same network"
        )
    return {key: other for key, (_, other) in found.items()}


def _canonical_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under every canonical name they have."""
    for prefix, module in canonical_modules(model):
        for registry in (module._parameters, module._buffers):
            for name, tensor in registry.items():
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    yield (f"{prefix}.{name}" if prefix else name), tensor


def _own_tensors(model: nn.Module, known: Named) -> dict[str, Tensor]:
    """The same under the names that the model, wrapped or not, has for them itself."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    ids = {id(tensor) for tensor in known.values()}
    return {name: tensor for name, tensor in named if id(tensor) in ids}


def _require_same_layers(first: nn.Module, second: nn.Module) -> None:
    """Refuse networks whose forward passes differ, as far as the classes of their modules show it."""
    kinds = {name: type(module).__qualname__ for name, module in canonical_modules(second)}
    for name, module in canonical_modules(first):
        kind = type(module).__qualname__
        if kinds.get(name, kind) != kind:
            raise UseError(
                f"{name or 'the network itself'} is a {kind} in model_a and a {kinds[name]} in model_b. Both "
                "have to be the same network"
            )


def _can_be_mixed(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _mixed(a: Tensor, b: Tensor, place: float) -> Tensor:
    """A new tensor, of the nearer end if they cannot be mixed."""
    if not _can_be_mixed(a):
        return (a if place < 0.5 else b).clone()
    if place in (0, 1):  # as it is, even if the other end is not finite
        return (b if place else a).clone()
    found = torch.lerp(_wide(a), _wide(b), place).to(a.dtype)
    return torch.where(a == b, a, found)  # a mask holds infinities


def _wide(tensor: Tensor) -> Tensor:
    """In at least float32."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


def _square(tensor: Tensor) -> float:
    """The squared Euclidean norm, in float64."""
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return float(wide.abs().square().sum())
