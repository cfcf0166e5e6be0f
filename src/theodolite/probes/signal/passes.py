"""The passes over the data: a trial, one pass that estimates directions, one that judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batch, differentiable
from theodolite.core.calling import Loss, call
from theodolite.core.errors import UseError
from theodolite.core.examples import num_examples, take
from theodolite.probes.example_losses import checked_logits, disagreement, example_losses, refuse_infinite
from theodolite.probes.signal.candidates import Candidate, Candidates
from theodolite.probes.signal.sites import GradientSums, Site, by_example, wide


@dataclass(frozen=True)
class Estimated:
    """A point on the examples that directions are estimated on."""

    directions: dict[str, Tensor]
    preconditioned: dict[str, Tensor]
    gradients: GradientSums


@dataclass(frozen=True)
class HeldOut:
    """A point on the held-out examples."""

    products: Tensor
    """By example, branch, and plain or preconditioned: the inner product of its gradient with the
    direction."""
    alignments: Tensor
    """By example: the inner product of its gradient in the stream with the mean of the other sample."""
    gradients: GradientSums


class Uneven(Exception):
    """Modules were called on some rows of some examples, as experts are: examples cannot be separated."""

    def __init__(self, candidates: Candidates) -> None:
        super().__init__("uneven")
        self.candidates = candidates

    def give_up(self) -> None:
        """Leave all of these modules to autograd."""
        for candidate in self.candidates.each:
            for holder in tuple(candidate.uneven):
                candidate.give_up(holder)
            for site in candidate.sites:
                site.clear()
            take_gradients(candidate)
        self.candidates.leaves.clear()


class Runner:
    """Runs the network on batches, with candidates in its stream."""

    def __init__(self, model: nn.Module, loss: Loss, candidates: Candidates, device: torch.device) -> None:
        self.model, self.loss, self.candidates, self.device = model, loss, candidates, device
        self.total, self.examples = 0.0, 0

    def disagreement(self, batch: Batch) -> str | None:
        """How the examples' own losses differ from the loss of a batch."""
        inputs, targets = differentiable(batch, str(self.device))
        with torch.no_grad():
            found = checked_logits(call(self.model, inputs), batch)
            self.candidates.leaves.clear()
            return disagreement(self.loss, found, targets)

    def run(self, batch: Batch, index: int, only: int | None = None) -> int:
        """One forward and one backward pass, of the sum of the examples' losses or of one of them."""
        inputs, targets = differentiable(batch, str(self.device))
        with torch.enable_grad():
            found = checked_logits(call(self.model, inputs), batch)
            losses = example_losses(self.loss, found, targets)
            refuse_infinite(losses, index)
            if not losses.requires_grad:
                raise UseError(
                    "no gradient flows from the loss back to the stream: the network or the loss detaches "
                    "its values or converts them to integers"
                )
            self.candidates.backward(losses.sum() if only is None else losses[only])
        self.total += float(losses.detach().double().sum())
        self.examples += len(losses)
        if only is None and any(candidate.uneven for candidate in self.candidates.each):
            raise Uneven(self.candidates)
        return len(losses)


