"""Who depends on whom: the ancestors and descendants of every value, as bit sets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

from theodolite.anatomy.recording.operations import CARRIES, SUMS, VIEWS
from theodolite.anatomy.recording.trace import Graph, Node, Ref
from theodolite.anatomy.structure.uses import Uses, product_operands


def bits(mask: int) -> Iterator[int]:
    """The positions of a mask's set bits, lowest first.

    >>> list(bits(0b10110))
    [1, 2, 4]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Flow:
    """The graph of the signal: values as bits, so that "between" is one `&`."""

    def __init__(self, uses: Uses) -> None:
        self.graph: Graph = uses.graph
        self.uses = uses
        count = len(self.graph.shapes)
        self.ancestors = [1 << value for value in range(count)]
        self.descendants = [1 << value for value in range(count)]
        for node in self.graph.nodes:
            above = 0
            for value in self.signals(node):
                above |= self.ancestors[value]
            for output in node.outputs:
                self.ancestors[output] |= above
        for node in reversed(self.graph.nodes):
            below = 0
            for output in node.outputs:
                below |= self.descendants[output]
            for value in self.signals(node):
                self.descendants[value] |= below

    def signals(self, node: Node) -> list[int]:
        """The signal among a node's inputs."""
        return [value for value in node.inputs if value in self.uses.signal]

    def maker(self, value: int) -> Node | None:
        """The node that made a value."""
        index = self.graph.maker[value]
        return None if index is None else self.graph.nodes[index]

    def readers(self, value: int) -> list[Node]:
        """The nodes that read a value."""
        return [self.graph.nodes[index] for index in self.graph.readers[value]]

    @cached_property
    def weighted(self) -> int:
        """The values a weight made: outputs of matrix products and convolutions with parameters."""
        mask = 0
        for use in self.uses.all:
            if use.kind == "weight":
                for output in self.graph.nodes[use.node].outputs:
                    mask |= 1 << output
        return mask

    @cached_property
    def live(self) -> int:
        """The values some output depends on."""
        mask = 0
        for output in self.graph.outputs:
            mask |= self.ancestors[output]
        return mask

    def between(self, start: int, end: int) -> int:
        """The values on the paths from start to end, both included."""
        return self.descendants[start] & self.ancestors[end]

    def weights_between(self, start: int, end: int) -> int:
        """How many values on the paths from start to end were made by a weight; start does not count."""
        return (self.between(start, end) & self.weighted & ~(1 << start)).bit_count()

    def layers(self, start: int, end: int) -> int:
        """The largest number of weights on one path from start to end."""
        longest = {start: 0}
        for value in bits(self.between(start, end) & ~(1 << start)):
            node = self.maker(value)
            assert node is not None
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
        while (node := self.maker(value)) is not None and self.is_handed_on(node) and self.signals(node):
            value = self.signals(node)[0]
        return value

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

    @cached_property
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
