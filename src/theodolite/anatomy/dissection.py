"""`dissect`: from a network to its Anatomy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from theodolite.anatomy.names import all_parameter_names, canonical_parameters, matching, starred
from theodolite.anatomy.part import (
    ROLES,
    UNTRAINED,
    Anatomy,
    AnatomyError,
    AttentionHeads,
    Branch,
    Norm,
    Part,
    Role,
    UnclassifiedError,
)
from theodolite.anatomy.position import Positions
from theodolite.anatomy.roles import (
    Fans,
    fans_by_growth,
    grown_axes,
    is_looked_up_bias,
    last_weight,
    lend,
)
from theodolite.anatomy.specimen import Specimen, examine, examine_built
from theodolite.anatomy.structure import branches, factors
from theodolite.anatomy.structure.elements import row_blocks
from theodolite.anatomy.structure.norms import follows_normalisation, read_by
from theodolite.anatomy.structure.uses import Use
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.size import Size


@exclusive()
def dissect(
    build: Build | nn.Module,
    inputs: Any,
    *,
    size: Size | None = None,
    roles: Mapping[str, Role] | None = None,
) -> Anatomy:
    """Find out what every parameter tensor of a network does.

    Shapes are compared across widths and the dataflow of one forward pass is followed; names carry no
    meaning. The pass of a large network runs on tensors without memory, unless its control flow depends on
    values.

    Args:
        build: `build(width, depth) -> nn.Module`, or a ready module. A ready module does not show which fans
            grow with width; this is then inferred from the position of each tensor in the network.
        inputs: what the network is called with: a tensor, a tuple (`model(*inputs)`) or a dict.
        size: the size to dissect, by default 128 × 4. `build` is also called at twice the width, and at
            twice the depth when the anatomy's `grown_blocks` is read or branches have streams of their own.
        roles: by pattern of names (`"blocks.*.scale"`), the role of tensors that cannot be classified,
            or that should have another role.

    Raises:
        AnatomyError: names the tensors that cannot be classified, and what to pass.

    >>> import torch
    >>> def build(width, depth):
    ...     hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    ...     return nn.Sequential(nn.Linear(8, width), *hidden, nn.Linear(width, 2))
    >>> anatomy = dissect(build, torch.zeros(4, 8), size=Size(32, 2))
    >>> [part.role for part in anatomy.values()]
    ['input', 'bias', 'hidden', 'bias', 'hidden', 'bias', 'output', 'bias']
    """
    if isinstance(build, nn.Module):
        if size is not None:
            raise AnatomyError(
                f"size={size} goes with a build function, but build is a ready {type(build).__name__}"
            )
        return _Dissection(examine(build, inputs), None, None, roles or {}).anatomy()
    if not callable(build):
        raise AnatomyError(f"build is {build!r}: pass build(width, depth) -> nn.Module, or a ready module")
    size = size or Size(128, 4)
    if not isinstance(size, Size):
        raise AnatomyError(f"size is {size!r}: write Size(width, depth)")
    size = size.network

    main = examine_built(build, size, inputs)
    wider = examine_built(build, Size(2 * size.width, size.depth), inputs)

    def deeper() -> Specimen:  # half of all tracing, and rarely needed
        return examine_built(build, Size(size.width, 2 * size.depth), inputs)

    view = _view(main, deeper)

    def grown_blocks() -> int:
        return len({block for block, _ in view(deeper()).places})

    return _Dissection(view(main), view(wider), size, roles or {}).anatomy(grown_blocks)


@exclusive()
def both_views(model: nn.Module, inputs: Any) -> tuple[Anatomy, ...]:
    """The anatomy of a ready module; if branches have small streams, also that with the branches of these.

    A module of one depth does not show which of the two depth adds to.
    """
    main = examine(model, inputs)
    inner = main.viewed(small_streams=False)
    views = (main, inner) if len(inner.residuals) > len(main.residuals) else (main,)
    return tuple(_Dissection(view, None, None, {}).anatomy() for view in views)


def _view(main: Specimen, deeper: Callable[[], Specimen]) -> Callable[[Specimen], Specimen]:
    """How to look at networks whose branches may have small streams: does depth add such branches?"""
    small_streams = None
    whole = main.viewed(small_streams=True)
    if len(whole.residuals) < len(main.viewed(small_streams=False).residuals):
        # A build that cannot go deeper has no depth to scale.
        with contextlib.suppress(UseError):
            added = deeper().viewed(small_streams=True)
            small_streams = len(added.residuals) > len(whole.residuals)
    return lambda specimen: specimen.viewed(small_streams=small_streams)


class _Dissection:
    """One specimen, compared with a wider one if given."""

    def __init__(
        self, main: Specimen, wider: Specimen | None, size: Size | None, roles: Mapping[str, Role]
    ) -> None:
        self.main, self.wider, self.size = main, wider, size
        self.flow, self.residuals = main.flow, main.residuals
        self.said = _match(roles, list(main.shapes))
        self.uses: dict[str, list[Use]] = {}
        for use in self.flow.uses.all:
            self.uses.setdefault(use.name, []).append(use)
        self.lent = lend(main.model, {name for name, uses in self.uses.items() if self._is_reached(uses)})
        self.said = self._untrained() | self.said
        untrained = {name for name, role in self.said.items() if role in UNTRAINED}
        self.grown = grown_axes(main, wider, size, untrained) if wider and size else None
        self.queries = {name for residual in main.residuals for name in residual.queries}
        self.inside = functools.reduce(operator.or_, (one.region for one in main.residuals), 0)
        self.homes = self._homes()
        self.on_stream = branches.names_on_stream(self.flow, main.residuals) - self.homes.keys()
        self.aliases = _aliases(main.model)
        self.undecayed = {name for name, one in canonical_parameters(main.model) if _is_marked(one)}

    def anatomy(self, grown_blocks: Callable[[], int] | None = None) -> Anatomy:
        found = self._branches()
        by_place = {(branch.block, branch.branch): branch for branch in found}
        parts: dict[str, Part] = {}
        problems: list[str] = []
        for name in self.main.shapes:
            part = self._part(name)
            if isinstance(part, str):
                problems.append(part)
                continue
            if name in self.homes:
                branch = by_place[self.homes[name]]
                part = dataclasses.replace(
                    part,
                    block=branch.block,
                    branch=branch.branch,
                    ends_branch=name in branch.ends,
                    branch_layers=branch.layers,
                    factor=self._factor_to_stream(name) if name in branch.ends else part.factor,
                )
            parts[name] = part
        if problems:
            more = f"\n... and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise UnclassifiedError("\n".join(problems[:5]) + more)
        return Anatomy(parts, tuple(found), self.size, grown_blocks, self._attention_outside())

    @functools.cached_property
    def positions(self) -> Positions:
        return Positions(self.flow, self.residuals)

    def _untrained(self) -> dict[str, Role]:
        """The tensors without a gradient, and those that nothing in the forward pass reads."""
        graph = self.flow.graph
        read = set(graph.returned)
        for node in reversed(graph.nodes):
            if not read.isdisjoint(node.outputs):
                read.update(node.inputs)
        known = {*self.uses, *self.lent, *self.flow.uses.unknown}
        known |= {name for value, name in graph.parameters.items() if value in read}
        unused = dict.fromkeys((name for name in self.main.shapes if name not in known), "unused")
        tensors = canonical_parameters(self.main.model)
        frozen = dict.fromkeys((name for name, tensor in tensors if not tensor.requires_grad), "frozen")
        return cast(dict[str, Role], unused | frozen)

    def _is_reached(self, uses: list[Use]) -> bool:
        """Does any of the uses make a value, or do all get no token, as those of an expert may?"""
        graph = self.flow.graph
        made = [value for use in uses for value in graph.nodes[use.node].outputs]
        return any(0 not in graph.shapes[value] for value in made)

    def _homes(self) -> dict[str, tuple[int, int]]:
        """By parameter: the block and branch it is first used in."""
        flow, where = self.flow, self.main.places
        pairs = list(zip(where, self.residuals, strict=True))
        inside = [(name, place) for place, one in pairs for name in branches.names_in(flow, one)]
        queries = [(name, place) for place, residual in pairs for name in residual.queries]
        feeding = branches.feeders(flow, self.residuals, where, self.main.single_block).items()
        homes = dict(reversed([*inside, *queries, *feeding]))  # the first counts
        return homes | {name: homes[other] for name, other in self.lent.items() if other in homes}

    def _attention_outside(self) -> tuple[AttentionHeads, ...]:
        here = branches.heads_outside(self.flow, self.residuals)
        wider = branches.heads_outside(self.wider.flow, self.wider.residuals) if self.wider else []
        if len(wider) != len(here):
            return tuple(here)
        return tuple(_compared(heads, partner) for heads, partner in zip(here, wider, strict=True))

    def _branches(self) -> list[Branch]:
        ends = [branches.ends_of(self.flow, residual) for residual in self.residuals]
        placements = branches.placements_of(self.flow, self.residuals, [by_norm for _, by_norm in ends])
        streams = branches.streams_of(self.flow, self.residuals)
        wide = self.wider
        wider = [branches.heads_of(wide.flow, one) for one in wide.residuals] if wide else []
        found = []
        by_place: dict[tuple[int, int], list[str]] = {}
        for name in self.main.shapes:
            if name in self.homes:
                by_place.setdefault(self.homes[name], []).append(name)
        for index, (place, residual) in enumerate(zip(self.main.places, self.residuals, strict=True)):
            attention = branches.heads_of(self.flow, residual)
            if attention and index < len(wider) and (partner := wider[index]):
                attention = _compared(attention, partner)
            names = tuple(by_place.get(place, ()))
            if not names:  # weights are shared between blocks
                names = tuple(branches.names_in(self.flow, residual))
            last = tuple(name for name in names if self.lent.get(name, name) in ends[index][0])
            layers, stream = residual.layers, streams[index]
            found.append(Branch(*place, placements[index], layers, names, last, attention, stream))
        return found

    def _part(self, name: str) -> Part | str:
        """The Part, without its place in a branch; or the reason why there is none."""
        shape = self.main.shapes[name]
        uses = self.uses.get(self.lent.get(name, name))
        said = self.said.get(name)
        if uses is None:
            if said is None:
                op = self.flow.uses.unknown.get(name)
                why = (
                    f"used by {op}, which does not tell its role"
                    if op
                    else "returned without meeting the inputs"
                )
                return f"{name} has shape {shape} and is {why}. {_remedy(name, shape)}"
            uses = [_use_for(name, shape, said)]
        use = uses[0]
        seen = use.node >= 0
        if seen and is_looked_up_bias(self.flow, use, self.inside):
            use = dataclasses.replace(use, kind="bias", op="add", in_axes=(), out_axes=use.out_axes)
        if self.grown is not None:
            fans = fans_by_growth(self.flow, use, self.grown[name])
        elif seen:
            fans = self.positions.fans(use, name in self.homes)
        else:
            fans = Fans(use.in_axes, use.out_axes, bool(use.in_axes), True, said)
        role = said or fans.role
        if role is None:
            stacked = self.grown and self.grown[name]
            grows = "only the number of matrices grows" if stacked else "no dimension grows"
            return f"{name} has shape {shape}, used by {use.op}: {grows} with width. {_remedy(name, shape)}"
        is_norm = use.kind == "gain" and seen and follows_normalisation(self.flow, use)
        alike = [one for one in uses if one.kind == use.kind]
        others = dict.fromkeys(one.op for one in uses[1:] if one.kind != uses[0].kind)
        as_weight = [one for one in uses if one.kind == "weight" != use.kind]
        return Part(
            name=name,
            shape=shape,
            op="norm" if is_norm else use.op,
            role=role,
            fan_in=math.prod(shape[axis] for axis in fans.in_axes),
            fan_out=math.prod(shape[axis] for axis in fans.out_axes),
            width_in=fans.width_in,
            width_out=fans.width_out,
            in_axes=fans.in_axes,
            out_axes=fans.out_axes,
            grown_axes=self._grown(name, fans),
            norm=self._norm(alike, is_norm),
            tied=self.aliases[name] or tuple(others),
            uses=() if role == "unused" else tuple(dict.fromkeys(one.kind for one in uses)),
            readout=_readout(uses),
            on_stream=name in self.on_stream,
            beside=last_weight(self.flow, use) if name not in self.lent and seen else None,
            offset=use.offset if use.kind == "gain" else 0.0,
            scale_free=seen and all(factors.degree(self.flow, one) == 0 for one in uses),
            rate=seen and any(factors.is_rate(self.flow, one) for one in uses),
            undecayed=name in self.undecayed,
            factor=self._factor(name, role, alike) if seen else 1.0,
            readout_factor=self._factor(name, "output", as_weight) if seen else 1.0,
            rows=row_blocks(self.flow, alike) if use.kind in ("weight", "bias") and seen else (),
            assumed="" if said else fans.assumed,
        )

    def _norm(self, uses: list[Use], is_norm: bool) -> Norm | None:
        """Who reads a gain of a norm, or a vector that multiplies weights."""
        if is_norm:
            return "output" if read_by(self.flow, uses).obstacle else "input"
        weights = [factors.scaled_weights(self.flow, use) for use in uses]
        if not all(weights) or any(use.in_axes for use in uses):
            return None
        return "input" if all(self.flow.tables.isdisjoint(names) for names in weights) else "output"

    def _factor_to_stream(self, name: str) -> float:
        index = self.main.places.index(self.homes[name])
        uses = self.uses[self.lent.get(name, name)]
        number = factors.factor_to_stream(self.flow, self.residuals[index], uses)
        return number * self._factor_beside(uses[0])

    def _factor(self, name: str, role: Role, uses: list[Use]) -> float:
        inside = name in self.homes and name not in self.queries
        number = factors.factor_elsewhere(self.flow, self.residuals, uses, role == "output" and not inside)
        return number * math.prod(self._factor_beside(use) for use in uses[:1])

    def _factor_beside(self, use: Use) -> float:
        """The size of what a tensor is multiplied by inside a weight, as it depends on the width.

        A gain for each entry of a weight multiplies entries of size `1/√n`. For a gain on a direction (a
        weight divided by a norm of itself), the size of the direction's entries relative to a weight's.
        """
        lead = factors.leading_weight(self.flow, use)
        part = self._part(lead) if lead else None
        if not isinstance(part, Part):
            return 1.0
        entry = part.fan_in ** (-0.5 if part.width_out else -1.0) if part.width_in else 1.0
        if use.in_axes:
            return entry if part.width_out else 1.0
        size = factors.direction_size(self.flow, use) / (entry * abs(use.number or 1.0))
        return size if part.scale_free and math.isfinite(size) and size > 0 else 1.0

    def _grown(self, name: str, fans: Fans) -> tuple[int, ...]:
        if self.grown is not None:
            return self.grown[name]
        grown = {*(fans.in_axes[:1] if fans.width_in else ()), *(fans.out_axes[:1] if fans.width_out else ())}
        return tuple(sorted(grown))


def _readout(uses: list[Use]) -> tuple[str, ...]:
    """The names by which a table is used as a weight; an operation where it is the table's own name."""
    tables = {use.alias for use in uses if use.kind == "table"}
    if not tables:
        return ()
    weights = [use for use in uses if use.kind == "weight"]
    return tuple(dict.fromkeys(use.op if use.alias in tables else use.alias for use in weights))


