"""The plain numbers of a forward pass: what a tensor's output is multiplied by on its way.

`x + (2/L)·f(x)` and `head(h)·(32/width)` do a part of what a change of size asks for. A number counts for the
last tensor it comes after; one in front of a readout, behind which there is a norm or a sum, for the readout.
A norm that divides by the length of a vector makes entries of `1/√n`, and so counts as that number: with the
`√n` that usually follows it, as nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.norms import follows_normalisation, is_normalisation, norm_size
from theodolite.anatomy.operations import HOMOGENEOUS
from theodolite.anatomy.residual import Residual
from theodolite.anatomy.trace import Node, Ref
from theodolite.anatomy.uses import Use


def factor_to_stream(flow: Flow, residual: Residual, uses: Iterable[Use]) -> float:
    """By what a tensor that ends a branch is multiplied before it is added; 1 if that cannot be told."""
    added = flow.graph.nodes[residual.addition].outputs[0]
    found = []
    for use in uses:
        made = flow.graph.nodes[use.node].outputs[0]
        if residual.region >> made & 1:
            behind = _behind(flow, [residual], use)
            found += [use.number * behind * one for one in _products(flow, made, added)]
    return _told(found)


def factor_elsewhere(
    flow: Flow, residuals: Iterable[Residual], uses: Iterable[Use], reads_out: bool
) -> float:
    """By what any other tensor is multiplied before the next weight, branch, norm, nonlinearity or output.

    For a readout also by what its input is. 1 if it cannot be told, or if a product of two signals comes
    next: the scale of attention is no tensor's.
    """
    residuals = list(residuals)
    found = []
    for use in uses:
        behind = _number_behind(flow, use) if reads_out else _behind(flow, residuals, use)
        ahead = _number_ahead(flow, residuals, use, CAPS if reads_out else HOMOGENEOUS)
        found.append(use.number * behind * ahead)
    return _told(found)


def _products(flow: Flow, start: int, end: int) -> list[float]:
    """The product of the numbers between two values; nan if it differs from path to path.

    None for paths that lead through a further weight.
    """
    products = {start: 1.0}
    for value in bits(flow.between(start, end) & ~(1 << start)):
        node = flow.maker(value)
        assert node is not None
        paths = [products[source] * _number(flow, node, source) for source in _carried(flow, node, products)]
        if paths and not _has(flow, node, "weight"):
            products[value] = _one(paths)
    return [products[end]] if end in products else []


CAPS = HOMOGENEOUS | {"tanh"}
"""What numbers on logits are counted through: `c·tanh(z/c)` caps them."""


def _number_ahead(flow: Flow, residuals: list[Residual], use: Use, passed: frozenset[str]) -> float:
    """The product of the numbers from a use on to what is more than a number, a view or a sum.

    Up to a sum if a weight or a product of two signals follows it: numbers between are the weight's or
    nobody's. nan where there is no sum before such a product, or before a readout, which takes the number.
    """
    first = flow.graph.nodes[use.node].outputs[0]
    additions = {residual.addition for residual in residuals}
    last = flow.graph.outputs | {residual.start for residual in residuals}
    products, found = {first: 1.0}, []
    until_sum: dict[int, float] = {}
    for value in bits(flow.descendants[first] & flow.live & ~(1 << first)):
        node = flow.maker(value)
        assert node is not None
        sources = [source for source in _carried(flow, node, products) if source not in last]
        if not sources:
            continue
        is_sum = node.op in ("add", "sub") and len(flow.signals(node)) > 1
        passes = flow.is_handed_on(node) or node.op in passed | {"add", "sub"}
        if _has(flow, node, "weight"):
            if _takes_numbers_behind(flow, node):
                found += [until_sum.get(source, math.nan) for source in sources]
            else:
                found += [until_sum.get(source, products[source]) for source in sources]
        elif flow.is_product_of_signals(node):
            found += [until_sum.get(source, math.nan) for source in sources]
        elif node.index in additions or not passes or _has(flow, node, "gain"):
            found += [products[source] for source in sources]
        else:
            products[value] = _one([products[source] * _number(flow, node, source) for source in sources])
            before = [until_sum[source] for source in sources if source in until_sum]
            if is_sum or before:
                until_sum[value] = _one(before or [products[value]])
    found += [product for value, product in products.items() if value in last]
    return _one(found)


def _takes_numbers_behind(flow: Flow, node: Node) -> bool:
    """Is it a readout, behind which there is a norm or a sum?"""
    made = node.outputs[0]
    weights = flow.descendants[made] & flow.live & flow.weighted & ~(1 << made)
    return not weights and _walk_back(flow, node)[1]


def _number_behind(flow: Flow, use: Use) -> float:
    """The product of the numbers a readout's input was multiplied by since the last norm or sum.

    1 if a weight comes before: then they are that weight's.
    """
    product, is_told = _walk_back(flow, flow.graph.nodes[use.node])
    return product if is_told else 1.0


def _behind(flow: Flow, residuals: Iterable[Residual], use: Use) -> float:
    """The same of a weight that is no readout; numbers after a gain are the gain's."""
    if use.kind != "weight":
        return _behind_norm(flow, use)
    starts = {residual.start for residual in residuals}
    product, is_told = _walk_back(flow, flow.graph.nodes[use.node], starts, gains=False)
    return product if is_told else 1.0


