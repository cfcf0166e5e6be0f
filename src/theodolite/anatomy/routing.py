"""Mixtures of a history: where a network reads a softmax-weighted sum of what it computed before.

Cross-layer routing has no chain of additions: `h = Σ_i α_i v_i`, with weights α that are a softmax over the
history v_0, v_1, …. Attention and mixtures of experts are softmax-weighted sums too; what tells a history
from their values is that its later members were computed from the earlier ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.operations import SOFTMAXES, VIEWS
from theodolite.anatomy.trace import Node


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