class Trial:
    """Finds the dimension of examples: the loss of one of two has no gradient in the other's half.

    Both examples are tried. One would not do: a loss that reads the first of many positions has no gradient
    in the second half of the positions either.
    """

    def __init__(self) -> None:
        self.example = 0
        self.dimensions: dict[tuple[Candidate, Site | None], set[int]] = {}
        self.shapes: dict[tuple[Candidate, Site | None], tuple[int, ...]] = {}

    def run(self, runner: Runner, batch: Batch) -> str | None:
        """Run two examples, or the only one twice; how the losses of examples differ from the batch's."""
        differs = runner.disagreement(batch)
        pair = take(batch, [0, 1] if num_examples(batch) > 1 else [0, 0])
        for self.example in (0, 1):
            with runner.candidates.heard_by(self):
                runner.run(pair, 0, only=self.example)
        for candidate in runner.candidates.each:
            take_gradients(candidate)
        for (candidate, site), found in self.dimensions.items():
            if found:
                # Of several possible dimensions, one of length two.
                shape = self.shapes[candidate, site]
                (site or candidate).example = min(found, key=lambda dim: (shape[dim] != 2, dim))
            elif site is None:
                raise UseError(
                    f"at {candidate.point.name} the loss of an example depends on another example of its "
                    "batch, or the examples are in neither of the first two dimensions of the stream: "
                    "examples have no gradients of their own"
                )
            else:  # called on rows of its own choice, as an expert is
                candidate.give_up(next(one for one, known in candidate.known.items() if known is site))
        for candidate in runner.candidates.each:
            candidate.settle()
        return differs

    def at_site(self, candidate: Candidate, site: Site, gradient: Tensor, features: Tensor) -> None:
        """The gradient of one example."""
        self._find(candidate, site, gradient)

    def in_stream(self, candidate: Candidate, gradient: Tensor) -> None:
        """The gradient of one example."""
        self._find(candidate, None, gradient)

    def _find(self, candidate: Candidate, site: Site | None, gradient: Tensor) -> None:
        refuse_not_finite(candidate.point.name, gradient)
        found = set()
        for dim in range(min(2, gradient.ndim)):
            half, odd = divmod(gradient.shape[dim], 2)
            if not odd and not bool(gradient.narrow(dim, 0 if self.example else half, half).any()):
                found.add(dim)
        self.shapes[candidate, site] = tuple(gradient.shape)
        self.dimensions[candidate, site] = self.dimensions.get((candidate, site), found) & found


class Estimating:
    """The first pass: sums of gradients."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.examples = 0
        self.gradients = {one: GradientSums(one.channels, runner.device) for one in runner.candidates.each}
        self.whole: dict[Candidate, dict[str, Tensor]] = {
            one: {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in one.whole.items()}
            for one in runner.candidates.each
        }
        self._now = 0

    def add(self, batch: Batch, index: int) -> None:
        """Add the examples of a batch."""
        self._now = num_examples(batch)
        with self.runner.candidates.heard_by(self):
            self.examples += self.runner.run(batch, index)
        for candidate, sums in self.whole.items():
            for name, gradient in take_gradients(candidate).items():
                sums[name] += gradient

    def at_site(self, candidate: Candidate, site: Site, gradient: Tensor, features: Tensor) -> None:
        """Add it."""
        site.add(gradient, features, self._now)

    def in_stream(self, candidate: Candidate, gradient: Tensor) -> None:
        """Add it."""
        self.gradients[candidate].add(_shifts(candidate, gradient, self._now, self.runner.device))

    def settle(self, ridge: float) -> dict[Candidate, Estimated]:
        """The directions at each point."""
        found: dict[Candidate, Estimated] = {}
        for candidate, sums in self.gradients.items():
            sums.examples = self.examples  # with those whose gradient never came
            plain: dict[str, Tensor] = {}
            preconditioned: dict[str, Tensor] = {}
            for site in candidate.sites:
                for into, made in zip(
                    (plain, preconditioned), site.settle(self.examples, ridge), strict=True
                ):
                    into.update(made)
            scale = _scale(plain, preconditioned)
            for name, total in self.whole[candidate].items():
                plain[name] = total / self.examples
                preconditioned[name] = scale * plain[name]
            found[candidate] = Estimated(plain, preconditioned, sums)
        return found


class Judging:
    """The second pass: the inner products of other examples' gradients with the directions."""

    def __init__(self, runner: Runner, estimated: Mapping[Candidate, Estimated]) -> None:
        self.runner, self.estimated = runner, estimated
        self.examples = 0
        self.gradients = {one: GradientSums(one.channels, runner.device) for one in runner.candidates.each}
        self.products: dict[Candidate, list[Tensor]] = {one: [] for one in estimated}
        self.alignments: dict[Candidate, list[Tensor]] = {one: [] for one in estimated}
        self._now = _Now(0, runner.device)
        self.one_by_one = any(one.whole for one in estimated)
        self._classes: set[int | None] = set()

    @property
    def one_class(self) -> bool:
        """Are all examples of one and the same class?"""
        return len(self._classes) == 1 and None not in self._classes

    def add(self, batch: Batch, index: int) -> None:
        """The examples of a batch; one by one if a gradient is autograd's, which adds them up."""
        self._classes.update(_classes(batch))
        singles = (take(batch, [example]) for example in range(num_examples(batch)))
        for part in singles if self.one_by_one else (batch,):
            now = self._now = _Now(num_examples(part), self.runner.device)
            with self.runner.candidates.heard_by(self):
                self.examples += self.runner.run(part, index)
            for candidate, found in self.estimated.items():
                products = now.of(candidate)
                for name, gradient in take_gradients(candidate).items():
                    branch = next(one.branch for one in candidate.point.outputs if one.name == name)
                    for at, directions in enumerate((found.directions, found.preconditioned)):
                        products[:, branch, at] += (gradient * directions[name]).sum().to(now.device)
                self.products[candidate].append(products)
                self.alignments[candidate].append(now.alignments.get(candidate, now.zeros(now.examples)))

    def at_site(self, candidate: Candidate, site: Site, gradient: Tensor, features: Tensor) -> None:
        """Take the products."""
        branch = next(iter(site.tensors.values())).branch
        judged = site.judge(gradient, features, self._now.examples)
        self._now.of(candidate)[:, branch] += judged.to(self._now.device)

    def in_stream(self, candidate: Candidate, gradient: Tensor) -> None:
        """Add it, and take the product."""
        shifts = _shifts(candidate, gradient, self._now.examples, self._now.device)
        self.gradients[candidate].add(shifts)
        self._now.alignments[candidate] = shifts @ self.estimated[candidate].gradients.mean

    def settle(self) -> dict[Candidate, HeldOut]:
        """The products at each point."""
        for sums in self.gradients.values():
            sums.examples = self.examples
        return {
            one: HeldOut(torch.cat(products), torch.cat(self.alignments[one]), self.gradients[one])
            for one, products in self.products.items()
        }


