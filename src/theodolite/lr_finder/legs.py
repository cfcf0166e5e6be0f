"""Short trainings at one rate each, from the same start: from low rates upwards, to where the loss rises."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.lr_finder.restore import Restore, kept
from theodolite.lr_finder.subject import Subject, check

CLOSE, OCTAVE = 2**0.25, 2.0
"""How closely the upper end is found, and how close to the best rate its neighbours are."""
EXTRA = 5
"""Legs that this takes about, after the first ascent."""
SLACK = 0.01
"""A loss that is higher than at the start by less than this share of the progress has not risen."""
BLOWN = 100.0
"""A leg is given up when its loss is above the first by so many times that, or the greatest progress: losses
that jump at first may still come down."""
SURE, LEAST = 3.0, 1e-5
"""A fall counts if it is so many standard errors, and such a share of the loss."""


Tell = Callable[[float], None]
"""Called with the rate of each leg before it begins."""


@dataclass(frozen=True)
class Leg:
    """A short training at one learning rate."""

    rate: float
    loss: float
    """After it, on the batches that judge; infinite where it was given up."""
    falls: bool
    """Is that below the start by more than the noise of these batches?"""


@dataclass(frozen=True)
class Curve:
    """The legs of one seed, in order of their rates."""

    seed: int
    start: float
    """The loss before any step, on the batches that judge."""
    legs: tuple[Leg, ...]
    high: float | None
    """The highest rate below the first that raised the loss; None where the very first did."""
    risen: bool
    """Did any rate raise it?"""

    @property
    def falls(self) -> bool:
        """Does any rate lower the loss by more than its noise?"""
        return any(leg.falls for leg in self.legs)

    @property
    def least(self) -> float:
        """The lowest loss after a leg."""
        return min(leg.loss for leg in self.legs)

    def lowest(self, share: float) -> float:
        """The lowest rate with this share of the greatest progress, between legs by a power law.

        >>> legs = [Leg(rate, 1 - 0.1 * rate, falls=True) for rate in (1.0, 4.0, 10.0)]
        >>> round(Curve(0, 1.0, tuple(legs), 10.0, risen=False).lowest(0.2), 6)
        2.0
        """
        enough = share * (self.start - self.least)
        reached = [(leg.rate, self.start - leg.loss) for leg in self.legs]
        at = next(index for index, (_, progress) in enumerate(reached) if progress >= enough)
        rate, progress = reached[at]
        before, less = reached[at - 1] if at else (rate, progress)
        if not 0 < less < progress:
            return rate
        return float(before * (rate / before) ** (math.log(enough / less) / math.log(progress / less)))

    @property
    def best(self) -> float:
        """Where the loss is lowest: the vertex of the parabola through the lowest leg and its neighbours.

        >>> legs = [Leg(2.0**k, (k - 0.25) ** 2, falls=True) for k in (-1, 0, 1)]
        >>> round(Curve(0, 9.0, tuple(legs), 2.0, risen=False).best, 6) == round(2**0.25, 6)
        True
        """
        at = min(range(len(self.legs)), key=lambda index: self.legs[index].loss)
        near = self.legs[max(at - 1, 0) : at + 2]
        if len(near) < 3 or not all(math.isfinite(leg.loss) for leg in near):
            return self.legs[at].rate
        (x0, y0), (x1, y1), (x2, y2) = ((math.log2(leg.rate), leg.loss) for leg in near)
        left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
        if right <= left:
            return float(self.legs[at].rate)
        vertex = (x0 + x1) / 2 - left * (x2 - x0) / 2 / (right - left)
        return float(2.0 ** min(max(vertex, x0), x2))


def ascend(subject: Subject, rates: Sequence[float], steps: int, seed: int, tell: Tell) -> Curve:
    """A leg at each rate, upwards, until one raises the loss; then closer to that one, and to the best."""
    check(subject)
    with kept(subject.model, subject.optimizer, subject.loss) as restore:
        runner = _Runner(subject, restore, steps, seed, tell)
        high, above = None, None
        for rate in rates:
            if runner.rises(rate):
                above = rate
                break
            high = rate
        while high is not None and above is not None and above / high > CLOSE * (1 + 1e-9):
            middle = math.sqrt(high * above)
            high, above = (high, middle) if runner.rises(middle) else (middle, above)
        while high is not None and (gap := runner.gap_beside_lowest()) is not None:
            runner.leg(math.sqrt(gap[0] * gap[1]))
        return Curve(seed, runner.start, runner.legs, high, risen=above is not None)


class _Runner:
    """Legs from one start, and what is known of the loss so far."""

    def __init__(self, subject: Subject, restore: Restore, steps: int, seed: int, tell: Tell) -> None:
        self._subject, self._restore, self._steps, self._seed = subject, restore, steps, seed
        self._tell = tell
        self._rates = [float(group["lr"]) for group in subject.optimizer.param_groups]
        self._legs: dict[float, Leg] = {}
        self._begin()
        self._refuse_bad_start()
        self._before = self._judged()
        self.start = self.least = float(self._before.mean())

    @property
    def legs(self) -> tuple[Leg, ...]:
        """Those made so far, in order of their rates."""
        return tuple(leg for _, leg in sorted(self._legs.items()))

    def rises(self, rate: float) -> bool:
        """Does a leg raise the loss, by more than could be an accident of small steps?"""
        slack = SLACK * max(self.start - self.least, 0.1 * abs(self.start))
        return self.leg(rate).loss > self.start + slack

    def gap_beside_lowest(self) -> tuple[float, float] | None:
        """Two rates, one of them with the lowest loss, that are more than an octave apart."""
        rates = sorted(self._legs)
        at = min(range(len(rates)), key=lambda index: self._legs[rates[index]].loss)
        near = rates[max(at - 1, 0) : at + 2]
        return next(((a, b) for a, b in pairwise(near) if b / a > OCTAVE * (1 + 1e-9)), None)

    def leg(self, rate: float) -> Leg:
        """Train from the start at this rate, and judge."""
        if rate not in self._legs:
            self._tell(rate)
            self._legs[rate] = self._made(rate)
        return self._legs[rate]

    def _made(self, rate: float) -> Leg:
        self._begin()
        self._set(rate / self._subject.base)
        with untouched_randomness(self._seed):
            done = self._train()
        after = self._judged() if done else torch.full_like(self._before, math.inf)
        loss = float(after.mean())
        if not math.isfinite(loss):
            return Leg(rate, math.inf, falls=False)
        self.least = min(self.least, loss)
        fall = self._before - after
        error = float(fall.std()) / math.sqrt(len(fall)) if len(fall) > 1 else 0.0
        falls = float(fall.mean()) > max(SURE * error, LEAST * abs(self.start))
        return Leg(rate, loss, falls)

    def _begin(self) -> None:
        self._restore()
        self._subject.model.train()
        self._subject.switch("train")

    def _set(self, factor: float) -> None:
        for group, rate in zip(self._subject.optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def _train(self) -> bool:
        """All steps; False if the loss or a gradient is not finite, or the loss far above its start."""
        limit = math.inf
        for step in range(self._steps):
            loss = self._backward(step)
            value = float(loss)
            if step == 0:
                limit = value + BLOWN * max(self.start - self.least, abs(value))
            if not value <= limit or not self._finite():
                return False
            self._subject.optimizer.step()
        return True

    def _backward(self, step: int) -> Tensor:
        for group in self._subject.optimizer.param_groups:
            for tensor in group["params"]:
                tensor.grad = None
        loss = self._subject.evaluate(self._subject.batches(step))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise UseError(
                f"the loss is {loss!r}: it has to be one number that depends on the model's parameters"
            )
        loss.backward()
        return loss.detach()

    def _judged(self) -> Tensor:
        """The loss on every batch that judges, with the weights that are meant to be kept."""
        self._subject.switch("eval")
        with torch.no_grad(), untouched_randomness(self._seed):
            losses = [self._subject.evaluate(batch).double() for batch in self._subject.judges]
        return torch.stack(losses).cpu()

    def _finite(self) -> bool:
        grads = [_entries(one.grad) for one in self._subject.model.parameters() if one.grad is not None]
        return bool(nn.utils.get_total_norm(grads).isfinite())

    def _refuse_bad_start(self) -> None:
        """Refuse a start that has no finite loss or gradient, naming the tensor."""
        tensors = dict(canonical_parameters(self._subject.model))
        for name, tensor in tensors.items():
            if not tensor.detach().isfinite().all():
                raise UseError(f"{name} is not finite before the first step. Initialise it, or load it anew")
        with untouched_randomness(self._seed):
            loss = self._backward(0)
        for name, tensor in tensors.items():
            if tensor.grad is not None and not _entries(tensor.grad).isfinite().all():
                raise UseError(
                    f"the gradient of {name} is not finite before the first step (the loss is "
                    f"{float(loss):.4g}). Check the model, the batch and the loss"
                )
        if not loss.isfinite():
            raise UseError(
                f"the loss is {float(loss)} before the first step. Check the model, the batch and the loss"
            )
        self._begin()


def _entries(grad: Tensor) -> Tensor:
    """Of a sparse gradient those that are not zero."""
    return grad.coalesce().values() if grad.is_sparse else grad