def _is_marked(tensor: Tensor) -> bool:
    """Does the network mark the tensor as not to decay, as the code of Mamba and S4 does?"""
    by_options = (getattr(tensor, "_optim", None) or {}).get("weight_decay")
    return bool(getattr(tensor, "_no_weight_decay", False)) or by_options == 0


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """By first name of a tensor: its other names."""
    names: dict[int, list[str]] = {}
    for name, tensor in all_parameter_names(model):
        names.setdefault(id(tensor), []).append(name)
    return {first: tuple(dict.fromkeys(others)) for first, *others in names.values()}


def _match(roles: Mapping[str, Role], names: list[str]) -> dict[str, Role]:
    """The roles that the caller gives, by name."""
    said: dict[str, Role] = {}
    for pattern, role in roles.items():
        if role not in ROLES:
            raise AnatomyError(f"roles[{pattern!r}] is {role!r}: a role is one of {', '.join(ROLES)}")
        found = matching(names, pattern)
        if not found:
            raise AnatomyError(
                f"roles[{pattern!r}] matches no parameter; there are {', '.join(names[:4])}, ..."
            )
        said |= dict.fromkeys(found, role)
    return said


def _remedy(name: str, shape: tuple[int, ...]) -> str:
    wide = len([size for size in shape if size > 1]) > 1
    example = "hidden" if wide else "input" if len(shape) > 1 else "gain"
    pattern = starred(name, steps=True)
    return f'Say what it is: roles={{"{pattern}": "{example}"}}, or another of {", ".join(ROLES)}'


def _use_for(name: str, shape: tuple[int, ...], role: Role) -> Use:
    """A use for a tensor that the forward pass does not show, with the layout of torch for that role."""
    axes = tuple(axis for axis, size in enumerate(shape) if size > 1)
    if role in ("bias", "gain"):
        return Use(-1, name, "bias" if role == "bias" else "gain", "unseen", (), axes)
    return Use(-1, name, "weight", "unseen", axes[1:], axes[:1])


def _compared(heads: AttentionHeads, wider: AttentionHeads) -> AttentionHeads:
    """The heads, with what the network at twice the width shows of them."""
    grows = wider.head_dim != heads.head_dim
    return dataclasses.replace(heads, head_dim_grows=grows, scale_at_double_width=wider.scale)
