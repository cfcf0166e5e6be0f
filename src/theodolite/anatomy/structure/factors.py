"""Factors: how a value scales with each parameter in it, and which plain numbers multiply it.

Scaled by s, the parameter W of `diag(b)·W·diag(γ)` scales the product by s: its degree is one. The direction
v of `g·v/‖v‖` changes nothing: its degree is zero, it is free of scale.

`x + (2/L)·f(x)` and `head(h)·(32/width)` do a part of what a change of size needs. A number belongs to the
last tensor before it; one in front of a readout, behind a norm, a sum or a nonlinearity, belongs to the
readout. A norm that divides by the length of a vector makes entries of `1/√n` and counts as that number;
with the `√n` that usually follows, it counts as 1.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

from theodolite.anatomy.recording.operations import (
    HOMOGENEOUS,
    NORMS,
    POSITIVE,
    REDUCTIONS,
    SOFTMAXES,
    VIEWS,
)
from theodolite.anatomy.recording.trace import Node, Ref
from theodolite.anatomy.structure.flow import Flow, walk
from theodolite.anatomy.structure.norms import (
    POWERS,
    follows_normalisation,
    is_normalisation,
    norm_size,
    size_through,
)
from theodolite.anatomy.structure.residual import TracedBranch
from theodolite.anatomy.structure.uses import Use, product_operands

_PRODUCTS = frozenset({"mul", "dot", "vdot", "mm", "mv", "bmm"})
_SAME = VIEWS | REDUCTIONS | {"add", "sub", "clamp", "clamp_min", "maximum", "neg", "abs", "cat", "stack"}


def degree(flow: Flow, use: Use) -> float:
    """The power of s by which the value that is used is multiplied if only the parameter is scaled by s.

    1 for a parameter itself, or times anything; 0 if it is divided by a norm of itself; nan if there is no
    such power, as for the β of `e^β·α`.
    """
    value = _value(flow, use)
    return math.nan if value is None else _degree(flow, value, [use.name])


def carriers(flow: Flow, uses: Iterable[Use]) -> list[str] | None:
    """The parameters to scale by s so that each value made of them is scaled by s; None if that cannot be.

    Of a product, only the largest: a factor on W as well as on γ would count twice.
    """
    together: dict[tuple[int, int | None], list[str]] = {}
    for use in uses:
        together.setdefault((use.node, _value(flow, use)), []).append(use.name)
    found: list[str] = []
    for (_, value), names in together.items():
        ones = names if value is None else _carriers_of(flow, value, names)
        if ones is None:
            return None
        found += ones
    return found


def scaled_weights(flow: Flow, use: Use) -> list[str]:
    """The weights that a gain is a factor of, and whose size they set together."""
    weights = [one for one in flow.uses.at(use.node) if one.kind == "weight" and use.kind == "gain"]
    return [one.name for one in weights if _value(flow, one) == _value(flow, use) and degree(flow, one) == 1]


def is_rate(flow: Flow, use: Use) -> bool:
    """Does a parameter represent a rate by its logarithm?

    The A of `exp(Δ·A)` is `−exp(A_log)`, the time step Δ is `softplus(Wx + b)`: A_log and b do. Biases in
    front of a gate or a softmax do not, as they reach no exponent.
    """
    value = _value(flow, use)
    nodes, held = _expression(flow, value) if value is not None else ([], set())
    reached = {at for at in held if flow.graph.parameters[at] == use.name}
    for node in nodes:
        if reached.intersection(node.inputs):
            if node.op in POSITIVE:
                return True
            reached.update(node.outputs)
    if use.kind != "bias":
        return False
    # A positive function reads the sum, and products by entries and sums over time lead to an exponent.
    added = flow.graph.nodes[use.node].outputs[:1]
    near = VIEWS | {"clamp", "clamp_min", "neg"}
    far = near | {"mul", "cumsum"}
    rates = [node for node in flow.reading(added, lambda node: node.op in near) if node.op in POSITIVE]
    made = [output for node in rates for output in node.outputs]
    return any(node.op in ("exp", "exp2") for node in flow.reading(made, lambda node: node.op in far))


def leading_weight(flow: Flow, use: Use) -> str | None:
    """The first weight in a product of parameters that one layer uses as its weight.

    None for that weight itself, and where they are not multiplied element by element.
    """
    value = _value(flow, use)
    for one in flow.uses.at(use.node):
        if one.name == use.name or value is None:
            return None
        if one.kind == "weight" and _value(flow, one) == value and _multiply(flow, value, one, use):
            return one.name
    return None


def direction_size(flow: Flow, use: Use) -> float:
    """The size of an entry of the value that is used if the entries of all parameters in it are of size 1."""
    value = _value(flow, use)
    if value is None:
        return math.nan
    return size_through(flow.graph, _expression(flow, value)[0], flow.graph.parameters)[value]


def _multiply(flow: Flow, value: int, lead: Use, use: Use) -> bool:
    """Is the value a product of one parameter, or of its direction, and another?"""
    own = _degree(flow, value, [use.name])
    matrices = any(node.op in ("mm", "bmm") for node in _expression(flow, value)[0])
    return (
        own == 1 and not matrices and _degree(flow, value, [lead.name, use.name]) == own + degree(flow, lead)
    )


def _carriers_of(flow: Flow, value: int, names: list[str]) -> list[str] | None:
    alone = [name for name in names if _degree(flow, value, [name]) == 1]
    if alone:
        return [max(alone, key=lambda name: math.prod(flow.uses.shapes[name]))]
    return None if _degree(flow, value, names) == 0 else names


def _value(flow: Flow, use: Use) -> int | None:
    """The input of a use's node that the parameter is in."""
    values = (value for value in flow.graph.nodes[use.node].inputs if value not in flow.uses.signal)
    names = flow.graph.parameters
    return next(
        (one for one in values if any(names[at] == use.name for at in _expression(flow, one)[1])), None
    )


