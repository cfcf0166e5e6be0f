"""What a golden table is: facts about tensors, branches of them, and the network they are about."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from theodolite.anatomy.part import AttentionHeads, Branch, Norm, Part, Placement, Role
from theodolite.core.size import Size

TWO_LAYERS, THREE_LAYERS = Size(64, 2), Size(64, 3)

Ranges = tuple[tuple[int, int], ...]
Rows = tuple[Ranges, ...]


@dataclass(frozen=True)
class Fact:
    """What the source says about one tensor, wherever it sits."""

    shape: tuple[int, ...]
    op: str
    role: Role
    in_axes: tuple[int, ...]
    out_axes: tuple[int, ...]
    grows: str
    """Which fans grow with width: `in`, `out`, `both` or `neither`."""
    norm: Norm | None = None
    read_by: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    factor: float = 1.0
    readout_factor: float = 1.0
    readout: tuple[str, ...] = ()
    offset: float = 0.0
    rows: Rows = ()


@dataclass(frozen=True)
class Limb:
    """One residual branch as the source writes it; names may be relative to `prefix`."""

    prefix: str
    placement: Placement
    facts: dict[str, Fact]
    ends: tuple[str, ...]
    layers: int = 2
    attention: AttentionHeads | None = None


@dataclass(frozen=True)
class Table:
    """All tensors of a network: those on or beside the stream, and those in branches by block."""

    outside: dict[str, Fact]
    blocks: list[list[Limb]]
    on_stream: tuple[str, ...] = ()
    """Patterns of what changes the stream between branches: norms after sums, projections."""

    def parts(self) -> dict[str, Part]:
        """The Part that `dissect` should give for every name; a name written twice raises."""
        parts: dict[str, Part] = {}
        for name, part in self._parts():
            if name in parts:
                raise ValueError(f"{name} is in the table twice")
            parts[name] = part
        return parts

    def _parts(self) -> Iterator[tuple[str, Part]]:
        for name, fact in self.outside.items():
            on_stream = any(fnmatchcase(name, pattern) for pattern in self.on_stream)
            yield name, replace(_part(name, fact), on_stream=on_stream)
        for b, limbs in enumerate(self.blocks):
            for r, limb in enumerate(limbs):
                unknown = [end for end in limb.ends if end not in limb.facts]
                if unknown:
                    raise ValueError(f"{limb.prefix}: ends {unknown} are no tensors of the branch")
                for name, fact in limb.facts.items():
                    part = _part(limb.prefix + name, fact)
                    ends = name in limb.ends
                    yield (
                        part.name,
                        replace(part, block=b, branch=r, ends_branch=ends, branch_layers=limb.layers),
                    )

    def branches(self) -> dict[tuple[int, int], Branch]:
        """The Branch expected at every (block, branch); parts and ends in alphabetical order."""
        return {
            (b, r): Branch(
                block=b,
                branch=r,
                placement=limb.placement,
                layers=limb.layers,
                parts=tuple(sorted(limb.prefix + name for name in limb.facts)),
                ends=tuple(sorted(limb.prefix + name for name in limb.ends)),
                attention=limb.attention,
            )
            for b, limbs in enumerate(self.blocks)
            for r, limb in enumerate(limbs)
        }

    def readers(self) -> dict[str, tuple[str, ...]]:
        """For every Input-Norm's gain: the weights that read it."""
        names = list(self.parts())
        facts = [("", name, fact) for name, fact in self.outside.items()]
        facts += [
            (limb.prefix, name, fact)
            for limbs in self.blocks
            for limb in limbs
            for name, fact in limb.facts.items()
        ]
        found: dict[str, tuple[str, ...]] = {}
        for prefix, name, fact in facts:
            if fact.norm == "input":
                patterns = [prefix + pattern for pattern in fact.read_by]
                found[prefix + name] = tuple(
                    reader for reader in names if any(fnmatchcase(reader, pattern) for pattern in patterns)
                )
        return found


@dataclass(frozen=True)
class Golden:
    """A network that can be built at any size, an input for it, and its table at a size."""

    build: Callable[[int, int], nn.Module]
    inputs: Callable[[], Any]
    table: Callable[[int, int], Table]
    size: Size = TWO_LAYERS
    silent: float = 0.0
    """The value of a branch's ends at which the branch adds nothing: 0, or -1 for gains stored as γ − 1."""
    shared: tuple[str, ...] = ()
    """Tensors that both branches of a block read; the table has them in the first."""


def _part(name: str, fact: Fact) -> Part:
    return Part(
        name=name,
        shape=fact.shape,
        op=fact.op,
        role=fact.role,
        fan_in=math.prod(fact.shape[axis] for axis in fact.in_axes),
        fan_out=math.prod(fact.shape[axis] for axis in fact.out_axes),
        width_in=fact.grows in ("in", "both"),
        width_out=fact.grows in ("out", "both"),
        in_axes=fact.in_axes,
        out_axes=fact.out_axes,
        norm=fact.norm,
        tied=fact.tied,
        factor=fact.factor,
        readout_factor=fact.readout_factor,
        readout=fact.readout,
        offset=fact.offset,
        rows=fact.rows,
    )
