"""The residual stream: where branches leave it, and where what they computed is added to it.

An addition is residual if one operand, the branch, was computed from the other, the stream, with a weight
in between. "From the other" means from anything the stream is a sum of, so that branches that read the same
point and are added one after the other (parallel attention and MLP) are both found.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.operations import BENDING
from theodolite.anatomy.routing import Mixture, find_mixtures
from theodolite.anatomy.trace import Node


@dataclass(frozen=True)
class Residual:
    """One branch of one residual addition."""

    addition: int
    """The node that adds the branch to the stream; of a routed one, the last of the first sum it is in."""
    start: int
    """The value of the stream the branch reads."""
    ends: tuple[int, ...]
    """The values that are added; more than one where a branch is itself a sum (shared and routed experts)."""
    region: int
    """The values from start to ends, as bits; start is not one of them."""
    layers: int
    attends: bool
    history: int | None = None
    """Of a branch that reads a mixture of earlier ones in place of their sum: the first of these."""
    queries: tuple[str, ...] = ()
    """The parameters that decide on the mixture it reads."""


def find_residuals(flow: Flow) -> list[Residual]:
    """All branches, in the order in which their first weight is used."""
    mixtures = find_mixtures(flow)
    if mixtures:
        return _ordered(flow, _routed(flow, mixtures))
    joins = [join for node in flow.graph.nodes if (join := _join(flow, node)) is not None]
    sums = 0
    for join in joins:
        sums |= 1 << flow.graph.nodes[join[0]].outputs[0]
    at = {join[0] for join in joins}
    for node in flow.graph.nodes:
        if node.index not in at and (join := _shortcut(flow, node, sums)) is not None:
            joins.append(join)
    found = [residual for join in _outermost(flow, joins) for residual in _branches(flow, *join)]
    return _ordered(flow, found)


def _ordered(flow: Flow, found: list[Residual]) -> list[Residual]:
    return sorted(found, key=lambda residual: (_first_weight(flow, residual), residual.addition))


def _routed(flow: Flow, mixtures: list[Mixture]) -> list[Residual]:
    """The branches of a network that mixes its history: each from a mixture to a new value."""
    found = []
    for term in sorted({term for mixture in mixtures for term in mixture.terms}):
        into = next(mixture for mixture in mixtures if term in mixture.terms)
        first = into.terms[0]
        if term == first:
            continue
        before = [
            mixture
            for mixture in mixtures
            if mixture.terms[0] == first and flow.ancestors[term] >> mixture.total & 1
        ]
        start = before[-1].total if before else first
        addition = flow.graph.maker[into.total]
        assert addition is not None
        queries = before[-1].queries if before else ()
        found += [
            dataclasses.replace(residual, history=first, queries=queries)
            for residual in _branches(flow, addition, start, term)
        ]
    return found


Join = tuple[int, int, int]
"""Addition, start, end."""


def _join(flow: Flow, node: Node) -> Join | None:
    """The residual addition at a node, if it is one."""
    operands = _summands(flow, node)
    for stream, branch in (operands, operands[::-1]) if operands else ():
        if node.op == "sub" and len(flow.readers(branch)) > 1:
            continue  # a difference that is only compared, as in a GRU
        if flow.lineage[stream] & flow.lineage[branch]:
            continue  # two sums that share a term: a mixture of streams, not a branch
        for start in reversed(list(bits(flow.lineage[stream] & flow.ancestors[branch]))):
            if flow.weights_between(start, branch):
                return node.index, start, branch
    return None


def _summands(flow: Flow, node: Node) -> list[int]:
    """The two signals of one shape that a node adds; none if it does something else."""
    operands = flow.signals(node)
    if node.op not in ("add", "sub") or len(operands) != 2 or operands[0] == operands[1]:
        return []
    shapes = {flow.graph.shapes[value] for value in (*operands, *node.outputs)}
    return operands if len(shapes) == 1 and flow.live >> node.outputs[0] & 1 else []


def _shortcut(flow: Flow, node: Node, sums: int) -> Join | None:
    """A stream that passes one weight on its way, where its shape changes (the projections of a ResNet).

    `sums` are the results of the residual additions found so far: a shortcut spans one branch, so none of
    them lies on its way.
    """
    operands = _summands(flow, node)
    if not operands:
        return None
    first, second = operands
    common = flow.ancestors[first] & flow.ancestors[second]
    if not common:
        return None
    fork = common.bit_length() - 1
    if all(reader.op in ("select", "unbind") for reader in flow.readers(fork)):
        return None  # the steps of a sequence, in a loop
    added = node.outputs[0]
    elsewhere = flow.descendants[fork] & flow.live & ~flow.descendants[added] & ~flow.ancestors[added]
    if elsewhere:  # the fork is read by something that does not end here
        return None
    for stream, branch in ((first, second), (second, first)):
        one_weight = flow.weights_between(fork, stream) == 1 and flow.layers(fork, branch) > 1
        one_weight &= not flow.between(fork, branch) & sums & ~(1 << fork)
        if one_weight and not _bends(flow, fork, stream) and _bends(flow, fork, branch):
            return node.index, fork, branch
    return None


def _bends(flow: Flow, start: int, end: int) -> bool:
    """Is there a nonlinearity between two values?"""
    makers = (flow.maker(value) for value in bits(flow.between(start, end) & ~(1 << start)))
    return any(
        maker is not None and (maker.op in BENDING or flow.is_product_of_signals(maker)) for maker in makers
    )


def _outermost(flow: Flow, joins: list[Join]) -> list[Join]:
    """Of residual additions inside one another's branches, those of the stream.

    A branch that leads through several residual additions is a skip around a whole stream (U-Net, long
    skips): it is not one of the stream's. Others inside a branch are inner details of it.
    """
    joins = [_from_last_sum(flow, join, joins) for join in joins]

    def inside(outer: Join, candidates: list[Join]) -> list[Join]:
        region = flow.between(outer[1], outer[2]) & ~(1 << outer[1])
        return [
            join
            for join in candidates
            if join[0] != outer[0] and region >> flow.graph.nodes[join[0]].outputs[0] & 1
        ]

    def leads_through(outer: Join) -> int:
        sums = [flow.graph.nodes[join[0]].outputs[0] for join in inside(outer, joins)]
        return sum(_all_pass(flow, outer[1], outer[2], value) for value in sums)

    kept = [join for join in joins if leads_through(join) < 2]
    details = {inner for join in kept for inner in inside(join, kept)}
    return [join for join in kept if join not in details]


def _from_last_sum(flow: Flow, join: Join, joins: list[Join]) -> Join:
    """The join, its branch beginning at the last sum it leads through if that is of the same stream.

    Where the halves of a stream change each other in turn, a branch reads what the one before it made.
    """
    addition, start, end = join
    for other in reversed(joins):
        total = flow.graph.nodes[other[0]].outputs[0]
        on_the_way = total != start and flow.between(start, end) >> total & 1
        if (
            on_the_way
            and flow.lineage[total] & flow.lineage[start]
            and not flow.lineage[total] >> start & 1
            and flow.weights_between(total, end)
            and _all_pass(flow, start, end, total)
        ):
            return addition, total, end
    return join


def _all_pass(flow: Flow, start: int, end: int, gate: int) -> bool:
    """Does every path from start to end lead through a value?"""
    inside = flow.between(start, end)
    waiting, seen = [start], {start, gate}
    while waiting:
        for node in flow.readers(waiting.pop()):
            fresh = [made for made in node.outputs if inside >> made & 1 and made not in seen]
            if end in fresh:
                return False
            seen.update(fresh)
            waiting += fresh
    return True


def _branches(flow: Flow, addition: int, start: int, end: int) -> list[Residual]:
    """The branches of one addition: terms that attend and terms that do not are parallel branches.

    Terms of one kind are one branch: two MLPs in parallel are a wider MLP.
    """
    kinds: dict[bool, list[int]] = {}
    for term in _terms(flow, start, end):
        makers = (flow.maker(value) for value in bits(flow.between(start, term) & ~(1 << start)))
        products = sum(maker is not None and flow.is_product_of_signals(maker) for maker in makers)
        # Queries with keys, and weights with values; a router's weights make one product.
        kinds.setdefault(products > 1, []).append(term)
    found = []
    for attends, terms in kinds.items():
        region = 0
        for term in terms:
            region |= flow.between(start, term) & ~(1 << start)
        layers = max(flow.layers(start, term) for term in terms)
        found.append(Residual(addition, start, tuple(terms), region, layers, attends))
    return found


def _terms(flow: Flow, start: int, end: int) -> list[int]:
    """The terms of a sum of branch outputs."""
    node = flow.maker(flow.back(end))
    if node is not None and node.op == "add":
        operands = flow.signals(node)
        if len(operands) == 2 and all(flow.weights_between(start, value) for value in operands):
            return [term for value in operands for term in _terms(flow, start, value)]
    return [end]


def _first_weight(flow: Flow, residual: Residual) -> int:
    weights = residual.region & flow.weighted
    return (weights & -weights).bit_length()
