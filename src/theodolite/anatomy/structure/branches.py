"""Facts about one residual branch: its parameters, what ends it, where its norms stand, how it attends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from theodolite.anatomy.names import starred
from theodolite.anatomy.part import Placement
from theodolite.anatomy.recording.operations import BENDING, BOUNDED, HOMOGENEOUS, SOFTMAXES
from theodolite.anatomy.recording.trace import Node
from theodolite.anatomy.structure.factors import carriers, degree
from theodolite.anatomy.structure.flow import Flow, bits
from theodolite.anatomy.structure.norms import follows_normalisation, is_normalisation
from theodolite.anatomy.structure.residual import TracedBranch
from theodolite.anatomy.structure.uses import Use, product_operands


@dataclass(frozen=True)
class Heads:
    """An attention's head dimension, and what it multiplies query times key by, if known."""

    dim: int
    scale: float | None


def names_in(flow: Flow, residual: TracedBranch) -> list[str]:
    """The parameters used in the branch, in the order of use."""
    return list(
        dict.fromkeys(use.name for node in _nodes(flow, residual) for use in flow.uses.at(node.index))
    )


def feeders(flow: Flow, residuals: list[TracedBranch]) -> dict[str, int]:
    """Parameters outside of every branch whose results only one branch reads: by name, that branch.

    Keys and values made from another stream (cross-attention) and tables of relative positions are such.
    """
    home: dict[int, int] = {}
    stream = 0
    for index, residual in enumerate(residuals):
        for value in bits(residual.region):
            home.setdefault(value, index)
        for value in (residual.start, *flow.graph.nodes[residual.addition].outputs):
            stream |= 1 << value
    found: dict[str, int] = {}
    for use in flow.uses.all:
        node = flow.graph.nodes[use.node]
        if use.kind not in ("weight", "table", "bias") or any(output in home for output in node.outputs):
            continue
        reached = _first_homes(flow, node, home, stream)
        if len(reached) == 1 and -1 not in reached:
            found.setdefault(use.name, reached.pop())
        else:
            found[use.name] = -1
    return {name: index for name, index in found.items() if index >= 0}


def _first_homes(flow: Flow, node: Node, home: Mapping[int, int], stream: int) -> set[int]:
    """The branches first reached from a node; -1 stands for the stream and the network's outputs."""
    reached: set[int] = set()
    waiting, seen = list(node.outputs), set(node.outputs)
    while waiting:
        value = waiting.pop()
        if stream >> value & 1 or value in flow.graph.outputs:
            reached.add(-1)
        elif value in home:
            reached.add(home[value])
        else:
            for reader in flow.readers(value):
                fresh = [output for output in reader.outputs if output not in seen]
                seen.update(fresh)
                waiting += [output for output in fresh if flow.live >> output & 1]
    return reached


def ends_of(flow: Flow, residual: TracedBranch) -> tuple[tuple[str, ...], bool]:
    """The tensors that end the branch, and whether a norm does.

    Of a weight and the vectors that multiply it, the weight alone. None, if a nonlinearity stands between
    them and the stream that a factor does not pass, or if one of them is divided by a norm of itself, so that
    a factor on it does nothing.
    """
    names: dict[str, None] = {}
    by_norm = False
    waiting, seen = list(residual.ends), set(residual.ends)
    while waiting:
        value = waiting.pop()
        node = flow.maker(value)
        if node is None:
            continue
        uses = flow.uses.at(node.index)
        if not residual.region >> value & 1:
            names.update(dict.fromkeys(use.name for use in uses if use.kind == "table"))  # a bias per expert
            continue
        if _is_bent_gain(flow, uses):
            waiting += [source for source in flow.signals(node) if source not in seen]
            seen.update(flow.signals(node))
            continue
        ending = carriers(flow, uses)
        if ending is None:
            return (), False
        names.update(dict.fromkeys(ending))
        if any(use.kind in ("weight", "gain") for use in uses):
            by_norm |= any(use.kind == "gain" and follows_normalisation(flow, use) for use in uses)
            continue
        if is_normalisation(flow, node):
            by_norm = True
            before = [flow.maker(flow.back(source)) for source in flow.signals(node)]
            gains = [
                use for maker in before if maker for use in flow.uses.at(maker.index) if use.kind == "gain"
            ]
            names.update(dict.fromkeys(carriers(flow, gains) or ()))  # applied on the way into the norm
            continue
        if node.op in BENDING - HOMOGENEOUS:
            return (), False
        sources = flow.signals(node)
        if len(sources) > 1 and (node.op == "mul" or flow.is_product_of_signals(node)):
            sources = [source for source in sources if not _is_gate(flow, source)]
        waiting += [source for source in sources if source not in seen]
        seen.update(sources)
    return tuple(names), by_norm


