"""Which tensor at base size a tensor at the target size corresponds to."""

from __future__ import annotations

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part
from theodolite.errors import UseError


def counterparts(target: Anatomy, base: Anatomy) -> dict[str, Part]:
    """For every tensor of the target, the one at base size that does the same.

    That is its namesake if the names are the same at both sizes. At another depth numbers in names are not
    compared, as depth moves them. Block l of L corresponds to block `⌊l·L_base/L⌋` or, where blocks are of
    several kinds, to the nearest that has such tensors: an initialisation that varies from block to block
    keeps its shape. Within a block, and outside of the blocks, tensors of equal names, roles and operations
    correspond in their order.
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
    here, there = _alike(target), _alike(base)
    found: dict[str, Part] = {}
    for (kind, block), parts in here.items():
        partners = there.get((kind, None))
        if block is not None:
            middle = block * base.num_blocks // target.num_blocks
            nearest = sorted(range(base.num_blocks), key=lambda one: (abs(one - middle), one))
            partners = next((there[kind, one] for one in nearest if (kind, one) in there), None)
        if partners is None:
            raise UseError(_unmatched(parts[0], target, base))
        for index, part in enumerate(parts):
            found[part.name] = partners[index * len(partners) // len(parts)]
    return {name: found[name] for name in target}


Kind = tuple[str, str, str, int]
"""Name without numbers, role, operation, number of dimensions."""


def _alike(anatomy: Anatomy) -> dict[tuple[Kind, int | None], list[Part]]:
    """Tensors of one kind in one block, in order."""
    found: dict[tuple[Kind, int | None], list[Part]] = {}
    for part in anatomy.values():
        kind = (_starred(part.name), part.role, part.op, len(part.shape))
        found.setdefault((kind, part.block), []).append(part)
    return found


def _unmatched(part: Part, target: Anatomy, base: Anatomy) -> str:
    place = "" if part.block is None else f" in block {part.block} of {target.num_blocks}"
    return (
        f"{part.name}{place} has no counterpart at the base size {base.size}, where the network "
        f"has {base.num_blocks} blocks. Choose a base at which every kind of tensor and block occurs"
    )


def _starred(name: str) -> str:
    return ".".join("*" if piece.isdigit() else piece for piece in name.split("."))
