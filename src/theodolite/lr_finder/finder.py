"""Which learning rates can be used: an interval, from short trainings at many rates and several seeds."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from theodolite.core.building import check_device, one_thread, untouched_randomness
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress
from theodolite.core.size import Size
from theodolite.lr_finder.legs import EXTRA, ascend
from theodolite.lr_finder.lr_range import LrRange, read_off
from theodolite.lr_finder.subject import Make, Subjects, subjects
from theodolite.planning import Plan
from theodolite.probes.steps.update import _no_hooks as no_hooks
from theodolite.workloads import Workload

STRIDE = 4.0
"""Between the rates of the first ascent."""

"""Called with what is being done and the fraction that is done."""


@exclusive()
def find_lr(
    what: Workload | nn.Module | str,
    optimizer: str | Plan | Make | Optimizer = "adamw",
    data: object = None,
    *,
    loss: Loss | None = None,
    size: Size | None = None,
    seeds: int | Sequence[int] = 3,
    low: float = 1e-5,
    high: float = 10.0,
    steps: int = 20,
    device: str = "cpu",
    progress: Progress | None = None,
) -> LrRange:
    """Find between which learning rates training goes forward, and where it goes farthest.

    Trains for a few steps at one rate, begins again from the same weights at four times the rate, and so on
    until the loss rises; then looks closer, about the best rate and where the loss begins to rise. (A ramp
    within one training would carry what low rates have done into what it says of high ones.) Each leg is
    judged before and after it by the same batches for all rates: for a workload held-out ones, for a module
    the last that it is given, on which it trains only if there is no other.

    - `low`: the lowest rate that makes a tenth of the greatest progress; the highest of all seeds.
    - `high`: the highest rate below the first that raises the loss, to a quarter of an octave; the lowest of
      all seeds. For gradient descent on a quadratic loss that is `2/λ_max`.
    - `best`: where the loss is lowest after these steps, by a parabola in `log lr`; the geometric mean over
      seeds, with the lowest and the highest of them as `spread`. Few steps see less noise than many: a long
      training may want less.

    Args:
        what: a Workload, the name of one, or a module.
        optimizer: the name of a rule (of a module: `adamw` or `sgd`), a Plan, a function `make(model)`, or
            of a module an optimizer of torch with any state. All groups are multiplied by one factor.
        data: of a module: a pair (inputs, targets), a list of pairs, a DataLoader.
        loss: of a module: `loss(logits, targets)`.
        size: of a workload; its own if None.
        seeds: how many, or which: of a workload the initial weights and batches, of a module the order of its
            batches and its dropout.
        low: the lowest rate that is tried.
        high: the highest.
        steps: of each leg.
        device: of a workload; a module is trained where it is.
        progress: called with a title and the fraction done.

    Leaves no trace: weights, buffers, gradients, modes, optimizer and data state and random numbers are as
    before, also after an error. Hooks of an optimizer that you give are not called.

    >>> import torch
    >>> class Bowl(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.at = nn.Parameter(torch.ones(2))
    ...     def forward(self, curvatures):
    ...         return (curvatures * self.at.square()).sum() / 2
    >>> batch = torch.tensor([1.0, 8.0]), None
    >>> print(find_lr(Bowl(), "sgd", batch, loss=lambda value, _: value, seeds=1).sentence)
    Bowl with sgd: learning rates from 0.00037 to 0.22, best 0.19
    """
    chosen = _seeds(seeds)
    rates = _grid(low, high)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UseError(f"steps is {steps!r}: a leg takes a whole number of steps, 1 or more")
    tell = progress or (lambda title, done: None)
    # Hooks of an optimizer that make(model) made are part of it; those of the caller's own would be traces.
    quiet = no_hooks(optimizer) if isinstance(optimizer, Optimizer) else contextlib.nullcontext()
    check_device(device)
    with untouched_randomness(), torch.enable_grad(), quiet:
        made = subjects(what, optimizer, data, loss, size=size, steps=steps, device=device)
        found = _search(what, made, rates, steps, chosen, device, tell)
    tell("Done", 1.0)
    return found


def _search(
    what: object,
    made: Subjects,
    rates: Sequence[float],
    steps: int,
    seeds: Sequence[int],
    device: str,
    tell: Progress,
) -> LrRange:
    """The curve of every seed, and what they agree on."""
    curves = []
    total = len(rates) + EXTRA
    alone = isinstance(what, nn.Module) or torch.device(device).type != "cpu"
    for index, seed in enumerate(seeds):
        subject = made.make(seed)
        groups, base = subject.groups, subject.base
        made_legs = itertools.count()

        def tell_leg(rate: float, index: int = index, made_legs: Iterator[int] = made_legs) -> None:
            share = min(next(made_legs) / total, 1.0)
            tell(f"seed {index + 1} of {len(seeds)}, rate {rate:.2g}", (index + share) / len(seeds))

        with contextlib.nullcontext() if alone else one_thread():
            curves.append(ascend(subject, rates, steps, seed, tell_leg))
    return read_off(made.name, made.optimizer, steps, curves, base, groups)


def _grid(low: float, high: float) -> list[float]:
    """From low to high in equal ratios of 4, or a little less.

    >>> _grid(0.25, 4.0)
    [0.25, 1.0, 4.0]
    """
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UseError(f"{name} is {value!r}: a learning rate is a positive number")
    if not low < high:
        raise UseError(f"low is {low:g} and high {high:g}: give low below high")
    if not math.isfinite(high / low):
        raise UseError(f"from low {low:g} to high {high:g} are too many rates to try: give a higher low")
    num = math.ceil(math.log(high / low, STRIDE) - 1e-9)
    return [low * (high / low) ** (place / num) for place in range(num)] + [float(high)]


def _seeds(seeds: int | Sequence[int]) -> list[int]:
    chosen = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    if isinstance(seeds, bool) or not chosen:
        raise UseError(f"seeds is {seeds!r}: say how many, 1 or more, or list them")
    for seed in chosen:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise UseError(f"seeds: {seed!r} is none. A seed is a whole number from 0 to 2⁶³ − 1")
    return chosen
