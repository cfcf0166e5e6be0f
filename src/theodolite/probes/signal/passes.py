"""The passes over the data: a trial, one pass that estimates directions, one that judges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from theodolite.core.batches import Batch, differentiable
from theodolite.core.calling import Loss, call
from theodolite.core.errors import UseError
from theodolite.core.examples import fingerprints, num_examples, take
from theodolite.probes.example_losses import checked_logits, disagreement, example_losses, refuse_infinite
from theodolite.probes.signal.candidates import Candidate, Candidates, Listener
from theodolite.probes.signal.sites import Directions, GradientSums, Site, by_example, wide


class Uneven(Exception):
    """Modules were called on some rows of some examples, as experts are: examples cannot be separated."""


@dataclass(frozen=True)
class Runner:
    """Runs the network on batches, with candidates in its stream."""

    model: nn.Module
    loss: Loss
    candidates: Candidates
    device: torch.device

    def run(self, batch: Batch, index: int, listener: Listener, only: int | None = None) -> Tensor:
        """One forward pass, and one backward pass of the sum of the examples' losses or of one of them."""
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
            self.candidates.backward(losses.sum() if only is None else losses[only], listener)
        if only is None and any(candidate.uneven for candidate in self.candidates.each):
            raise Uneven
        return losses.detach().double()

    def trial(self, batch: Batch) -> str | None:
        """Find the dimension of examples, and say how the losses of examples differ from the batch's.

        The loss of one of two examples has no gradient in the other's half. Both examples are tried. One
        would not do: a loss that reads the first of many positions has no gradient in the second half of the
        positions either.
        """
        inputs, targets = differentiable(batch, str(self.device))
        with torch.no_grad():
            differs = disagreement(self.loss, checked_logits(call(self.model, inputs), batch), targets)
        self.candidates.leaves.clear()
        possible: dict[tuple[Candidate, Site | None], set[int]] = {}
        shapes: dict[tuple[Candidate, Site | None], torch.Size] = {}

        def look(candidate: Candidate, gradient: Tensor, site: Site | None, features: Tensor) -> None:
            refuse_not_finite(candidate.point.name, gradient)
            found = set()
            for dim in range(min(2, gradient.ndim)):
                half, odd = divmod(gradient.shape[dim], 2)
                if not odd and not bool(gradient.narrow(dim, 0 if example else half, half).any()):
                    found.add(dim)
            shapes[candidate, site] = gradient.shape
            possible[candidate, site] = possible.get((candidate, site), found) & found

        for example in (0, 1):  # twice the same if there is only one
            self.run(take(batch, [0, 1 % num_examples(batch)]), 0, look, only=example)
        for (candidate, site), found in possible.items():
            if found:
                # Of several possible dimensions, one of length two.
                shape = shapes[candidate, site]
                (site or candidate).example = min(found, key=lambda dim: (shape[dim] != 2, dim))
            elif site is None:
                raise UseError(
                    f"at {candidate.point.name} the loss of an example depends on another example of its "
                    "batch, or the examples are in neither of the first two dimensions of the stream: "
                    "examples have no gradients of their own"
                )
            else:  # called on rows of its own choice, as an expert is
                candidate.give_up(next(one for one, known in candidate.known.items() if known is site))
        for candidate in self.candidates.each:
            take_gradients(candidate)
            for holder in candidate.holders.keys() - candidate.known.keys():  # never called
                candidate.known[holder] = None
        return differs