def _expression(flow: Flow, value: int) -> tuple[list[Node], set[int]]:
    """The nodes that made a value, and the values in it that are parameters."""
    graph = flow.graph

    def sources(one: int) -> tuple[int, ...]:
        node = None if one in graph.parameters else flow.maker(one)
        return () if node is None else node.inputs

    values = set(walk([value], sources))
    held = values & graph.parameters.keys()
    made = sorted({index for one in values - held if (index := graph.maker[one]) is not None})
    return [graph.nodes[index] for index in made], held


def _degree(flow: Flow, value: int, names: Iterable[str]) -> float:
    """The power of s that multiplies a value if the named parameters are scaled by s; nan if unknown."""
    names = set(names)
    nodes, parameters = _expression(flow, value)
    found = {at: float(flow.graph.parameters[at] in names) for at in parameters}
    for node in nodes:
        held = [found[source] for source in node.inputs if source in found]
        if held:  # else a constant
            found.update(dict.fromkeys(node.outputs, _after(node, held, found)))
    return found.get(value, math.nan)


def _after(node: Node, held: list[float], found: dict[int, float]) -> float:
    """The degree of a node's outputs."""
    if not any(held):  # nothing that was scaled is in it
        return 0.0
    same = held[0] if len(set(held)) == 1 else math.nan
    if node.op in _PRODUCTS:
        return sum(held)
    if node.op == "div":
        return found.get(node.inputs[0], 0.0) - sum(found.get(value, 0.0) for value in node.inputs[1:])
    if node.op in NORMS:  # of its gain, unless there is a shift
        _, gain, shift = (found.get(node.read(position), 0.0) for position in NORMS[node.op])
        return gain if shift in (0.0, gain) else math.nan
    if node.op == "_weight_norm_interface":  # g·v/‖v‖ of v and g
        return found.get(node.inputs[1], 0.0)
    if node.op == "pow" and isinstance(node.args[1], (int, float)):
        return same * node.args[1]
    if node.op in POWERS:
        return same * POWERS[node.op]
    return same if node.op in _SAME else math.nan


