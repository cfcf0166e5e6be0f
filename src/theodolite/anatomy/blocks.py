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

    A block ends where the next branch belongs to another element of the outermost list of modules, or is of a
    kind the block already has: lists show blocks in code that has them, kinds in code that has not.
    """
    elements = _elements(specimen.model)
    found: list[tuple[int, int]] = []
    kinds: set[object] = set()
    last = None
    block, branch = -1, 0
    for residual in specimen.residuals:
        names = names_in(specimen.flow, residual)
        owners = Counter(elements.get(name.rpartition(".")[0]) for name in names)
        element = owners.most_common(1)[0][0] if owners else None
        kind = _kind(specimen, names, residual.attends)
        if block < 0 or element != last or kind in kinds:
            block, branch, kinds = block + 1, 0, set()
        else:
            branch += 1
        kinds.add(kind)
        last = element
        found.append((block, branch))
    return found


def _kind(specimen: Specimen, names: list[str], attends: bool) -> object:
    """What tells one branch of a block from another, whatever the sizes: its operations and how many of each.

    A cross-attention is told from a self-attention by the weights it uses inside the branch: its keys and values
    are made outside of it.
    """
    inside = set(names)
    counted = Counter(use.op for use in specimen.flow.uses.all if use.name in inside and use.kind == "weight")
    return attends, tuple(sorted(counted.items()))


def _elements(model: nn.Module) -> dict[str, str | None]:
    """By module name: the element of the outermost list of modules it belongs to."""
    modules = dict(canonical_modules(model))
    found: dict[str, str | None] = {}
    for name in modules:
        steps = name.split(".") if name else []
        found[name] = None
        for length in range(1, len(steps) + 1):
            parent = modules.get(".".join(steps[: length - 1]))
            if isinstance(parent, _CONTAINERS):
                found[name] = ".".join(steps[:length])
                break
    return found
