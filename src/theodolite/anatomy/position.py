"""Roles in a ready module: by position in the dataflow, and what has to be assumed where that does not tell.

One network shows no dimension that grows. What reads the data has a fixed number of inputs, what makes the
result a fixed number of outputs, and everything between is taken to grow with width. Where another reading is
as likely, as for key heads that several query heads share, `Fans.assumed` says which one was taken.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from theodolite.anatomy.part import Role
from theodolite.anatomy.recording.operations import CONVOLUTIONS, SOFTMAXES, VIEWS
from theodolite.anatomy.recording.trace import Node
from theodolite.anatomy.roles import Fans, reads_data
from theodolite.anatomy.structure.flow import Flow, mask_of, walk
from theodolite.anatomy.structure.mixing import find_mixing
from theodolite.anatomy.structure.norms import is_normalisation
from theodolite.anatomy.structure.residual import TracedBranch
from theodolite.anatomy.structure.uses import Use, product_operands

RANK_STAYS = "the rank stays, as it adds to another weight"
POSITIONS_STAY = "the number of positions that it mixes stays"
NARROW = 4
"""A side that is more than this many times smaller than the other may be fixed."""

LINEAR = VIEWS | {"mul", "div", "add", "sub", "neg", "cat"}


class Positions:
    """Fans by position, for all tensors of one network with these residual branches."""

    def __init__(self, flow: Flow, residuals: Sequence[TracedBranch]) -> None:
        self.flow = flow
        self.mixing = find_mixing(flow)
        sizes = {size for one in residuals for size in self._stream_sizes(one)}
        counted = _counted_channels(flow)
        self.widths = sizes & counted.keys() or {size for size, _ in counted.most_common(1)}
        self.shared = _shared_heads(flow)
        self.low_ranks = _low_ranks(flow, self.widths)
        self.tied_ranks = _tied_sizes(flow) - self.widths

    def fans(self, use: Use, in_branch: bool) -> Fans:
        """By the dataflow alone: what reads the data is input, what makes the result is output."""
        flow = self.flow
        if use.kind == "gain" and (scaled := [one for one in flow.uses.at(use.node) if one.kind == "weight"]):
            return self._of_scale(use, self.fans(scaled[0], in_branch))
        is_last = not in_branch and _makes_result(flow, use)
        if use.kind == "bias" or use.kind == "gain":
            grows = bool(use.out_axes) and not (is_last and use.kind == "bias")
            return Fans(use.in_axes, use.out_axes, False, grows, use.kind)
        as_input = Fans(use.in_axes, use.out_axes, False, True, "input")
        as_output = Fans(use.in_axes, use.out_axes, True, False, "output")
        if use.kind != "weight" or _is_depthwise(flow, use):
            return as_input
        if _reads_data(flow, use):
            inputs, outputs = _channels(flow, use)
            if in_branch and inputs in self.widths and NARROW * inputs >= outputs:
                data = "the data follow the width, as they are the residual stream"
                return Fans(use.in_axes, use.out_axes, True, True, "hidden", data)
            return dataclasses.replace(as_input, assumed=_of_features(flow, use) or self._of_data(use))
        if self._reads_results(use):
            return as_input
        if is_last:
            return dataclasses.replace(as_output, assumed=self._of_results(use))
        if _size(flow, use, use.out_axes) == 1 or _routes(flow, use) or _is_for_each(flow, use):
            return as_output
        if _size(flow, use, use.in_axes) == 1:
            return as_input
        if fans := self._of_positions(use):
            return fans
        if rank := _rank_beside(flow, use):
            side = as_output if rank == "outputs" else as_input
            return dataclasses.replace(side, assumed=RANK_STAYS)
        return Fans(use.in_axes, use.out_axes, True, True, "hidden", self._of_hidden(use))

    def _stream_sizes(self, residual: TracedBranch) -> set[int]:
        """The channels of the stream that a branch adds to: in its last dimension, or in the second one.

        The last weights of the branch make as many. Where none does, both dimensions may hold them.
        """
        flow = self.flow
        shape = flow.graph.shapes[residual.total]
        sizes = {*shape[1:2], *shape[-1:]}
        weights = {index for end in residual.ends for index in _last_weights(flow, end, residual.region)}
        return sizes & {_made(flow, index) for index in weights - self.mixing.makes} or sizes

    def _of_positions(self, use: Use) -> Fans | None:
        """There are as many positions as the data have."""
        reads, makes = (use.node in nodes for nodes in (self.mixing.reads, self.mixing.makes))
        if not (reads or makes):
            return None
        if reads and makes:
            positions = "the positions that it mixes grow in number too"
            return Fans(use.in_axes, use.out_axes, True, True, "hidden", positions)
        role: Role = "input" if reads else "output"
        return Fans(use.in_axes, use.out_axes, makes, reads, role, POSITIONS_STAY)

    def _of_scale(self, use: Use, weight: Fans) -> Fans:
        """A scale vector grows with the side of the weight that it runs over."""
        if use.in_axes and weight.role == "hidden":
            return Fans(use.in_axes, use.out_axes, True, True, "gain")
        grows = {"inputs": weight.width_in, "outputs": weight.width_out, None: False}[use.along]
        return Fans((), tuple(sorted(use.in_axes + use.out_axes)), False, grows, "gain")

    def _of_data(self, use: Use) -> str:
        inputs, outputs = _channels(self.flow, use)
        same = inputs in self.widths and outputs % inputs == 0
        return f"the number of data stays, though it is the width, {inputs}" if same else ""

    def _of_results(self, use: Use) -> str:
        """Where as many values are returned as the weight reads, as by a layer alone."""
        inputs, outputs = _channels(self.flow, use)
        made, _ = _results(self.flow, use)
        sizes = {outputs, *_values_at_a_position(self.flow, use, made)}
        return f"the number of results stays, though it is the width, {inputs}" if inputs in sizes else ""

    def _of_hidden(self, use: Use) -> str:
        if use.name in self.low_ranks or _channels(self.flow, use)[1] in self.tied_ranks:
            return "the rank, the number of values between two weights, grows too"
        if (heads := self.shared.get(use.node)) is not None:
            return f"the number of key and value heads grows: {heads[0]} here, for {heads[1]} query heads"
        if _is_grouped(self.flow, use):
            return "the channels of a group grow in number, and the groups do not"
        small, large = sorted(_channels(self.flow, use))
        if NARROW * small < large and small not in self.widths:
            return f"a side that is more than {NARROW} times smaller than the other grows too"
        if NARROW * large <= min(self.widths):
            return f"both sides grow, though they are {NARROW} times smaller than the width, or more"
        return ""

    def _reads_results(self, use: Use) -> bool:
        """Does it read results of the network that are few, as a decoder reads the latent?"""
        flow = self.flow
        inner, outer = _channels(flow, use)
        if NARROW * inner >= outer:
            return False
        before = {
            index
            for value in flow.signals(flow.graph.nodes[use.node])
            for index in _last_weights(flow, value)
        }
        weights = [_weight_at(flow, flow.graph.nodes[index]) for index in before]
        return bool(weights) and all(one is not None and _makes_result(flow, one) for one in weights)


def _size(flow: Flow, use: Use, axes: Iterable[int]) -> int:
    """The number of entries along axes of a parameter."""
    return math.prod(flow.uses.shapes[use.name][axis] for axis in axes)


def _made(flow: Flow, index: int) -> int:
    """The number of channels that the weight at a node makes."""
    node = flow.graph.nodes[index]
    return flow.graph.shapes[node.outputs[0]][1 if node.op in CONVOLUTIONS else -1]


def _counted_channels(flow: Flow) -> Counter[int]:
    """How many weights read or make a size."""
    weights = (use for use in flow.uses.all if use.kind == "weight")
    return Counter(size for use in weights for size in _channels(flow, use))


def _channels(flow: Flow, use: Use) -> tuple[int, int]:
    """The numbers of inputs, without the positions of a kernel, and of outputs."""
    kernel = range(2, len(flow.uses.shapes[use.name])) if use.op == "conv" else ()
    inner = [axis for axis in use.in_axes if axis not in kernel]
    return _size(flow, use, inner), _size(flow, use, use.out_axes)


def _is_depthwise(flow: Flow, use: Use) -> bool:
    """Does every channel have its own kernel? Then the input fan is the kernel, which does not grow."""
    if use.op != "conv":
        return False
    node = flow.graph.nodes[use.node]
    signal, weight = (flow.graph.shapes[node.args[position].value] for position in (0, 1))
    return weight[1] == 1 < signal[1]


def _is_grouped(flow: Flow, use: Use) -> bool:
    return use.op == "conv" and flow.graph.nodes[use.node].args[8] > 1


def _reads_data(flow: Flow, use: Use) -> bool:
    """Does it read the data, and neither a start of zeros nor one that is learned?"""
    node = flow.graph.nodes[use.node]
    sources = flow.signals(node)
    learned = bool(sources) and not flow.above(sources) & mask_of(flow.graph.inputs)
    return reads_data(flow, use) and not learned and flow.uses.zeros.isdisjoint(node.inputs)


def _of_features(flow: Flow, use: Use) -> str:
    """Sinusoids of a time may be as many as there are channels."""
    node = flow.graph.nodes[use.node]
    pair = product_operands(node)
    made: set[str] = set()

    def sources(value: int) -> Sequence[int]:
        maker = flow.maker(value)
        made.update([maker.op] if maker else [])
        return maker.inputs if maker else ()

    if pair is None or not all(True for _ in walk(pair, sources)) or made.isdisjoint({"sin", "cos"}):
        return ""
    return "the number of sinusoids that it reads stays"


def _makes_result(flow: Flow, use: Use) -> bool:
    """Does the result leave the network without meeting another weight?

    Results that the network also goes on with, such as the states of a recurrent layer or the features of a
    backbone, count if they are few, as the latent of an autoencoder.
    """
    results, reached = _results(flow, use)
    if not results:
        return False
    made = flow.graph.nodes[use.node].outputs[0]
    later = flow.below(reached) & flow.weighted & ~(1 << made)
    if not later:
        return True
    inputs = _size(flow, use, use.in_axes)
    sizes = _values_at_a_position(flow, use, results) or {1}
    if any(one.name == use.name for node in flow.makers(later) for one in flow.uses.at(node.index)):
        return max(sizes) * NARROW < inputs  # read again by the weight itself: rather a state
    if results.isdisjoint(flow.graph.outputs):
        return False
    several = len(flow.graph.outputs) > 1
    return max(sizes) * NARROW < inputs if several else inputs not in sizes


def _results(flow: Flow, use: Use) -> tuple[set[int], set[int]]:
    """The results of the network that the weight makes without another one, and all that is on their way."""
    reached = set(
        walk(flow.graph.nodes[use.node].outputs[:1], lambda value: flow.made_of(value, ~flow.weighted))
    )
    return reached & flow.graph.outputs or reached & flow.graph.returned, reached


def _values_at_a_position(flow: Flow, use: Use, results: Iterable[int]) -> set[int]:
    """How many values results of the weight have at each position."""
    shapes = (shape for one in results if (shape := flow.graph.shapes[one]))
    if use.op != "conv":
        return {shape[-1] for shape in shapes}
    outputs = _channels(flow, use)[1]  # in any dimension: they may have been moved to the last one
    return {outputs if outputs in shape else shape[:2][-1] for shape in shapes}


def _routes(flow: Flow, use: Use) -> bool:
    """Do the largest entries of the result choose what is computed next?"""

    def passes(node: Node) -> bool:
        return not flow.is_product_of_signals(node) and len(flow.signals(node)) == 1

    made = flow.graph.nodes[use.node].outputs[:1]
    readers = flow.reading(made, passes, flow.floating & ~flow.weighted)
    return any(node.op in ("topk", "sort", "argmax") for node in readers)


def _is_for_each(flow: Flow, use: Use) -> bool:
    """Is it a vector for each head, `(h·v).sum(-1)`, rather than one matrix?"""
    node = flow.graph.nodes[use.node]
    signals = flow.signals(node)
    if node.op != "mul" or len(signals) != 1 or not use.in_axes:
        return False
    value = next((value for value in node.inputs if value != signals[0]), signals[0])
    signal, weight = flow.graph.shapes[signals[0]], flow.graph.shapes[value]
    pairs = zip(reversed(signal), reversed(weight), strict=False)
    return all(one == other or other == 1 for one, other in pairs)


def _rank_beside(flow: Flow, use: Use) -> str | None:
    """Of a pair of low rank whose product adds to another weight: which side of this one the rank is.

    `W + BA` may be computed in the weights, or as the sum of `Wx` and `B(Ax)`.
    """
    return _rank_in_weight(flow, use) or _rank_in_sum(flow, use)


def _rank_in_weight(flow: Flow, use: Use) -> str | None:
    def sides(one: Use) -> tuple[int, int]:
        return _size(flow, one, one.in_axes), _size(flow, one, one.out_axes)

    here = sides(use)
    others = [sides(one) for one in flow.uses.at(use.node) if one.kind == "weight" and one.name != use.name]
    for whole in others:
        if here[0] == whole[0] and here[1] < min(whole) and (here[1], whole[1]) in others:
            return "outputs"
        if here[1] == whole[1] and here[0] < min(whole) and (whole[0], here[0]) in others:
            return "inputs"
    return None


def _rank_in_sum(flow: Flow, use: Use) -> str | None:
    if (up := _after(flow, use)) is not None and _adds_to_weight(flow, use, up):
        return "outputs"
    below = _before(flow, use)
    return "inputs" if below is not None and _adds_to_weight(flow, below, use) else None


def _after(flow: Flow, use: Use) -> Use | None:
    """The weight that alone reads the result, handed on as a whole."""
    readers = [
        node
        for node in flow.reading(flow.graph.nodes[use.node].outputs, flow.is_handed_on)
        if not flow.is_handed_on(node)
    ]
    return _weight_at(flow, readers[0]) if len(readers) == 1 else None


def _before(flow: Flow, use: Use) -> Use | None:
    """The weight that made what this one reads."""
    sources = flow.signals(flow.graph.nodes[use.node])
    maker = flow.maker(flow.back(sources[0])) if len(sources) == 1 else None
    return _weight_at(flow, maker) if maker is not None else None


def _weight_at(flow: Flow, node: Node) -> Use | None:
    return next((one for one in flow.uses.at(node.index) if one.kind == "weight"), None)


def _adds_to_weight(flow: Flow, down: Use, up: Use) -> bool:
    """Is B(Ax) added to Wx, with a W of higher rank?"""
    read = flow.signals(flow.graph.nodes[down.node])
    made = flow.graph.nodes[up.node].outputs
    rank = flow.graph.shapes[flow.graph.nodes[down.node].outputs[0]][-1]
    if len(read) != 1 or rank >= min(flow.graph.shapes[value][-1] for value in (read[0], made[0])):
        return False
    for node in flow.reading(made, flow.is_handed_on):
        for other in flow.signals(node) if node.op == "add" else ():
            beside = flow.maker(flow.back(other))
            whole = _weight_at(flow, beside) if beside is not None and beside.index != up.node else None
            if whole is not None and beside is not None:
                sources = flow.signals(beside)
                if len(sources) == 1 and flow.back(sources[0]) == flow.back(read[0]):
                    return True
    return False


def _low_ranks(flow: Flow, widths: Collection[int]) -> set[str]:
    """Pairs of weights, or a table and a weight, with only a norm in between and fewer values there."""

    def passes(node: Node) -> bool:
        alone = len(flow.signals(node)) == 1 or not flow.ancestors[node.outputs[0]] & flow.weighted  # tables
        return (alone and node.op in LINEAR) or is_normalisation(flow, node)

    found: set[str] = set()
    for use in flow.uses.all:
        if use.kind not in ("weight", "table"):
            continue
        for node in flow.reading(flow.graph.nodes[use.node].outputs, passes):
            other = _weight_at(flow, node)
            if other is None or other.name == use.name or _is_grouped(flow, other):
                continue
            rank, made = _channels(flow, other)
            if rank not in widths and rank < min(made, _channels(flow, use)[0]):
                found |= {use.name, other.name}
    return found


def _tied_sizes(flow: Flow) -> set[int]:
    """How many values each row of a table has that is the readout too: so many a layer before it makes."""
    tables = [use for use in flow.uses.all if use.kind == "table"]
    weights = {use.name for use in flow.uses.all if use.kind == "weight"}
    return {_size(flow, use, use.out_axes) for use in tables if use.name in weights}


def _shared_heads(flow: Flow) -> dict[int, tuple[int, int]]:
    """By node of a weight that makes keys or values for several query heads each: their number, and those."""
    found: dict[int, tuple[int, int]] = {}
    for node in flow.graph.nodes:
        if node.op not in SOFTMAXES or not flow.signals(node):
            continue
        scores = next((one for _, one in _upward(flow, node) if flow.is_product_of_signals(one)), None)
        pair = product_operands(scores) if scores is not None else None
        mixed = [
            one for one in flow.reading(node.outputs, flow.is_handed_on) if flow.is_product_of_signals(one)
        ]
        if pair is None or not mixed:
            continue
        head = flow.graph.shapes[pair[0]][-1]
        values = [value for value in product_operands(mixed[0]) or () if value in flow.uses.signal]
        made = [_last_weights(flow, value) for value in (*pair, *values)]
        sizes = {
            index: flow.graph.shapes[flow.graph.nodes[index].outputs[0]][-1] for one in made for index in one
        }
        query = max((sizes[index] for index in made[0]), default=0)
        for index, size in sizes.items():
            if size < query and size % head == 0 and query % head == 0:
                found[index] = size // head, query // head
    return found


def _upward(flow: Flow, node: Node) -> Iterator[tuple[int, Node]]:
    """Back from a softmax through masks and scales, along the first signal."""
    while signals := flow.signals(node):
        maker = flow.maker(signals[0])
        if maker is None or flow.weighted >> signals[0] & 1:  # scores of a weight alone
            return
        yield signals[0], maker
        if flow.is_product_of_signals(maker):
            return
        node = maker


def _last_weights(flow: Flow, value: int, inside: int = -1) -> list[int]:
    """The nodes of the weights that a value was made by, with no other weight in between.

    Values outside of the mask `inside` are not followed.
    """

    def sources(one: int) -> Sequence[int]:
        maker = flow.maker(one)
        if maker is None or flow.weighted >> one & 1:
            return []
        return [signal for signal in flow.signals(maker) if inside >> signal & 1]

    reached = walk([value], sources)
    return [
        maker.index for one in reached if flow.weighted >> one & 1 and (maker := flow.maker(one)) is not None
    ]
