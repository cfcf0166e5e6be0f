"""Expressions: values that are made of parameters alone, such as a transposed weight or `1 + gain`.

For each parameter in one: the dimensions it runs over, the numbers added to it and multiplied by it.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from theodolite.anatomy.recording.operations import NORMS, VIEWS
from theodolite.anatomy.recording.trace import Graph, Node, Ref

Axes = tuple[tuple[int, ...], ...]
"""By dimension of the expression: the parameter's dimensions it runs over."""


class Settled(NamedTuple):
    """The axes of one of two parameters whose matrix product is a weight; later operations keep them."""

    out_axes: tuple[int, ...]
    in_axes: tuple[int, ...]


class Expressions:
    """What is known of the expressions of a graph, by value."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.shapes = {name: graph.shapes[value] for value, name in graph.parameters.items()}
        self.axes: dict[int, dict[str, Axes]] = {
            value: {name: own_axes(graph.shapes[value])} for value, name in graph.parameters.items()
        }
        self.alias = dict(graph.aliases)
        """The name by which the network holds the parameter."""
        self.offset: dict[int, dict[str, float]] = {}
        """By parameter: the number it was shifted by, 1 in `1 + gain`."""
        self.number: dict[int, float] = {}
        """What the parameters were multiplied by; 1 where it is more than a product."""
        self.scalers: dict[int, set[str]] = {}
        """The parameters that others were multiplied by."""

    def extend(self, node: Node, values: list[int], *, composes: bool) -> None:
        """Note the outputs of a node that reads expressions and no signal.

        `composes` says that a matrix product of two parameters becomes the weight of a layer.
        """
        args = tuple(arg for arg in node.args[1:] if not isinstance(arg, Ref))
        offset, number = self._offset(node, values), self._number(node)
        # The largest first: a weight divided by a norm of itself has the axes of the weight.
        ordered = sorted(values, key=lambda value: -math.prod(self.graph.shapes[value]))
        scalers = {name for value in ordered for name in self.scalers.get(value, ())}
        if node.op == "mul":
            others = {name for value in ordered[1:] for name in self.axes[value]}
            scalers |= others - self.axes[ordered[0]].keys()
        for output in node.outputs:
            shape = self.graph.shapes[output]
            merged: dict[str, Axes] = {}
            for value in ordered:
                for name, axes in self.axes[value].items():
                    if isinstance(axes, Settled):
                        pass
                    elif composes:
                        axes = Settled(axes[0], axes[1])
                    elif node.op in NORMS and value != node.read(NORMS[node.op][0]):
                        axes = _along_norm(node, axes, len(shape))
                    else:
                        axes = moved(node.op, axes, self.graph.shapes[value], shape, args)
                    merged.setdefault(name, axes)
            self.axes[output], self.scalers[output] = merged, scalers
            self.offset[output], self.number[output] = offset, number
            if (alias := self.alias.get(ordered[0])) is not None:
                self.alias[output] = alias

    def varying(self, name: str, axes: Axes) -> tuple[int, ...]:
        """The parameter's dimensions along which the expression varies."""
        return tuple(sorted({axis for group in axes for axis in group if self.shapes[name][axis] > 1}))

    def _offset(self, node: Node, values: list[int]) -> dict[str, float]:
        before = {name: shift for value in values for name, shift in self.offset.get(value, {}).items()}
        numbers = [arg for arg in node.args if isinstance(arg, (int, float))]
        if node.op in VIEWS | {"cat"} or (node.op == "mul" and not numbers):
            return before
        if node.op not in ("add", "sub") or len(numbers) != 1:
            return {}
        shift = numbers[0] if node.op == "add" else -numbers[0]
        names = (name for value in values for name in self.axes[value])
        return {name: before.get(name, 0.0) + shift for name in names}

    def _number(self, node: Node) -> float:
        read = [self._number_of(arg) for arg in node.args]
        if node.op in VIEWS:
            return read[0]
        if node.op == "mul":
            return read[0] * read[1]
        if node.op == "div":
            return read[0] / read[1] if read[1] else 1.0
        return -read[0] if node.op == "neg" else 1.0

    def _number_of(self, arg: Any) -> float:
        if isinstance(arg, Ref):
            return self.number.get(arg.value, self.graph.numbers.get(arg.value, 1.0))
        return float(arg) if isinstance(arg, (int, float)) else 1.0


def axes_along(axes: Axes, dims: Iterable[int]) -> tuple[int, ...]:
    """The parameter's dimensions that some dimensions of an expression run over."""
    return tuple(dict.fromkeys(axis for dim in dims for axis in axes[dim]))


def _along_norm(node: Node, axes: Axes, rank: int) -> Axes:
    """Where the gain or shift of a fused norm lies in its result."""
    if "layer" in node.op or "rms" in node.op:
        return ((),) * (rank - len(axes)) + axes
    return ((), *axes, *((),) * (rank - 2))


def own_axes(shape: tuple[int, ...]) -> Axes:
    """A parameter's own dimensions.

    >>> own_axes((8, 3))
    ((0,), (1,))
    """
    return tuple((axis,) for axis in range(len(shape)))


def reshaped(axes: Axes, old: tuple[int, ...], new: tuple[int, ...]) -> Axes:
    """The axes after a reshape; a merged dimension runs over all that it merges.

    >>> reshaped(((0,), (1,)), (12, 5), (3, 4, 5))
    ((0,), (0,), (1,))
    >>> reshaped(((0,), (1,), (2,)), (2, 3, 5), (6, 5))
    ((0, 1), (2,))
    """
    if old == new:
        return axes
    # Dimensions are kept apart where both shapes have a boundary: the product up to there is the same.
    products = [list(itertools.accumulate(shape, operator.mul, initial=1)) for shape in (old, new)]
    boundaries = sorted(set(products[0]).intersection(products[1]))
    before, after = ([bisect.bisect_right(boundaries, start) for start in one[:-1]] for one in products)
    merged = {
        piece: axes_along(axes, [dim for dim, its_piece in enumerate(before) if its_piece == piece])
        for piece in after
    }
    return tuple(merged[piece] if size > 1 else () for piece, size in zip(after, new, strict=True))


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
        swapped = list(axes)
        swapped[args[0]], swapped[args[1]] = axes[args[1]], axes[args[0]]
        return tuple(swapped)
    if op == "permute":
        return tuple(axes[dim % rank] for dim in args[0])
    if op in ("select", "unbind"):
        dim = (args[0] if args else 0) % rank
        return axes[:dim] + axes[dim + 1 :]
    if op == "unsqueeze":
        dim = args[0] % (rank + 1)
        return (*axes[:dim], (), *axes[dim:])
    if math.prod(shape) == math.prod(out):
        return reshaped(axes, shape, out)
    if len(out) >= rank:  # expand, slice, repeat, elementwise with broadcasting: aligned at the right
        return ((),) * (len(out) - rank) + axes
    return tuple(tuple(axis for group in axes for axis in group) for _ in out)