def _is_bent_gain(flow: Flow, uses: Sequence[Use]) -> bool:
    """Is it a gain such as sigmoid(g), which does not scale with its parameter, on a signal that does?"""
    return bool(uses) and all(
        use.kind == "gain" and degree(flow, use) != 1 and not follows_normalisation(flow, use) for use in uses
    )


def _is_gate(flow: Flow, value: int) -> bool:
    """Is the value bounded by a softmax or a sigmoid since its last weight?"""
    waiting, seen = [value], {value}
    while waiting:
        node = flow.maker(waiting.pop())
        if node is None or any(use.kind == "weight" for use in flow.uses.at(node.index)):
            continue
        if node.op in BOUNDED:
            return True
        fresh = [source for source in flow.signals(node) if source not in seen]
        seen.update(fresh)
        waiting += fresh
    return False


def streams_of(flow: Flow, residuals: list[TracedBranch]) -> list[int]:
    """By branch: its residual stream, counted from 0.

    Two sums are of one stream if one reaches the other on a way outside of all branches: an encoder's reach
    the decoder's only through its branches.
    """
    inside = 0
    for residual in residuals:
        inside |= residual.region
    sums = [flow.graph.nodes[residual.addition].outputs[0] for residual in residuals]
    streams = list(range(len(residuals)))
    for index, total in enumerate(sums):
        reached = {total}
        for value in bits(flow.descendants[total] & flow.live & ~(1 << total)):
            node = flow.maker(value)
            if node is None or reached.isdisjoint(flow.signals(node)):
                continue
            if value in sums:  # the next one, which goes on from there
                old, new = streams[sums.index(value)], streams[index]
                streams = [new if one == old else one for one in streams]
            elif not inside >> value & 1:
                reached.add(value)
    for index, residual in enumerate(residuals):  # what reads one history is one stream
        alike = [each.history is not None and each.history == residual.history for each in residuals]
        streams = [streams[index] if same else one for same, one in zip(alike, streams, strict=True)]
    order = list(dict.fromkeys(streams))
    return [order.index(one) for one in streams]


def names_on_stream(flow: Flow, residuals: list[TracedBranch]) -> set[str]:
    """The parameters that change the stream beside and between its branches.

    Also those before the first and after the last branch that are called as the others are, but for numbers.
    """
    inside = between = around = 0
    sums = [flow.graph.nodes[residual.addition].outputs[0] for residual in residuals]
    streams = streams_of(flow, residuals)
    for residual, total, stream in zip(residuals, sums, streams, strict=True):
        inside |= residual.region
        between |= flow.between(residual.start, total) & ~(1 << residual.start)
        for other, its_stream in zip(sums, streams, strict=True):
            if its_stream == stream:
                between |= flow.between(other, residual.start) & ~(1 << other)
        around |= flow.ancestors[residual.start] | flow.descendants[total]

    def used(path: int) -> set[str]:
        makers = (flow.maker(value) for value in bits(path & ~inside))
        return {use.name for node in makers if node is not None for use in flow.uses.at(node.index)}

    found = used(between)
    kinds = {starred(name) for name in found}
    return found | {name for name in used(around & flow.live) if starred(name) in kinds}


def placement_of(flow: Flow, residual: TracedBranch, ends_in_norm: bool) -> Placement:
    """Where the branch's norms stand; `post` only where a later branch reads the normalised sum."""
    opens_with_norm = any(
        is_normalisation(flow, node) and not flow.weights_between(residual.start, node.outputs[0])
        for node in _nodes(flow, residual)
    )
    if opens_with_norm:
        return "peri" if ends_in_norm else "pre"
    if ends_in_norm:
        return "out"
    return "post" if normed_sum(flow, residual) is not None else inside_of(flow, residual)


def inside_of(flow: Flow, residual: TracedBranch) -> Placement:
    """`inner` if the whole branch passes a norm between its weights, else `none`."""
    norms = [node for node in _nodes(flow, residual) if is_normalisation(flow, node)]
    return "inner" if any(_all_pass(flow, residual, node) for node in norms) else "none"


