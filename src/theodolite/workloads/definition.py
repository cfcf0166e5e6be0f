"""`Workload`: a network, its data and its loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from theodolite.core.arguments import whole
from theodolite.core.batches import Batch
from theodolite.core.calling import Build, Loss, described, evaluate, see_inside
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.workloads.batching import HeldOutOf, Resized, targets_per_example, usual_batch
from theodolite.workloads.metrics import Metric, check_metrics

HELD_OUT_SEED = 2**31 - 1
"""The seed of held-out batches where a workload has none of its own; too large for the seed of a run."""


@dataclass(frozen=True)
class Workload:
    """A network, its data and its loss, as three functions.

    Args:
        name: its name in reports.
        build: `build(width, depth) -> nn.Module`.
        batch: `batch(seed, step) -> (inputs, targets)`, a pure function: the same seed and step give the
            same batch in every process, so that a run can be resumed. `inputs` is a tensor, a tuple
            (`model(*inputs)`), a dict (`model(**inputs)`), or an object with tensors in it, such as a
            dataclass (`model(inputs)`). Dimension 0 of the inputs is that of the examples. It may have a
            third argument, `batch(seed, step, num=64)`, and draw `num` examples; otherwise other batch sizes
            are cut from the stream of examples that these batches make.
        loss: `loss(logits, targets) -> scalar`, with the logits that `core.calling.logits` finds in the
            model's output. A loss of the whole output is `OutputLoss(loss)`, called as
            `loss(output, targets)`; one that calls the model itself is `ModelLoss(loss)`, called as
            `loss(model, batch)`.
        size: the default size.
        held_out: batches that are never trained on, `held_out(seed, step)`, by which runs are judged. By
            default, batches of a seed that no run has, which suffices where data never repeat.
        schedule: the learning-rate schedule you train with, if the survey should check it:
            `schedule(optimizer) -> LRScheduler`.
        metrics: what a trained network is judged by beside the loss, by name: `metric(model) -> float`, or
            `StepsTo("accuracy", at_least=0.95)`. Lower is better. A function is called after training, in
            eval mode and without gradients; `inf` says that there is no finite value, as of a solver that
            does not converge.
        optimizer: how you make your optimizer, `optimizer(model) -> Optimizer`, if your own parameterization
            should be measured (`parameterization="own"`, and the audit). It may return several, and
            schedulers beside them, in the forms of Lightning's `configure_optimizers`.
        roles: of tensors that `dissect` cannot classify, by pattern of names, as in
            `{"blocks.*.scale": "gain"}`.

    >>> import torch
    >>> from torch import nn
    >>> def build(width: int, depth: int) -> nn.Module:
    ...     hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    ...     return nn.Sequential(nn.Linear(8, width), *hidden, nn.Linear(width, 2))
    >>> def batch(seed: int, step: int):
    ...     generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    ...     inputs = torch.randn(16, 8, generator=generator)
    ...     return inputs, (inputs.sum(1) > 0).long()
    >>> mine = Workload("mine", build, batch, nn.functional.cross_entropy, size=Size(32, 2))
    >>> model = mine.build(32, 2)
    >>> mine.evaluate(model, mine.batch(0, 0)).shape
    torch.Size([])
    """

    name: str
    build: Build
    batch: Callable[[int, int], Batch]
    loss: Loss
    size: Size = field(default=Size(128, 4))
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    held_out: Callable[[int, int], Batch] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict, hash=False)
    optimizer: Callable[[nn.Module], Any] | None = field(default=None, hash=False)
    roles: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise UseError(f"the name of a workload is {self.name!r}: give a string")
        if not isinstance(self.size, Size):
            raise UseError(f"workload {self.name!r}: size is {self.size!r}. Give a Size, as in Size(256, 4)")
        optional = ("schedule", "held_out", "optimizer")
        for name in ("build", "batch", "loss", *optional):
            value = getattr(self, name)
            if not callable(value) and not (name in optional and value is None):
                raise UseError(f"workload {self.name!r}: {name} is {value!r}, which cannot be called")
        object.__setattr__(self, "metrics", check_metrics(self.name, self.metrics))
        if not isinstance(self.roles, Mapping):
            raise UseError(
                f"workload {self.name!r}: roles is {self.roles!r}. Give roles by pattern of names, as in "
                '{"blocks.*.scale": "gain"}'
            )

    @property
    def usual_batch(self) -> int:
        """The number of examples of its batches."""
        return usual_batch(self)

    def with_batch(self, num: int | None) -> Workload:
        """The same workload with `num` examples in a batch; None changes nothing.

        The examples of a run stay the same, in the same order: a batch k times as large is k of the usual
        ones, one after the other. A batch function with an argument `num` draws the examples itself.
        Held-out batches keep their size.
        """
        if num is None:
            return self
        source, num = self.source, whole(f"workload {self.name!r}: the batch", num, least=1)
        if num == source.usual_batch:
            return source
        return dataclasses.replace(source, batch=Resized(source, num), held_out=HeldOutOf(source))

    @property
    def source(self) -> Workload:
        """The workload with its own batches, if `with_batch` made this one."""
        return self.batch.source if isinstance(self.batch, Resized) else self

    def steps_for(self, size: Size) -> int:
        """The number of steps in which training sees `size.tokens` targets, in batches of `size.batch`.

        Rounded, and at least one.
        """
        if size.tokens is None:
            example = f"Size({size.width}, {size.depth}, tokens=10**6)"
            raise UseError(f"size is {size}: give the number of tokens too, as in {example}")
        examples = self.source.usual_batch if size.batch is None else size.batch
        return max(1, round(size.tokens / (examples * targets_per_example(self.source))))

    def tokens_in(self, steps: int, batch: int | None = None) -> int:
        """The number of targets that training sees in some steps."""
        examples = self.source.usual_batch if batch is None else batch
        return round(steps * examples * targets_per_example(self.source))

    def evaluate(self, model: nn.Module, batch: Batch, *, temperature: float = 1.0) -> Tensor:
        """The loss of the model on one batch, with its logits divided by the temperature."""
        return evaluate(self.loss, model, batch, temperature=temperature)

    def roles_with(self, more: Mapping[str, Any] | None) -> dict[str, Any]:
        """Its roles and those of a caller, which win where a pattern is the same."""
        return {**self.roles, **(more or {})}

    def draw(self, seed: int, step: int) -> Batch:
        """`batch(seed, step)`; raises `UseError` if it is not a pair or is empty."""
        return self._checked(f"batch({seed}, {step})", self.batch(seed, step))

    def draw_held_out(self, step: int) -> Batch:
        """A held-out batch, the same for every run."""
        if self.held_out is not None:
            return self._checked(f"held_out(0, {step})", self.held_out(0, step))
        return self.draw(HELD_OUT_SEED, step)

    def _checked(self, called: str, drawn: Batch) -> Batch:
        if not (isinstance(drawn, tuple) and len(drawn) == 2):
            raise UseError(
                f"workload {self.name!r}: {called} returned {described(drawn)}, not a pair (inputs, targets)"
            )
        tensors = [leaf for leaf in tree_leaves(see_inside(drawn)[0]) if isinstance(leaf, Tensor)]
        if not tensors or any(tensor.numel() == 0 for tensor in tensors):
            raise UseError(
                f"workload {self.name!r}: {called} is empty: its inputs are {described(drawn[0])}. "
                "Return at least one example"
            )
        return drawn
