"""Parameters as matrices: (out, in) whatever the layout, sharded or not."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from theodolite.errors import UseError

Axes = tuple[tuple[int, ...], tuple[int, ...]]
"""The dimensions that inputs run over, and those that outputs run over."""

LINEAR: Axes = ((1,), (0,))


def as_matrices(tensor: Tensor, axes: Axes) -> Tensor:
    """(stack, out, in): dimensions in neither are a stack of independent matrices.

    >>> import torch
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


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded over processes (DTensor)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def scattered(tensor: Tensor, like: Any) -> Tensor:
    """A whole tensor, the same in every process, sharded as `like` is."""
    if not hasattr(like, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate()] * like.device_mesh.ndim
    whole = DTensor.from_local(tensor.contiguous(), like.device_mesh, replicated, run_check=False)
    return whole.redistribute(placements=like.placements)


def check_matrices(optimizer: str, group: dict[str, Any]) -> None:
    """Refuse, by name, what is not a matrix."""
    in_axes, out_axes = group["axes"]
    used = (*in_axes, *out_axes)
    if not in_axes or not out_axes or len(set(used)) != len(used) or min(used) < 0:
        raise UseError(f"axes is {group['axes']!r}: it is (in, out), two disjoint tuples of dimensions")
    for place, tensor in enumerate(group["params"]):
        name = group["param_names"][place] if "param_names" in group else f"parameter {place}"
        if tensor.ndim < 2:
            raise UseError(
                f"{name} has shape {tuple(tensor.shape)}: {optimizer} trains matrices. "
                "Give it to another optimizer, as theodolite.plan does"
            )
        if max(used) >= tensor.ndim:
            raise UseError(
                f"{name} has shape {tuple(tensor.shape)}: it has no dimension {max(used)}, which "
                f"axes={group['axes']!r} names"
            )
        if tensor.is_complex():
            raise UseError(f"{name} is complex: {optimizer} trains real matrices")


def _order(tensor: Tensor, axes: Axes) -> tuple[list[int], tuple[int, int, int]]:
    in_axes, out_axes = axes
    stack = [axis for axis in range(tensor.ndim) if axis not in (*in_axes, *out_axes)]
    sizes = [math.prod(tensor.shape[axis] for axis in some) for some in (stack, out_axes, in_axes)]
    return [*stack, *out_axes, *in_axes], (sizes[0], sizes[1], sizes[2])
