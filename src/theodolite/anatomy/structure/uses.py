"""What the forward pass does with each parameter: every place where one meets the signal.

A value is constant, an expression of parameters (a transposed weight, `1 + gain`), or signal; indices and
masks carry no signal. A parameter is used where an expression of it meets the signal, and the operation there
says what it is: a factor of a matrix product is a weight, what is multiplied elementwise is a gain, what is
added is a bias.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from theodolite.anatomy.recording.operations import (
    ADDITIONS,
    CELLS,
    CONVOLUTIONS,
    JOINTS,
    LOOKUPS,
    MULTIPLICATIONS,
    NORMS,
    PRODUCTS,
    REDUCTIONS,
    VIEWS,
)
from theodolite.anatomy.recording.trace import Graph, Node, Ref
from theodolite.anatomy.structure.axes import Axes, moved, own_axes

UseKind = Literal["weight", "table", "token", "gain", "bias"]
Along = Literal["inputs", "outputs"] | None


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
    """The name it was taken by: a tied tensor has several."""
    offset: float = 0.0
    """The number that was added to it before."""
    along: Along = None
    """Of a vector that multiplies a weight: whether it runs over the weight's inputs or outputs."""
    number: float = 1.0
    """What it was multiplied by before."""


@dataclass(frozen=True)
class Uses:
    """All uses in the order of execution, and which values are signal."""

    graph: Graph
    all: tuple[Use, ...]
    signal: frozenset[int]
    unknown: dict[str, str]
    """Parameters that meet the signal in an operation that says nothing: by name, the operation."""

    def at(self, node: int) -> tuple[Use, ...]:
        """The uses at one node."""
        return self._by_node.get(node, ())

    @cached_property
    def _by_node(self) -> dict[int, tuple[Use, ...]]:
        found: dict[int, tuple[Use, ...]] = {}
        for use in self.all:
            found[use.node] = (*found.get(use.node, ()), use)
        return found


def product_operands(node: Node) -> tuple[int, int] | None:
    """The values of the two factors of a matrix product."""
    positions = PRODUCTS.get(node.op)
    if positions is None:
        return None
    return node.args[positions[0]].value, node.args[positions[1]].value


def find_uses(graph: Graph) -> Uses:
    """Every place where a parameter meets the signal."""
    return _Finder(graph).find()


@dataclass(frozen=True)
class Factor:
    """One of two parameters whose product is a weight: its axes are settled, whatever becomes of that."""

    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]


