"""Residual branches: where is the stream, and what is added to it?

A branch is found by its addition. Cross-layer routing has no chain of additions: it reads a softmax-weighted
sum `h = Σ_i α_i v_i` of the history v_0, v_1, …. Attention and mixtures of experts are softmax-weighted sums
too; a history differs from their values in that its later members were computed from the earlier ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from theodolite.anatomy.recording.operations import BENDING, SOFTMAXES, VIEWS
from theodolite.anatomy.recording.trace import Node
from theodolite.anatomy.structure.flow import Flow, bits


@dataclass(frozen=True)
class TracedBranch:
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


def find_residuals(flow: Flow) -> list[TracedBranch]:
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


def _ordered(flow: Flow, found: list[TracedBranch]) -> list[TracedBranch]:
    return sorted(found, key=lambda residual: (_first_weight(flow, residual), residual.addition))


def _routed(flow: Flow, mixtures: list[Mixture]) -> list[TracedBranch]:
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


def _branches(flow: Flow, addition: int, start: int, end: int) -> list[TracedBranch]:
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
        found.append(TracedBranch(addition, start, tuple(terms), region, layers, attends))
    return found


def _terms(flow: Flow, start: int, end: int) -> list[int]:
    """The terms of a sum of branch outputs."""
    node = flow.maker(flow.back(end))
    if node is not None and node.op == "add":
        operands = flow.signals(node)
        if len(operands) == 2 and all(flow.weights_between(start, value) for value in operands):
            return [term for value in operands for term in _terms(flow, start, value)]
    return [end]


def _first_weight(flow: Flow, residual: TracedBranch) -> int:
    weights = residual.region & flow.weighted
    return (weights & -weights).bit_length()


@dataclass(frozen=True)
class Mixture:
    """One softmax-weighted sum over a history."""

    total: int
    """The value that is the sum."""
    terms: tuple[int, ...]
    """The values that are mixed, in the order in which they were made."""
    queries: tuple[str, ...]
    """The parameters that decide on the weights."""


def find_mixtures(flow: Flow) -> list[Mixture]:
    """All of them in the order of the pass; none, unless what one of them makes is mixed by another.

    A network that only reads out a mixture of its layers has a residual stream beside it.
    """
    softmaxes = (node for node in flow.graph.nodes if node.op in SOFTMAXES)
    found = [mixture for node in softmaxes if (mixture := _mixture(flow, node)) is not None]
    found = _with_common_terms(flow, found)
    totals = 0
    for mixture in found:
        totals |= 1 << mixture.total
    chained = any(flow.ancestors[term] & totals for mixture in found for term in mixture.terms)
    return sorted(found, key=lambda mixture: mixture.total) if chained else []


def _with_common_terms(flow: Flow, mixtures: list[Mixture]) -> list[Mixture]:
    """The same value may be cast or viewed anew for each mixture: it is the first of these in all of them."""
    first: dict[int, int] = {}
    for term in sorted({term for mixture in mixtures for term in mixture.terms}):
        first.setdefault(flow.back(term), term)
    return [
        dataclasses.replace(mixture, terms=tuple(first[flow.back(term)] for term in mixture.terms))
        for mixture in mixtures
    ]


def _mixture(flow: Flow, softmax: Node) -> Mixture | None:
    weights = softmax.outputs[0]
    if weights not in flow.uses.signal or not flow.live >> weights & 1:
        return None
    products = _products(flow, weights)
    terms = sorted({term for _, others in products for term in others})
    if len(terms) < 2 or not _is_history(flow, terms):
        return None
    total = _total(flow, products, flow.graph.shapes[terms[0]])
    return Mixture(total, tuple(terms), _queries(flow, terms, softmax))


def _products(flow: Flow, weights: int) -> list[tuple[int, list[int]]]:
    """What is multiplied by the weights: for each product, what it made and the values in it.

    None, if something else is done with the weights too.
    """
    found = []
    waiting, seen = [weights], {weights}
    while waiting:
        value = waiting.pop()
        for node in flow.readers(value):
            others = [other for other in flow.signals(node) if other != value]
            if node.op in VIEWS and not others:
                waiting += [made for made in node.outputs if made not in seen]
                seen.update(node.outputs)
            elif len(others) == 1 and (node.op == "mul" or flow.is_product_of_signals(node)):
                found.append((node.outputs[0], _set_side_by_side(flow, others[0])))
            else:
                return []
    return found


def _set_side_by_side(flow: Flow, value: int) -> list[int]:
    """The values that were stacked into one; the value itself, if it is none such."""
    node = flow.maker(flow.back(value))
    if node is not None and node.op in ("stack", "cat"):
        return [_before_unsqueezing(flow, source) for source in flow.signals(node)]
    return [value]


def _before_unsqueezing(flow: Flow, value: int) -> int:
    node = flow.maker(value)
    return flow.signals(node)[0] if node is not None and node.op == "unsqueeze" else value


def _is_history(flow: Flow, terms: Sequence[int]) -> bool:
    """Were all but the first computed from the first, with a weight in between?"""
    first, *later = terms
    return all(flow.weights_between(first, term) for term in later)


def _total(flow: Flow, products: Sequence[tuple[int, list[int]]], shape: tuple[int, ...]) -> int:
    """The last value of a term's shape that is a sum of the products and of nothing else."""
    sums = {made for made, _ in products}
    total, first = max(sums), min(sums)
    stacked = any(len(terms) > 1 for _, terms in products)
    for value in bits(flow.live >> first << first):
        node = flow.maker(value)
        assert node is not None
        carried = flow.signals(node)
        if value in sums or not carried or not sums.issuperset(carried):
            continue
        if node.op == "add" or node.op in VIEWS or (node.op == "sum" and stacked):
            stacked = stacked and node.op != "sum"  # over the history, once
            sums.add(value)
            total = value if flow.graph.shapes[value] == shape else total
    return total


def _queries(flow: Flow, terms: Sequence[int], softmax: Node) -> tuple[str, ...]:
    """The parameters between the history and the softmax; those that made the history are not among them."""
    scores = flow.signals(softmax)[0]
    before, after = 0, 0
    for term in terms:
        before |= flow.ancestors[term]
        after |= flow.descendants[term]
    names: dict[str, None] = {}
    for value in bits(after & flow.ancestors[scores] & ~before):
        node = flow.maker(value)
        if node is not None:
            names.update(dict.fromkeys(use.name for use in flow.uses.at(node.index)))
    return tuple(names)
