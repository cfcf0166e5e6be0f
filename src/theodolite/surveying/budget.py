"""How much a section may compute: work is counted, and batches are cut to what is affordable.

Work is counted in multiplications of a matrix product, so that a survey gives the same result on every
machine. The clock ends a section only as a last resort, for work that is not counted; the finding says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from theodolite.core.batches import Batch, targets_in
from theodolite.core.errors import UseError
from theodolite.core.higher_order import plain_operators
from theodolite.workloads import Workload

OPERATION = 3e5
"""Cost of starting one operation, in multiplications: about 15 µs."""
ENTRY = 20.0
"""Cost of one entry of an output tensor, in multiplications: about 1 ns."""
GROUPED = 50
"""A grouped convolution, such as a depthwise one, counts as this many operations."""
LAST_RESORT, DEEP_LAST_RESORT = 1800.0, 4 * 3600.0
"""Seconds after which the clock ends a section: ten times what its work takes on one core."""

clock = time.monotonic
"""Replaced in tests."""


class TooLong(UseError):
    """It would take, or has taken, too long."""


class Budget:
    """Counts work up to a limit.

    >>> budget = Budget(100.0)
    >>> budget.spend(60.0)
    >>> budget.spend(60.0)
    Traceback (most recent call last):
    theodolite.surveying.budget.TooLong: it would take more than 1e+02 multiplications
    """

    def __init__(self, work: float, *, deep: bool = False) -> None:
        self._left = self._work = work
        self._seconds = DEEP_LAST_RESORT if deep else LAST_RESORT
        self._begun = clock()

    def spend(self, work: float = 0.0) -> None:
        """Count the work that comes next. Raises TooLong beyond the limit."""
        self._left -= work
        if self._left < 0:
            raise TooLong(f"it would take more than {self._work:.2g} multiplications")
        spent = clock() - self._begun
        if spent > self._seconds:
            raise TooLong(f"it was stopped after {spent:.0f} s; a faster machine could complete it")


@dataclass(frozen=True)
class Work:
    """Counts of what was computed: multiplications in matrix products and convolutions, operations, and
    entries of the tensors that they made."""

    multiplications: float
    operations: int
    entries: int

    @property
    def total(self) -> float:
        """All of it, in multiplications."""
        return self.multiplications + OPERATION * self.operations + ENTRY * self.entries


def pass_work(run: Callable[[], object]) -> Work:
    """Count the work of a call.

    >>> pass_work(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    Work(multiplications=24.0, operations=3, entries=26)
    """
    with plain_operators(), _Counter() as counter:
        run()
    return Work(counter.flops / 2, counter.operations, counter.entries)


class _Counter(TorchDispatchMode):
    """Counts operations. Torch's FlopCounterMode installs module hooks, which fail for a module that returns
    a view of a parameter or calls torch.autograd.grad."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.operations = self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        grouped = func is torch.ops.aten.convolution.default and args[8] > 1
        self.operations += GROUPED if grouped else 1
        made = func(*args, **(kwargs or {}))
        flops = flop_registry.get(getattr(func, "_overloadpacket", None))
        if flops is not None:
            self.flops += flops(*args, **(kwargs or {}), out_val=made)
        if not getattr(func, "is_view", False):
            self.entries += sum(leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        return made


def examples_in(batch: Batch) -> int | None:
    """The number of examples; None unless they are the first dimension of every tensor.

    >>> examples_in((torch.zeros(256, 8), torch.zeros(256))), examples_in((torch.zeros(2), torch.zeros(3)))
    (256, None)
    """
    shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    lengths = {shape[0] if shape else None for shape in shapes}
    return lengths.pop() if len(lengths) == 1 else None


def first_of(batch: Batch, examples: int) -> Batch:
    """The first examples, at least one; the whole batch if its examples are not known."""
    if examples_in(batch) is None:
        return batch
    kept = max(1, examples)
    fewer: Batch = tree_map(lambda leaf: leaf[:kept] if isinstance(leaf, Tensor) else leaf, batch)
    return fewer


def few(batch: Batch, targets: int) -> Batch:
    """The first examples, with about `targets` targets.

    >>> inputs, labels = few((torch.zeros(256, 8), torch.zeros(256)), 128)
    >>> len(inputs), len(labels)
    (128, 128)
    """
    return first_of(batch, targets * (examples_in(batch) or 1) // max(1, targets_in(batch)))


def amount(batch: Batch, whole: Batch) -> int | str:
    """The number of targets, and of how many if the batch was cut.

    >>> whole = torch.zeros(256, 8), torch.zeros(256)
    >>> amount(few(whole, 128), whole), amount(whole, whole)
    ('128 of 256', 256)
    """
    kept, before = targets_in(batch), targets_in(whole)
    return kept if kept == before else f"{kept} of {before}"


def with_few(workload: Workload, targets: int) -> Workload:
    """The workload with about `targets` targets in each batch, held-out batches included."""
    held_out = workload.held_out
    return replace(
        workload,
        batch=lambda seed, step: few(workload.draw(seed, step), targets),
        held_out=None if held_out is None else lambda seed, step: few(held_out(seed, step), targets),
    )
