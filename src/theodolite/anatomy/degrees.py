"""How a weight or gain that is computed from parameters goes with each of them.

Scaled by s, a factor W of `diag(b)·W·diag(γ)` scales the product by s: it is of degree one. The direction v
of `g·v/‖v‖` changes nothing: it is of degree zero, or free of scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from theodolite.anatomy.flow import Flow
from theodolite.anatomy.operations import REDUCTIONS, VIEWS
from theodolite.anatomy.trace import Node
from theodolite.anatomy.uses import Use

POWERS = {"square": 2.0, "var": 2.0, "var_mean": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
"""Operations that raise their argument to a power; of several results, the first."""

_PRODUCTS = frozenset({"mul", "dot", "vdot", "mm", "mv", "bmm"})
_SAME = VIEWS | REDUCTIONS | {"add", "sub", "clamp", "clamp_min", "maximum", "neg", "abs", "cat", "stack"}


def degree(flow: Flow, use: Use) -> float:
    """The power of s with which the value that is used goes if the parameter alone is scaled by s.

    1 for a parameter as it is, or times anything; 0 if it is divided by a norm of itself; nan if there is no
    such power, as for the β of `e^β·α`.
    """
    value = _value(flow, use)
    return math.nan if value is None else _degree(flow, value, [use.name])


def carriers(flow: Flow, uses: Iterable[Use]) -> list[str] | None:
    """The parameters to scale by s so that each value they make is scaled by s; None if nothing does that.

    Of a product one factor is enough, the largest: a factor on W as well as on γ would count twice.
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
    """The weights that a gain is a factor of: those that set their size together with it."""
    weights = [one for one in flow.uses.at(use.node) if one.kind == "weight" and use.kind == "gain"]
    return [one.name for one in weights if _value(flow, one) == _value(flow, use) and degree(flow, one) == 1]


def norm_span(flow: Flow, use: Use) -> int:
    """Of the g in `g·v/‖v‖`: how many entries of v one norm is taken over; 0 if it is no such g."""
    value = _value(flow, use)
    directions = [
        one
        for one in flow.uses.at(use.node)
        if one.kind in ("weight", "table") and _value(flow, one) == value and degree(flow, one) == 0
    ]
    if value is None or not directions or degree(flow, use) != 1:
        return 0
    nodes = _expression(flow, value)[0]
    if any(node.op in ("mul", "div") and len(node.inputs) < 2 for node in nodes):
        return 0  # times a number, which may go with the width
    spans = {span for node in nodes if (span := _span(flow, node))}
    return spans.pop() if len(spans) == 1 else 0


def _span(flow: Flow, node: Node) -> int:
    """How many entries one of a node's Euclidean norms is taken over; 0 if the node takes none."""
    sizes = [math.prod(flow.graph.shapes[value]) for value in (node.inputs[:1] + node.outputs[-1:])]
    if node.op == "_weight_norm_interface":
        return sizes[0] // sizes[1]
    if node.op in ("linalg_vector_norm", "norm"):
        order = next((arg for arg in node.args[1:2] if isinstance(arg, (int, float))), 2)
        return sizes[0] // sizes[1] if order == 2 else 0
    squared = flow.maker(node.inputs[0]) if node.op == "sum" else None
    is_square = squared is not None and (squared.op == "square" or _raises_to(squared, 2))
    return sizes[0] // sizes[1] if is_square else 0


def _raises_to(node: Node, power: float) -> bool:
    return node.op == "pow" and node.args[1] == power


def _carriers_of(flow: Flow, value: int, names: list[str]) -> list[str] | None:
    alone = [name for name in names if _degree(flow, value, [name]) == 1]
    if alone:
        sizes = {name: math.prod(flow.graph.shapes[at]) for at, name in flow.graph.parameters.items()}
        return [max(alone, key=lambda name: sizes[name])]
    return None if _degree(flow, value, names) == 0 else names


def _value(flow: Flow, use: Use) -> int | None:
    """What the node of a use reads that the parameter is in."""
    for value in flow.graph.nodes[use.node].inputs:
        if value not in flow.uses.signal and use.name in _expression(flow, value)[1]:
            return value
    return None


def _expression(flow: Flow, value: int) -> tuple[list[Node], set[str]]:
    """The nodes that made a value and the parameters it is made of."""
    nodes, names = set(), set()
    waiting, seen = [value], {value}
    while waiting:
        value = waiting.pop()
        if value in flow.graph.parameters:
            names.add(flow.graph.parameters[value])
        elif (node := flow.maker(value)) is not None:
            nodes.add(node.index)
            waiting += [source for source in node.inputs if source not in seen]
            seen.update(node.inputs)
    return [flow.graph.nodes[index] for index in sorted(nodes)], names


def _degree(flow: Flow, value: int, names: Iterable[str]) -> float:
    """The power of s a value goes with when the named parameters are scaled by s; nan if it is not known."""
    names = set(names)
    found = {at: float(name in names) for at, name in flow.graph.parameters.items()}
    for node in _expression(flow, value)[0]:
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
    if node.op == "_weight_norm_interface":  # g·v/‖v‖ of v and g
        return found.get(node.inputs[1], 0.0)
    if node.op == "pow" and isinstance(node.args[1], (int, float)):
        return same * node.args[1]
    if node.op in POWERS:
        return same * POWERS[node.op]
    return same if node.op in _SAME else math.nan
