"""Measure the gradient noise along training, from the backward passes that the loop makes anyway.

The gradients of the microbatches of one step, and the gradient of the whole step, suffice: with U
microbatches of b examples each, gradients h_u that the backward passes give, and H their sum,

    signal ∝ (|H|² − Σ|h_u|²)/(U(U − 1)),    noise ∝ b(Σ|h_u|²/U − signal)

are unbiased. Microbatches are those of gradient accumulation, the processes of DistributedDataParallel, or
both. A hook takes the norm of each gradient before it is accumulated and before processes average it; the
optimizer's step needs H itself.

Both are averaged over steps, and the critical batch is the ratio of the averages. The interval is a bootstrap
over blocks of consecutive steps, as gradients of steps near each other are alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.arguments import positive, whole
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.replicas import group_of
from theodolite.present.text import counted
from theodolite.probes.noise.estimates import drawn, norm, squared, squares
from theodolite.probes.noise.metric import NoState, root_factors
from theodolite.probes.noise.noise import in_metric, intervals, trained
from theodolite.probes.noise.result import FEW, Noise, NoiseAlong

MOST_BLOCKS = 64
"""Blocks of steps that are kept. Then neighbours are merged, or the oldest forgotten."""
BLOCKS_OF_HALFLIFE = 8
"""A block is at most this part of a half-life."""
ROUNDING = 1e-3


class NoiseMeter:
    """The critical batch along training: three lines in a loop of your own.

    Args:
        model: the model in training: plain, compiled, or a DistributedDataParallel.
        examples: of one backward pass in one process, the same each time.
        optimizer: measure in its coordinates, as `noise` does; steps before it has a state are left out.
        halflife: forget earlier steps: after so many steps they count half. None: all steps count the same.

    Call `step()` once for each step of the optimizer: after the last `backward()`, and before gradients are
    clipped, the optimizer steps and gradients are zeroed. Each step needs two backward passes in all: by
    accumulation, or in two processes. The loss may be divided by the number of accumulated microbatches or
    not, but alike for all of them. `result()` may be asked for at any time, and `close()` removes the hooks;
    a `with` block does so too. Nothing about the training changes.

    Costs a norm of each gradient in each backward pass, another in each step, and one exchange of a number
    for each tensor between processes. Memory does not grow with the number of steps.

    Gradients of 4 and 2 in each step, or 3 ± 1: their variance is 2, and their product 8.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.ones_(model.weight)
    >>> with NoiseMeter(model, examples=1) as meter:
    ...     for _ in range(20):
    ...         for target in (-1.0, 0.0):
    ...             loss = (model(torch.ones(1, 1)) - target).square().mean() / 2
    ...             loss.backward()
    ...         meter.step()
    ...         model.zero_grad()
    >>> round(meter.result().whole.signal, 4), round(meter.result().critical, 4)
    (8.0, 0.25)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        examples: int,
        optimizer: Optimizer | None = None,
        halflife: float | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UseError(f"model is {described(model)}, not a torch.nn.Module")
        self.examples = whole("examples", examples, least=1)
        self.halflife = None if halflife is None else positive("halflife", halflife)
        self.tensors = trained(model)
        self.steps = 0
        """Steps that were measured."""
        self._optimizer = optimizer
        self._group = group_of(model)
        self._processes = 1 if self._group is None else dist.get_world_size(self._group)
        self._roots: dict[str, Tensor | float] | None = None
        self._norms: dict[str, list[Tensor]] = {name: [] for name in self.tensors}
        self._blocks = _Blocks(self.halflife)
        self._microbatches = 0
        self._batch = 0
        self._left_out = {"with one microbatch": 0, "with gradients that are not finite": 0}
        self._hooks = [
            tensor.register_hook(partial(self._see, name)) for name, tensor in self.tensors.items()
        ]
        if optimizer is not None:
            self._look_at_optimizer()

    @torch.no_grad()
    @exclusive()
    def step(self) -> None:
        """Take in the gradients of one step of the optimizer."""
        if not self._hooks:
            raise UseError("the meter is closed: make a new NoiseMeter for more steps")
        local, number = self._taken()
        if self._optimizer is not None and self._roots is None:
            self._look_at_optimizer()
            return
        own = torch.cat([local, local.new_tensor([number])])
        if self._group is not None:
            dist.all_reduce(own, group=self._group)
        gradients = [
            torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for tensor in self.tensors.values()
        ]
        if self._roots is not None:
            gradients = [
                in_metric(one, self._roots[name]) for name, one in zip(self.tensors, gradients, strict=True)
            ]
        together = squares([_dense(one) for one in gradients]).to(own) * self._processes**2
        every = torch.stack([own[:-1], together]).cpu()
        units = round(float(own[-1]))
        if self._optimizer is not None:
            self._look_at_optimizer()
        self._add(every[0], every[1], units)

    def result(self) -> Noise:
        """The critical batch over the steps so far, with its interval."""
        if self.steps < 2:
            raise UseError(
                f"{counted(self.steps, 'step')} of training measured: an interval takes two. Call "
                "meter.step() after the last backward() of each step"
            )
        blocks = self._blocks.each
        noises = torch.stack([block.noise for block in blocks], 1)
        signals = torch.stack([block.signal for block in blocks], 1)
        counts = torch.tensor([block.weight for block in blocks], dtype=torch.float64)
        draws = drawn(len(blocks))
        over = draws @ counts
        every, rows = intervals(
            noises.sum(1) / counts.sum(),
            signals.sum(1) / counts.sum(),
            noises @ draws.T / over,
            signals @ draws.T / over,
            self.tensors,
        )
        notes = [f"left out: {counted(many, 'step')} {why}" for why, many in self._left_out.items() if many]
        if len(blocks) < FEW:
            notes.append(f"{len(blocks)} steps are few for an interval: it is rough")
        return Noise(
            whole=every,
            tensors=rows,
            batch=self._batch,
            examples=self._microbatches * self.examples,
            microbatch=self.examples,
            units=self._microbatches,
            steps=self.steps,
            optimizer="" if self._optimizer is None else type(self._optimizer).__name__,
            along=tuple(
                NoiseAlong(
                    block.last,
                    float(block.noise.sum() / block.weight),
                    float(block.signal.sum() / block.weight),
                )
                for block in blocks
            ),
            notes=tuple(notes),
        )

    def close(self) -> None:
        """Remove the hooks. `result` still works."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._norms = {name: [] for name in self.tensors}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _see(self, name: str, gradient: Tensor) -> None:
        """The hook: the gradient of one backward pass, before it is accumulated."""
        if self._optimizer is not None and self._roots is None:
            return
        with torch.no_grad():
            found = gradient.detach()
            if self._roots is not None:
                found = in_metric(found, self._roots[name])
            self._norms[name].append(norm(_dense(found)))

    def _taken(self) -> tuple[Tensor, int]:
        """`Σ|h_u|²` by tensor (T,), and the number of backward passes since the last step; then none."""
        counts = [len(norms) for norms in self._norms.values()]
        every = [one for norms in self._norms.values() for one in norms]
        self._norms = {name: [] for name in self.tensors}
        device = next(iter(self.tensors.values())).device
        found = torch.zeros(len(counts), dtype=torch.float64, device=device)
        if every:
            places = [at for at, count in enumerate(counts) for _ in range(count)]
            found.index_add_(0, torch.tensor(places, device=device), squared(every).to(device))
        return found, max(counts)

    def _add(self, each: Tensor, together: Tensor, units: int) -> None:
        """One step: `Σ|h_u|²` and `|H|²` by tensor, and the number of microbatches of all processes."""
        if not units:
            raise UseError(
                "no backward pass since the last step: call meter.step() once for each step of the "
                "optimizer, after backward()"
            )
        if units < 2:
            if not self.steps:
                raise UseError(
                    "the step has one backward pass in all, so its gradient has nothing to be compared with. "
                    "Accumulate two or more microbatches, train in two or more processes, or measure with "
                    "th.probes.noise"
                )
            self._left_out["with one microbatch"] += 1
            return
        if not bool(each.isfinite().all() and together.isfinite().all()):
            self._left_out["with gradients that are not finite"] += 1
            return
        if float(together.sum()) > units * float(each.sum()) * (1 + ROUNDING):
            raise UseError(
                "the gradients are larger than the backward passes since the last step can make them: zero "
                "them after each step of the optimizer, and call meter.step() in each"
            )
        # As if the loss was divided by the number of microbatches of a process, as is usual.
        scale = (units / self._processes) ** 2
        signal = scale * (together - each) / (units * (units - 1))
        noise = self.examples * (scale * each / units - signal)
        self.steps += 1
        self._microbatches += units
        self._batch = units * self.examples
        self._blocks.add(noise, signal, self.steps)

    def _look_at_optimizer(self) -> None:
        """The factors of the next step; none before the optimizer's first."""
        assert self._optimizer is not None
        try:
            self._roots = root_factors(self._optimizer, self.tensors)
        except NoState:
            self._roots = None


