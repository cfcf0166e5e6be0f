"""Which tensor at base size a tensor at the target size corresponds to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal

from theodolite.anatomy import Anatomy
from theodolite.anatomy.names import starred
from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError


def counterparts(target: Anatomy, base: Anatomy) -> dict[str, Part]:
    """For every tensor of the target that is trained, the one at base size that does the same.

    That is its namesake if the names are the same at both sizes. At another depth numbers in names are not
    compared, as depth moves them. Block l of L corresponds to block `⌊l·L_base/L⌋` or, where blocks are of
    several kinds, to the nearest that has such tensors: an initialisation that varies from block to block
    keeps its shape. Within a block, and outside of the blocks, tensors of equal names, roles, operations and
    fans in units of the width correspond in their order; biases and gains go with the weight before them.
    """
    if {part.name for part in target.trained} == {part.name for part in base.trained}:
        for part in target.trained:
            name = part.name
            if base[name].role != part.role:
                raise UseError(
                    f"{name} is {part.role} at {target.size} and {base[name].role} at {base.size}: shapes "
                    f"{part.shape} and {base[name].shape}. Choose another base size, or say what it is: "
                    f'roles={{"{name}": …}}'
                )
        return {part.name: base[part.name] for part in target.trained}
    in_order = _in_order(target, base)
    found = in_order | _beside_weights(target, base, in_order)
    for part in target.trained:
        if part.name not in found:
            raise UseError(_unmatched(part, target, base))
    return {part.name: found[part.name] for part in target.trained}


def _in_order(target: Anatomy, base: Anatomy) -> dict[str, Part]:
    """Tensors of one kind, block by block, in their order."""
    found: dict[str, Part] = {}
    for kind in KINDS:
        here, there = (_alike(one.values(), kind, one, "block") for one in (target, base))
        for (key, block), parts in here.items():
            partners = there.get((key, None))
            if block is not None:
                middle = block * base.num_blocks // target.num_blocks
                nearest = sorted(range(base.num_blocks), key=lambda one: (abs(one - middle), one))
                partners = next((there[key, one] for one in nearest if (key, one) in there), None)
            _pair(parts, partners or [], found)
    return found


def _beside_weights(target: Anatomy, base: Anatomy, weights: Mapping[str, Part]) -> dict[str, Part]:
    """Biases and gains that follow a weight: those of one kind that follow the weight's counterpart.

    In a plain stack of layers all biases have one name and equal fans, whatever the fan-in of their layers.
    """
    found: dict[str, Part] = {}
    for kind in KINDS:
        here, there = (_alike(_followers(one), kind, one, "beside") for one in (target, base))
        for (key, weight), parts in here.items():
            partner = weights.get(weight)
            _pair(parts, there.get((key, partner.name), []) if partner else [], found)
    return found


def _pair(parts: list[Part], partners: list[Part], found: dict[str, Part]) -> None:
    """Part i of n corresponds to partner `⌊i·n_base/n⌋`, unless it has one."""
    for index, part in enumerate(parts if partners else ()):
        found.setdefault(part.name, partners[index * len(partners) // len(parts)])


def _followers(anatomy: Anatomy) -> list[Part]:
    """Biases and gains that are in one block with the weight before them."""
    return [part for part in anatomy.values() if part.beside and anatomy[part.beside].block == part.block]


Kind = Callable[[Part, int], Hashable]


def _named(part: Part, width: int) -> Hashable:
    """Name without pieces that are numbers, role, operation, number of dimensions."""
    starred = ".".join("*" if piece.isdigit() else piece for piece in part.name.split("."))
    return starred, part.role, part.op, len(part.shape)


def _roughly_named(part: Part, width: int) -> Hashable:
    """The same without any number, as for `weight_ih_l0`."""
    return starred(part.name), part.role, part.op, len(part.shape)


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


def _alike(
    parts: Iterable[Part], kind: Kind, anatomy: Anatomy, place: Literal["block", "beside"]
) -> dict[tuple[Hashable, Any], list[Part]]:
    """Tensors of one kind in one place, in order."""
    width = anatomy.size.width if anatomy.size else 1
    found: dict[tuple[Hashable, Any], list[Part]] = {}
    for part in parts:
        found.setdefault((kind(part, width), getattr(part, place)), []).append(part)
    return found


def _unmatched(part: Part, target: Anatomy, base: Anatomy) -> str:
    place = "" if part.block is None else f" in block {part.block} of {target.num_blocks}"
    return (
        f"{part.name}{place} has no counterpart at the base size {base.size}, where the network "
        f"has {base.num_blocks} blocks. Choose a base at which every kind of tensor and block occurs"
    )
