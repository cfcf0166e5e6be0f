"""Find learning rates: short trainings at many rates from the same start, for several seeds."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.anatomy.names import canonical_parameters
from theodolite.core import arguments
from theodolite.core.batches import Batches
from theodolite.core.building import check_device, one_thread, untouched_randomness
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.finite import not_finite
from theodolite.core.progress import Progress, silent
from theodolite.core.size import Size
from theodolite.lr_finder.lr_range import LrCurve, LrRange, LrTrial, read_off
from theodolite.lr_finder.subject import Subject, check, subjects
from theodolite.optimizers.planned import set_lr
from theodolite.planning import Plan
from theodolite.planning.factory import MakeOptimizer
from theodolite.probes.steps.update import Snapshot, no_hooks
from theodolite.workloads import Workload

STRIDE = 4.0
"""Ratio of the rates of the first ascent."""
CLOSE, OCTAVE = 2**0.25, 2.0
"""Ratios to which the upper end and the neighbours of the best rate are refined."""
EXTRA = 5
"""Trials that this takes, about, after the first ascent."""
SLACK = 0.01
"""A loss above the start by less than this fraction of the progress has not risen."""
BLOWN = 100.0
"""A trial ends when its loss exceeds the first by this many times that, or the greatest progress: losses that
jump at first may still come down."""
SURE, LEAST = 3.0, 1e-5
"""A fall counts if it is this many standard errors, and this fraction of the loss."""


@exclusive()
def find_lr(
    workload: Workload | nn.Module | str,
    loss: Loss | None = None,
    batches: Batches | None = None,
    *,
    optimizer: str | Plan | MakeOptimizer | Optimizer = "adamw",
    size: Size | None = None,
    seeds: int | Sequence[int] = 3,
    low: float = 1e-5,
    high: float = 10.0,
    steps: int = 20,
    device: str = "cpu",
    progress: Progress | None = None,
) -> LrRange:
    """Find the learning rates at which training makes progress, and the best of them.

    Trains for a few steps at one rate, starts again from the same weights at four times the rate, and so on
    until the loss rises; then refines around the best rate and where the loss begins to rise. (A ramp within
    one training would carry effects of low rates over to high ones.) Each trial is judged before and after by
    the same batches for all rates: held-out ones of a workload, the last ones of a module's batches. A module
    is trained on these only if there are no others.

    - `low`: the lowest rate that makes a tenth of the greatest progress; the highest of all seeds.
    - `high`: the highest rate below the first that raises the loss, to a quarter of an octave; the lowest of
      all seeds. For gradient descent on a quadratic loss that is `2/λ_max`.
    - `best`: where the loss is lowest after these steps, by a parabola in `log lr`; the geometric mean over
      seeds, with the lowest and the highest of them as `spread`. Few steps see less noise than many: a long
      training may need a lower rate.

    Args:
        workload: a Workload, the name of one, or a module with `loss` and `batches`.
        loss: of a module: `loss(logits, targets)`.
        batches: of a module: a pair (inputs, targets), a list of pairs, a DataLoader.
        optimizer: the name of a rule (of a module: `adamw` or `sgd`), a Plan, a function `make(model)`; of a
            workload also `own`, its own optimizer, for whose default learning rate the rates stand; of a
            module also a torch optimizer with any state. All groups are multiplied by one factor.
        size: of a workload; its own if None.
        seeds: a number of seeds, or the seeds: of a workload's initial weights and batches, of the order of a
            module's batches and its dropout.
        low: the lowest rate that is tried.
        high: the highest.
        steps: of each trial.
        device: of a workload; a module is trained where it is.
        progress: called with a title and the fraction done.

    Weights, buffers, gradients, modes, optimizer and data state and random state are restored, also after an
    error. Hooks of a given optimizer are not called.

    >>> import torch
    >>> class Bowl(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.at = nn.Parameter(torch.ones(2))
    ...     def forward(self, curvatures):
    ...         return (curvatures * self.at.square()).sum() / 2
    >>> batch = torch.tensor([1.0, 8.0]), None
    >>> print(find_lr(Bowl(), lambda value, _: value, batch, optimizer="sgd", seeds=1).sentence)
    Bowl with sgd: learning rates from 0.00037 to 0.22, best 0.19
    """
    chosen = arguments.seeds("seeds", seeds)
    rates = _grid(low, high)
    arguments.whole("steps", steps, least=1)
    check_device(device)
    tell = progress or silent
    # Hooks of an optimizer from make(model) are part of it; those of the caller's own would have effects.
    quiet = no_hooks(optimizer) if isinstance(optimizer, Optimizer) else contextlib.nullcontext()
    # Small networks on the CPU train faster with one thread; a module may be of any size.
    is_small = not isinstance(workload, nn.Module) and torch.device(device).type == "cpu"
    with untouched_randomness(), torch.enable_grad(), quiet:
        name, rule, make = subjects(workload, loss, batches, optimizer, size=size, steps=steps, device=device)
        curves = []
        for index, seed in enumerate(chosen):
            subject = make(seed)
            check(subject)
            groups, base, done = subject.groups, subject.base, itertools.count()

            def tell_trial(rate: float, index: int = index, done: Iterator[int] = done) -> None:
                share = min(next(done) / (len(rates) + EXTRA), 1.0)
                tell(f"seed {index + 1} of {len(chosen)}, rate {rate:.2g}", (index + share) / len(chosen))

            with one_thread() if is_small else contextlib.nullcontext():
                curves.append(_curve(subject, rates, steps, seed, tell_trial))
    tell("Done", 1.0)
    return read_off(name, rule, steps, curves, base, groups)


def _grid(low: float, high: float) -> list[float]:
    """From low to high in equal ratios of 4, or a little less.

    >>> _grid(0.25, 4.0)
    [0.25, 1.0, 4.0]
    """
    arguments.positive("low", low)
    arguments.positive("high", high)
    if not low < high:
        raise UseError(f"low is {low:g} and high {high:g}: give low below high")
    if not math.isfinite(high / low):
        raise UseError(f"from low {low:g} to high {high:g} are too many rates to try: give a higher low")
    num = math.ceil(math.log(high / low, STRIDE) - 1e-9)
    return [low * (high / low) ** (place / num) for place in range(num)] + [float(high)]


def _curve(
    subject: Subject, rates: Sequence[float], steps: int, seed: int, tell: Callable[[float], None]
) -> LrCurve:
    """A trial at each rate, upwards, until one raises the loss; then refined there and around the best."""
    with _restored(subject.model, subject.optimizer, subject.loss) as restore:
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
            runner.trial(math.sqrt(gap[0] * gap[1]))
        trials = tuple(trial for _, trial in sorted(runner.trials.items()))
        return LrCurve(seed, runner.start, trials, high, risen=above is not None)


@contextmanager
def _restored(model: nn.Module, optimizer: Optimizer, loss: object = None) -> Iterator[Callable[[], None]]:
    """Restore everything that steps change at the end, also after an error or Ctrl-C.

    Yields a function that restores it at any time, without gradients, to start again. It costs a copy of the
    weights and of the optimizer's state. Attributes of modules get their objects back; changes inside objects
    other than tensors stay.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer, before = torch.optim.Adam(model.parameters()), model.weight.tolist()
    >>> with _restored(model, optimizer) as restore:
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> model.weight.tolist() == before, model.weight.grad, len(optimizer.state)
    (True, None, 0)
    """
    everything = nn.ModuleList([model, *([loss] if isinstance(loss, nn.Module) else [])])
    snapshot = Snapshot(optimizer, everything)
    tables = [
        (table, dict(table))
        for module in everything.modules()
        for table in (vars(module), module._buffers, module._parameters)
    ]

    def put_back() -> None:
        for table, before in tables:
            table.clear()
            table.update(before)
        snapshot.restore()

    def restore() -> None:
        put_back()
        for tensor in everything.parameters():
            tensor.grad = None

    try:
        yield restore
    finally:
        put_back()


class _Runner:
    """Trials from one start, and the lowest loss so far."""

    def __init__(
        self,
        subject: Subject,
        restore: Callable[[], None],
        steps: int,
        seed: int,
        tell: Callable[[float], None],
    ) -> None:
        self._subject, self._restore, self._steps, self._seed = subject, restore, steps, seed
        self._tell = tell
        self._rates = [float(group["lr"]) for group in subject.optimizer.param_groups]
        self.trials: dict[float, LrTrial] = {}
        self._begin()
        self._refuse_bad_start()
        self._before = self._judged()
        self.start = self.least = float(self._before.mean())

    def rises(self, rate: float) -> bool:
        """Does a trial raise the loss, beyond an accident of small steps?"""
        slack = SLACK * max(self.start - self.least, 0.1 * abs(self.start))
        return self.trial(rate).loss > self.start + slack

    def gap_beside_lowest(self) -> tuple[float, float] | None:
        """Two rates, one of them with the lowest loss, that are more than an octave apart."""
        rates = sorted(self.trials)
        at = min(range(len(rates)), key=lambda index: self.trials[rates[index]].loss)
        near = rates[max(at - 1, 0) : at + 2]
        return next(((a, b) for a, b in pairwise(near) if b / a > OCTAVE * (1 + 1e-9)), None)

    def trial(self, rate: float) -> LrTrial:
        """Train from the start at this rate, and judge."""
        if rate not in self.trials:
            self._tell(rate)
            self.trials[rate] = self._run(rate)
        return self.trials[rate]

    def _run(self, rate: float) -> LrTrial:
        self._begin()
        for group, own in zip(self._subject.optimizer.param_groups, self._rates, strict=True):
            set_lr(group, own * rate / self._subject.base)
        with untouched_randomness(self._seed):
            done = self._train()
        after = self._judged() if done else torch.full_like(self._before, math.inf)
        loss = float(after.mean())
        if not math.isfinite(loss):
            return LrTrial(rate, math.inf, falls=False)
        self.least = min(self.least, loss)
        fall = self._before - after
        error = float(fall.std()) / math.sqrt(len(fall)) if len(fall) > 1 else 0.0
        return LrTrial(rate, loss, float(fall.mean()) > max(SURE * error, LEAST * abs(self.start)))

    def _begin(self) -> None:
        self._restore()
        self._subject.model.train()
        self._subject.switch("train")

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
        """The loss on every batch that judges, with the weights for evaluation."""
        self._subject.switch("eval")
        with torch.no_grad(), untouched_randomness(self._seed):
            losses = [self._subject.evaluate(batch).double() for batch in self._subject.judges]
        return torch.stack(losses).cpu()

    def _finite(self) -> bool:
        grads = [_entries(one.grad) for one in self._subject.model.parameters() if one.grad is not None]
        return bool(nn.utils.get_total_norm(grads).isfinite())

    def _refuse_bad_start(self) -> None:
        """Raise if a tensor, its gradient or the loss is not finite at the start."""
        tensors = dict(canonical_parameters(self._subject.model))
        if bad := not_finite(tensors):
            raise UseError(f"{bad[0]} is not finite before the first step. Initialise it, or load it anew")
        with untouched_randomness(self._seed):
            loss = self._backward(0)
        grads = {name: one.grad for name, one in tensors.items() if one.grad is not None}
        if bad := not_finite({name: _entries(grad) for name, grad in grads.items()}):
            raise UseError(
                f"the gradient of {bad[0]} is not finite before the first step (the loss is "
                f"{float(loss):.4g}). Check the model, the batch and the loss"
            )
        if not loss.isfinite():
            raise UseError(
                f"the loss is {float(loss)} before the first step. Check the model, the batch and the loss"
            )
        self._begin()


def _entries(grad: Tensor) -> Tensor:
    """The stored entries of a sparse gradient, or all."""
    return grad.coalesce().values() if grad.is_sparse else grad
