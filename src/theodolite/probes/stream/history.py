"""The stream during training: depth × step."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from theodolite.core.batches import Batch, on_device
from theodolite.core.building import build_model, untouched_randomness
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.files import html_path, plain, write_whole
from theodolite.core.size import Size
from theodolite.planning.plan import Plan
from theodolite.present.figure import Figure
from theodolite.probes.scaling.first_steps import PROBE_STEP
from theodolite.probes.stream.figures import TITLES, course_figure
from theodolite.probes.stream.reach import Reach
from theodolite.probes.stream.stream import Stream, stream
from theodolite.workloads import Workload

QUANTITIES = tuple(field.name for field in dataclasses.fields(Reach) if field.name in TITLES)
DRAWN = ("stream", "stream_gradient", "share", "cosine")


class StreamCourse:
    """Looks at one network's stream, as it is trained; call `record` whenever you like.

    Args:
        model: what is trained.
        loss: `loss(logits, targets) -> scalar`.
        batch: what to look at, the same each time.
        skip: also take the loss without each branch and block: a forward pass for each.

    >>> import torch, theodolite as th
    >>> model, batch = th.models.ResidualMLP(8, 2, inputs=4), (torch.ones(2, 4), torch.tensor([0, 1]))
    >>> course = StreamCourse(model, nn.functional.cross_entropy, batch)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> for step in range(3):
    ...     _ = course.record(step)
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    ...     optimizer.step()
    >>> course.steps, len(course.values("stream")[0])
    ((0, 1, 2), 2)
    """

    def __init__(self, model: nn.Module, loss: Loss, batch: Batch, *, skip: bool = False) -> None:
        self._model, self._loss, self._batch, self._skip = model, loss, batch, skip
        self.steps: tuple[int, ...] = ()
        self.streams: tuple[Stream, ...] = ()
        """What was seen at each of the steps."""

    def record(self, step: int) -> Stream:
        """Look at the stream now."""
        layout = self.streams[-1].layout if self.streams else None
        found = stream(self._model, self._loss, self._batch, skip=self._skip, layout=layout)
        self.steps, self.streams = (*self.steps, step), (*self.streams, found)
        return found

    def values(self, name: str) -> tuple[tuple[float, ...], ...]:
        """One quantity of `Reach`, by step and by branch; nan where it was not measured."""
        if name not in QUANTITIES:
            raise UseError(f"{name!r} is not measured: it is one of {', '.join(QUANTITIES)}")
        every = ([getattr(one, name) for one in found.reaches] for found in self.streams)
        return tuple(tuple(math.nan if one is None else one for one in row) for row in every)

    def figure(self, quantities: Sequence[str] = DRAWN) -> Figure:
        """A heat map of depth × step for each quantity."""
        if not self.streams:
            raise UseError("nothing was recorded yet: call record(step) first")
        return course_figure(self, quantities)

    def save(self, path: str | Path) -> Path:
        """Write one self-contained page with the heat maps, and the numbers as JSON beside it."""
        from theodolite.present.page import figure_html, sheet

        path = html_path(path, kind="stream")
        drawn = self.figure((*DRAWN, "skipped") if self._skip else DRAWN)
        text = sheet(
            title="The residual stream during training",
            kicker="The residual stream during training",
            heading=f"{len(self.streams)} looks from step {self.steps[0]} to step {self.steps[-1]}",
            sections=[figure_html(drawn, 0), f"<pre>{escape(str(self))}</pre>"],
            figures=[drawn],
        )
        write_whole(path, text)
        rows = [
            {"step": step, "loss": one.loss, "start": one.start, "start_gradient": one.start_gradient}
            | {"blocks": one.blocks, "reaches": one.reaches, "notes": one.notes}
            for step, one in zip(self.steps, self.streams, strict=True)
        ]
        found = {"stream": {"steps": self.steps}, "looks": rows}
        write_whole(path.with_suffix(".json"), json.dumps(plain(found), indent=1, allow_nan=False))
        return path

    def __str__(self) -> str:
        lines = [
            f"{'step':>6}{'loss':>10}{'stream':>10}{'gradient':>10}{'f/h':>8}{'cosine':>8}{'headroom':>10}"
        ]
        for step, one in zip(self.steps, self.streams, strict=True):
            last = one.reaches[-1]
            lines.append(
                f"{step:>6}{one.loss:>10.4f}{one.growth.ratio:>9.3g}×{one.backward.ratio:>9.3g}×"
                f"{last.share:>8.2g}{last.cosine:>8.3f}{one.largest.headroom:>10.1f}"
            )
        lines.append("stream: last block over the start; gradient: the other way; f/h, cosine: last branch")
        return "\n".join(lines)


@exclusive()
def stream_course(
    workload: Workload,
    how: Plan | Callable[[nn.Module], Optimizer],
    *,
    size: Size | None = None,
    steps: int = 100,
    every: int = 10,
    seed: int = 0,
    skip: bool = False,
    device: str = "cpu",
) -> StreamCourse:
    """Train a new network and look at its stream every so many steps, on a batch that is not trained on.

    Args:
        workload: the network, its data and its loss.
        how: a plan, which starts the network and gives its optimizer; or a function that makes an optimizer
            for the network as it is built, as `lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)`.
        size: of the network; the workload's own if None. A plan has its own.
        steps: of training.
        every: steps between looks; there is one before the first and one after the last.
        seed: of the initial weights and of the batches.
        skip: also take the loss without each branch and block.
        device: where to train.

    Training ends where the loss is no longer a number, with a last look there. No random number is spent.
    """
    if steps < 0 or every < 1:
        raise UseError(f"steps is {steps!r} and every {every!r}: they have to be at least 0 and 1")
    if isinstance(how, Plan) and size is not None and size != how.size:
        raise UseError(f"size is {size}, but the plan is for {how.size}: leave size out")
    with untouched_randomness(seed):
        if isinstance(how, Plan):
            model = how.build(seed, device=device).train()
            optimizer = how.optimizer(model, check_gradients=False)  # a divergence is a result
        else:
            model = build_model(workload.build, size or workload.size, seed=seed, device=device).train()
            optimizer = how(model)
        probe = on_device(workload.draw(seed, PROBE_STEP), device)
        course = StreamCourse(model, workload.loss, probe, skip=skip)
        for step in range(steps):
            if step % every == 0:
                course.record(step)
            optimizer.zero_grad()
            loss = workload.evaluate(model, on_device(workload.draw(seed, step), device))
            loss.backward()
            optimizer.step()
            if not bool(loss.isfinite()):
                course.record(step + 1)
                return course
        course.record(steps)
    return course
