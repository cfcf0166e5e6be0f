"""Roles: by which fans of a tensor grow with width."""

from __future__ import annotations

import heapq
from collections.abc import Container
from dataclasses import dataclass

from torch import nn

from theodolite.anatomy.names import canonical_modules, canonical_parameters
from theodolite.anatomy.part import AnatomyError, Role
from theodolite.anatomy.recording.operations import VIEWS
from theodolite.anatomy.specimen import Specimen
from theodolite.anatomy.structure.flow import Flow
from theodolite.anatomy.structure.uses import Use
from theodolite.core.size import Size


@dataclass(frozen=True)
class Fans:
    """Which axes are input and output, which of them grow, and the role that follows."""

    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    width_in: bool
    width_out: bool
    role: Role | None
    """None where nothing grows: then it is unknown how the tensor should be scaled."""
    assumed: str = ""
    """For a ready module: what was assumed, as a clause; empty where the dataflow alone tells."""


def fans_by_growth(flow: Flow, use: Use, grown: tuple[int, ...]) -> Fans:
    """By the axes that grow with width.

    A weight of which only the input grows is `output`, wherever it stands: a readout, a router, the keys of a
    fixed number of heads. One of which only the output grows is `input`, and so is one that reads the data
    and does not grow.
    """
    in_axes, out_axes = use.in_axes, use.out_axes
    if use.kind in ("token", "table") and use.op != "embedding":
        # Learned tokens and tables of positions: what grows is the output, the rest chooses the token.
        in_axes = tuple(axis for axis in (*in_axes, *out_axes) if axis not in grown)
        out_axes = grown
    elif use.kind in ("bias", "gain"):
        if not (set(in_axes) & set(grown) and set(out_axes) & set(grown)):  # else a gain for each entry
            in_axes, out_axes = (), in_axes + out_axes
        # An axis of size one may yet grow.
        out_axes = tuple(sorted({*out_axes, *grown} - {*in_axes}))
    elif use.op == "linear":
        out_axes = _without_stack(out_axes, grown)
    width_in = any(axis in grown for axis in in_axes)
    width_out = any(axis in grown for axis in out_axes)
    if use.kind == "bias" or use.kind == "gain":
        return Fans(in_axes, out_axes, width_in, width_out, use.kind)
    by_growth: dict[tuple[bool, bool], Role] = {
        (False, True): "input",
        (True, True): "hidden",
        (True, False): "output",
    }
    role = by_growth.get((width_in, width_out))
    if role is None and (use.kind != "weight" or reads_data(flow, use)):
        role = "input"
    return Fans(in_axes, out_axes, width_in, width_out, role)


def _without_stack(axes: tuple[int, ...], grown: tuple[int, ...]) -> tuple[int, ...]:
    """Output axes without a leading one that stays while others grow: stacked experts, or q, k and v."""
    stacked = len(axes) > 1 and axes[0] == 0 and 0 not in grown and any(axis in grown for axis in axes)
    return axes[1:] if stacked else axes


def is_looked_up_bias(flow: Flow, use: Use, inside: int) -> bool:
    """Is it looked up and added to what a weight made, as the biases of a stack of experts are?

    `inside` is the mask of all values in branches. A sum outside of them, as of embeddings of a time and of a
    label, is no bias.
    """
    if use.op != "embedding":
        return False
    carried = set(flow.graph.nodes[use.node].outputs)
    for node in flow.reading(carried, lambda node: node.op in VIEWS):
        if node.op == "add" and len(flow.signals(node)) == 2:
            others = [other for other in flow.signals(node) if other not in carried]
            is_inside = any(inside >> output & 1 for output in node.outputs)
            return is_inside and all(flow.weighted >> flow.back(other) & 1 for other in others)
        if node.op not in VIEWS:
            return False
        carried.update(node.outputs)
    return False


def last_weight(flow: Flow, use: Use) -> str | None:
    """The last weight or table before a bias or gain; None if the data reach it without one."""
    if use.kind not in ("bias", "gain"):
        return None
    waiting, seen = [-use.node], {use.node}  # the latest node first
    while waiting:
        node = flow.graph.nodes[-heapq.heappop(waiting)]
        for other in flow.uses.at(node.index):
            if other.kind not in ("bias", "gain") and other.name != use.name:
                return other.name
        for value in flow.signals(node):
            if (maker := flow.graph.maker[value]) is not None and maker not in seen:
                seen.add(maker)
                heapq.heappush(waiting, -maker)
    return None


def reads_data(flow: Flow, use: Use) -> bool:
    """Is there no parameter between the network's inputs and this one?"""
    return not any(flow.ancestors[value] & flow.fed for value in flow.signals(flow.graph.nodes[use.node]))


def grown_axes(
    main: Specimen, wider: Specimen, size: Size, untrained: Container[str] = ()
) -> dict[str, tuple[int, ...]]:
    """By parameter: the dimensions that are larger at twice the width.

    Width may add tensors (a norm per head), but neither remove nor shrink one that is trained.
    """
    here, there = f"build({size.width}, {size.depth})", f"build({2 * size.width}, {size.depth})"
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in main.shapes.items():
        other = wider.shapes.get(name)
        if other is None and name not in untrained:
            raise AnatomyError(
                f"{here} has the tensor {name}, {there} has not: width may not take tensors away"
            )
        pairs = list(enumerate(zip(shape, other or (), strict=False)))
        fits = other is not None and len(other) == len(shape) and all(a <= b for _, (a, b) in pairs)
        if not fits and name not in untrained:
            raise AnatomyError(
                f"{name} has shape {shape} in {here} but {other} in {there}: it does not grow with width"
            )
        found[name] = tuple(axis for axis, (a, b) in pairs if a != b) if fits else ()
    if not any(found.values()):
        if len(wider.shapes) > len(main.shapes):
            raise AnatomyError(f"{there} has more tensors than {here}, but none that is larger")
        raise AnatomyError(
            f"{there} has the same shapes as {here}: build ignores its width. Use it to size the layers"
        )
    return found


def lend(model: nn.Module, used: set[str]) -> dict[str, str]:
    """By unused parameter: a used one of the same shape in another element of the same list of modules.

    An expert that no token was sent to is like the expert beside it.
    """
    modules = dict(canonical_modules(model))
    shapes = {name: tensor.shape for name, tensor in canonical_parameters(model)}
    lent: dict[str, str] = {}
    for name in shapes:
        if name in used:
            continue
        steps = name.split(".")
        others = (
            ".".join([*steps[:position], key, *steps[position + 1 :]])
            for position in range(len(steps) - 2, -1, -1)
            if isinstance(holder := modules.get(".".join(steps[:position])), (nn.ModuleList, nn.ModuleDict))
            for key, _ in holder.named_children()
        )
        alike = (other for other in others if other in used and shapes.get(other) == shapes[name])
        if (other := next(alike, None)) is not None:
            lent[name] = other
    return lent
