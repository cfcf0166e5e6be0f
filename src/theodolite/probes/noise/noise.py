"""The gradient noise scale: from which batch size on do larger batches stop saving steps?

With g the mean gradient and Σ the covariance of the gradients of single examples, a step along the mean over
B examples lowers the loss by the share 1/(1 + B_crit/B) of what a step along g would,

    B_crit = Tr Σ/|g|²

if the curvature is the same in all directions. To the same loss, training takes `1 + B_crit/B` times the
least number of steps, and `1 + B/B_crit` times the least number of examples.

An optimizer with steps `Δθ = −P·gradient`, P a positive diagonal with its learning rates in it, takes plain
gradient steps in the coordinates `P^(−1/2) θ`. There the gradient is `P^(1/2) g` and the covariance
`P^(1/2) Σ P^(1/2)`, and to first order a step lowers the loss by `gᵀPg`:

    B_crit = Tr(PΣ)/(gᵀPg)

Curvature that is the same in all directions is assumed in these coordinates, where it is what the optimizer
aims at. With one P for all entries it is the plain one.

References:
    McCandlish et al., An empirical model of large-batch training, 2018.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.core.arguments import whole
from theodolite.core.batches import Batch, Batches, device_of, differentiable
from theodolite.core.calling import Loss, described, evaluate
from theodolite.core.errors import UseError
from theodolite.core.examples import count_examples, each_batch, num_examples, take
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, silent
from theodolite.core.replicas import group_of, on_all_ranks, together
from theodolite.present.text import counted, listed
from theodolite.probes.eval_mode import at_rest
from theodolite.probes.example_losses import AGREEMENT, scalar_loss
from theodolite.probes.noise.estimates import FoldSums, Moments, gathered, interval
from theodolite.probes.noise.metric import root_factors
from theodolite.probes.noise.result import FEW, Noise, TensorNoise, tensor_noise

UNITS = 32
"""Gradients that batches are cut into, and the most that are kept: the independent units of the bootstrap."""
FEWEST, MOST_BYTES = 8, 2**30
"""Gradients that are kept: fewer than `UNITS` if they take more memory than this, but not fewer than that."""

COMPARED = 8
"""Examples on which the loss of a batch is compared with those of its halves, at most."""


@on_all_ranks
@exclusive()
def noise(
    model: nn.Module,
    loss: Loss,
    batches: Batches,
    *,
    optimizer: Optimizer | None = None,
    microbatch: int | None = None,
    batch: int | None = None,
    progress: Progress | None = None,
) -> Noise:
    """The critical batch of a network, and of each of its tensors. The network is left unchanged.

    Args:
        model: any module, on any device, wrapped or not. It runs in eval mode: dropout is off, and batch
            norms use running statistics.
        loss: `loss(logits, targets) -> scalar`, `OutputLoss` or `ModelLoss`; the mean over the examples of a
            batch, or their sum, which is found out.
        batches: a pair (inputs, targets), a list of pairs or a DataLoader. Dimension 0 is the examples, which
            are independent: sequences or images, not tokens. Under DistributedDataParallel each process
            brings its own.
        optimizer: measure in its coordinates, `Tr(PΣ)/(gᵀPg)`, with P as its next step has it: of Adam,
            AdamW, NAdam, RMSprop, Adagrad or SGD, also as `Planned` or `Joined`. Adam needs a few steps
            before.
        microbatch: examples of one gradient. 1 takes the gradient of each example; None cuts the batches so
            that there are about 32 gradients. The estimate has the same expectation.
        batch: examples of one step, to compare with; those of the first batch if left out.
        progress: called with a title and the fraction done.

    Costs one backward pass for each microbatch. Up to 32 gradients are kept, or 1 GiB of them, but at least
    8; with more microbatches, gradients are added up in folds. The interval is a bootstrap over these.

    A linear model whose gradients are 4 and 2, or 3 ± 1: their variance is 2, and 3² − 2/2 = 8.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(layer.weight)
    >>> inputs, targets = torch.ones(2, 1), torch.tensor([[-1.0], [0.0]])
    >>> found = noise(layer, nn.functional.mse_loss, (inputs, targets), microbatch=1)
    >>> found.whole.noise, found.whole.signal, found.critical
    (2.0, 8.0, 0.25)
    """
    if not isinstance(model, nn.Module):
        raise UseError(f"model is {described(model)}, not a torch.nn.Module")
    if microbatch is not None:
        whole("microbatch", microbatch, least=1)
    if batch is not None:
        whole("batch", batch, least=1)
    tensors = trained(model)
    roots = None if optimizer is None else root_factors(optimizer, tensors)
    group = group_of(model)
    processes = 1 if group is None else dist.get_world_size(group)
    own = copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss  # it may have state
    examples = count_examples(batches)
    each = microbatch or math.ceil(examples * processes / UNITS)
    size = sum(tensor.numel() * max(4, tensor.element_size()) for tensor in tensors.values())
    kept = max(FEWEST, min(UNITS, MOST_BYTES // max(1, size)))
    passes = _Passes(unwrap(model), own, tensors, roots, each, max(2, kept // processes))
    together(model, lambda: passes.run(batches, examples, progress or silent))
    moments = passes.sums.moments(group)
    _refuse_infinite(moments, list(tensors))
    units, total = int(moments.units.sum()), int(moments.examples.sum())
    largest, step = (
        int(one)
        for one in gathered(
            torch.tensor([[passes.largest, passes.first]], device=device_of(model)), group
        ).amax(0)
    )
    if units < 2:
        raise UseError(
            f"{counted(total, 'example')} in one gradient {'has' if total == 1 else 'have'} no spread: give "
            "more examples, or a smaller microbatch"
        )
    notes = [*passes.notes]
    if len(moments.units) < FEW:
        notes.append(f"{len(moments.units)} independent gradients are few for an interval: it is rough")
    every, rows = summarised(moments, tensors)
    if every.noise == every.signal == 0:
        raise UseError("the gradient of every example is zero, so there is neither noise nor a signal")
    if unmoved := [name for name in tensors if roots is not None and not _moves(roots[name])]:
        notes.append(f"no step of the optimizer moves {listed(unmoved)}")
    return Noise(
        whole=every,
        tensors=rows,
        batch=batch or step * processes,
        examples=total,
        microbatch=largest if units < total else 1,
        units=units,
        steps=0,
        optimizer="" if optimizer is None else type(optimizer).__name__,
        along=(),
        notes=tuple(notes),
    )


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that require a gradient, by canonical name, each once."""
    every = dict(canonical_parameters(model))
    for name, tensor in every.items():
        if type(tensor).__name__ in ("DTensor", "FlatParameter"):
            raise UseError(
                f"{name} is sharded ({type(tensor).__name__}), so no process has a whole gradient. Measure "
                "an unsharded copy of the model"
            )
    found = {name: tensor for name, tensor in every.items() if tensor.requires_grad}
    if not found:
        raise UseError(f"none of the {len(every)} parameters requires a gradient, so there is no noise in it")
    return found