def refuse_not_finite(name: str, *found: Tensor) -> None:
    """Raise if a gradient at a point, or a value computed from it, is not finite."""
    if not all(bool(one.isfinite().all()) for one in found):
        raise UseError(
            f"at {name} the gradient of the loss in the stream is not finite, so the signal is not known. "
            "Look for an operation between there and the loss without a derivative, such as a square root of "
            "zeros, or for a value that overflows"
        )


def take_gradients(candidate: Candidate) -> dict[str, Tensor]:
    """The gradients that autograd has left at output tensors; they are removed there."""
    found = {name: tensor.grad for name, tensor in candidate.whole.items() if tensor.grad is not None}
    for tensor in candidate.whole.values():
        tensor.grad = None
    return found


@dataclass
class _Now:
    """The products of the current backward pass."""

    examples: int
    device: torch.device
    products: dict[Candidate, Tensor] = field(default_factory=dict)
    alignments: dict[Candidate, Tensor] = field(default_factory=dict)

    def of(self, candidate: Candidate) -> Tensor:
        branches = 1 + max(one.branch for one in candidate.point.outputs)
        return self.products.setdefault(candidate, self.zeros(self.examples, branches, 2))

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.device)


def _shifts(candidate: Candidate, gradient: Tensor, examples: int, device: torch.device) -> Tensor:
    """For each example the gradient of its loss with respect to a shift of the stream, (B, C)."""
    rows = by_example(gradient, examples, candidate.example, candidate.channel)
    return rows.sum(1, dtype=wide(rows.dtype)).to(device, torch.float64)


def _scale(plain: Mapping[str, Tensor], preconditioned: Mapping[str, Tensor]) -> float:
    """The mean factor of a preconditioner, `⟨M, MP⟩/⟨M, M⟩`; 1 if nothing was preconditioned."""
    square = sum(float(one.square().sum()) for one in plain.values())
    if not square:
        return 1.0
    return sum(float((one * preconditioned[name]).sum()) for name, one in plain.items()) / square


def _classes(batch: Batch) -> set[int | None]:
    """The classes of examples; None if their targets are something else."""
    targets = batch[1]
    if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
        return set(targets.unique().tolist())
    return {None}
