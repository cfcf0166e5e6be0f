"""Parameters as matrices (out, in), whatever their layout; several matrices where outputs are fused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.core.errors import UseError
from theodolite.optimizers.step_checks import names_of

Axes = tuple[tuple[int, ...], tuple[int, ...]]
"""The dimensions of inputs, and those of outputs."""

Rows = tuple[tuple[tuple[int, int], ...], ...]
"""Blocks of outputs, each a tuple of half-open ranges."""

LINEAR: Axes = ((1,), (0,))


@dataclass(frozen=True)
class MatrixLayout:
    """How a tensor holds its matrices.

    >>> fused = MatrixLayout(LINEAR, rows=(((0, 2),), ((2, 4),), ((4, 6),)))     # queries, keys and values
    >>> [tuple(one.shape) for one in fused.matrices(torch.zeros(6, 2))]
    [(1, 2, 2), (1, 2, 2), (1, 2, 2)]
    """

    axes: Axes
    rows: Rows = ()

    @staticmethod
    def of(group: dict[str, Any], tensor: Tensor) -> MatrixLayout:
        """The layout of a tensor in a parameter group."""
        axes = group["axes"]
        return MatrixLayout(usual_axes(tensor.ndim) if axes is None else axes, group.get("rows") or ())

    def fans(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """(in, out) of each block."""
        in_axes, out_axes = self.axes
        fan_in, fan_out = (math.prod(shape[axis] for axis in some) for some in (in_axes, out_axes))
        if not self.rows:
            return [(fan_in, fan_out)]
        return [(fan_in, sum(stop - start for start, stop in ranges)) for ranges in self.rows]

    def matrices(self, tensor: Tensor) -> list[Tensor]:
        """(stack, out, in) of each block."""
        if not self.rows:
            return [as_matrices(tensor, self.axes)]
        found = []
        for ranges in self.rows:
            pieces = [as_matrices(self._piece(tensor, *span), self.axes) for span in ranges]
            found.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-2))
        return found

    def places(self, tensor: Tensor, block: int, matrices: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Where the matrices of a block go: parts of the tensor, each with its values, in the same shape."""
        if not self.rows:
            return [(tensor, from_matrices(matrices, tensor, self.axes))]
        spans = self.rows[block]
        parts = matrices.split([stop - start for start, stop in spans], dim=-2)
        pieces = [self._piece(tensor, *span) for span in spans]
        return [
            (piece, from_matrices(part, piece, self.axes)) for piece, part in zip(pieces, parts, strict=True)
        ]

    def mapped(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """A function of matrices (stack, out, in), applied to each block of tensors of this layout."""
        made = torch.empty_like(tensors[0])
        for block, matrices in enumerate(zip(*map(self.matrices, tensors), strict=True)):
            for place, part in self.places(made, block, function(*matrices)):
                place.copy_(part)
        return made

    def _piece(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor.narrow(self.axes[1][0], start, stop - start)


def usual_axes(ndim: int) -> Axes:
    """The axes of a matrix (out, in), or of a kernel (out, in, …), whose positions are inputs.

    >>> usual_axes(2), usual_axes(4)
    (((1,), (0,)), ((1, 2, 3), (0,)))
    """
    return tuple(range(1, ndim)), (0,)


def as_matrices(tensor: Tensor, axes: Axes) -> Tensor:
    """A tensor as (stack, out, in): dimensions in neither of the axes are a stack of independent matrices.

    >>> as_matrices(torch.zeros(8, 3, 5, 5), ((1, 2, 3), (0,))).shape     # a convolution
    torch.Size([1, 8, 75])
    >>> as_matrices(torch.zeros(4, 16, 32), ((1,), (2,))).shape           # four experts, (in, out) each
    torch.Size([4, 32, 16])
    """
    order, sizes = _order(tensor, axes)
    return tensor.permute(order).reshape(sizes)


def from_matrices(matrices: Tensor, like: Tensor, axes: Axes) -> Tensor:
    """The inverse of `as_matrices`, for a tensor of the shape of `like`."""
    order, _ = _order(like, axes)
    inverse = [order.index(axis) for axis in range(like.ndim)]
    return matrices.reshape([like.shape[axis] for axis in order]).permute(inverse)


def check_matrices(optimizer: str, group: dict[str, Any]) -> None:
    """Refuse, by name, parameters that are not matrices."""
    for name, tensor in zip(names_of(group), group["params"], strict=True):
        shape = tuple(tensor.shape)
        if tensor.ndim < 2:
            raise UseError(
                f"{name} has shape {shape}: {optimizer} trains matrices. Give it to another optimizer: "
                "theodolite.plan(…).optimizer(model) pairs them, with AdamW for vectors"
            )
        if tensor.is_complex():
            raise UseError(f"{name} is complex: {optimizer} trains real matrices")
        if group["axes"] is None and tensor.ndim == 3:
            raise UseError(
                f"{name} has shape {shape}: a stack of matrices, or the kernel of a convolution? Say which: "
                "axes=((2,), (1,)) for a stack of (out, in), axes=((1, 2), (0,)) for a kernel"
            )
        layout = MatrixLayout.of(group, tensor)
        _check_axes(name, shape, layout.axes)
        if layout.rows:
            _check_rows(name, shape, layout)


def _check_axes(name: str, shape: tuple[int, ...], axes: Axes) -> None:
    in_axes, out_axes = axes
    used = (*in_axes, *out_axes)
    if not in_axes or not out_axes or len(set(used)) != len(used) or min(used) < 0:
        raise UseError(f"axes is {axes!r}: it is (in, out), two disjoint tuples of dimensions")
    if max(used) >= len(shape):
        raise UseError(
            f"{name} has shape {shape}: it has no dimension {max(used)}, which axes={axes!r} names"
        )


def _check_rows(name: str, shape: tuple[int, ...], layout: MatrixLayout) -> None:
    out_axes = layout.axes[1]
    if len(out_axes) != 1:
        raise UseError(
            f"{name}: rows are of one dimension of outputs, and axes={layout.axes!r} names several"
        )
    spans = sorted(span for ranges in layout.rows for span in ranges)
    ends = [0, *(stop for _, stop in spans)]
    gaps = any(start != end or stop <= start for (start, stop), end in zip(spans, ends, strict=False))
    if gaps or ends[-1] != shape[out_axes[0]]:
        raise UseError(
            f"{name} has {shape[out_axes[0]]} outputs, and rows={layout.rows!r} does not name each of them "
            "once: give every block as a tuple of half-open ranges"
        )


def _order(tensor: Tensor, axes: Axes) -> tuple[list[int], tuple[int, int, int]]:
    in_axes, out_axes = axes
    stack = [axis for axis in range(tensor.ndim) if axis not in (*in_axes, *out_axes)]
    sizes = [math.prod(tensor.shape[axis] for axis in some) for some in (stack, out_axes, in_axes)]
    return [*stack, *out_axes, *in_axes], (sizes[0], sizes[1], sizes[2])