@dataclass
class _Block:
    """Sums over consecutive steps, which fade with age."""

    noise: Tensor
    """(T,)."""
    signal: Tensor
    weight: float
    """The number of steps, faded alike."""
    steps: int
    last: int


class _Blocks:
    """Blocks of equal numbers of steps, of which at most `MOST_BLOCKS` are kept."""

    def __init__(self, halflife: float | None) -> None:
        self.each: list[_Block] = []
        self.length = 1
        """Steps of a whole block."""
        self.fade = 1.0 if halflife is None else 0.5 ** (1 / halflife)
        self.longest = math.inf if halflife is None else max(1.0, halflife / BLOCKS_OF_HALFLIFE)

    def add(self, noise: Tensor, signal: Tensor, step: int) -> None:
        """One step more."""
        if self.fade < 1:
            for block in self.each:
                block.noise *= self.fade
                block.signal *= self.fade
                block.weight *= self.fade
        if self.each and self.each[-1].steps < self.length:
            _merge(self.each[-1], _Block(noise, signal, 1.0, 1, step))
            return
        if len(self.each) == MOST_BLOCKS:
            if 2 * self.length <= self.longest:
                self.length *= 2
                pairs = zip(self.each[::2], self.each[1::2], strict=True)
                self.each = [_merge(one, other) for one, other in pairs]
            else:
                self.each.pop(0)
        self.each.append(_Block(noise.clone(), signal.clone(), 1.0, 1, step))


def _merge(one: _Block, other: _Block) -> _Block:
    one.noise += other.noise
    one.signal += other.signal
    one.weight += other.weight
    one.steps += other.steps
    one.last = other.last
    return one


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
