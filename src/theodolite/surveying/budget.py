"""How much a section may spend. Work is counted, so that a survey says the same on every machine.

The unit is one multiplication of a matrix product. The clock ends a section only as a last resort, for work
that the count does not see, and the finding says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from theodolite.core.errors import UseError
from theodolite.core.higher_order import plain_operators

OPERATION = 3e5
"""What it takes to start one operation, whatever it computes: about 15 µs, in multiplications."""
ENTRY = 20.0
"""What it takes to make one entry of a tensor: about 1 ns, in multiplications."""
GROUPED = 50
"""As how many operations a convolution by groups counts, such as a depthwise one."""
LAST_RESORT, DEEP_LAST_RESORT = 1800.0, 4 * 3600.0
"""Seconds after which a section is ended by the clock: ten times what its work takes on one core."""

clock = time.monotonic
"""Tests put another one in its place."""


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
        """Count what is to be done next; raise TooLong if it is too much."""
        self._left -= work
        if self._left < 0:
            raise TooLong(f"it would take more than {self._work:.2g} multiplications")
        spent = clock() - self._begun
        if spent > self._seconds:
            raise TooLong(
                f"it was stopped by the clock after {spent:.0f} s, so that a faster machine would say more"
            )


@dataclass(frozen=True)
class Work:
    """What was run."""

    multiplications: float
    """In matrix products and convolutions."""
    operations: int
    """Of any kind; a convolution by groups counts as many."""
    entries: int
    """Of the tensors that operations made."""

    @property
    def total(self) -> float:
        """All of it, in multiplications."""
        return self.multiplications + OPERATION * self.operations + ENTRY * self.entries


def pass_work(run: Callable[[], object]) -> Work:
    """What is run, counted.

    >>> pass_work(lambda: torch.ones(2, 3) @ torch.ones(3, 4))
    Work(multiplications=24.0, operations=3, entries=26)
    """
    with plain_operators(), _Counter() as counter:
        run()
    return Work(counter.flops / 2, counter.operations, counter.entries)


class _Counter(TorchDispatchMode):
    """Counts what is computed.

    Torch's FlopCounterMode also asks which module computes it, by hooks that a module which returns a view of
    a parameter does not survive, nor one that calls torch.autograd.grad.
    """

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