def summarised(moments: Moments, tensors: dict[str, Tensor]) -> tuple[TensorNoise, tuple[TensorNoise, ...]]:
    """The whole network, and every tensor."""
    noises, signals = (one[:, 0] for one in moments.estimates())
    every, rows = intervals(noises, signals, *moments.estimates(moments.draws()), tensors)
    if len(moments.units) > 2:
        return every, rows
    # Each draw of two units that has a product of different ones is the two: they have no spread.
    return _unbounded(every), tuple(_unbounded(one) for one in rows)


def _unbounded(found: TensorNoise) -> TensorNoise:
    return replace(found, low=None, high=None)


def intervals(
    noises: Tensor,
    signals: Tensor,
    drawn_noises: Tensor,
    drawn_signals: Tensor,
    tensors: Mapping[str, Tensor],
) -> tuple[TensorNoise, tuple[TensorNoise, ...]]:
    """The whole network, and every tensor: estimates (T,) and their draws (T, R)."""
    sizes = [tensor.numel() for tensor in tensors.values()]
    rows = [
        tensor_noise(
            name,
            sizes[at],
            interval(float(noises[at]), float(signals[at]), drawn_noises[at], drawn_signals[at]),
        )
        for at, name in enumerate(tensors)
    ]
    sums = interval(float(noises.sum()), float(signals.sum()), drawn_noises.sum(0), drawn_signals.sum(0))
    return tensor_noise("all", sum(sizes), sums), tuple(rows)


def in_metric(gradient: Tensor, root: Tensor | float) -> Tensor:
    """√P times a gradient."""
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return gradient * root


def _refuse_infinite(moments: Moments, names: Sequence[str]) -> None:
    finite = moments.squares.isfinite()
    if not bool(finite.all()):
        at, fold = (int(one) for one in (~finite).nonzero()[0])
        where = f"in microbatch {fold}" if bool((moments.units == 1).all()) else "in some microbatch"
        raise UseError(
            f"the gradient of {names[at]} is not finite {where}. Look at its inputs and targets, at the "
            "weights, and for operations that overflow"
        )


