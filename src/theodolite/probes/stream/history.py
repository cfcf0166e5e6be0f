"""The residual stream during training: depth × step."""

from __future__ import annotations

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
from theodolite.present.figure import Figure
from theodolite.present.result import Block, Result
from theodolite.present.text import Table
from theodolite.probes.scaling.first_steps import PROBE_STEP
from theodolite.probes.stream.maps import DRAWN, RATIOS, branch_values, depth_maps, why_no_ratio
from theodolite.probes.stream.result import Stream
from theodolite.probes.stream.stream import stream
from theodolite.workloads import Workload


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
        return branch_values(self.streams, name)

    def figure(self, quantities: Sequence[str] = DRAWN) -> Figure:
        """A heat map of depth × step for each quantity."""
        if not self.streams:
            raise UseError("nothing is recorded yet: call record(step) first")
        return depth_maps(self.streams, self._labels, "step", quantities)

    def blocks(self) -> Iterator[Block]:
        """A row for each recorded step, and heat maps."""
        if not self.streams:
            yield "nothing is recorded yet: call record(step)"
            return
        yield self.table()
        yield "\n".join(
            [
                "stream: last block over the start; gradient: the other way; f/h, cosine: last branch",
                *why_no_ratio(self.streams, self._labels, "step"),
            ]
        )
        yield self.figure((*DRAWN, "skipped") if self.skip else DRAWN)

    def table(self) -> Table:
        """One row for each recorded step."""
        rows = [
            (
                *(step, one.loss, one.growth.ratio, one.backward.ratio),
                *(one.branches[-1].share, one.branches[-1].cosine, one.largest.headroom),
            )
            for step, one in zip(self.steps, self.streams, strict=True)
        ]
        return Table(("step", "loss", *RATIOS, "f/h", "cosine", "headroom"), rows)

    @property
    def _labels(self) -> list[str]:
        return [str(step) for step in self.steps]


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