def factor_to_stream(flow: Flow, residual: TracedBranch, uses: Iterable[Use]) -> float:
    """What the output of a tensor that ends a branch is multiplied by before it is added; 1 if unknown."""
    found = []
    for use in uses:
        made = flow.graph.nodes[use.node].outputs[0]
        if residual.region >> made & 1:
            behind = _behind(flow, [residual], use)
            found += [use.number * behind * one for one in _products(flow, made, residual.total)]
    return _told(found)


def factor_elsewhere(
    flow: Flow, residuals: Iterable[TracedBranch], uses: Iterable[Use], reads_out: bool
) -> float:
    """What the output of another tensor is multiplied by.

    Counted up to the next weight, branch, norm, nonlinearity or output of the network. For a readout, also
    what its input is multiplied by. 1 if unknown, or if the product of queries and keys comes next and they
    are not made by one weight: the scale of attention belongs to no tensor.
    """
    residuals = list(residuals)
    found = []
    for use in uses:
        behind = _behind(flow, residuals, use, reads_out=reads_out)
        ahead = _number_ahead(flow, residuals, use, CAPS if reads_out else HOMOGENEOUS)
        found.append(use.number * behind * ahead)
    return _told(found)


def _products(flow: Flow, start: int, end: int) -> list[float]:
    """The product of the numbers between two values; nan if paths differ, none if all pass a weight."""
    products = {start: 1.0}
    for value, node in flow.made(flow.after(start, end)):
        sources = [source for source in flow.signals(node) if source in products]
        paths = [products[source] * _number(flow, node, source) for source in sources]
        if paths and "weight" not in flow.kinds(node):
            products[value] = _one(paths)
    return [products[end]] if end in products else []


CAPS = HOMOGENEOUS | {"tanh"}
"""Nonlinearities that numbers on logits are counted through: `c·tanh(z/c)` caps them."""


def _number_ahead(flow: Flow, residuals: list[TracedBranch], use: Use, passed: frozenset[str]) -> float:
    """The product of the numbers after a use, up to what is more than a number, a view or a sum.

    Only up to a sum if a weight or a product of two signals follows it: the numbers between belong to the
    weight or to no tensor. nan where there is no sum before such a product or before a readout.
    """
    first = flow.graph.nodes[use.node].outputs[0]
    sums = {residual.total for residual in residuals}
    last = flow.graph.outputs | {residual.start for residual in residuals}
    products, found = {first: 1.0}, []
    until_sum: dict[int, float] = {}
    for value, node in _reading(flow, products):
        sources = [source for source in flow.signals(node) if source in products and source not in last]
        if not sources:
            continue
        is_sum = node.op in ("add", "sub") and len(flow.signals(node)) > 1
        passes = flow.is_handed_on(node) or node.op in passed | {"add", "sub"}
        if "weight" in flow.kinds(node):
            taken = _taken_by_readout(flow, node)
            found += [until_sum.get(source, products[source] / taken) for source in sources]
        elif flow.is_product_of_signals(node):
            found += _before_product(flow, node, products, until_sum)
        elif value in sums or not passes or "gain" in flow.kinds(node):
            found += [products[source] for source in sources]
        else:
            products[value] = _one([products[source] * _number(flow, node, source) for source in sources])
            before = [until_sum[source] for source in sources if source in until_sum]
            if is_sum or before:
                until_sum[value] = _one(before or [products[value]])
    found += [product for value, product in products.items() if value in last]
    return _one(found)


def _before_product(
    flow: Flow, node: Node, products: Mapping[int, float], until_sum: Mapping[int, float]
) -> list[float]:
    """Of the operands of a product of two signals, those that are known: which numbers belong to a weight.

    Those up to a sum; those that both operands have, as queries and keys of one fused weight; and those of
    the values that a softmax weighs. nan otherwise.
    """
    pair = product_operands(node) or ()
    shared = flow.shared(pair)
    found = []
    for operand, other in zip(pair, reversed(pair), strict=True):
        if operand not in products:
            continue
        maker = flow.maker(flow.back(other))
        if operand in until_sum:
            found.append(until_sum[operand])
        elif maker is not None and maker.op in SOFTMAXES:
            found.append(products[operand])
        else:
            found.append(products.get(shared, math.nan) if shared is not None else math.nan)
    return found