class Passes:
    """A pass that estimates directions at each point, then one over other examples that judges them."""

    def __init__(self, runner: Runner) -> None:
        each = runner.candidates.each
        self.runner = runner
        self.total_loss = 0.0
        self.estimated_on = self.judged_on = 0
        """The number of examples of each pass."""
        self.gradients = {one: GradientSums(one.channels, runner.device) for one in each}
        """Of the stream, over both passes."""
        self.means: dict[Candidate, Tensor] = {}
        """The gradient of the stream in the first pass."""
        self.directions: dict[Candidate, Directions] = {}
        self.products: dict[Candidate, list[Tensor]] = {one: [] for one in each}
        """By example, branch, and plain or preconditioned: the inner product of its gradient with the
        direction."""
        self.alignments: dict[Candidate, list[Tensor]] = {one: [] for one in each}
        """By example: the inner product of its gradient in the stream with the mean of the first pass."""
        self.shared = 0
        """The number of judging examples that are also among the others."""
        self._seen: set[bytes] = set()
        self._classes: set[int | None] = set()
        self._whole: dict[Candidate, dict[str, Tensor]] = {
            one: {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in one.whole.items()}
            for one in each
        }

    @property
    def one_class(self) -> bool:
        """Are all examples that judge of one and the same class?"""
        return len(self._classes) == 1 and None not in self._classes

    def estimate(self, batch: Batch, index: int) -> None:
        """Add the gradients of a batch's examples."""
        number = num_examples(batch)

        def add(candidate: Candidate, gradient: Tensor, site: Site | None, features: Tensor) -> None:
            if site is None:
                self.gradients[candidate].add(self._shifts(candidate, gradient, number))
            else:
                site.add(gradient, features, number)

        self.total_loss += float(self.runner.run(batch, index, add).sum())
        self.estimated_on += number
        self._seen.update(fingerprints([batch]))
        for candidate, sums in self._whole.items():
            for name, gradient in take_gradients(candidate).items():
                sums[name] += gradient

    def settle(self, ridge: float) -> None:
        """Make the directions at each point of the sums."""
        for candidate, sums in self.gradients.items():
            self.means[candidate] = sums.mean(self.estimated_on)
            plain: dict[str, Tensor] = {}
            preconditioned: dict[str, Tensor] = {}
            for site in candidate.sites:
                own, other = site.settle(self.estimated_on, ridge)
                plain |= own
                preconditioned |= other
            scale = _scale(plain, preconditioned)
            for name, total in self._whole[candidate].items():
                plain[name] = total / self.estimated_on
                preconditioned[name] = scale * plain[name]
            self.directions[candidate] = plain, preconditioned

    def judge(self, batch: Batch, index: int) -> None:
        """Take the products of examples; one by one if a gradient is autograd's, which adds them up."""
        self._classes |= _classes(batch)
        self.shared += sum(one in self._seen for one in fingerprints([batch]))
        one_by_one = any(one.whole for one in self.directions)
        singles = (take(batch, [example]) for example in range(num_examples(batch)))
        for part in singles if one_by_one else (batch,):
            self._judge(part, index)

    def _judge(self, batch: Batch, index: int) -> None:
        number = num_examples(batch)
        now: dict[Candidate, Tensor] = {}
        for candidate, made in self.products.items():
            branches = 1 + max(one.branch for one in candidate.point.outputs)
            now[candidate] = torch.zeros(number, branches, 2, dtype=torch.float64, device=self.runner.device)
            made.append(now[candidate])
            self.alignments[candidate].append(now[candidate].new_zeros(number))

        def take_products(
            candidate: Candidate, gradient: Tensor, site: Site | None, features: Tensor
        ) -> None:
            if site is None:
                shifts = self._shifts(candidate, gradient, number)
                self.gradients[candidate].add(shifts)
                self.alignments[candidate][-1] = shifts @ self.means[candidate]
            else:
                branch = next(iter(site.tensors.values())).branch
                now[candidate][:, branch] += site.judge(gradient, features, number).to(self.runner.device)

        self.total_loss += float(self.runner.run(batch, index, take_products).sum())
        self.judged_on += number
        for candidate, both in self.directions.items():
            for name, gradient in take_gradients(candidate).items():
                branch = next(one.branch for one in candidate.point.outputs if one.name == name)
                for at, directions in enumerate(both):
                    now[candidate][:, branch, at] += (
                        (gradient * directions[name]).sum().to(self.runner.device)
                    )

    def _shifts(self, candidate: Candidate, gradient: Tensor, examples: int) -> Tensor:
        """For each example the gradient of its loss with respect to a shift of the stream, (B, C)."""
        rows = by_example(gradient, examples, candidate.example, candidate.channel)
        return rows.sum(1, dtype=wide(rows.dtype)).to(self.runner.device, torch.float64)


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
