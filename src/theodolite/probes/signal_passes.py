"""The passes over the data: a trial on two units, one that estimates, one that judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.calling import call
from theodolite.errors import UseError
from theodolite.probes.course import on_device
from theodolite.probes.second_order.score import Loss
from theodolite.probes.signal_candidates import Candidate, Candidates
from theodolite.probes.signal_sites import Site, by_unit
from theodolite.probes.signal_sums import GradientSums, wide
from theodolite.probes.units import checked_logits, refuse_infinite, take, unit_losses, units_in
from theodolite.workloads import Batch


@dataclass(frozen=True)
class Judged:
    """A point on the held-out units."""

    values: Tensor
    """By unit, branch, and plain or preconditioned: the product of the unit's gradient with the direction."""
    alignments: Tensor
    """By unit: the product of its gradient by the stream with the mean of the others."""
    gradients: GradientSums


@dataclass(frozen=True)
class Estimated:
    """A point on the units that the direction is estimated on."""

    directions: dict[str, Tensor]
    preconditioned: dict[str, Tensor]
    gradients: GradientSums


class Runner:
    """Runs the network on batches, with candidates in its stream."""

    def __init__(self, model: nn.Module, loss: Loss, candidates: Candidates, device: torch.device) -> None:
        self.model, self.loss, self.candidates, self.device = model, loss, candidates, device
        self.total, self.units = 0.0, 0

    def run(self, batch: Batch, index: int, only: int | None = None) -> int:
        """One forward and one backward pass, of the sum of the units' losses or of one of them."""
        inputs, targets = tree_map(_usable, on_device(batch, str(self.device)))
        with torch.enable_grad():
            found = checked_logits(call(self.model, inputs), batch)
            losses = unit_losses(self.loss, found, targets)
            refuse_infinite(losses, index)
            if not losses.requires_grad:
                raise UseError(
                    "autograd finds no way from the loss back to the stream: the network or the loss "
                    "detaches what it computes, or makes whole numbers of it"
                )
            self.candidates.backward(losses.sum() if only is None else losses[only])
        self.total += float(losses.detach().double().sum())
        self.units += len(losses)
        return len(losses)


class Trial:
    """Learns in which dimension units run: the loss of the first of two has no gradient by the second."""

    def __init__(self) -> None:
        self.mixed: list[str] = []

    def run(self, runner: Runner, batch: Batch) -> None:
        """Two units, or the only one twice."""
        pair = take(batch, [0, 1] if units_in(batch) > 1 else [0, 0])
        with runner.candidates.heard_by(self):
            runner.run(pair, 0, only=0)
        if self.mixed:
            raise UseError(
                f"at {self.mixed[0]} the loss of a unit depends on another unit of its batch, or units run "
                "in neither of the first two dimensions of the stream: units have no gradients of their own"
            )
        for candidate in runner.candidates.each:
            for _ in _whole(candidate):
                pass  # what autograd left there is of the trial
        runner.total, runner.units = 0.0, 0

    def at_site(self, candidate: Candidate, site: Site, gradient: Tensor, features: Tensor) -> None:
        """A gradient of the first unit."""
        site.unit = self._dimension(candidate, gradient)

    def in_stream(self, candidate: Candidate, gradient: Tensor) -> None:
        """A gradient of the first unit."""
        candidate.unit = self._dimension(candidate, gradient)

    def _dimension(self, candidate: Candidate, gradient: Tensor) -> int:
        for dim in range(min(2, gradient.ndim)):
            half, odd = divmod(gradient.shape[dim], 2)
            if not odd and not bool(gradient.narrow(dim, half, half).any()):
                return dim
        self.mixed.append(candidate.point.name)
        return 0


