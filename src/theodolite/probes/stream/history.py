"""The residual stream during training: depth × step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar

from torch import nn
from torch.optim import Optimizer

from theodolite.core import arguments
from theodolite.core.batches import Batch, on_device
from theodolite.core.building import build_model, untouched_randomness
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, share
from theodolite.core.size import Size
from theodolite.planning.plan import Plan
from theodolite.present.figure import Figure, Panel, frame, heat_map
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table
from theodolite.probes.scaling.first_steps import PROBE_STEP
from theodolite.probes.stream.stream import Stream, stream
from theodolite.workloads import Workload

TITLES = {
    "stream": "RMS of the stream",
    "added": "RMS of the branches",
    "share": "Branch over stream, ‖f‖/‖h‖",
    "cosine": "Cosine of neighbours",
    "stream_gradient": "RMS of the stream's gradient",
    "branch_gradient": "RMS of the branches' gradients",
    "largest": "Largest entry of the stream",
    "peak": "Largest entry over the median",
    "skipped": "Loss without the branch, minus the loss",
}
"""By quantity of `BranchReading`."""
LINEAR = ("cosine", "skipped")
"""Quantities that are not drawn on a logarithmic scale."""
DRAWN = ("stream", "stream_gradient", "share", "cosine")


@dataclass
class StreamHistory(Result):
    """The residual stream of a network at several steps of its training; `record` adds one.

    Args:
        model: what is trained.
        loss: `loss(logits, targets) -> scalar`.
        batch: the batch to measure on, the same each time.
        skip: also measure the loss without each branch and block: a forward pass for each.

    >>> import torch, theodolite as th
    >>> model, batch = th.models.ResidualMLP(8, 2, inputs=4), (torch.ones(2, 4), torch.tensor([0, 1]))
    >>> history = StreamHistory(model, nn.functional.cross_entropy, batch)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step in range(3):
    ...     _ = history.record(step)
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    ...     optimizer.step()
    >>> history.steps, len(history.values("stream")[0])
    ((0, 1, 2), 2)
    """

    kind: ClassVar[str] = "residual stream during training"
    model: nn.Module = field(repr=False, compare=False)
    loss: Loss = field(repr=False, compare=False)
    batch: Batch = field(repr=False, compare=False)
    _: KW_ONLY
    skip: bool = False
    steps: tuple[int, ...] = field(default=(), init=False)
    streams: tuple[Stream, ...] = field(default=(), init=False)
    """The stream at each of the steps."""

    def record(self, step: int) -> Stream:
        """Measure the stream now."""
        layout = self.streams[-1].layout if self.streams else None
        found = stream(self.model, self.loss, self.batch, skip=self.skip, layout=layout)
        self.steps, self.streams = (*self.steps, step), (*self.streams, found)
        return found

    def values(self, name: str) -> tuple[tuple[float, ...], ...]:
        """One quantity of `BranchReading`, by step and by branch; nan where it was not measured."""
        arguments.one_of("name", name, TITLES)
        every = ([getattr(one, name) for one in found.branches] for found in self.streams)
        return tuple(tuple(math.nan if one is None else one for one in row) for row in every)

    def figure(self, quantities: Sequence[str] = DRAWN) -> Figure:
        """A heat map of depth × step for each quantity."""
        if not self.streams:
            raise UseError("nothing is recorded yet: call record(step) first")
        return Figure(
            caption="Each column is a step: the first branch of the first block at the bottom, the last "
            "branch of the last block at the top.",
            alt=". ".join(self._described(name) for name in quantities),
            panels=tuple(self._map(name) for name in quantities),
        )

    def blocks(self) -> Iterator[Block]:
        """A row for each recorded step, and heat maps."""
        if not self.streams:
            yield "nothing is recorded yet: call record(step)"
            return
        yield self.table()
        yield "stream: last block over the start; gradient: the other way; f/h, cosine: last branch"
        yield self.figure((*DRAWN, "skipped") if self.skip else DRAWN)

    def table(self) -> Table:
        """One row for each recorded step."""
        times = [Column(name, lambda ratio: f"{ratio:.3g}×") for name in ("stream", "gradient")]
        rows = [
            (
                *(step, one.loss, one.growth.ratio, one.backward.ratio),
                *(one.branches[-1].share, one.branches[-1].cosine, one.largest.headroom),
            )
            for step, one in zip(self.steps, self.streams, strict=True)
        ]
        return Table(("step", "loss", *times, "f/h", "cosine", "headroom"), rows)

    def _map(self, name: str) -> Panel:
        rows = [list(row) for row in zip(*self.values(name), strict=True)]
        shown = [[_height(name, value) for value in row] for row in rows]
        finite = [value for row in shown for value in row if value is not None]
        drawn = heat_map(
            shown,
            x=[str(step) for step in self.steps],
            y=[f"{one.block}.{one.branch}" for one in self.streams[0].branches],
            hover="step %{x}, block %{y}: %{text}",
        )
        drawn["text"] = [[f"{value:.4g}" for value in row] for row in rows]
        if finite and name not in LINEAR:
            ticks = [min(finite) + part / 4 * (max(finite) - min(finite)) for part in range(5)]
            drawn["colorbar"] |= {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks]}
        layout = frame(height=260, x="step", y="block")
        layout["xaxis"] |= {"type": "category", "nticks": 8}
        layout["yaxis"] |= {"type": "category", "nticks": 12}
        return Panel(TITLES[name], (drawn,), layout)

    def _described(self, name: str) -> str:
        first, last = self.values(name)[0], self.values(name)[-1]
        return (
            f"{TITLES[name]}: from {first[0]:.3g} to {first[-1]:.3g} with depth at step {self.steps[0]}, "
            f"from {last[0]:.3g} to {last[-1]:.3g} at step {self.steps[-1]}"
        )


@exclusive()
def stream_history(
    workload: Workload,
    optimizer: Plan | Callable[[nn.Module], Optimizer],
    *,
    size: Size | None = None,
    steps: int = 100,
    every: int = 10,
    seed: int = 0,
    skip: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
) -> StreamHistory:
    """Train a new network and measure its stream every few steps, on a batch that is not trained on.

    Args:
        workload: the network, its data and its loss.
        optimizer: a plan, which initialises the network and gives its optimizer; or a function that makes an
            optimizer for the network as it was built.
        size: of the network; the workload's own if None. A plan has its own.
        steps: of training.
        every: steps between measurements; there is one before the first step and one after the last.
        seed: of the initial weights and of the batches.
        skip: also measure the loss without each branch and block.
        device: where to train.
        progress: called with a title and the fraction done.

    Training ends if the loss is not finite, with a last measurement. The global random state is unchanged.

    >>> import torch, theodolite as th
    >>> mlp = th.workload("mlp-mixture")
    >>> def sgd(model):
    ...     return torch.optim.SGD(model.parameters(), lr=0.1)
    >>> stream_history(mlp, sgd, steps=4, every=2).steps
    (0, 2, 4)
    """
    arguments.whole("steps", steps, least=0)
    arguments.whole("every", every, least=1)
    if isinstance(optimizer, Plan) and size is not None and size != optimizer.size:
        raise UseError(f"size is {size}, but the plan is for {optimizer.size}: leave size out")
    tell = share(progress, "training")
    with untouched_randomness(seed):
        if isinstance(optimizer, Plan):
            model = optimizer.build(seed, device=device).train()
            made = optimizer.optimizer(model, check_gradients=False)  # a divergence is a result
        else:
            model = build_model(workload.build, size or workload.size, seed=seed, device=device).train()
            made = optimizer(model)
        probe = on_device(workload.draw(seed, PROBE_STEP), device)
        history = StreamHistory(model, workload.loss, probe, skip=skip)
        for step in range(steps):
            tell(step / steps)
            if step % every == 0:
                history.record(step)
            made.zero_grad()
            loss = workload.evaluate(model, on_device(workload.draw(seed, step), device))
            loss.backward()
            made.step()
            if not bool(loss.isfinite()):
                history.record(step + 1)
                return history
        history.record(steps)
    return history


def _height(name: str, value: float) -> float | None:
    """A value on the scale of its map; None if it has no place there."""
    if not math.isfinite(value) or (name not in LINEAR and value <= 0):
        return None
    return value if name in LINEAR else math.log10(value)
