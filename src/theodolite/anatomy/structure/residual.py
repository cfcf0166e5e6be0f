"""Residual branches: where is the stream, and what is added to it?

A branch is found by its addition. Cross-layer routing has no chain of additions: it reads a softmax-weighted
sum `h = Σ_i α_i v_i` of the history v_0, v_1, …. Attention and mixtures of experts are softmax-weighted sums
too; a history differs from their values in that its later members were computed from the earlier ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from theodolite.anatomy.recording.operations import BENDING, SOFTMAXES, VIEWS
from theodolite.anatomy.recording.trace import Node
from theodolite.anatomy.structure.flow import Flow, bits, mask_of


@dataclass(frozen=True)
class TracedBranch:
    """One branch of one residual addition."""

    total: int
    """The sum of the stream and the branch; for a routed one, the first mixture with it."""
    start: int
    """The value of the stream the branch reads."""
    ends: tuple[int, ...]
    """The values that are added; several where a branch is itself a sum (shared and routed experts)."""
    region: int
    """The values from start to ends as bits, without start."""
    layers: int
    attends: bool
    history: int | None = None
    """Of a branch that reads a mixture of earlier values in place of their sum: the first of these."""
    queries: tuple[str, ...] = ()
    """The parameters that set the weights of the mixture it reads."""


def find_residuals(flow: Flow, *, small_streams: bool | None = None) -> list[TracedBranch]:
    """All branches, in the order in which their first weight is used.

    A branch may have a small stream of its own. `small_streams=True` finds such branches, and False the
    branches of their streams. By default it is True if there are several.
    """
    if mixtures := find_mixtures(flow):
        found = _routed(flow, mixtures)
    else:
        joins = [join for node in flow.graph.nodes if (join := _join(flow, node)) is not None]
        sums = mask_of(total for total, _, _ in joins)
        others = [node for node in flow.graph.nodes if not sums & mask_of(node.outputs)]
        joins += [join for node in others if (join := _shortcut(flow, node, sums)) is not None]
        found = [
            residual for join in _outermost(flow, joins, small_streams) for residual in _branches(flow, *join)
        ]

    def order(residual: TracedBranch) -> tuple[int, int]:
        weights = residual.region & flow.weighted
        return weights & -weights, residual.total

    return sorted(found, key=order)


def _routed(flow: Flow, mixtures: list[Mixture]) -> list[TracedBranch]:
    """The branches of a network that mixes its history: each from a mixture to a new value."""
    found = []
    for term in sorted({term for mixture in mixtures for term in mixture.terms}):
        into = next(mixture for mixture in mixtures if term in mixture.terms)
        first = into.terms[0]
        if term == first:
            continue
        alike = [mixture for mixture in mixtures if mixture.terms[0] == first]
        before = [mixture for mixture in alike if flow.ancestors[term] >> mixture.total & 1]
        start, queries = (before[-1].total, before[-1].queries) if before else (first, ())
        found += [
            dataclasses.replace(residual, history=first, queries=queries)
            for residual in _branches(flow, into.total, start, term)
        ]
    return found


Join = tuple[int, int, int]
"""A residual addition: the sum, the start and the end of the branch."""


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
                return node.outputs[0], start, branch
    return None


def _summands(flow: Flow, node: Node) -> list[int]:
    """The two signals of one shape that a node adds; none if it does something else."""
    operands = flow.signals(node)
    if node.op not in ("add", "sub") or len(operands) != 2 or operands[0] == operands[1]:
        return []
    shapes = {flow.graph.shapes[value] for value in (*operands, *node.outputs)}
    return operands if len(shapes) == 1 and flow.live >> node.outputs[0] & 1 else []


def _shortcut(flow: Flow, node: Node, sums: int) -> Join | None:
    """A residual addition whose stream passes one weight, where its shape changes (projections in ResNets).

    `sums` are the results of the residual additions found so far. A shortcut spans one branch, so none of
    them may lie on its way.
    """
    operands = _summands(flow, node)
    common = flow.ancestors[operands[0]] & flow.ancestors[operands[1]] if operands else 0
    if not common:
        return None
    fork = common.bit_length() - 1
    if all(reader.op in ("select", "unbind") for reader in flow.readers(fork)):
        return None  # the steps of a sequence, in a loop
    added = node.outputs[0]
    elsewhere = flow.descendants[fork] & flow.live & ~flow.descendants[added] & ~flow.ancestors[added]
    if elsewhere:  # the fork is read by something that does not end here
        return None
    for stream, branch in (operands, operands[::-1]):
        one_weight = flow.weights_between(fork, stream) == 1 and flow.layers(fork, branch) > 1
        one_weight &= not flow.after(fork, branch) & sums
        if one_weight and not _bends(flow, fork, stream) and _bends(flow, fork, branch):
            return added, fork, branch
    return None


def _bends(flow: Flow, start: int, end: int) -> bool:
    """Is there a nonlinearity between two values?"""
    makers = flow.makers(flow.after(start, end))
    return any(node.op in BENDING or flow.is_product_of_signals(node) for node in makers)


def _outermost(flow: Flow, joins: list[Join], small_streams: bool | None) -> list[Join]:
    """The residual additions of the stream, where some lie inside the branches of others.

    A branch that leads through several residual additions is a skip around a whole stream (U-Net, long
    skips) and none of its branches, unless it has a small stream of its own as its siblings have. Other
    additions inside a branch are details of it.
    """
    joins = [_from_last_sum(flow, join, joins) for join in joins]

    def inside(outer: Join, candidates: list[Join]) -> list[Join]:
        region = flow.after(outer[1], outer[2])
        return [join for join in candidates if join[0] != outer[0] and region >> join[0] & 1]

    inner = {join: inside(join, joins) for join in joins}
    long = {join for join in joins if sum(_all_pass(flow, join, total) for total, _, _ in inner[join]) > 1}
    small = {
        join for join in long if _has_own_stream(flow, join, inner[join]) and long.isdisjoint(inner[join])
    }
    if small_streams is None:
        small_streams = len(small) > 1
    skips = long - small if small_streams else long
    kept = [join for join in joins if join not in skips]
    details = {detail for join in kept for detail in inside(join, kept)}
    return [join for join in kept if join not in details]


def _has_own_stream(flow: Flow, join: Join, inner: list[Join]) -> bool:
    """Do the additions inside of a branch share no term with the stream around it, and keep its size?

    So it is where each branch is a transformer between two projections, as in the U-Nets of Stable Diffusion.
    A long skip goes around the stream itself, or around one at another resolution.
    """
    start = join[1]
    size = math.prod(flow.graph.shapes[start])
    return all(
        not flow.lineage[total] & flow.lineage[start] and math.prod(flow.graph.shapes[total]) == size
        for total, _, _ in inner
    )


def _from_last_sum(flow: Flow, join: Join, joins: list[Join]) -> Join:
    """Let the branch begin at the last sum that it leads through, if that sum is of the same stream.

    Where the halves of a stream change each other in turn, a branch reads the sum of the one before it.
    """
    total, start, end = join
    region = flow.after(start, end)
    for other, _, _ in reversed(joins):
        if (
            region >> other & 1
            and flow.lineage[other] & flow.lineage[start]
            and not flow.lineage[other] >> start & 1
            and flow.weights_between(other, end)
            and _all_pass(flow, join, other)
        ):
            return total, other, end
    return join


def _all_pass(flow: Flow, join: Join, gate: int) -> bool:
    """Does every path through the branch lead through a value?"""
    _, start, end = join
    return flow.must_pass(start, (end,), (gate,), flow.between(start, end))


def _branches(flow: Flow, total: int, start: int, end: int) -> list[TracedBranch]:
    """The branches of one sum: terms that attend and terms that do not are parallel branches.

    Terms of one kind are one branch: two MLPs in parallel are a wider MLP.
    """
    kinds: dict[bool, list[int]] = {}
    for term in _terms(flow, start, end):
        products = sum(map(flow.is_product_of_signals, flow.makers(flow.after(start, term))))
        # Queries with keys, and weights with values; a router's weights make only one product.
        kinds.setdefault(products > 1, []).append(term)
    found = []
    for attends, terms in kinds.items():
        region = flow.descendants[start] & flow.above(terms) & ~(1 << start)
        layers = max(flow.layers(start, term) for term in terms)
        found.append(TracedBranch(total, start, tuple(terms), region, layers, attends))
    return found


def _terms(flow: Flow, start: int, end: int) -> list[int]:
    """The terms of a sum of branch outputs."""
    node = flow.maker(flow.back(end))
    if node is not None and node.op == "add":
        operands = flow.signals(node)
        if len(operands) == 2 and all(flow.weights_between(start, value) for value in operands):
            return [term for value in operands for term in _terms(flow, start, value)]
    return [end]


@dataclass(frozen=True)
class Mixture:
    """One softmax-weighted sum over a history."""

    total: int
    """The value that is the sum."""
    terms: tuple[int, ...]
    """The values that are mixed, in the order in which they were made."""
    queries: tuple[str, ...]
    """The parameters that decide on the weights of this mixture alone."""


def find_mixtures(flow: Flow) -> list[Mixture]:
    """All mixtures in the order of the pass; none unless the result of one is mixed by another.

    A network that only reads out a mixture of its layers has a residual stream beside it.
    """
    softmaxes = (node for node in flow.graph.nodes if node.op in SOFTMAXES)
    found = [mixture for node in softmaxes if (mixture := _mixture(flow, node)) is not None]
    found = _with_common_terms(flow, found)
    totals = mask_of(mixture.total for mixture in found)
    chained = any(flow.ancestors[term] & totals for mixture in found for term in mixture.terms)
    return sorted(found, key=lambda mixture: mixture.total) if chained else []


def _with_common_terms(flow: Flow, mixtures: list[Mixture]) -> list[Mixture]:
    """Where each mixture has its own cast or view of a value, put the first of them into all mixtures."""
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
    # A history: all but the first were computed from the first, with a weight in between.
    if len(terms) < 2 or not all(flow.weights_between(terms[0], term) for term in terms[1:]):
        return None
    total = _total(flow, products, flow.graph.shapes[terms[0]])
    return Mixture(total, tuple(terms), _queries(flow, terms, softmax))


def _products(flow: Flow, weights: int) -> list[tuple[int, list[int]]]:
    """The products with the weights: for each, its result and the values in it.

    Nothing if the weights are used in another way too.
    """
    found = []
    carried = {weights}
    for node in flow.reading(carried, lambda node: node.op in VIEWS and len(flow.signals(node)) == 1):
        others = [other for other in flow.signals(node) if other not in carried]
        if node.op in VIEWS and not others:
            carried.update(node.outputs)
        elif len(others) == 1 and (node.op == "mul" or flow.is_product_of_signals(node)):
            found.append((node.outputs[0], _stacked(flow, others[0])))
        else:
            return []
    return found


def _stacked(flow: Flow, value: int) -> list[int]:
    """The values that were stacked into one; the value itself if there are none."""
    node = flow.maker(flow.back(value))
    if node is None or node.op not in ("stack", "cat"):
        return [value]
    makers = [(source, flow.maker(source)) for source in flow.signals(node)]
    return [flow.signals(one)[0] if one and one.op == "unsqueeze" else source for source, one in makers]


def _total(flow: Flow, products: Sequence[tuple[int, list[int]]], shape: tuple[int, ...]) -> int:
    """The last value of a term's shape that is a sum of the products and of nothing else."""
    sums = {made for made, _ in products}
    total, first = max(sums), min(sums)
    stacked = any(len(terms) > 1 for _, terms in products)
    for value, node in flow.made(flow.live >> first << first):
        carried = flow.signals(node)
        if value in sums or not carried or not sums.issuperset(carried):
            continue
        if node.op == "add" or node.op in VIEWS or (node.op == "sum" and stacked):
            stacked = stacked and node.op != "sum"  # over the history, once
            sums.add(value)
            total = value if flow.graph.shapes[value] == shape else total
    return total


def _queries(flow: Flow, terms: Sequence[int], softmax: Node) -> tuple[str, ...]:
    """The parameters that make the scores of the softmax and nothing else."""
    scores = flow.signals(softmax)[0]
    made = (
        node
        for value, node in flow.made(flow.ancestors[scores] & ~flow.above(terms))
        if value == scores or flow.must_pass(value, flow.graph.outputs, [scores], flow.live)
    )
    return tuple(dict.fromkeys(use.name for node in made for use in flow.uses.at(node.index)))
