"""Residual branches: their parameters, the tensors that end them, the places of their norms, attention."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

from theodolite.anatomy.names import starred
from theodolite.anatomy.part import AttentionHeads, Placement
from theodolite.anatomy.recording.operations import BENDING, BOUNDED, HOMOGENEOUS, NORMS, SOFTMAXES
from theodolite.anatomy.recording.trace import Node
from theodolite.anatomy.structure.factors import carriers, degree
from theodolite.anatomy.structure.flow import Flow, bits, walk
from theodolite.anatomy.structure.norms import follows_normalisation, is_normalisation
from theodolite.anatomy.structure.residual import TracedBranch
from theodolite.anatomy.structure.uses import Use, product_operands


def names_in(flow: Flow, residual: TracedBranch) -> list[str]:
    """The parameters used in the branch, in the order of use."""
    uses = (use for node in flow.makers(residual.region) for use in flow.uses.at(node.index))
    return list(dict.fromkeys(use.name for use in uses))


def feeders(
    flow: Flow, residuals: list[TracedBranch], places: Sequence[tuple[int, int]], inside: str
) -> dict[str, tuple[int, int]]:
    """Parameters outside of every branch whose results one block alone reads: by name, its first such branch.

    Examples are keys and values made from another stream (cross-attention), tables of relative positions, and
    a layer that modulates all branches of a block.

    A single block reads alone what several would share, such as the embedding of a time: there, `inside` is
    what the names of tensors that belong to the block begin with.
    """
    home: dict[int, int] = {}
    for index, residual in enumerate(residuals):
        for value in bits(residual.region):
            home.setdefault(value, index)
    outside = {end for residual in residuals for end in (residual.start, residual.total)} | flow.graph.outputs

    def onward(value: int) -> list[int]:
        return [] if value in outside or value in home else flow.made_of(value, flow.live)

    found: dict[str, int] = {}
    for use in flow.uses.all:
        outputs = flow.graph.nodes[use.node].outputs
        if use.kind not in ("weight", "table", "bias") or any(output in home for output in outputs):
            continue
        values = [value for value in walk(outputs, onward) if value in outside or value in home]
        reached = {-1 if value in outside else home[value] for value in values}
        if -1 not in reached and len({places[index][0] for index in reached}) == 1:
            found.setdefault(use.name, min(reached))
        else:
            found[use.name] = -1
    return {name: places[index] for name, index in found.items() if index >= 0 and name.startswith(inside)}


def ends_of(flow: Flow, residual: TracedBranch) -> tuple[tuple[str, ...], bool]:
    """The tensors that end the branch, and whether a norm does.

    Of a weight and the vectors that multiply it, only the weight. Nothing if a nonlinearity that a factor
    does not pass stands between them and the stream, or if one of them is divided by a norm of itself, so
    that a factor on it has no effect.
    """
    names: dict[str, None] = {}
    by_norm = False
    waiting, seen = list(residual.ends), set(residual.ends)
    while waiting:
        value = waiting.pop()
        node = flow.maker(value)
        if node is None:
            continue
        uses, sources = flow.uses.at(node.index), flow.signals(node)
        if not residual.region >> value & 1:
            names.update(dict.fromkeys(use.name for use in uses if use.kind == "table"))  # a bias per expert
            continue
        if not _is_bent_gain(flow, uses):
            ending = carriers(flow, uses)
            if ending is None:
                return (), False
            names.update(dict.fromkeys(ending))
            if any(use.kind in ("weight", "gain") for use in uses):
                by_norm |= any(use.kind == "gain" and follows_normalisation(flow, use) for use in uses)
                continue
            if is_normalisation(flow, node):
                by_norm = True
                before = [maker for source in sources if (maker := flow.maker(flow.back(source)))]
                gains = [one for maker in before for one in flow.uses.at(maker.index) if one.kind == "gain"]
                names.update(dict.fromkeys(carriers(flow, gains) or ()))  # applied on the way into the norm
                continue
            if node.op in BENDING - HOMOGENEOUS:
                return (), False
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

    def sources(value: int) -> list[int]:
        node = flow.maker(value)
        return [] if node is None or flow.weighted >> value & 1 else flow.signals(node)

    makers = (flow.maker(one) for one in walk([value], sources))
    return any(node is not None and node.op in BOUNDED for node in makers)


def streams_of(flow: Flow, residuals: list[TracedBranch]) -> list[int]:
    """By branch: its residual stream, counted from 0.

    Two sums are of one stream if a path outside of all branches connects them. An encoder's sums reach the
    decoder's only through branches.
    """
    inside = set(bits(functools.reduce(operator.or_, (residual.region for residual in residuals), 0)))
    first: dict[int, int] = {}
    for index, residual in enumerate(residuals):
        first.setdefault(residual.total, index)
    streams = list(range(len(residuals)))

    def onward(value: int) -> list[int]:
        return [] if value in first else _beside(value)

    def _beside(value: int) -> list[int]:
        readers = (node for node in flow.readers(value) if value in flow.signals(node))
        made = (output for node in readers for output in node.outputs if flow.live >> output & 1)
        return [output for output in made if output in first or output not in inside]

    for index, residual in enumerate(residuals):
        for value in walk(_beside(residual.total), onward):
            if value in first:  # the next one, which goes on from there
                old, new = streams[first[value]], streams[index]
                streams = [new if one == old else one for one in streams]
    for index, residual in enumerate(residuals):  # branches that read one history are one stream
        alike = [each.history is not None and each.history == residual.history for each in residuals]
        streams = [streams[index] if same else one for same, one in zip(alike, streams, strict=True)]
    order = list(dict.fromkeys(streams))
    return [order.index(one) for one in streams]


def names_on_stream(flow: Flow, residuals: list[TracedBranch]) -> set[str]:
    """The parameters that change the stream beside and between its branches.

    Those before the first and after the last branch are included if their names differ from the others' only
    in numbers.
    """
    inside = between = around = 0
    pairs = list(zip(residuals, streams_of(flow, residuals), strict=True))
    for residual, stream in pairs:
        inside |= residual.region
        between |= flow.after(residual.start, residual.total)
        for other in (one for one, its_stream in pairs if its_stream == stream):
            between |= flow.after(other.total, residual.start)
        around |= flow.ancestors[residual.start] | flow.descendants[residual.total]

    def used(path: int) -> set[str]:
        return {use.name for node in flow.makers(path & ~inside) for use in flow.uses.at(node.index)}

    found = used(between)
    kinds = {starred(name) for name in found}
    return found | {name for name in used(around & flow.live) if starred(name) in kinds}


def placements_of(flow: Flow, residuals: list[TracedBranch], ends_in_norm: Iterable[bool]) -> list[Placement]:
    """Where the norms of each branch stand; `inner` if every path passes one norm between its weights."""
    found: list[Placement] = []
    for residual, by_norm, after in zip(residuals, ends_in_norm, stream_after(flow, residuals), strict=True):
        start, region = residual.start, residual.region
        norms = [node for node in flow.makers(region) if is_normalisation(flow, node)]
        if any(not flow.weights_between(start, node.outputs[0]) for node in norms):
            found.append("peri" if by_norm else "pre")
        elif by_norm or after != residual.total:
            found.append("out" if by_norm else "post")
        else:
            inner = any(flow.must_pass(start, residual.ends, node.outputs, region) for node in norms)
            found.append("inner" if inner else "none")
    return found


def stream_after(flow: Flow, residuals: list[TracedBranch]) -> list[int]:
    """The stream after each branch: the sum, or the normalised sums if a later branch reads one of these.

    The last norm of a network is read by no branch, and does not count by itself.
    """
    starts = {flow.back(residual.start) for residual in residuals}
    normed = [_normed_sum(flow, residual) for residual in residuals]
    if not any(made is not None and flow.back(made) in starts for made in normed):
        return [residual.total for residual in residuals]
    return [one.total if made is None else made for one, made in zip(residuals, normed, strict=True)]


def _normed_sum(flow: Flow, residual: TracedBranch) -> int | None:
    """The normalised sum after the addition, if nothing but one norm reads the sum."""
    total = residual.total
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
    """On from a bare normalisation to what its gain and shift make of it, in its shape.

    A view of another shape may be a part, as that of the class token. A number belongs to the norm only in
    front of its gain, as the √n of `x/‖x‖·√n`; behind it, it is a multiplier of what comes next.
    """
    found, shape = value, flow.graph.shapes[value]
    maker = flow.maker(value)
    whole = maker is not None and maker.op in NORMS
    while len(readers := flow.readers(value)) == 1:
        kinds = flow.kinds(readers[0])
        scaled = kinds & {"gain", "bias"}
        if "weight" in kinds or not (scaled or flow.is_handed_on(readers[0])):
            break
        if not scaled and whole and flow.factor(readers[0]) is not None:
            break
        whole |= bool(scaled)
        value = readers[0].outputs[0]
        found = value if flow.graph.shapes[value] == shape else found
    return found


def heads_of(flow: Flow, residual: TracedBranch) -> AttentionHeads | None:
    """The heads of the branch's first softmax attention, not compared with a wider network."""
    return next(_attending(flow, flow.makers(residual.region)), None)


