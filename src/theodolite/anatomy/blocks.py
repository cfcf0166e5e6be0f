"""Branches gathered into blocks: attention and MLP of one transformer layer are one block."""

from __future__ import annotations

import itertools
from collections import Counter

from torch import nn

from theodolite.anatomy.branches import names_in
from theodolite.anatomy.names import canonical_modules
from theodolite.anatomy.specimen import Specimen

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def places(specimen: Specimen) -> list[tuple[int, int]]:
    """By residual branch: its block, and which branch of the block it is, both counted from 0.

    Branches of one element of a list of modules are one block, unless they are the same modules called again.
    Where lists do not show blocks, a block ends where a branch is of a kind the block already has, or stands
    at another position of its outermost list.
    """
    elements = _elements(specimen.model)
    found: list[tuple[int, int]] = []
    kinds: set[object] = set()
    used: set[str] = set()
    last: tuple[str, ...] = ()
    block, branch = -1, 0
    for residual in specimen.residuals:
        names = names_in(specimen.flow, residual)
        home = _common([elements.get(name.rpartition(".")[0], ()) for name in names])
        kind = _kind(specimen, names, residual.attends)
        same_element = home == last and home != ()
        same_position = _position(home) == _position(last)
        again = not used.isdisjoint(names) and kind in kinds
        if block < 0 or again or not (same_element or (same_position and kind not in kinds)):
            block, branch, kinds, used = block + 1, 0, set(), set()
        else:
            branch += 1
        kinds.add(kind)
        used.update(names)
        last = home
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


def _elements(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """By module name: the elements of lists of modules it lies in, outermost first."""
    modules = dict(canonical_modules(model))
    found: dict[str, tuple[str, ...]] = {}
    for name in modules:
        steps = name.split(".") if name else []
        paths = [".".join(steps[:length]) for length in range(len(steps) + 1)]
        found[name] = tuple(
            path for parent, path in itertools.pairwise(paths) if isinstance(modules[parent], _CONTAINERS)
        )
    return found


def _common(homes: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The elements that most of a branch's parameters lie in; a norm may be held elsewhere."""
    counted = Counter(home[:length] for home in homes for length in range(1, len(home) + 1))
    inside = [home for home, count in counted.items() if 2 * count > len(homes)]
    return max(inside, key=len, default=())


def _position(home: tuple[str, ...]) -> str | None:
    return home[0].rpartition(".")[2] if home else None
