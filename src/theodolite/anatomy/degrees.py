"""How a weight or gain that is computed from parameters goes with each of them.

Scaled by s, a factor W of `diag(b)·W·diag(γ)` scales the product by s: it is of degree one. The direction v
of `g·v/‖v‖` changes nothing: it is of degree zero, or free of scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from theodolite.anatomy.flow import Flow
from theodolite.anatomy.norms import POWERS, size_after
from theodolite.anatomy.operations import NORMS, POSITIVE, REDUCTIONS, VIEWS
from theodolite.anatomy.trace import Node
from theodolite.anatomy.uses import Use

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


def is_rate(flow: Flow, use: Use) -> bool:
    """Does a parameter stand for a rate by its logarithm?

    The A of `exp(Δ·A)` is `−exp(A_log)`, the time step Δ is `softplus(Wx + b)`: A_log and b do. Biases in
    front of a gate or a softmax do not: no exponent is reached from there.
    """
    value = _value(flow, use)
    reached = {at for at, name in flow.graph.parameters.items() if name == use.name}
    for node in _expression(flow, value)[0] if value is not None else ():
        if reached.intersection(node.inputs):
            if node.op in POSITIVE:
                return True
            reached.update(node.outputs)
    if use.kind != "bias":
        return False
    added = flow.graph.nodes[use.node].outputs[0]
    return any(_leads_to(flow, one, ("exp", "exp2")) for one in _made_positive(flow, added))


def _made_positive(flow: Flow, start: int) -> list[int]:
    """What a positive function makes of a value, with nothing but views and clamps between them."""
    waiting = [start]
    found: list[int] = []
    while waiting:
        for node in flow.readers(waiting.pop()):
            if node.op in POSITIVE:
                found += node.outputs
            elif node.op in VIEWS | {"clamp", "clamp_min", "neg"}:
                waiting += node.outputs
    return found


def _leads_to(flow: Flow, start: int, ops: Collection[str]) -> bool:
    """Is one of these operations reached through products by entries, sums over time and views alone?"""
    waiting, seen = [start], {start}
    while waiting:
        for node in flow.readers(waiting.pop()):
            if node.op in ops:
                return True
            if node.op in VIEWS | {"mul", "neg", "clamp", "clamp_min", "cumsum"}:
                waiting += [made for made in node.outputs if made not in seen]
                seen.update(node.outputs)
    return False


def leading_weight(flow: Flow, use: Use) -> str | None:
    """Of a product of several parameters that one layer uses as its weight: the first weight in it.

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
    """The size of an entry of the value that is used if those of all parameters in it are of size one."""
    value = _value(flow, use)
    if value is None:
        return math.nan
    sizes = dict.fromkeys(flow.graph.parameters, 1.0)
    for node in _expression(flow, value)[0]:
        sizes.update(dict.fromkeys(node.outputs, size_after(flow.graph, node, sizes)))
    return sizes[value]


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
