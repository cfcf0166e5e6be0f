"""Branches gathered into blocks: attention and MLP of one transformer layer are one block."""

from __future__ import annotations

from collections import Counter

from torch import nn

from theodolite.anatomy.branches import names_in
from theodolite.anatomy.names import canonical_modules
from theodolite.anatomy.specimen import Specimen

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def places(specimen: Specimen) -> list[tuple[int, int]]:
    """By residual branch: its block, and which branch of the block it is, both counted from 0.

    A block ends where the next branch stands at another position of its outermost list of modules, or is of a
    kind the block already has: lists show blocks in code that has them, kinds in code that has not.
    """
    positions = _positions(specimen.model)
    found: list[tuple[int, int]] = []
    kinds: set[object] = set()
    last = None
    block, branch = -1, 0
    for residual in specimen.residuals:
        names = names_in(specimen.flow, residual)
        held_at = Counter(positions.get(name.rpartition(".")[0]) for name in names)
        position = held_at.most_common(1)[0][0] if held_at else None
        kind = _kind(specimen, names, residual.attends)
        if block < 0 or position != last or kind in kinds:
            block, branch, kinds = block + 1, 0, set()
        else:
            branch += 1
        kinds.add(kind)
        last = position
        found.append((block, branch))
    return found


def _kind(specimen: Specimen, names: list[str], attends: bool) -> object:
    """What tells one branch of a block from another, whatever the sizes: its operations and how many of each.

    A cross-attention is told from a self-attention by the weights it uses inside the branch: its keys and
    values are made outside of it.
    """
    inside = set(names)
    counted = Counter(use.op for use in specimen.flow.uses.all if use.name in inside and use.kind == "weight")
    return attends, tuple(sorted(counted.items()))


def _positions(model: nn.Module) -> dict[str, str | None]:
    """By module name: at which position of its outermost list of modules it stands."""
    modules = dict(canonical_modules(model))
    found: dict[str, str | None] = {}
    for name in modules:
        steps = name.split(".") if name else []
        parents = (".".join(steps[:length]) for length in range(len(steps)))
        inside = (
            step
            for parent, step in zip(parents, steps, strict=True)
            if isinstance(modules[parent], _CONTAINERS)
        )
        found[name] = next(inside, None)
    return found