def _all_pass(flow: Flow, residual: TracedBranch, gate: Node) -> bool:
    """Does every path through the branch lead through this node? (Not so for a norm of queries.)"""
    waiting, seen = [residual.start], {residual.start}
    while waiting:
        value = waiting.pop()
        if value in residual.ends:
            return False
        for node in flow.readers(value):
            if node.index != gate.index:
                fresh = [made for made in node.outputs if made not in seen and residual.region >> made & 1]
                seen.update(fresh)
                waiting += fresh
    return True


def normed_sum(flow: Flow, residual: TracedBranch) -> int | None:
    """What a norm makes of the stream after the addition, if nothing else reads the sum."""
    total = flow.graph.nodes[residual.addition].outputs[0]
    found: set[int] = set()
    waiting, seen = [total], {total}
    while waiting:
        value = waiting.pop()
        if value in flow.graph.outputs:
            return None
        for node in flow.readers(value):
            if is_normalisation(flow, node):
                found.add(node.index)
                continue
            fresh = [made for made in node.outputs if made not in seen and flow.live >> made & 1]
            # A norm is a few operations long, none of them with a weight.
            if any(flow.weights_between(total, made) for made in fresh) or len(seen) > 16:
                return None
            seen.update(fresh)
            waiting += fresh
    return _with_gain(flow, flow.graph.nodes[found.pop()].outputs[0]) if len(found) == 1 else None


def _with_gain(flow: Flow, value: int) -> int:
    """On from a bare normalisation to what its gain and shift make of it."""
    while len(readers := flow.readers(value)) == 1:
        uses = flow.uses.at(readers[0].index)
        if not flow.is_handed_on(readers[0]) and not any(use.kind in ("gain", "bias") for use in uses):
            break
        if any(use.kind == "weight" for use in uses):
            break
        value = readers[0].outputs[0]
    return value


def heads_of(flow: Flow, residual: TracedBranch) -> Heads | None:
    """The head dimension and the scale of the branch's first softmax attention."""
    return next(_attending(flow, _nodes(flow, residual)), None)


def heads_outside(flow: Flow, residuals: list[TracedBranch]) -> list[Heads]:
    """Those of all softmax attentions outside of every branch, in the order of execution."""
    inside = {node.index for residual in residuals for node in _nodes(flow, residual)}
    return list(_attending(flow, (node for node in flow.graph.nodes if node.index not in inside)))


def _attending(flow: Flow, nodes: Iterable[Node]) -> Iterator[Heads]:
    """The heads of each softmax over products of queries and keys."""
    for node in nodes:
        if node.op not in SOFTMAXES or not flow.signals(node):
            continue
        scores, scale = _scores(flow, flow.signals(node)[0])
        pair = product_operands(scores) if scores is not None else None
        if scores is None or pair is None:
            continue
        scale *= float(scores.kwargs.get("alpha", 1.0))
        for operand in pair:
            scale *= _scale_behind(flow, operand)
        yield Heads(flow.graph.shapes[pair[0]][-1], None if math.isnan(scale) else scale)


def _scores(flow: Flow, value: int) -> tuple[Node | None, float]:
    """Back from a softmax to the product of queries and keys, and the product of the numbers on the way."""
    scale = 1.0
    while (node := flow.maker(value)) is not None:
        if flow.is_product_of_signals(node):
            return node, scale
        kinds = {use.kind for use in flow.uses.at(node.index)}
        if "weight" in kinds or not flow.signals(node):
            break
        factor = flow.factor(node)
        scale *= math.nan if "gain" in kinds else 1.0 if factor is None else factor
        value = flow.signals(node)[0]
    return None, scale


def _scale_behind(flow: Flow, value: int) -> float:
    """The product of the numbers a value was multiplied by since its last weight, norm or sum."""
    scale = 1.0
    while (node := flow.maker(value)) is not None and flow.is_handed_on(node) and flow.signals(node):
        factor = flow.factor(node)
        scale *= 1.0 if factor is None else factor
        value = flow.signals(node)[0]
    return scale


def _nodes(flow: Flow, residual: TracedBranch) -> Iterator[Node]:
    seen = -1
    for value in bits(residual.region):
        node = flow.maker(value)
        if node is not None and node.index != seen:
            seen = node.index
            yield node
