"""Which tensor at base size a tensor at the target size corresponds to."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part
from theodolite.errors import UseError


def counterparts(target: Anatomy, base: Anatomy) -> dict[str, Part]:
    """For every tensor of the target, the one at base size that does the same.

    That is its namesake if the names are the same at both sizes. At another depth numbers in names are not
    compared, as depth moves them. Block l of L corresponds to block `⌊l·L_base/L⌋` or, where blocks are of
    several kinds, to the nearest that has such tensors: an initialisation that varies from block to block
    keeps its shape. Within a block, and outside of the blocks, tensors of equal names, roles, operations and
    fans in units of the width correspond in their order.
    """
    if set(target) == set(base):
        for name, part in target.items():
            if base[name].role != part.role:
                raise UseError(
                    f"{name} is {part.role} at {target.size} and {base[name].role} at {base.size}: shapes "
                    f"{part.shape} and {base[name].shape}. Choose another base size, or say what it is: "
                    f'roles={{"{name}": …}}'
                )
        return {name: base[name] for name in target}
    found: dict[str, Part] = {}
    for kind in KINDS:
        here, there = _alike(target, kind), _alike(base, kind)
        for (key, block), parts in here.items():
            partners = there.get((key, None))
            if block is not None:
                middle = block * base.num_blocks // target.num_blocks
                nearest = sorted(range(base.num_blocks), key=lambda one: (abs(one - middle), one))
                partners = next((there[key, one] for one in nearest if (key, one) in there), None)
            for index, part in enumerate(parts if partners else ()):
                assert partners is not None
                found.setdefault(part.name, partners[index * len(partners) // len(parts)])
    for part in target.values():
        if part.name not in found:
            raise UseError(_unmatched(part, target, base))
    return {name: found[name] for name in target}


Kind = Callable[[Part, int], Hashable]


def _named(part: Part, width: int) -> Hashable:
    """Name without pieces that are numbers, role, operation, number of dimensions."""
    starred = ".".join("*" if piece.isdigit() else piece for piece in part.name.split("."))
    return starred, part.role, part.op, len(part.shape)


def _roughly_named(part: Part, width: int) -> Hashable:
    """The same without any number, as for `weight_ih_l0`."""
    return re.sub(r"\d+", "*", part.name), part.role, part.op, len(part.shape)


def _fans(part: Part, width: int) -> Hashable:
    """Fans in units of the width, which tell the stages of a network apart."""
    return part.width_in and part.fan_in / width, part.width_out and part.fan_out / width


KINDS: tuple[Kind, ...] = (
    lambda part, width: (_named(part, width), _fans(part, width)),
    lambda part, width: (_roughly_named(part, width), _fans(part, width)),
    _named,
    _roughly_named,
)
"""What has to be equal, the strictest first."""


def _alike(anatomy: Anatomy, kind: Kind) -> dict[tuple[Hashable, int | None], list[Part]]:
    """Tensors of one kind in one block, in order."""
    width = anatomy.size.width if anatomy.size else 1
    found: dict[tuple[Hashable, int | None], list[Part]] = {}
    for part in anatomy.values():
        found.setdefault((kind(part, width), part.block), []).append(part)
    return found


def _unmatched(part: Part, target: Anatomy, base: Anatomy) -> str:
    place = "" if part.block is None else f" in block {part.block} of {target.num_blocks}"
    return (
        f"{part.name}{place} has no counterpart at the base size {base.size}, where the network "
        f"has {base.num_blocks} blocks. Choose a base at which every kind of tensor and block occurs"
    )
