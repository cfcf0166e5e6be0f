"""Many matrices made orthogonal in few products: those of one shape as one batch.

A product of small matrices leaves an accelerator idle, and each costs the same to start. So all matrices of
one shape go through Newton–Schulz together, as many as a bound on memory lets. Where they are so small that
starting kernels is what takes the time, a GPU records them once as a CUDA graph, and plays them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.optimizers.orthogonal import computing_dtype, iterated

AT_ONCE, AT_ONCE_ON_CPU = 2**27, 2**19
"""Most entries of a batch."""
ALONE_ON_CPU = 2**16
"""Entries of a matrix from which on a batch gains nothing on the CPU."""
LARGE = 2**22
"""Entries of a matrix from which on an accelerator minds traffic more than the number of kernels."""
RECORDED = 2**24
"""Most entries of a batch that a GPU records: it keeps the memory of all that is recorded."""

Fill = Callable[[list[Tensor]], None]
"""Writes matrices into the slots (out, in) of a batch."""


@dataclass(frozen=True)
class Matter:
    """Matrices of one tensor, or of a block of its rows, and how they are made orthogonal."""

    count: int
    """How many: 1, or the number of experts."""
    shape: tuple[int, int]
    """out, in"""
    dtype: torch.dtype
    device: torch.device
    steps: int
    eps: float

    @property
    def numel(self) -> int:
        """Entries of all of them."""
        return self.count * math.prod(self.shape)

    @property
    def is_large(self) -> bool:
        """Is a kernel for each of them worth its start?"""
        return self.device.type != "cpu" and math.prod(self.shape) >= LARGE

    @property
    def cost(self) -> float:
        """Multiplications of Newton–Schulz."""
        short, long = sorted(self.shape)
        return self.count * self.steps * float(2 * short * short * long + short**3)


def batches(matters: Sequence[Matter]) -> Iterator[list[int]]:
    """Places of what goes through Newton–Schulz together: of one shape, so many that they fit."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for place, one in enumerate(matters):
        alike.setdefault((one.shape, one.dtype, one.device, one.steps, one.eps), []).append(place)
    for places in alike.values():
        room = _room(matters[places[0]])
        batch: list[int] = []
        filled = 0
        for place in places:
            if batch and filled + matters[place].numel > room:
                yield batch
                batch, filled = [], 0
            batch.append(place)
            filled += matters[place].numel
        yield batch


class Batch:
    """Newton–Schulz of matrices that go together, as often as there are steps.

    >>> one = Matter(2, (3, 2), torch.float64, torch.device("cpu"), steps=5, eps=1e-7)
    >>> made = Batch([one])(lambda slots: [slot.copy_(torch.eye(3, 2)) for slot in slots])
    >>> made.shape, bool((made[0] - torch.eye(3, 2)).abs().max() < 0.35)
    (torch.Size([2, 3, 2]), True)
    """

    def __init__(self, matters: Sequence[Matter]) -> None:
        self.first = matters[0]
        self.shape = (sum(one.count for one in matters), *self.first.shape)
        self.dtype = computing_dtype(self.first.dtype, self.first.device, self.first.shape)
        self._calls = 0
        self._recording: _Recording | None = None
        self._is_recorded = self.first.device.type == "cuda" and math.prod(self.shape) <= RECORDED

    def __call__(self, fill: Fill) -> Tensor:
        """(all matrices, out, in), in the dtype it computes in. A recorded one is there until the next call.

        The first call runs as it is written, the second is recorded.
        """
        self._calls += 1
        if self._is_recorded and self._calls > 1 and not torch.cuda.is_current_stream_capturing():
            if self._recording is None:
                self._recording = _Recording(self._empty(), self._iterated)
            fill(self._recording.slots)
            return self._recording.play()
        stack = self._empty()
        fill(list(stack.unbind()))
        return self._iterated(stack)

    def _empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.first.device)

    def _iterated(self, stack: Tensor) -> Tensor:
        return iterated(stack, steps=self.first.steps, eps=self.first.eps)


class _Recording:
    """A function of one tensor as a CUDA graph."""

    def __init__(self, given: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        self.slots = list(given.unbind())
        self._device = given.device
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that loads data, go on as they like.
        with (
            torch.cuda.device(given.device),
            torch.cuda.graph(self._graph, capture_error_mode="thread_local"),
        ):
            self._made = function(given)

    def play(self) -> Tensor:
        with torch.cuda.device(self._device):  # on the stream of what has filled the slots
            self._graph.replay()
        return self._made


def _room(one: Matter) -> int:
    if one.device.type != "cpu":
        return AT_ONCE
    return AT_ONCE_ON_CPU if math.prod(one.shape) <= ALONE_ON_CPU else 0