def _reading(flow: Flow, values: Mapping[int, object]) -> Iterator[tuple[int, Node]]:
    """What is made of the values, those that are added meanwhile too, in the order of execution."""
    waiting: list[int] = []
    known: set[int] = set()
    followed = 0
    while True:
        for value in list(values)[followed:]:
            followed += 1
            for index in flow.graph.readers[value]:
                if index not in known:
                    known.add(index)
                    heapq.heappush(waiting, index)
        if not waiting:
            return
        node = flow.graph.nodes[heapq.heappop(waiting)]
        yield from ((made, node) for made in node.outputs if flow.live >> made & 1)


def _taken_by_readout(flow: Flow, node: Node) -> float:
    """The product of the numbers on its input that belong to a weight itself: 1, unless it is a readout.

    nan for a readout that follows a norm or a sum.
    """
    made = node.outputs[0]
    if flow.descendants[made] & flow.live & flow.weighted & ~(1 << made):
        return 1.0
    product, before = _walk_back(flow, node)
    return product if product and before == "weight" else math.nan


def _behind(flow: Flow, residuals: Iterable[TracedBranch], use: Use, *, reads_out: bool = False) -> float:
    """The product of the numbers a weight's input was multiplied by since the last norm or sum.

    1 if another weight comes before them: then they belong to that weight. So do numbers after a gain belong
    to the gain. A readout takes them too, but only from the nonlinearity of that weight on. For a gain: the
    numbers between it and its norm.
    """
    is_weight = reads_out or use.kind == "weight"
    if not is_weight and use.kind != "gain":
        return 1.0
    starts = {residual.start for residual in residuals} if is_weight and not reads_out else set()
    product, before = _walk_back(flow, flow.graph.nodes[use.node], starts, gains=reads_out)
    taken = reads_out or before == "norm" or (is_weight and before != "weight")
    return product if taken else 1.0


def _walk_back(
    flow: Flow, node: Node, starts: Collection[int] = (), *, gains: bool = True
) -> tuple[float, str]:
    """The product of the numbers before a weight or gain; and `weight` or `norm`, if that precedes them.

    Behind a weight, only of those after its nonlinearity. Without `gains` a gain counts as a weight.
    """
    product, since = 1.0, 1.0
    for value, maker in flow.chain(node):
        if value in starts:
            break
        uses, kinds = flow.uses.at(maker.index), flow.kinds(maker)
        if kinds & ({"weight", "table"} if gains else {"weight", "table", "gain"}):
            return since, "weight"
        if is_normalisation(flow, maker):
            return product * norm_size(flow, maker), "norm"
        vectors = kinds & {"gain", "bias"}
        if any(use.kind == "gain" and not follows_normalisation(flow, use) for use in uses):
            break
        if not (vectors or flow.is_handed_on(maker) or maker.op in HOMOGENEOUS):
            break
        signals = flow.signals(maker)
        product *= 1.0 if vectors or len(signals) != 1 else _number(flow, maker, signals[0])
        if maker.op in HOMOGENEOUS:
            since = product
    return product, ""


def _number(flow: Flow, node: Node, source: int) -> float:
    """What a node multiplies one of its signals by."""
    factor = flow.factor(node)
    if factor is not None:
        return factor
    scaled = node.op in ("add", "sub") and len(node.args) > 1 and node.args[1] == Ref(source)
    return float(node.kwargs.get("alpha", 1.0)) if scaled else 1.0


def _one(products: list[float]) -> float:
    """The number that all paths agree on, else nan."""
    same = products and all(math.isclose(product, products[0]) for product in products)
    return products[0] if same else math.nan


def _told(products: list[float]) -> float:
    """The absolute value that all products agree on, else 1."""
    size = abs(_one(products))
    return size if math.isfinite(size) and size > 0 else 1.0