Expression = dict[str, Axes | Factor]
"""By parameter: the axes it has in a value that is made of parameters alone."""


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.expression: dict[int, Expression] = {
            value: {name: own_axes(graph.shapes[value])} for value, name in graph.parameters.items()
        }
        self.shapes = {name: graph.shapes[value] for value, name in graph.parameters.items()}
        self.alias = dict(graph.aliases)
        self.offset: dict[int, dict[str, float]] = {}
        self.number: dict[int, float] = {}
        self.scalers: dict[int, set[str]] = {}
        """By expression: the parameters in it that others were multiplied by."""
        self.signal = {value for value in graph.inputs if graph.floating[value]}
        self.zeros: set[int] = set()
        self.raw = set(self.signal)
        """The signal that no parameter has met yet."""
        self.uses: list[Use] = []
        self.unknown: dict[str, str] = {}

    def find(self) -> Uses:
        for node in self.graph.nodes:
            self._visit(node)
        return Uses(self.graph, tuple(self.uses), frozenset(self.signal), self.unknown)

    def _visit(self, node: Node) -> None:
        if self._is_zero(node):
            self.zeros.update(node.outputs)
            return
        weights = [value for value in node.inputs if value in self.expression]
        has_signal = any(value in self.signal for value in node.inputs)
        if weights and self._is_use(node, has_signal):
            self._use(node)
        elif weights:
            self._express(node, weights)
            return
        elif not has_signal:
            return
        elif all(value in self.raw or value not in self.signal for value in node.inputs):
            self.raw.update(node.outputs)
        self.signal.update(output for output in node.outputs if self.graph.floating[output])

    def _is_zero(self, node: Node) -> bool:
        """Is it zeros, a view of them, or a product with them, as a state that begins empty?"""
        if node.op in ("zeros", "zeros_like", "new_zeros"):
            return True
        read = [value in self.zeros for value in node.inputs]
        moved = node.op in VIEWS - {"constant_pad_nd", "masked_fill", "where"}
        return any(read) if node.op == "mul" else moved and bool(read) and all(read)

    def _is_use(self, node: Node, has_signal: bool) -> bool:
        if node.op in LOOKUPS:
            return not self._selects_matrices(node)
        if has_signal:
            return True
        if node.op in NORMS:
            return node.read(NORMS[node.op][0]) in self.expression and not self._becomes_weight(node)
        # A constant or learned tokens going through a layer. Products with vectors alone are how
        # parametrizations (spectral norm) compute a weight.
        composes = node.op == "mm" and self._becomes_weight(node)
        return node.op in PRODUCTS and node.op not in ("mv", "addmv") and not composes

    def _selects_matrices(self, node: Node) -> bool:
        """`experts[chosen]`: which matrix, not which row."""
        table = node.read(0)
        if node.op != "index" or table not in self.expression or len(self.graph.shapes[table]) < 3:
            return False
        chosen = [position for position, index in enumerate(node.args[1]) if index is not None]
        return chosen == [0]

    def _becomes_weight(self, node: Node) -> bool:
        """Does a layer use as its weight what is made of parameters here, as in W + B A?"""
        waiting, seen = list(node.outputs), set(node.outputs)
        while waiting:
            value = waiting.pop()
            for reader in (self.graph.nodes[index] for index in self.graph.readers[value]):
                read = product_operands(reader)
                if read is not None:
                    return (
                        read[1] == value and read[0] not in self.expression and reader.op in ("mm", "addmm")
                    )
                if reader.op in CONVOLUTIONS:
                    return reader.read(1) == value
                if reader.op in REDUCTIONS:
                    continue  # what it is divided by
                if reader.op not in VIEWS | ADDITIONS | {"mul", "div"}:
                    return False
                waiting += [made for made in reader.outputs if made not in seen]
                seen.update(reader.outputs)
        return False

    def _express(self, node: Node, weights: list[int]) -> None:
        """Still an expression of parameters: follow its axes."""
        args = tuple(arg for arg in node.args[1:] if not isinstance(arg, Ref))
        composed = node.op == "mm" and len(weights) > 1 and self._becomes_weight(node)
        offset, number = self._offset(node, weights), self._number(node)
        # The largest first: a weight divided by a norm of itself has the axes of the weight.
        ordered = sorted(weights, key=lambda value: -math.prod(self.graph.shapes[value]))
        scalers = {name for value in ordered for name in self.scalers.get(value, ())}
        if node.op == "mul":
            others = {name for value in ordered[1:] for name in self.expression[value]}
            scalers |= others - self.expression[ordered[0]].keys()
        for output in node.outputs:
            self.scalers[output] = scalers
            shape = self.graph.shapes[output]
            merged: Expression = {}
            for value in ordered:
                for name, axes in self.expression[value].items():
                    if composed and not isinstance(axes, Factor):
                        axes = Factor(axes[1], axes[0])
                    elif node.op in NORMS and value != node.read(NORMS[node.op][0]):
                        axes = self._along_norm(node, axes, len(shape))
                    elif not isinstance(axes, Factor):
                        axes = moved(node.op, axes, self.graph.shapes[value], shape, args)
                    merged.setdefault(name, axes)
            self.expression[output] = merged
            self.offset[output], self.number[output] = offset, number
            if (alias := self.alias.get(ordered[0])) is not None:
                self.alias[output] = alias

    def _offset(self, node: Node, weights: list[int]) -> dict[str, float]:
        """By parameter: the number that what has become of it was shifted by, 1 in `1 + gain`."""
        before = {name: shift for value in weights for name, shift in self.offset.get(value, {}).items()}
        numbers = [arg for arg in node.args if isinstance(arg, (int, float))]
        if node.op in VIEWS | {"cat"} or (node.op == "mul" and not numbers):
            return before
        if node.op not in ("add", "sub") or len(numbers) != 1:
            return {}
        shift = numbers[0] if node.op == "add" else -numbers[0]
        names = (name for value in weights for name in self.expression[value])
        return {name: before.get(name, 0.0) + shift for name in names}

    def _number(self, node: Node) -> float:
        """What the parameters in an expression have been multiplied by; 1 where it is more than a product."""
        read = [self._number_of(arg) for arg in node.args]
        if node.op in VIEWS:
            return read[0]
        if node.op == "mul":
            return read[0] * read[1]
        if node.op == "div":
            return read[0] / read[1] if read[1] else 1.0
        if node.op == "neg":
            return -read[0]
        return 1.0

    def _number_of(self, arg: Any) -> float:
        if isinstance(arg, Ref):
            return self.number.get(arg.value, self.graph.numbers.get(arg.value, 1.0))
        return float(arg) if isinstance(arg, (int, float)) else 1.0

    @staticmethod
    def _along_norm(node: Node, axes: Axes | Factor, rank: int) -> Axes | Factor:
        """Where the gain or shift of a fused norm lies in its result."""
        if isinstance(axes, Factor):
            return axes
        if "layer" in node.op or "rms" in node.op:
            return ((),) * (rank - len(axes)) + axes
        return ((), *axes, *((),) * (rank - 2))

    def _use(self, node: Node) -> None:
        if node.op in PRODUCTS:
            self._use_product(node)
        elif node.op in CONVOLUTIONS:
            self._use_convolution(node)
        elif node.op in NORMS:
            signal, gain, shift = NORMS[node.op]
            self._add(node, node.read(signal), "token", "concat")
            self._add(node, node.read(gain), "gain", "norm")
            self._add(node, node.read(shift), "bias", "add")
        elif node.op in LOOKUPS:
            self._use_lookup(node)
        elif node.op in CELLS:
            for position in CELLS[node.op]:
                self._add(node, node.read(position), "bias", "add")
        elif node.op in ADDITIONS:
            for value in node.inputs:
                self._add_term(node, value)
        elif node.op in MULTIPLICATIONS:
            for value in node.inputs:
                if not self._use_contraction(node, value) and not self._use_outer(node, value):
                    self._add(node, value, "gain", "scale")
        elif node.op in JOINTS:
            for value in node.inputs:
                self._add(node, value, "token", "concat")
        else:
            for value in node.inputs:
                for name in self.expression.get(value, ()):
                    self.unknown.setdefault(name, node.op)

    def _use_product(self, node: Node) -> None:
        left, right = PRODUCTS[node.op]
        x, w = node.read(left), node.read(right)
        if left == 1:
            self._add_term(node, node.read(0))
        if w in self.expression:
            vector = len(self.graph.shapes[w]) == 1
            self._add_matrix(node, w, inner=-1 if vector else -2, outer=None if vector else -1)
            self._add(node, x, "token", "concat")
        else:
            self._add_matrix(node, x, inner=-1, outer=-2)

    def _use_contraction(self, node: Node, value: int) -> bool:
        """`(h·v).sum(-1)`: what is multiplied elementwise and summed at once is a weight."""
        reader, dims = self._summed(node)
        if value not in self.expression or reader is None:
            return False
        rank, out = len(self.graph.shapes[value]), len(self.graph.shapes[node.outputs[0]])
        inner = [dim - (out - rank) for dim in dims]
        for name, axes in self.expression[value].items():
            summed = _flat(axes, [dim for dim in inner if dim >= 0])
            if not any(self.shapes[name][axis] > 1 for axis in summed):
                return False
        for name, axes in self.expression[value].items():
            kept = _flat(axes, [dim for dim in range(rank) if dim not in inner])
            self._append_weight(node, value, name, _flat(axes, [dim for dim in inner if dim >= 0]), kept)
        if reader.op == "mean":
            before, after = (math.prod(self.graph.shapes[one.outputs[0]]) for one in (node, reader))
            count = before / after
            for index, use in enumerate(self.uses):
                if use.node == node.index:
                    self.uses[index] = dataclasses.replace(use, number=use.number / count)
        return True

    def _use_outer(self, node: Node, value: int) -> bool:
        """A vector times one number of the data, as x·w of a single feature, is a weight of fan-in one."""
        others = [other for other in node.inputs if other in self.raw]
        if node.op != "mul" or value not in self.expression or len(others) != 1:
            return False
        signal, rank = self.graph.shapes[others[0]], len(self.graph.shapes[value])
        padded = (1,) * (rank - len(signal)) + signal[max(0, len(signal) - rank) :]
        varying = [dim for dim, size in enumerate(self.graph.shapes[value]) if size > 1]
        if not varying or any(padded[dim] != 1 for dim in varying[-1:]):
            return False
        for name, axes in self.expression[value].items():
            self._append(node, name, "weight", "linear", (), _flat(axes, varying[-1:]))
        return True

    def _summed(self, node: Node) -> tuple[Node | None, list[int]]:
        """The sum or mean that alone reads an elementwise product, and the dimensions it sums over."""
        readers = [self.graph.nodes[index] for index in self.graph.readers[node.outputs[0]]]
        if node.op != "mul" or len(readers) != 1 or readers[0].op not in ("sum", "mean"):
            return None, []
        (reader,) = readers
        rank = len(self.graph.shapes[node.outputs[0]])
        named = reader.args[1] if len(reader.args) > 1 else None
        return reader, [dim % rank for dim in named] if named else list(range(rank))

    def _use_convolution(self, node: Node) -> None:
        weight, bias, transposed = node.read(1), node.read(2), node.args[6]
        self._add(node, bias, "bias", "add")
        self._add(node, node.read(0), "token", "concat")
        rank = len(self.graph.shapes[weight])
        kernel = range(2, rank)
        channels_in, channels_out = (0, 1) if transposed else (1, 0)
        for name, axes in self.expression.get(weight, {}).items():
            in_axes = _flat(axes, (channels_in, *kernel))
            self._append_weight(node, weight, name, in_axes, _flat(axes, (channels_out,)))

    def _use_lookup(self, node: Node) -> None:
        table = node.read(0)
        if node.op == "index":
            looked_up = [position for position, index in enumerate(node.args[1]) if index is not None]
        elif "embedding" in node.op:
            looked_up = [0]
        else:
            looked_up = [node.args[1] if isinstance(node.args[1], int) else 0]
        if table not in self.expression:  # indices computed from parameters alone
            for value in node.inputs[1:]:
                self._add(node, value, "token", "concat")
            return
        rank = len(self.graph.shapes[table])
        kept = [dim for dim in range(rank) if dim not in looked_up]
        for name, axes in self.expression[table].items():
            in_axes, out_axes = _flat(axes, looked_up), _flat(axes, kept)
            if not kept:  # single numbers, one for each head or distance, as score_mods look up
                self._append(node, name, "bias", "add", (), in_axes)
            elif not self._append_factor(node, table, name, in_axes, out_axes):
                self._append(node, name, "table", "embedding", in_axes, out_axes)

    def _add_term(self, node: Node, value: int) -> None:
        """Something added: a bias, or, if it varies along several dimensions, a table of positions."""
        for name, axes in self.expression.get(value, {}).items():
            dims = self._varying(name, axes)
            if len(dims) > 1 and not self._spans_heads(node, value, name):
                self._append(node, name, "table", "add", dims[:-1], dims[-1:])
            else:
                self._append(node, name, "bias", "add", (), dims)

    def _spans_heads(self, node: Node, value: int, name: str) -> bool:
        """Is it added to a weight's output that was split into heads, an entry for each output?"""
        others = [other for other in node.inputs if other != value and other in self.signal]
        size = math.prod(self.shapes[name])
        while len(others) == 1 and (maker := self.graph.maker[others[0]]) is not None:
            made = self.graph.nodes[maker]
            if made.op in PRODUCTS:
                return self.graph.shapes[others[0]][-1] == size
            if made.op not in VIEWS | {"add"}:
                return False
            others = [other for other in made.inputs if other in self.signal]
        return False

    def _add_matrix(self, node: Node, value: int, inner: int, outer: int | None) -> None:
        for name, axes in self.expression.get(value, {}).items():
            if isinstance(axes, Factor):
                self._append_weight(node, value, name, axes.in_axes, axes.out_axes)
            else:
                out_axes = axes[outer] if outer is not None else ()
                self._append_weight(node, value, name, axes[inner], out_axes)

    def _append_weight(
        self, node: Node, value: int, name: str, in_axes: tuple[int, ...], out_axes: tuple[int, ...]
    ) -> None:
        op = "conv" if node.op in CONVOLUTIONS else "linear"
        if not self._append_factor(node, value, name, in_axes, out_axes):
            self._append(node, name, "weight", op, in_axes, out_axes)

    def _append_factor(
        self, node: Node, value: int, name: str, in_axes: tuple[int, ...], out_axes: tuple[int, ...]
    ) -> bool:
        """One parameter of several is a gain if it runs over fewer dimensions than another one does, as a
        scale vector or the lengths of weight normalisation, or if it multiplies the other entry by entry."""
        inner, outer = (
            tuple(axis for axis in axes if self.shapes[name][axis] > 1) for axes in (in_axes, out_axes)
        )
        others = [
            self._varying(other, axes) for other, axes in self.expression[value].items() if other != name
        ]
        if not others:
            return False
        if (inner and outer) or len(inner + outer) >= max(map(len, others)):
            if name in self.scalers.get(value, ()):
                self._append(node, name, "gain", "scale", inner, outer)
            return name in self.scalers.get(value, ())
        along: Along = "inputs" if inner else "outputs" if outer else None
        self._append(node, name, "gain", "scale", (), inner + outer, along)
        return True

    def _add(self, node: Node, value: int, kind: UseKind, op: str) -> None:
        for name, axes in self.expression.get(value, {}).items():
            dims = self._varying(name, axes)
            if kind == "token":
                self._append(node, name, kind, op, dims[:-1], dims[-1:])
            else:
                self._append(node, name, kind, op, (), dims)
        if kind == "token" and value in self.expression:
            self._begin_stream(value)

    def _begin_stream(self, value: int) -> None:
        """From here on it is signal, and so is what it is a view of: a stream may begin as a parameter."""
        while value in self.expression:
            del self.expression[value]
            self.signal.add(value)
            maker = self.graph.maker[value]
            node = None if maker is None else self.graph.nodes[maker]
            if node is None or node.op not in VIEWS or node.inputs[0] in self.graph.parameters:
                break
            value = node.inputs[0]

    def _append(
        self,
        node: Node,
        name: str,
        kind: UseKind,
        op: str,
        in_axes: tuple[int, ...],
        out_axes: tuple[int, ...],
        along: Along = None,
    ) -> None:
        value = next(value for value in node.inputs if name in self.expression.get(value, ()))
        self.uses.append(
            Use(
                node.index,
                name,
                kind,
                op,
                tuple(sorted(in_axes)),
                tuple(sorted(out_axes)),
                self.alias.get(value, name),
                self.offset.get(value, {}).get(name, 0.0),
                along,
                self.number.get(value, 1.0),
            )
        )

    def _varying(self, name: str, axes: Axes | Factor) -> tuple[int, ...]:
        """The parameter's dimensions along which the expression varies."""
        shape = self.shapes[name]
        if isinstance(axes, Factor):
            axes = (axes.out_axes, axes.in_axes)
        return tuple(sorted({axis for group in axes for axis in group if shape[axis] > 1}))


def _flat(axes: Axes | Factor, dims: Any) -> tuple[int, ...]:
    if isinstance(axes, Factor):
        axes = (axes.out_axes, axes.in_axes)
    return tuple(dict.fromkeys(axis for dim in dims for axis in axes[dim]))
