"""The passes over the data: one that estimates, one that judges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.core.batches import Batch, on_device
from theodolite.core.calling import Loss, call
from theodolite.core.errors import UseError
from theodolite.core.examples import num_examples, take
from theodolite.probes.example_losses import checked_logits, disagreement, example_losses, refuse_infinite
from theodolite.probes.signal.candidates import Candidate, Candidates
from theodolite.probes.signal.sites import Site, by_unit
from theodolite.probes.signal.sums import GradientSums, wide


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


class Uneven(Exception):
    """Modules were called on some rows of some units, as experts are: theirs cannot be told apart."""

    def __init__(self, candidates: Candidates) -> None:
        super().__init__("uneven")
        self.candidates = candidates

    def give_up(self) -> None:
        """Leave all of these to autograd."""
        for candidate in self.candidates.each:
            for holder in tuple(candidate.uneven):
                candidate.give_up(holder)
            for site in candidate.sites:
                site.clear()
            for _ in left_by_autograd(candidate):
                pass
        self.candidates.leaves.clear()


class Runner:
    """Runs the network on batches, with candidates in its stream."""

    def __init__(self, model: nn.Module, loss: Loss, candidates: Candidates, device: torch.device) -> None:
        self.model, self.loss, self.candidates, self.device = model, loss, candidates, device
        self.total, self.units = 0.0, 0

    def missed(self, batch: Batch) -> str | None:
        """What the units' own losses leave out of the loss of a batch."""
        inputs, targets = tree_map(_usable, on_device(batch, str(self.device)))
        with torch.no_grad():
            found = checked_logits(call(self.model, inputs), batch)
            self.candidates.leaves.clear()
            return disagreement(self.loss, found, targets)

    def run(self, batch: Batch, index: int, only: int | None = None) -> int:
        """One forward and one backward pass, of the sum of the units' losses or of one of them."""
        inputs, targets = tree_map(_usable, on_device(batch, str(self.device)))
        with torch.enable_grad():
            found = checked_logits(call(self.model, inputs), batch)
            losses = example_losses(self.loss, found, targets)
            refuse_infinite(losses, index)
            if not losses.requires_grad:
                raise UseError(
                    "autograd finds no way from the loss back to the stream: the network or the loss "
                    "detaches what it computes, or makes whole numbers of it"
                )
            self.candidates.backward(losses.sum() if only is None else losses[only])
        self.total += float(losses.detach().double().sum())
        self.units += len(losses)
        if only is None and any(candidate.uneven for candidate in self.candidates.each):
            raise Uneven(self.candidates)
        return len(losses)


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
        self._now = num_examples(batch)
        with self.runner.candidates.heard_by(self):
            self.units += self.runner.run(batch, index)
        for candidate, sums in self.whole.items():
            for name, gradient in left_by_autograd(candidate):
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
            scale = _scale(plain, preconditioned)
            for name, total in self.whole[candidate].items():
                plain[name] = total / self.units
                preconditioned[name] = scale * plain[name]
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
        self._classes: set[int | None] = set()

    @property
    def one_class(self) -> bool:
        """Are all units of one and the same class?"""
        return len(self._classes) == 1 and None not in self._classes

    def add(self, batch: Batch, index: int) -> None:
        """The units of a batch; one by one where only autograd can tell a gradient: it adds them up."""
        self._classes.update(_classes(batch))
        for part in _singles(batch) if self.one_by_one else (batch,):
            now = self._now = _Now(num_examples(part), self.runner.device)
            with self.runner.candidates.heard_by(self):
                self.units += self.runner.run(part, index)
            for candidate, found in self.estimated.items():
                values = now.values.get(candidate, now.none(_branches(candidate)))
                for name, gradient in left_by_autograd(candidate):
                    branch = _branch(candidate, name)
                    for at, directions in enumerate((found.directions, found.preconditioned)):
                        values[:, branch, at] += (gradient * directions[name]).sum().to(now.device)
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


def refuse_not_finite(name: str, *found: Tensor) -> None:
    """Raise if a gradient at a point, or what was made of it, is not finite."""
    if not all(bool(one.isfinite().all()) for one in found):
        raise UseError(
            f"at {name} the gradient of the loss by the stream is not finite, so that the signal is not "
            "known. Look for an operation between there and the loss without a derivative, such as a square "
            "root of zeros, or for a value that overflows"
        )


def left_by_autograd(candidate: Candidate) -> Iterator[tuple[str, Tensor]]:
    """The gradients that autograd has left at closers, taken away."""
    for name, tensor in candidate.whole.items():
        if tensor.grad is not None:
            gradient, tensor.grad = tensor.grad, None
            yield name, gradient


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


def _branch(candidate: Candidate, name: str) -> int:
    return next(closer.branch for closer in candidate.point.closers if closer.name == name)


def _branches(candidate: Candidate) -> int:
    return 1 + max(closer.branch for closer in candidate.point.closers)


def _singles(batch: Any) -> Iterator[Batch]:
    for unit in range(num_examples(batch)):
        yield take(batch, [unit])


def _scale(plain: Mapping[str, Tensor], preconditioned: Mapping[str, Tensor]) -> float:
    """What a preconditioner does to M on average, `⟨M, MP⟩/⟨M, M⟩`; 1 where nothing was preconditioned."""
    square = sum(float(one.square().sum()) for one in plain.values())
    if not square:
        return 1.0
    return sum(float((one * preconditioned[name]).sum()) for name, one in plain.items()) / square


def _classes(batch: Batch) -> set[int | None]:
    """The classes of units; None if their targets are something else."""
    targets = batch[1]
    if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
        return set(targets.unique().tolist())
    return {None}
