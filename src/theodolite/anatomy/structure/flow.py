"""`Flow`: which value depends on which. A set of values is an integer, its bits the values."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from theodolite.anatomy.recording.operations import CARRIES, SUMS, VIEWS
from theodolite.anatomy.recording.trace import Graph, Node, Ref
from theodolite.anatomy.structure.uses import Uses, product_operands


def bits(mask: int) -> Iterator[int]:
    """The positions of a mask's set bits, lowest first.

    >>> list(bits(0b10110))
    [1, 2, 4]
    """
    for start, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
        while byte:
            low = byte & -byte
            yield 8 * start + low.bit_length() - 1
            byte ^= low


def mask_of(values: Iterable[int]) -> int:
    """The mask whose bits are the values: the reverse of `bits`."""
    found = bytearray()
    for value in values:
        byte = value >> 3
        if byte >= len(found):
            found.extend(bytes(byte + 1 - len(found)))
        found[byte] |= 1 << (value & 7)
    return int.from_bytes(found, "little")


def walk(start: Iterable[int], onward: Callable[[int], Iterable[int]]) -> Iterator[int]:
    """Everything that is reached from `start` by `onward`, each once.

    >>> sorted(walk([1], lambda one: [one + 2, one + 3] if one < 4 else []))
    [1, 3, 4, 5, 6]
    """
    waiting = list(dict.fromkeys(start))
    seen = set(waiting)
    while waiting:
        one = waiting.pop()
        yield one
        fresh = [other for other in dict.fromkeys(onward(one)) if other not in seen]
        seen.update(fresh)
        waiting += fresh


class Flow:
    """The dataflow of the signal through a recorded forward pass."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses = Uses(graph)
        self._signals = [[one for one in node.inputs if one in self.uses.signal] for node in graph.nodes]
        count = len(graph.shapes)
        self.ancestors = [1 << value for value in range(count)]
        self.descendants = [1 << value for value in range(count)]
        for node in self.graph.nodes:
            above = self.above(self.signals(node))
            for output in node.outputs:
                self.ancestors[output] |= above
        for node in reversed(self.graph.nodes):
            below = self.below(node.outputs)
            for value in self.signals(node):
                self.descendants[value] |= below

    def above(self, values: Iterable[int]) -> int:
        """The values, and all that they depend on."""
        return functools.reduce(operator.or_, (self.ancestors[value] for value in values), 0)

    def below(self, values: Iterable[int]) -> int:
        """The values, and all that depends on them."""
        return functools.reduce(operator.or_, (self.descendants[value] for value in values), 0)

    def signals(self, node: Node) -> list[int]:
        """The inputs of a node that are signal."""
        return self._signals[node.index]

    def maker(self, value: int) -> Node | None:
        """The node that made a value."""
        index = self.graph.maker[value]
        return None if index is None else self.graph.nodes[index]

    def made(self, mask: int) -> Iterator[tuple[int, Node]]:
        """The values of a mask that were made by nodes, in order, each with its node."""
        return ((value, node) for value in bits(mask) if (node := self.maker(value)) is not None)

    def makers(self, mask: int) -> Iterator[Node]:
        """The nodes that made the values of a mask, in order, each once."""
        return (next(pairs)[1] for _, pairs in itertools.groupby(self.made(mask), lambda pair: pair[1].index))

    def readers(self, value: int) -> list[Node]:
        """The nodes that read a value."""
        return [self.graph.nodes[index] for index in self.graph.readers[value]]

    def reading(
        self, values: Iterable[int], passes: Callable[[Node], bool], inside: int = -1
    ) -> Iterator[Node]:
        """The nodes that read the values, and those that read what nodes for which `passes` is true made.

        Outputs outside of the mask `inside` are not followed.
        """

        def onward(index: int) -> list[int]:
            node = self.graph.nodes[index]
            made = [one for one in node.outputs if inside >> one & 1] if passes(node) else []
            return [reader for one in made for reader in self.graph.readers[one]]

        first = [reader for value in values for reader in self.graph.readers[value]]
        return (self.graph.nodes[index] for index in walk(first, onward))

    def made_of(self, value: int, inside: int = -1) -> list[int]:
        """What is made directly of a value, of what lies inside of a mask."""
        return [made for node in self.readers(value) for made in node.outputs if inside >> made & 1]

    def must_pass(self, start: int, ends: Collection[int], gate: Iterable[int], inside: int) -> bool:
        """Does every path from start to the ends, inside of a mask, lead through the gate?"""
        open_ = inside & ~mask_of(gate)
        return all(value not in ends for value in walk([start], lambda one: self.made_of(one, open_)))

    def chain(self, node: Node) -> Iterator[tuple[int, Node]]:
        """Back from a node while there is only one signal to follow: that signal, and what made it."""
        while len(signals := self.signals(node)) == 1 and (maker := self.maker(signals[0])) is not None:
            yield signals[0], maker
            node = maker

    def kinds(self, node: Node) -> set[str]:
        """The kinds of the uses of parameters at a node."""
        return {use.kind for use in self.uses.at(node.index)}

    @functools.cached_property
    def weighted(self) -> int:
        """The values a weight made: outputs of matrix products and convolutions with parameters."""
        weights = (use for use in self.uses.all if use.kind == "weight")
        return mask_of(output for use in weights for output in self.graph.nodes[use.node].outputs)

    @functools.cached_property
    def floating(self) -> int:
        """The values that are no indices and no masks."""
        return mask_of(value for value, is_floating in enumerate(self.graph.floating) if is_floating)

    @functools.cached_property
    def tables(self) -> frozenset[str]:
        """The parameters that are looked up."""
        return frozenset(use.name for use in self.uses.all if use.kind == "table")

    @functools.cached_property
    def fed(self) -> int:
        """The values a weight, a table or learned tokens made."""
        tables = [use.node for use in self.uses.all if use.kind in ("table", "token")]
        return self.weighted | mask_of(value for node in tables for value in self.graph.nodes[node].outputs)

    @functools.cached_property
    def live(self) -> int:
        """The values some output depends on."""
        return self.above(self.graph.outputs)

    def between(self, start: int, end: int) -> int:
        """The values on the paths from start to end, both included."""
        return self.descendants[start] & self.ancestors[end]

    def after(self, start: int, end: int) -> int:
        """The values on the paths from start to end, without start."""
        return self.between(start, end) & ~(1 << start)

    def weights_between(self, start: int, end: int) -> int:
        """How many values on the paths from start to end were made by a weight; start does not count."""
        return (self.after(start, end) & self.weighted).bit_count()

    def layers(self, start: int, end: int) -> int:
        """The largest number of weights on one path from start to end."""
        longest = {start: 0}
        for value, node in self.made(self.after(start, end)):
            above = max((longest[source] for source in self.signals(node) if source in longest), default=0)
            longest[value] = above + (self.weighted >> value & 1)
        return longest[end]

    def is_handed_on(self, node: Node) -> bool:
        """Does the node only move the signal, or scale it as a whole?"""
        return (node.op in VIEWS and len(self.signals(node)) == 1) or self.factor(node) is not None

    def factor(self, node: Node) -> float | None:
        """What a node multiplies its whole signal by; nan for a scalar the trace does not show."""
        if node.op not in ("mul", "div") or len(self.signals(node)) != 1:
            return None
        others = [value for value in node.inputs if value not in self.uses.signal]
        if any(math.prod(self.graph.shapes[other]) != 1 for other in others):
            return None
        numbers = [self.graph.numbers.get(other, math.nan) for other in others]
        numbers += [float(arg) for arg in node.args if isinstance(arg, (int, float))]
        number = numbers[0] if numbers else math.nan
        if node.op == "div" and isinstance(node.args[0], Ref) and node.args[0].value in self.uses.signal:
            return 1.0 / number if number else math.nan
        return number

    def back(self, value: int) -> int:
        """Back through everything that only hands the signal on."""
        return self.back_with_factor(value)[0]

    def back_with_factor(self, value: int) -> tuple[int, float]:
        """The same, and what the signal was multiplied by on the way."""
        return list(self.way_back(value).items())[-1]

    def way_back(self, value: int) -> dict[int, float]:
        """The values on that way, from the last one on: what each was multiplied by after it."""
        product, found = 1.0, {value: 1.0}
        while (node := self.maker(value)) is not None and self.is_handed_on(node):
            factor = self.factor(node)
            product *= 1.0 if factor is None else factor
            value = self.signals(node)[0]
            found[value] = product
        return found

    def shared(self, pair: Sequence[int]) -> int | None:
        """The value that two signals are views and multiples of, as queries and keys of one fused weight."""
        one, other = (self.way_back(value) for value in pair)
        return next((value for value in one if value in other), None)

    def is_product_of_signals(self, node: Node) -> bool:
        """Is it a matrix product of two signals, as in attention?"""
        pair = product_operands(node)
        return pair is not None and all(value in self.uses.signal for value in pair)

    def _is_exponential(self, value: int) -> bool:
        node = self.maker(self.back(value))
        return node is not None and node.op == "exp"

    def _picks_token(self, node: Node) -> bool:
        """Is one token picked out of what is also read as a whole? (Not so for the steps of a sequence.)"""
        if node.op != "select":
            return False
        return any(reader.op not in ("select", "slice") for reader in self.readers(node.inputs[0]))

    @functools.cached_property
    def lineage(self) -> list[int]:
        """By value: the values it is a sum of, through views and factors that are not signals.

        A stream may be multiplied by a number, a mask, a learned vector or `e^s` on its way, and a token or
        a half of its channels may be picked out of it.
        """
        masks = [1 << value for value in range(len(self.graph.shapes))]
        for node in self.graph.nodes:
            sources = self.signals(node)
            if node.op in ("mul", "div"):
                sources = [source for source in sources if not self._is_exponential(source)]
            moved = node.op in CARRIES or node.op in ("mul", "div") or self._picks_token(node)
            if node.op in SUMS or (moved and len(sources) == 1):
                for output in node.outputs:
                    for source in sources:
                        masks[output] |= masks[source]
        return masks
