"""Where the branches of a candidate block end, and what the gradient there is worth.

A site is the module that closes a branch. While the network runs, its output, which is zero, is a leaf of
autograd's graph: the backward pass brings the gradient g of the loss by it, and goes no further into the
candidate. With the features φ that the module was given, that is all there is to know of the gradient by what
the module holds.
"""

# B units, P positions of a unit, O outputs, F features, C channels

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.probes.signal.sums import GainSums, MapSums, product, wide
from theodolite.surgery import Closer

CHUNK = 2**24
"""Numbers that the windows of a convolution may take at a time."""

Closers = Mapping[str, Closer]
"""By name within the module that holds them."""


class Site(Protocol):
    """What a branch ends with."""

    closers: Closers
    channel: int
    """The dimension of the module's output in which the closers' outputs run."""
    unit: int
    """The dimension in which units run; each may have several indices of it."""
    features: int
    outputs: int
    """How many channels the module makes."""

    def add(self, gradient: Tensor, features: Tensor, units: int) -> None:
        """Add the gradient of some units."""

    def settle(self, units: int, ridge: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By closer: the mean gradient of all units, and the preconditioned one."""

    def judge(self, gradient: Tensor, features: Tensor, units: int) -> Tensor:
        """For each unit the products of its gradient with both, (B, 2)."""

    def clear(self) -> None:
        """Forget all units."""


class MapSite:
    """`y = Wφ + b`: a linear map, or a convolution, which is one of the windows of its input."""

    def __init__(self, module: nn.Module, closers: Closers) -> None:
        self.module, self.closers = module, closers
        self.unit = 0
        self.convolves = isinstance(module, (nn.Conv1d, nn.Conv2d))
        self.channel = 1 if self.convolves else -1
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.weight_shape, self.transposed = weight.shape, is_transposed(module)
        matrix = weight.T if self.transposed else weight.flatten(1)
        self.outputs, self.features = matrix.shape
        self.directions = torch.zeros(())
        self.shifts = torch.zeros(())
        self.clear()

    def clear(self) -> None:
        """Forget all units."""
        weight = self.module.weight
        assert isinstance(weight, Tensor)
        self.sums = MapSums(self.outputs, self.features, like=weight)

    def add(self, gradient: Tensor, features: Tensor, units: int) -> None:
        """Add the gradient of some units."""
        for _, rows, columns in self._rows(gradient, features, units):
            self.sums.add(rows, columns)

    def settle(self, units: int, ridge: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By closer: the mean gradient, and the preconditioned one."""
        both = self.sums.mean(units), self.sums.preconditioned(units, ridge)
        dtype = wide(self.sums.square.dtype)
        self.directions = torch.cat([weight for weight, _ in both]).to(dtype).T.contiguous()
        self.shifts = torch.stack([bias for _, bias in both]).to(dtype) * ("bias" in self.closers)
        del self.sums
        plain, preconditioned = ({"weight": self._shaped(weight), "bias": bias} for weight, bias in both)
        return _named(self.closers, plain), _named(self.closers, preconditioned)

    def judge(self, gradient: Tensor, features: Tensor, units: int) -> Tensor:
        """For each unit the products of its gradient with both, (B, 2)."""
        found = gradient.new_zeros(units, 2, dtype=wide(gradient.dtype))
        for start, rows_BPO, columns_BPF in self._rows(gradient, features, units):
            flat = columns_BPF.flatten(0, 1)
            # As halves where the products are of halves: a direction may be rounded, a sum may not.
            moved = product(flat, self.directions.to(flat.dtype) if flat.is_cuda else self.directions)
            moved_BP2O = moved.unflatten(0, rows_BPO.shape[:2]).unflatten(2, (2, -1)) + self.shifts
            found[start : start + len(rows_BPO)] = torch.einsum(
                "bpo,bpko->bk", rows_BPO.to(moved.dtype), moved_BP2O
            )
        return found

    def _rows(self, gradient: Tensor, features: Tensor, units: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        rows = by_unit(gradient, units, self.unit, self.channel)
        if not self.convolves:
            yield 0, rows, by_unit(features, units, self.unit, -1)
            return
        each = max(1, CHUNK // (rows.shape[1] * self.weight_shape[1:].numel()))
        for start in range(0, units, each):
            yield start, rows[start : start + each], windows(self.module, features[start : start + each])

    def _shaped(self, matrix: Tensor) -> Tensor:
        return matrix.T.contiguous() if self.transposed else matrix.reshape(self.weight_shape)


class GainSite:
    """`y = z∘u + s`: the gain z of a norm, or any vector that multiplies channels, and its shift."""

    def __init__(
        self, module: nn.Module, closers: Closers, gain: str, shift: str | None, channel: int
    ) -> None:
        self.module, self.closers = module, closers
        self.gain, self.shift, self.channel, self.unit = gain, shift, channel, 0
        tensor = getattr(module, gain)
        self.outputs, self.features = tensor.numel(), 1
        self.directions = torch.zeros(())
        self.clear()

    def clear(self) -> None:
        """Forget all units."""
        self.sums = GainSums(self.outputs, like=getattr(self.module, self.gain))

    def add(self, gradient: Tensor, features: Tensor, units: int) -> None:
        """Add the gradient of some units."""
        self.sums.add(*(by_unit(one, units, self.unit, self.channel) for one in (gradient, features)))

    def settle(self, units: int, ridge: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """By closer: the mean gradient, and the preconditioned one."""
        both = self.sums.mean(units), self.sums.preconditioned(units, ridge)
        self.directions = torch.stack(
            [torch.stack([gain, shift * (self.shift is not None)]) for gain, shift in both]
        )
        plain, other = ({self.gain: gain, self.shift or "": shift} for gain, shift in both)
        return _named(self.closers, plain), _named(self.closers, other)

    def judge(self, gradient: Tensor, features: Tensor, units: int) -> Tensor:
        """For each unit the products of its gradient with both, (B, 2)."""
        rows, columns = (
            by_unit(one, units, self.unit, self.channel).to(wide(one.dtype)) for one in (gradient, features)
        )
        own = torch.stack([(rows * columns).sum(1), rows.sum(1)], 1).double()
        return torch.einsum("bsc,ksc->bk", own, self.directions)


def by_unit(tensor: Tensor, units: int, unit: int, channel: int) -> Tensor:
    """As (B, P, C).

    >>> by_unit(torch.zeros(5, 2, 3), 2, unit=1, channel=-1).shape  # a sequence first, then units
    torch.Size([2, 5, 3])
    >>> by_unit(torch.zeros(10, 3), 2, unit=0, channel=-1).shape  # units and positions in one
    torch.Size([2, 5, 3])
    """
    moved = tensor.movedim((unit, channel), (0, -1))
    return moved.reshape(units, -1, moved.shape[-1])


def windows(convolution: nn.Module, maps: Tensor) -> Tensor:
    """What each output of a convolution is a linear map of, (B, P, F).

    >>> convolution = nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
    >>> maps = torch.randn(1, 2, 5, 5)
    >>> found = windows(convolution, maps) @ convolution.weight.flatten(1).T
    >>> torch.allclose(found[0, :, 0], convolution(maps)[0, 0].flatten(), atol=1e-6)
    True
    """
    assert isinstance(convolution, (nn.Conv1d, nn.Conv2d))
    padded = F.pad(maps, convolution._reversed_padding_repeated_twice)
    kernel, dilation, stride = convolution.kernel_size, convolution.dilation, convolution.stride
    if isinstance(convolution, nn.Conv1d):
        padded, kernel, dilation, stride = padded[:, :, None], (1, *kernel), (1, *dilation), (1, *stride)
    return F.unfold(padded, kernel, dilation=dilation, stride=stride).transpose(1, 2)


def is_transposed(module: nn.Module) -> bool:
    """Is it GPT-2's Conv1D, a linear map with a weight (in, out)?"""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_map(module: nn.Module) -> bool:
    """Is it a linear map or a convolution whose forward pass is torch's own?"""
    forward = type(module).forward
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        plain = forward in (nn.Conv1d.forward, nn.Conv2d.forward)
        return plain and module.groups == 1 and module.padding_mode == "zeros"
    return is_transposed(module) or (isinstance(module, nn.Linear) and forward is nn.Linear.forward)


def _named(closers: Closers, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {closer.name: tensors[own] for own, closer in closers.items()}