def _moves(root: Tensor | float) -> bool:
    return isinstance(root, Tensor) or root > 0


@dataclass
class _Passes:
    """Backward passes over all microbatches."""

    model: nn.Module
    loss: Loss
    tensors: dict[str, Tensor]
    roots: dict[str, Tensor | float] | None
    microbatch: int
    folds: int

    def __post_init__(self) -> None:
        self.sums = FoldSums(self.folds)
        self.first = 0
        """Examples of the first batch."""
        self.largest = 0
        """Examples of the largest microbatch."""
        self.notes: list[str] = []
        self._summed = False
        """Is the loss of a batch the sum over its examples?"""

    def run(self, batches: Batches, examples: int, tell: Progress) -> None:
        """Add the gradient of every microbatch."""
        norms = [one for one in self.model.modules() if isinstance(one, _BatchNorm) and one.training]
        if any(one.running_mean is not None for one in norms):
            self.notes.append("batch norms use running statistics here, and those of the batch in training")
        done = 0
        with at_rest(self.model), torch.enable_grad():
            for index, given in enumerate(each_batch(batches)):
                pair = differentiable(given, str(device_of(self.model)))
                if not index:
                    self.first = num_examples(pair)
                    self._summed = self._sums(pair)
                for part in cut(pair, self.microbatch):
                    self.sums.add(self._gradients(part), num_examples(part))
                    self.largest = max(self.largest, num_examples(part))
                done += num_examples(pair)
                tell("gradients", done / examples)

    def _gradients(self, part: Batch) -> list[Tensor]:
        """The mean gradient over the examples of a microbatch, times √P."""
        value = scalar_loss(evaluate(self.loss, self.model, part))
        if self._summed:
            value = value / num_examples(part)
        if not value.requires_grad:
            raise UseError("the loss does not depend on the model's parameters, so it has no gradient")
        found: Sequence[Tensor] = torch.autograd.grad(
            value, list(self.tensors.values()), materialize_grads=True
        )
        if self.roots is not None:
            return [in_metric(one, self.roots[name]) for name, one in zip(self.tensors, found, strict=True)]
        return [one if one.layout is torch.strided else one.to_dense() for one in found]

    @torch.no_grad()
    def _sums(self, pair: Batch) -> bool:
        """Is the loss of a batch the sum over its examples? If it is neither that nor their mean, a note."""
        some = take(pair, slice(0, min(2 * self.microbatch, COMPARED)))
        number = num_examples(some)
        if number < 2:
            return False
        halves = list(cut(some, math.ceil(number / 2)))
        together = float(evaluate(self.loss, self.model, some))
        losses = [float(evaluate(self.loss, self.model, half)) for half in halves]
        shares = [num_examples(half) / number for half in halves]
        mean = sum(share * one for share, one in zip(shares, losses, strict=True))
        size = sum(share * abs(one) for share, one in zip(shares, losses, strict=True))
        eps = max(torch.finfo(tensor.dtype).eps for tensor in self.tensors.values())
        close = max(AGREEMENT, 4 * eps)
        if not math.isfinite(together) or abs(together - mean) <= close * size:
            return False
        if abs(together - sum(losses)) <= close * sum(map(abs, losses)):
            return True
        if size <= close * abs(together):
            raise UseError(
                f"the loss of a microbatch alone is 0, that of two together {together:.3g}: it compares the "
                "examples of a batch, so they are not independent. Put what is compared into one example"
            )
        if float(evaluate(self.loss, self.model, some)) != together:
            return self._grows(pair)  # it draws random numbers
        self.notes.append(
            f"the loss of {number} examples, {together:.3g}, is not the mean over its halves, {mean:.3g}: "
            "here every microbatch counts by its examples"
        )
        return False

    def _grows(self, pair: Batch) -> bool:
        """Is the loss of a batch larger than that of a sixteenth, by more than chance would have it?"""
        number = num_examples(pair)
        fewer = max(1, number // 16)
        part = take(pair, slice(0, fewer))
        losses = [abs(float(evaluate(self.loss, self.model, one))) for one in (pair, part)]
        return losses[0] > math.sqrt(number / fewer) * losses[1]


def cut(pair: Any, examples: int) -> Iterator[Batch]:
    """A batch in microbatches."""
    number = num_examples(pair)
    if number <= examples:
        yield pair
        return
    for start in range(0, number, examples):
        yield take(pair, slice(start, start + examples))