def heads_outside(flow: Flow, residuals: list[TracedBranch]) -> list[AttentionHeads]:
    """The heads of all softmax attention outside of every branch, in the order of execution."""
    inside = {node.index for residual in residuals for node in flow.makers(residual.region)}
    return list(_attending(flow, (node for node in flow.graph.nodes if node.index not in inside)))


def _attending(flow: Flow, nodes: Iterable[Node]) -> Iterator[AttentionHeads]:
    """The heads of each softmax over products of queries and keys."""
    for node in nodes:
        if node.op not in SOFTMAXES or not flow.signals(node):
            continue
        scores, scale = _scores(flow, flow.signals(node)[0])
        pair = product_operands(scores) if scores is not None else None
        if scores is None or pair is None:
            continue
        scale *= float(scores.kwargs.get("alpha", 1.0))
        shared = flow.shared(pair)  # numbers before it are those of a fused weight
        for operand in pair:
            way = flow.way_back(operand)
            scale *= way[list(way)[-1] if shared is None else shared]
        dim = flow.graph.shapes[pair[0]][-1]
        yield AttentionHeads(dim, False, None if math.isnan(scale) else scale, None)


def _scores(flow: Flow, value: int) -> tuple[Node | None, float]:
    """Back from a softmax to the product of queries and keys, and the product of the numbers on the way."""
    scale = 1.0
    while (node := flow.maker(value)) is not None:
        if flow.is_product_of_signals(node):
            return node, scale
        kinds = flow.kinds(node)
        if "weight" in kinds or not flow.signals(node):
            break
        factor = flow.factor(node)
        scale *= math.nan if "gain" in kinds else 1.0 if factor is None else factor
        value = flow.signals(node)[0]
    return None, scale
