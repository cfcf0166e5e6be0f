"""Which dimensions of a parameter the dimensions of an expression of it come from."""

from __future__ import annotations

import math
from typing import Any

Axes = tuple[tuple[int, ...], ...]
"""By dimension of the expression: the parameter's dimensions it runs over."""


def own_axes(shape: tuple[int, ...]) -> Axes:
    """A parameter's own dimensions.

    >>> own_axes((8, 3))
    ((0,), (1,))
    """
    return tuple((axis,) for axis in range(len(shape)))


def reshaped(axes: Axes, old: tuple[int, ...], new: tuple[int, ...]) -> Axes:
    """The axes after a reshape: a merged dimension runs over all it was made of.

    >>> reshaped(((0,), (1,)), (12, 5), (3, 4, 5))
    ((0,), (0,), (1,))
    >>> reshaped(((0,), (1,), (2,)), (2, 3, 5), (6, 5))
    ((0, 1), (2,))
    """
    if old == new:
        return axes
    result: list[tuple[int, ...]] = []
    left, right = 0, 0
    while right < len(new):
        if new[right] == 1:
            result.append(())
            right += 1
            continue
        first_left, first_right = left, right
        have, want = 1, new[right]
        right += 1
        while have != want and (left < len(old) or right < len(new)):
            if have < want and left < len(old):
                have *= old[left]
                left += 1
            elif right < len(new):
                want *= new[right]
                right += 1
            else:
                break
        merged = tuple(dict.fromkeys(axis for group in axes[first_left:left] for axis in group))
        result += [merged if new[dim] > 1 else () for dim in range(first_right, right)]
    return tuple(result)


def moved(op: str, axes: Axes, shape: tuple[int, ...], out: tuple[int, ...], args: tuple[Any, ...]) -> Axes:
    """The axes after one operation on a single expression.

    >>> moved("t", ((0,), (1,)), (8, 4), (4, 8), ())
    ((1,), (0,))
    >>> moved("select", ((0,), (1,), (2,)), (6, 8, 4), (8, 4), (0, 3))
    ((1,), (2,))
    """
    rank = len(shape)
    if op == "t":
        return axes[::-1]
    if op in ("transpose", "swapaxes"):
        first, second = args[0] % rank, args[1] % rank
        swapped = list(axes)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        return tuple(swapped)
    if op == "permute":
        return tuple(axes[dim % rank] for dim in args[0])
    if op == "select":
        return tuple(group for dim, group in enumerate(axes) if dim != args[0] % rank)
    if op == "unbind":
        dim = (args[0] if args else 0) % rank
        return tuple(group for position, group in enumerate(axes) if position != dim)
    if op == "unsqueeze":
        dim = args[0] % (rank + 1)
        return (*axes[:dim], (), *axes[dim:])
    if math.prod(shape) == math.prod(out):
        return reshaped(axes, shape, out)
    if len(out) >= rank:  # expand, slice, repeat, elementwise with broadcasting: aligned at the right
        return ((),) * (len(out) - rank) + axes
    return tuple(tuple(axis for group in axes for axis in group) for _ in out)
