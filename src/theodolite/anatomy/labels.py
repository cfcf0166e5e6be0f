"""Numbers carried through views: where do the elements of a tensor go?

A tensor of labels takes the place of a value, and every view that follows is applied to it with the view's
own code. Labels repeat along all other dimensions; as those have stride zero, they cost no memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from theodolite.anatomy.operations import COPIES, RESHAPES, VIEWS
from theodolite.anatomy.trace import Graph, Node

# fmt: off
_REPLAYED = frozenset({
    "transpose", "swapaxes", "permute", "t", "unsqueeze", "squeeze", "expand", "repeat", "slice", "narrow",
    "select", "split", "split_with_sizes", "unsafe_split", "unbind", "chunk", "roll", "flip",
})
# fmt: on


def labels_along(shape: tuple[int, ...], dim: int) -> Tensor:
    """Labels 0, 1, 2, … along one dimension of a shape.

    >>> labels_along((2, 3), -1)
    tensor([[0, 1, 2],
            [0, 1, 2]])
    """
    dim %= len(shape)
    ones = [size if axis == dim else 1 for axis, size in enumerate(shape)]
    return torch.arange(shape[dim]).view(ones).expand(shape)


def varies(labels: Tensor, dim: int) -> bool:
    """Do the labels differ along a dimension?

    >>> varies(labels_along((2, 3), -1), 0), varies(labels_along((2, 3), -1), 1)
    (False, True)
    """
    if labels.shape[dim] < 2 or labels.stride(dim) == 0:
        return False
    return bool((labels != labels.narrow(dim, 0, 1)).any())


def follow(graph: Graph, node: Node, labels: Tensor) -> list[Tensor] | None:
    """The labels after a view, one tensor per output; None if the node is no view that can be followed."""
    if node.op in COPIES:
        return [labels]
    if node.op in RESHAPES:
        return [labels.reshape(node.args[1])]
    if node.op in _REPLAYED:
        made = getattr(torch.ops.aten, node.op)(labels, *node.args[1:], **node.kwargs)
        return list(made) if isinstance(made, (tuple, list)) else [made]
    shape = graph.shapes[node.outputs[0]]
    if node.op == "as_strided":  # how pooling puts back a memory format
        return [labels] if shape == tuple(labels.shape) else None
    if node.op == "constant_pad_nd" or node.op.startswith(("reflection_pad", "replication_pad")):
        padded = [dim for dim, size in enumerate(shape) if size != labels.shape[dim]]
        if any(varies(labels, dim) for dim in padded):
            return None
        return [(labels.amax(padded, keepdim=True) if padded else labels).expand(shape)]
    if node.op not in VIEWS or not shape or labels.dim() == 0 or shape[-1] != labels.shape[-1]:
        return None
    # Tokens picked, padded or gathered by indices the trace does not show.
    by_token = any(varies(labels, dim) for dim in range(labels.dim() - 1))
    return None if by_token else [labels[(0,) * (labels.dim() - 1)].expand(shape)]
