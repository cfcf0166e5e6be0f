"""Uses: every place where the forward pass applies a parameter to the signal.

A value is constant, an expression of parameters (a transposed weight, `1 + gain`), or signal; indices and
masks carry no signal. A parameter is used where an expression of it meets the signal, and the operation there
determines its kind: a factor of a matrix product is a weight, a factor of an elementwise product a gain, a
term of a sum a bias.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from theodolite.anatomy.recording import operations as ops
from theodolite.anatomy.recording.trace import Graph, Node
from theodolite.anatomy.structure.expressions import Expressions, Settled, axes_along

UseKind = Literal["weight", "table", "token", "gain", "bias"]
Along = Literal["inputs", "outputs"] | None
Dims = tuple[int, ...]


@dataclass(frozen=True)
class Use:
    """One place where a parameter meets the signal."""

    node: int
    name: str
    kind: UseKind
    op: str
    """The Part's operation: `linear`, `conv`, `embedding`, `concat`, `norm`, `scale` or `add`."""
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    alias: str = ""
    """The name by which it was read: a tied tensor has several."""
    offset: float = 0.0
    """The number that was added to it."""
    along: Along = None
    """Of a vector that multiplies a weight: does it run over the weight's inputs or outputs?"""
    number: float = 1.0
    """The number that it was multiplied by."""


def product_operands(node: Node) -> tuple[int, int] | None:
    """The values of the two factors of a matrix product."""
    if node.op not in ops.PRODUCTS:
        return None
    left, right = ops.PRODUCTS[node.op]
    return node.args[left].value, node.args[right].value


