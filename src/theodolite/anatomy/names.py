"""Names of tensors: canonical ones, the same inside any wrapper, and one pattern for many of them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from torch import Tensor, nn

# The child through which a wrapper holds the module it wraps, by the wrapper's class. Classes, not
# strings: a user's own attribute may be called `module` too.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}

MANY = 4
"""Equal tensors in one block, such as separate experts, share one pattern if there are at least so many."""


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside the outermost wrappers, such as DDP or `torch.compile`."""
    while (child := _wrapped(type(model))) is not None:
        model = getattr(model, child)
    return model


def _wrapped(kind: type[nn.Module]) -> str | None:
    """The child that a class of torch wraps, also if the class is derived from it, as by FSDP."""
    bases = (base for base in kind.__mro__ if base.__module__.startswith("torch."))
    return next((child for base in bases if (child := _WRAPPERS.get(base.__name__))), None)


def canonical_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under its canonical name, without wrappers; a shared module under each of its names."""
    model = unwrap(model)
    yield prefix, model
    for name, child in model.named_children():
        yield from canonical_modules(child, f"{prefix}.{name}" if prefix else name)


def canonical_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its canonical name; a tied one once, under its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in all_parameter_names(model):
        first.setdefault(id(tensor), (name, tensor))
    yield from first.values()


def all_parameter_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under every canonical name it has."""
    for prefix, module in canonical_modules(model):
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield (f"{prefix}.{name}" if prefix else name), tensor


def starred(name: str, *, steps: bool = False) -> str:
    """A name with stars for its numbers, or for those that are whole steps of its path.

    >>> starred("blocks.3.norm1.weight"), starred("blocks.3.norm1.weight", steps=True)
    ('blocks.*.norm*.weight', 'blocks.*.norm1.weight')
    """
    return re.sub(r"(?<![^.])\d+(?![^.])" if steps else r"\d+", "*", name)


class Placed(Protocol):
    """What can be gathered under a pattern: it has a name and lies in a block, or in none."""

    @property
    def name(self) -> str:
        """Canonical."""

    @property
    def block(self) -> int | None:
        """Counted from 0."""


Item = TypeVar("Item", bound=Placed)


def gather(items: Iterable[Item], key: Callable[[Item], Hashable]) -> list[tuple[str, tuple[Item, ...]]]:
    """Patterns, each with its items: those with equal keys whose names differ only in numbers."""
    alike: dict[Hashable, list[Item]] = {}
    order: dict[str, int] = {}
    for item in items:
        order[item.name] = len(order)
        alike.setdefault((starred(item.name, steps=True), key(item)), []).append(item)
    folds = [
        (starred_name([item.name for item in members]), tuple(members))
        for group in alike.values()
        for members in _columns(group)
    ]
    return sorted(folds, key=lambda one: order[one[1][0].name])


def _columns(group: list[Item]) -> list[list[Item]]:
    """Split a group that has several members in each block into the first of each, the second of each, …"""
    places: dict[int | None, list[Item]] = {}
    for item in group:
        places.setdefault(item.block, []).append(item)
    counts = {len(members) for members in places.values()}
    if len(counts) != 1 or (count := counts.pop()) >= MANY or (None in places and count > 1):
        return [group]
    return [list(column) for column in zip(*places.values(), strict=True)]


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The names that are, or match, a pattern: a name with brackets is itself and no pattern."""
    return [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]


def starred_name(names: Sequence[str]) -> str:
    """One pattern for names of equal length: a star where they differ.

    >>> starred_name(["h.0.mlp.0.w", "h.1.mlp.0.w"])
    'h.*.mlp.0.w'
    """
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(column[0] if len(set(column)) == 1 else "*" for column in columns)


def ranges(numbers: Iterable[int]) -> str:
    """Integers as ranges.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    >>> ranges(range(0, 24, 2))
    '0, 2, …, 22'
    """
    found = runs(numbers)
    steps = {later.start - earlier.start for earlier, later in pairwise(found)}
    if len(found) > 3 and len(steps) == 1 and all(len(run) == 1 for run in found):
        return f"{found[0].start}, {found[1].start}, …, {found[-1].start}"
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in found)


def runs(numbers: Iterable[int]) -> list[range]:
    """Consecutive integers as ranges.

    >>> runs([0, 1, 2, 6, 7])
    [range(0, 3), range(6, 8)]
    """
    found: list[range] = []
    for number in sorted(set(numbers)):
        start = found.pop().start if found and found[-1].stop == number else number
        found.append(range(start, number + 1))
    return found
