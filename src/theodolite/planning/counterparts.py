"""Which tensor at base size a tensor at the target size corresponds to."""

from __future__ import annotations

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part
from theodolite.errors import UseError


def counterparts(target: Anatomy, base: Anatomy) -> dict[str, Part]:
    """For every tensor of the target, the one at base size that does the same.

    A tensor outside of the blocks has one of the same name. Blocks differ in number: block l of L corresponds
    to block `⌊l·L_base/L⌋`, so that an initialisation that varies from block to block keeps its shape. Names
    are compared, not read: numbers in them may differ.
    """
    alike: dict[tuple[str, int | None], list[Part]] = {}
    for part in base.values():
        alike.setdefault((_starred(part.name), part.block), []).append(part)
    found: dict[str, Part] = {}
    for part in target.values():
        if part.block is None:
            candidates = alike.get((_starred(part.name), None))
        else:
            middle = part.block * base.num_blocks // target.num_blocks
            # Where blocks are of several kinds, the nearest of the same kind.
            blocks = sorted(range(base.num_blocks), key=lambda block: (abs(block - middle), block))
            groups = (alike.get((_starred(part.name), block)) for block in blocks)
            candidates = next((group for group in groups if group), None)
        if not candidates:
            place = "" if part.block is None else f" in block {part.block} of {target.num_blocks}"
            raise UseError(
                f"{part.name}{place} has no counterpart at the base size {base.size}, where the network has "
                f"{base.num_blocks} blocks. Choose a base at which every kind of tensor and block occurs"
            )
        found[part.name] = max(candidates, key=lambda one: _agreement(one.name, part.name))
        if found[part.name].role != part.role:
            raise UseError(
                f"{part.name} is {part.role} at {target.size} and {found[part.name].role} at {base.size}: "
                f"shapes {part.shape} and {found[part.name].shape}. Choose another base size, or say what it "
                f'is: roles={{"{part.name}": …}}'
            )
    return found


def _starred(name: str) -> str:
    return ".".join("*" if piece.isdigit() else piece for piece in name.split("."))


def _agreement(one: str, other: str) -> int:
    return sum(a == b for a, b in zip(one.split("."), other.split("."), strict=True))