class Estimating:
    """The first pass: sums of gradients."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.units = 0
        self.gradients = {one: GradientSums(one.channels, runner.device) for one in runner.candidates.each}
        self.whole: dict[Candidate, dict[str, Tensor]] = {
            one: {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in one.whole.items()}
            for one in runner.candidates.each
        }
        self._now = 0

    def add(self, batch: Batch, index: int) -> None:
        """The units of a batch."""
        self._now = units_in(batch)
        with self.runner.candidates.heard_by(self):
            self.units += self.runner.run(batch, index)
        for candidate, sums in self.whole.items():
            for name, gradient in _whole(candidate):
                sums[name] += gradient

    def at_site(self, candidate: Candidate, site: Site, gradient: Tensor, features: Tensor) -> None:
        """Adds it."""
        site.add(gradient, features, self._now)

    def in_stream(self, candidate: Candidate, gradient: Tensor) -> None:
        """Adds it."""
        self.gradients[candidate].add(_shifts(candidate, gradient, self._now, self.runner.device))

    def settle(self, ridge: float) -> dict[Candidate, Estimated]:
        """What was found at each point."""
        found: dict[Candidate, Estimated] = {}
        for candidate, sums in self.gradients.items():
            sums.units = self.units  # also those whose gradient never came
            plain: dict[str, Tensor] = {}
            preconditioned: dict[str, Tensor] = {}
            for site in candidate.sites:
                for into, made in zip((plain, preconditioned), site.settle(self.units, ridge), strict=True):
                    into.update(made)
            plain |= {name: total / self.units for name, total in self.whole[candidate].items()}
            found[candidate] = Estimated(plain, preconditioned, sums)
        return found


class Judging:
    """The second pass: the products of other units' gradients with what the first pass found."""

    def __init__(self, runner: Runner, estimated: Mapping[Candidate, Estimated]) -> None:
        self.runner, self.estimated = runner, estimated
        self.units = 0
        self.gradients = {one: GradientSums(one.channels, runner.device) for one in runner.candidates.each}
        self.values: dict[Candidate, list[Tensor]] = {one: [] for one in estimated}
        self.alignments: dict[Candidate, list[Tensor]] = {one: [] for one in estimated}
        self._now: _Now | None = None
        self.one_by_one = any(one.whole for one in estimated)

    def add(self, batch: Batch, index: int) -> None:
        """The units of a batch; one by one where only autograd can tell a gradient: it adds them up."""
        for part in _singles(batch) if self.one_by_one else (batch,):
            now = self._now = _Now(units_in(part), self.runner.device)
            with self.runner.candidates.heard_by(self):
                self.units += self.runner.run(part, index)
            for candidate, found in self.estimated.items():
                values = now.values.get(candidate, now.none(_branches(candidate)))
                for name, gradient in _whole(candidate):
                    branch = _branch(candidate, name)
                    values[:, branch, 0] += (gradient * found.directions[name]).sum().to(now.device)
                self.values[candidate].append(values)
                self.alignments[candidate].append(now.alignments.get(candidate, now.none()))

    def at_site(self, candidate: Candidate, site: Site, gradient: Tensor, features: Tensor) -> None:
        """Takes the products."""
        now = self._now
        assert now is not None
        values = now.values.setdefault(candidate, now.none(_branches(candidate)))
        branch = next(iter(site.closers.values())).branch
        values[:, branch] += site.judge(gradient, features, now.units).to(now.device)

    def in_stream(self, candidate: Candidate, gradient: Tensor) -> None:
        """Adds it, and takes the product."""
        now = self._now
        assert now is not None
        shifts = _shifts(candidate, gradient, now.units, now.device)
        self.gradients[candidate].add(shifts)
        now.alignments[candidate] = shifts @ self.estimated[candidate].gradients.mean

    def settle(self) -> dict[Candidate, Judged]:
        """What was found at each point."""
        for sums in self.gradients.values():
            sums.units = self.units
        return {
            one: Judged(torch.cat(values), torch.cat(self.alignments[one]), self.gradients[one])
            for one, values in self.values.items()
        }


@dataclass
class _Now:
    """What a backward pass has brought so far."""

    units: int
    device: torch.device
    values: dict[Candidate, Tensor] = field(default_factory=dict)
    alignments: dict[Candidate, Tensor] = field(default_factory=dict)

    def none(self, branches: int | None = None) -> Tensor:
        shape = (self.units,) if branches is None else (self.units, branches, 2)
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


def _usable(leaf: Any) -> Any:
    """Autograd takes nothing that was made in inference mode: a copy of it."""
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf


def _shifts(candidate: Candidate, gradient: Tensor, units: int, device: torch.device) -> Tensor:
    """For each unit the gradient of its loss by a shift of the stream in all positions, (B, C)."""
    rows = by_unit(gradient, units, candidate.unit, candidate.channel)
    return rows.sum(1, dtype=wide(rows.dtype)).to(device, torch.float64)


def _whole(candidate: Candidate) -> Iterator[tuple[str, Tensor]]:
    """The gradients that autograd has left at closers, taken away."""
    for name, tensor in candidate.whole.items():
        if tensor.grad is not None:
            gradient, tensor.grad = tensor.grad, None
            yield name, gradient


def _branch(candidate: Candidate, name: str) -> int:
    return next(closer.branch for closer in candidate.point.closers if closer.name == name)


def _branches(candidate: Candidate) -> int:
    return 1 + max(closer.branch for closer in candidate.point.closers)


def _singles(batch: Any) -> Iterator[Batch]:
    for unit in range(units_in(batch)):
        yield take(batch, [unit])
