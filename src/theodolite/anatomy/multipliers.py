"""The plain numbers of a forward pass: what a tensor's output is multiplied by on its way.

`x + (2/L)·f(x)` and `head(h)·(32/width)` do a part of what a change of size asks for. A number counts for the
last tensor it comes after; one in front of a readout, behind which there is a norm or a sum, for the readout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from theodolite.anatomy.flow import Flow, bits
from theodolite.anatomy.operations import BENDING, HOMOGENEOUS, SOFTMAXES
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
            found += _products(flow, made, added)
    return _told(found)


def factor_outside(flow: Flow, residuals: Iterable[Residual], uses: Iterable[Use], reads_out: bool) -> float:
    """By what a tensor outside of the branches is multiplied before the first branch, norm or output.

    For a readout also by what its input is; 1 if it cannot be told.
    """
    residuals = list(residuals)
    found = []
    for use in uses:
        behind = _number_behind(flow, use) if reads_out else 1.0
        found.append(behind * _number_ahead(flow, residuals, use, CAPS if reads_out else HOMOGENEOUS))
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

    nan if that is a weight, as what stands between two weights may be either's, or a nonlinearity.
    """
    first = flow.graph.nodes[use.node].outputs[0]
    additions = {residual.addition for residual in residuals}
    last = flow.graph.outputs | {residual.start for residual in residuals}
    products, found = {first: 1.0}, []
    for value in bits(flow.descendants[first] & flow.live & ~(1 << first)):
        node = flow.maker(value)
        assert node is not None
        sources = [source for source in _carried(flow, node, products) if source not in last]
        if not sources:
            continue
        passes = flow.is_handed_on(node) or node.op in passed | {"add", "sub"}
        if _has(flow, node, "weight") or node.op in BENDING - SOFTMAXES - passed:
            found.append(math.nan)
        elif node.index in additions or not passes or _has(flow, node, "gain"):
            found += [products[source] for source in sources]
        else:
            products[value] = _one([products[source] * _number(flow, node, source) for source in sources])
    found += [product for value, product in products.items() if value in last]
    return _one(found)


def _number_behind(flow: Flow, use: Use) -> float:
    """The product of the numbers a weight's input was multiplied by since the last weight, norm or sum."""
    product = 1.0
    (value, *_) = flow.signals(flow.graph.nodes[use.node]) or (-1,)
    while value >= 0 and (node := flow.maker(value)) is not None and flow.is_handed_on(node):
        if _has(flow, node, "gain") or not flow.signals(node):
            break
        value = flow.signals(node)[0]
        product *= _number(flow, node, value)
    return product


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