class Uses:
    """All uses of a graph's parameters, and which of its values are signal."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.all: list[Use] = []
        """In the order of execution."""
        self.signal = {value for value in graph.inputs if graph.floating[value]}
        self.unknown: dict[str, str] = {}
        """Parameters that meet the signal in an operation that determines no kind: by name, the operation."""
        self.expressions = Expressions(graph)
        self.shapes, self.axes = self.expressions.shapes, self.expressions.axes
        self.zeros: set[int] = set()
        self.raw = set(self.signal)
        """The signal that no parameter has met yet."""
        self.averaged: dict[int, float] = {}
        """By node that multiplies: the number of products that a mean is taken of."""
        self._by_node: dict[int, list[Use]] = {}
        for node in graph.nodes:
            self._visit(node)

    def at(self, node: int) -> Sequence[Use]:
        """The uses at one node."""
        return self._by_node.get(node, ())

    def _visit(self, node: Node) -> None:
        if self._is_zero(node):
            self.zeros.update(node.outputs)
            return
        weights = [value for value in node.inputs if value in self.axes]
        has_signal = any(value in self.signal for value in node.inputs)
        if weights and self._is_use(node, has_signal):
            self._use(node)
        elif weights:
            composes = node.op == "mm" and len(weights) > 1 and self._becomes_weight(node)
            self.expressions.extend(node, weights, composes=composes)
            return
        elif not has_signal:
            return
        elif all(value in self.raw or value not in self.signal for value in node.inputs):
            self.raw.update(node.outputs)
        self.signal.update(output for output in node.outputs if self.graph.floating[output])

    def _is_zero(self, node: Node) -> bool:
        """Is it zeros, a view of them, or a product with them, as an initial state is?"""
        if node.op in ("zeros", "zeros_like", "new_zeros"):
            return True
        read = [value in self.zeros for value in node.inputs]
        moved = node.op in ops.VIEWS - {"constant_pad_nd", "masked_fill", "where"}
        return any(read) if node.op == "mul" else moved and bool(read) and all(read)

    def _is_use(self, node: Node, has_signal: bool) -> bool:
        if node.op in ops.LOOKUPS:
            return not self._selects_matrices(node)
        if has_signal:
            return True
        if node.op in ops.NORMS:
            return node.read(ops.NORMS[node.op][0]) in self.axes and not self._becomes_weight(node)
        # A constant or learned tokens going through a layer. Products with vectors alone are how
        # parametrizations (spectral norm) compute a weight.
        composes = node.op == "mm" and self._becomes_weight(node)
        return node.op in ops.PRODUCTS and node.op not in ("mv", "addmv") and not composes

    def _selects_matrices(self, node: Node) -> bool:
        """Does it choose matrices rather than rows, as `experts[chosen]` does?"""
        table = node.read(0)
        if node.op != "index" or table not in self.axes or len(self.graph.shapes[table]) < 3:
            return False
        return [position for position, index in enumerate(node.args[1]) if index is not None] == [0]

    def _becomes_weight(self, node: Node) -> bool:
        """Is the result, an expression of parameters, the weight of a layer, as W + B A may be?"""
        waiting, seen = list(node.outputs), set(node.outputs)
        while waiting:
            value = waiting.pop()
            for reader in (self.graph.nodes[index] for index in self.graph.readers[value]):
                if (read := product_operands(reader)) is not None:
                    return read[1] == value and read[0] not in self.axes and reader.op in ("mm", "addmm")
                if reader.op in ops.CONVOLUTIONS:
                    return reader.read(1) == value
                if reader.op in ops.REDUCTIONS:
                    continue  # a norm to divide by
                if reader.op not in ops.VIEWS | ops.ADDITIONS | {"mul", "div"}:
                    return False
                waiting += [made for made in reader.outputs if made not in seen]
                seen.update(reader.outputs)
        return False

    def _use(self, node: Node) -> None:
        if node.op in ops.PRODUCTS:
            self._use_product(node)
        elif node.op in ops.CONVOLUTIONS:
            self._use_convolution(node)
        elif node.op in ops.NORMS:
            signal, gain, shift = ops.NORMS[node.op]
            self._add(node, node.read(signal), "token", "concat")
            self._add(node, node.read(gain), "gain", "norm")
            self._add(node, node.read(shift), "bias", "add")
        elif node.op in ops.LOOKUPS:
            self._use_lookup(node)
        elif node.op in ops.CELLS:
            for position in ops.CELLS[node.op]:
                self._add(node, node.read(position), "bias", "add")
        else:
            for value in node.inputs:
                self._use_operand(node, value)

    def _use_operand(self, node: Node, value: int) -> None:
        if node.op in ops.ADDITIONS:
            self._add_term(node, value)
        elif node.op in ops.JOINTS:
            self._add(node, value, "token", "concat")
        elif node.op not in ops.MULTIPLICATIONS:
            for name in self.axes.get(value, ()):
                self.unknown.setdefault(name, node.op)
        elif not self._use_contraction(node, value) and not self._use_outer(node, value):
            self._add(node, value, "gain", "scale")

    def _use_product(self, node: Node) -> None:
        left, right = ops.PRODUCTS[node.op]
        x, w = node.read(left), node.read(right)
        if left == 1:
            self._add_term(node, node.read(0))
        if w in self.axes:
            vector = len(self.graph.shapes[w]) == 1
            self._add_matrix(node, w, inner=-1 if vector else -2, outer=None if vector else -1)
            self._add(node, x, "token", "concat")
        else:
            self._add_matrix(node, x, inner=-1, outer=-2)

    def _use_contraction(self, node: Node, value: int) -> bool:
        """`(h·v).sum(-1)`: the factor of an elementwise product that is summed at once is a weight."""
        reader, dims = self._summed(node)
        if value not in self.axes or reader is None:
            return False
        rank, out = len(self.graph.shapes[value]), len(self.graph.shapes[node.outputs[0]])
        inner = [dim - (out - rank) for dim in dims if dim >= out - rank]
        outer = [dim for dim in range(rank) if dim not in inner]
        summed = {name: axes_along(axes, inner) for name, axes in self.axes[value].items()}
        if not all(any(self.shapes[name][axis] > 1 for axis in axes) for name, axes in summed.items()):
            return False
        if reader.op == "mean":
            before, after = (math.prod(self.graph.shapes[one.outputs[0]]) for one in (node, reader))
            self.averaged[node.index] = before / after
        for name, axes in self.axes[value].items():
            self._append_matrix(node, value, name, summed[name], axes_along(axes, outer))
        return True

    def _use_outer(self, node: Node, value: int) -> bool:
        """A vector times one number of the data, as x·w of a single feature, is a weight of fan-in 1."""
        others = [other for other in node.inputs if other in self.raw]
        if node.op != "mul" or value not in self.axes or len(others) != 1:
            return False
        signal, rank = self.graph.shapes[others[0]], len(self.graph.shapes[value])
        padded = (1,) * (rank - len(signal)) + signal[max(0, len(signal) - rank) :]
        varying = [dim for dim, size in enumerate(self.graph.shapes[value]) if size > 1]
        if not varying or any(padded[dim] != 1 for dim in varying[-1:]):
            return False
        for name, axes in self.axes[value].items():
            self._append(node, name, "weight", "linear", (), axes_along(axes, varying[-1:]))
        return True

    def _summed(self, node: Node) -> tuple[Node | None, list[int]]:
        """The sum or mean that is the only reader of an elementwise product, and the dimensions it sums."""
        readers = [self.graph.nodes[index] for index in self.graph.readers[node.outputs[0]]]
        if node.op != "mul" or len(readers) != 1 or readers[0].op not in ("sum", "mean"):
            return None, []
        rank = len(self.graph.shapes[node.outputs[0]])
        named = readers[0].args[1] if len(readers[0].args) > 1 else None
        return readers[0], [dim % rank for dim in named] if named else list(range(rank))

    def _use_convolution(self, node: Node) -> None:
        weight, bias, transposed = node.read(1), node.read(2), node.args[6]
        self._add(node, bias, "bias", "add")
        self._add(node, node.read(0), "token", "concat")
        kernel = range(2, len(self.graph.shapes[weight]))
        channels_in, channels_out = (0, 1) if transposed else (1, 0)
        for name, axes in self.axes.get(weight, {}).items():
            in_axes, out_axes = axes_along(axes, (channels_in, *kernel)), axes_along(axes, (channels_out,))
            self._append_matrix(node, weight, name, in_axes, out_axes, op="conv")

    def _use_lookup(self, node: Node) -> None:
        table = node.read(0)
        if node.op == "index":
            looked_up = [position for position, index in enumerate(node.args[1]) if index is not None]
        elif "embedding" in node.op:
            looked_up = [0]
        else:
            looked_up = [node.args[1] if isinstance(node.args[1], int) else 0]
        if table not in self.axes:  # indices computed from parameters alone
            for value in node.inputs[1:]:
                self._add(node, value, "token", "concat")
            return
        kept = [dim for dim in range(len(self.graph.shapes[table])) if dim not in looked_up]
        for name, axes in self.axes[table].items():
            in_axes, out_axes = axes_along(axes, looked_up), axes_along(axes, kept)
            if not kept:  # single numbers, one for each head or distance, as in score_mods
                self._append(node, name, "bias", "add", (), in_axes)
            else:
                self._append_matrix(node, table, name, in_axes, out_axes, "table", "embedding")

    def _add_term(self, node: Node, value: int) -> None:
        """A term of a sum: a bias or, if it varies along several dimensions, a table of positions."""
        for name, axes in self.axes.get(value, {}).items():
            dims = self.expressions.varying(name, axes)
            if len(dims) > 1 and not self._spans_heads(node, value, name):
                self._append(node, name, "table", "add", dims[:-1], dims[-1:])
            else:
                self._append(node, name, "bias", "add", (), dims)

    def _spans_heads(self, node: Node, value: int, name: str) -> bool:
        """Is it added to the output of a weight that was split into heads, an entry for each output?"""
        others = [other for other in node.inputs if other != value and other in self.signal]
        size = math.prod(self.shapes[name])
        while len(others) == 1 and (maker := self.graph.maker[others[0]]) is not None:
            made = self.graph.nodes[maker]
            if made.op in ops.PRODUCTS:
                return self.graph.shapes[others[0]][-1] == size
            if made.op not in ops.VIEWS | {"add"}:
                return False
            others = [other for other in made.inputs if other in self.signal]
        return False

    def _add_matrix(self, node: Node, value: int, inner: int, outer: int | None) -> None:
        for name, axes in self.axes.get(value, {}).items():
            if isinstance(axes, Settled):
                in_axes, out_axes = axes.in_axes, axes.out_axes
            else:
                in_axes, out_axes = axes[inner], axes[outer] if outer is not None else ()
            self._append_matrix(node, value, name, in_axes, out_axes)

    def _append_matrix(
        self,
        node: Node,
        value: int,
        name: str,
        in_axes: Dims,
        out_axes: Dims,
        kind: UseKind = "weight",
        op: str = "linear",
    ) -> None:
        """A weight or table; a gain if the expression has several parameters and this one scales the others.

        It does if it runs over fewer dimensions than another one, as a scale vector or the lengths of weight
        normalisation, or if it multiplies another one entry by entry.
        """
        shape, varying = self.shapes[name], self.expressions.varying
        inner, outer = (tuple(axis for axis in axes if shape[axis] > 1) for axes in (in_axes, out_axes))
        others = [varying(other, axes) for other, axes in self.axes[value].items() if other != name]
        if others and not (inner and outer) and len(inner + outer) < max(map(len, others)):
            along: Along = "inputs" if inner else "outputs" if outer else None
            self._append(node, name, "gain", "scale", (), inner + outer, along)
        elif others and name in self.expressions.scalers.get(value, ()):
            self._append(node, name, "gain", "scale", inner, outer)
        else:
            self._append(node, name, kind, op, in_axes, out_axes)

    def _add(self, node: Node, value: int, kind: UseKind, op: str) -> None:
        for name, axes in self.axes.get(value, {}).items():
            dims = self.expressions.varying(name, axes)
            rows = dims[:-1] if kind == "token" else ()
            self._append(node, name, kind, op, rows, dims[len(rows) :])
        if kind == "token" and value in self.axes:
            self._begin_stream(value)

    def _begin_stream(self, value: int) -> None:
        """Count an expression, and what it is a view of, as signal: a stream may begin as a parameter."""
        while value in self.axes:
            del self.axes[value]
            self.signal.add(value)
            maker = self.graph.maker[value]
            node = None if maker is None else self.graph.nodes[maker]
            if node is None or node.op not in ops.VIEWS or node.inputs[0] in self.graph.parameters:
                break
            value = node.inputs[0]

    def _append(
        self, node: Node, name: str, kind: UseKind, op: str, inner: Dims, outer: Dims, along: Along = None
    ) -> None:
        value = next(value for value in node.inputs if name in self.axes.get(value, ()))
        alias = self.expressions.alias.get(value, name)
        offset = self.expressions.offset.get(value, {}).get(name, 0.0)
        number = self.expressions.number.get(value, 1.0) / self.averaged.get(node.index, 1.0)
        axes = tuple(sorted(inner)), tuple(sorted(outer))
        use = Use(node.index, name, kind, op, *axes, alias, offset, along, number)
        self.all.append(use)
        self._by_node.setdefault(node.index, []).append(use)