def _walk_back(
    flow: Flow, node: Node, starts: Collection[int] = (), *, gains: bool = True
) -> tuple[float, bool]:
    """The numbers on the way back from a weight, and whether no weight is at the end of it.

    Without `gains` one at the end counts as a weight does: the numbers after it are its own.
    """
    product = 1.0
    signals = flow.signals(node)
    while len(signals) == 1 and (maker := flow.maker(signals[0])) is not None:
        if signals[0] in starts:
            break
        uses = flow.uses.at(maker.index)
        if any(use.kind in ("weight", "table") or (use.kind == "gain" and not gains) for use in uses):
            return product, False
        if is_normalisation(flow, maker):
            return product * norm_size(flow, maker), True
        vectors = [use for use in uses if use.kind in ("gain", "bias")]
        if any(use.kind == "gain" and not follows_normalisation(flow, use) for use in vectors):
            break
        if not (vectors or flow.is_handed_on(maker) or maker.op in HOMOGENEOUS):
            break
        signals = flow.signals(maker)
        product *= 1.0 if vectors or len(signals) != 1 else _number(flow, maker, signals[0])
    return product, True


def _behind_norm(flow: Flow, use: Use) -> float:
    """The numbers between a gain and the norm that it directly follows, with the norm's own."""
    if use.kind != "gain":
        return 1.0
    product = 1.0
    signals = flow.signals(flow.graph.nodes[use.node])
    while len(signals) == 1 and (node := flow.maker(signals[0])) is not None:
        if _has(flow, node, "weight") or _has(flow, node, "gain"):
            break
        if is_normalisation(flow, node):
            return product * norm_size(flow, node)
        if not flow.is_handed_on(node):
            break
        signals = flow.signals(node)
        product *= _number(flow, node, signals[0])
    return 1.0


def _number(flow: Flow, node: Node, source: int) -> float:
    """What a node multiplies one of its signals by."""
    factor = flow.factor(node)
    if factor is not None:
        return factor
    scaled = node.op in ("add", "sub") and len(node.args) > 1 and node.args[1] == Ref(source)
    return float(node.kwargs.get("alpha", 1.0)) if scaled else 1.0


def _carried(flow: Flow, node: Node, products: dict[int, float]) -> list[int]:
    return [source for source in flow.signals(node) if source in products]


def _has(flow: Flow, node: Node, kind: str) -> bool:
    return any(use.kind == kind for use in flow.uses.at(node.index))


def _one(products: list[float]) -> float:
    """The number that all paths agree on, else nan."""
    same = products and all(math.isclose(product, products[0]) for product in products)
    return products[0] if same else math.nan


def _told(products: list[float]) -> float:
    """The size of the one product, or 1; the sign of a factor is not its size."""
    size = abs(_one(products))
    return size if math.isfinite(size) and size > 0 else 1.0
