"""What at base size corresponds to what at the target size: tensors, and residual branches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from theodolite.anatomy import Anatomy, Branch
from theodolite.anatomy.names import starred
from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.present.text import counted


def counterparts(target: Anatomy, base: Anatomy) -> dict[str, Part]:
    """For every trained tensor of the target, the tensor at base size that corresponds to it.

    If the names are the same at both sizes, it is the tensor of the same name. Otherwise numbers in names are
    ignored, as they change with depth. Block l of L corresponds to block `⌊l·L_base/L⌋` or, where blocks are
    of several kinds, to the nearest with such tensors, so that an initialisation that varies over the blocks
    keeps its profile. Within a block, and outside of the blocks, tensors with equal names, roles, operations
    and fans in units of the width correspond in order; biases and gains follow the weight before them. What
    is left has the counterpart of its name, if the name has no number.
    """
    if {part.name for part in target.trained} == {part.name for part in base.trained}:
        for part in target.trained:
            other = base[part.name]
            if other.role != part.role:
                raise UseError(
                    f"{part.name} is {part.role} at {target.size} and {other.role} at {base.size}: shapes "
                    f"{part.shape} and {other.shape}. Choose another base size, or say what it is: "
                    f'roles={{"{part.name}": …}}'
                )
        return {part.name: base[part.name] for part in target.trained}
    in_order = _in_order(target, base)
    found = _same_names(target, base) | in_order | _beside_weights(target, base, in_order)
    for part in target.trained:
        if part.name not in found:
            place = "" if part.block is None else f" in block {part.block} of {target.num_blocks}"
            raise UseError(
                f"{part.name}{place} has no counterpart at the base size {base.size}, where the network has "
                f"{counted(base.num_blocks, 'block')}. Choose a base at which every kind of tensor and block "
                "occurs"
            )
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


def _same_names(target: Anatomy, base: Anatomy) -> dict[str, Part]:
    """Tensors of one role whose name has no number, whether or not they belong to a block."""
    pairs = ((part, base[part.name]) for part in target.values() if part.name in base)
    return {
        part.name: other
        for part, other in pairs
        if starred(part.name) == part.name and (part.role, part.op) == (other.role, other.op)
    }


def _beside_weights(target: Anatomy, base: Anatomy, weights: Mapping[str, Part]) -> dict[str, Part]:
    """Biases and gains that follow a weight correspond to those that follow the weight's counterpart.

    In a plain stack of layers all biases have the same name and fans, whatever the fan-in of their layers.
    """
    found: dict[str, Part] = {}
    for kind in KINDS:
        here, there = (_alike(_followers(one), kind, one, "beside") for one in (target, base))
        for (key, weight), parts in here.items():
            partner = weights.get(weight)
            _pair(parts, there.get((key, partner.name), []) if partner else [], found)
    return found


def _pair(parts: list[Part], partners: list[Part], found: dict[str, Part]) -> None:
    """Part i of n gets partner `⌊i·n_base/n⌋`, unless it has one already."""
    for index, part in enumerate(parts if partners else ()):
        found.setdefault(part.name, partners[index * len(partners) // len(parts)])


def _followers(anatomy: Anatomy) -> list[Part]:
    """Biases and gains in the same block as the weight before them."""
    return [part for part in anatomy.values() if part.beside and anatomy[part.beside].block == part.block]


KINDS = ((True, True), (True, False), (False, True), (False, False))
"""From the strictest to the loosest: must fans be equal, and numbers within the steps of a name?"""


def _alike(
    parts: Iterable[Part], kind: tuple[bool, bool], anatomy: Anatomy, place: Literal["block", "beside"]
) -> dict[tuple[Hashable, Any], list[Part]]:
    """Tensors of one kind in one place, in order.

    The kind is name, role, operation and number of dimensions, and the fans in units of the width, which tell
    the stages of a network apart. `weight_ih_l0` has a number within a step of its name.
    """
    fans, steps = kind
    width = anatomy.size.width if anatomy.size else 1
    found: dict[tuple[Hashable, Any], list[Part]] = {}
    for part in parts:
        key: tuple[Hashable, ...] = starred(part.name, steps=steps), part.role, part.op, len(part.shape)
        if fans:
            key += part.width_in and part.fan_in / width, part.width_out and part.fan_out / width
        found.setdefault((key, getattr(part, place)), []).append(part)
    return found


@dataclass(frozen=True)
class RepeatedBranches:
    """The residual branches that a deeper network has more of, at the target and at base size."""

    at_target: tuple[Branch, ...]
    at_base: tuple[Branch, ...]
    lone: tuple[Branch, ...]
    """Branches at the target size that do not repeat: their number does not depend on depth."""
    single: frozenset[str] = frozenset()
    """Tensors whose number does not depend on depth."""

    @property
    def ratio(self) -> float:
        """Branches at the target size for each branch at base size, of all streams."""
        return len(self.at_target) / len(self.at_base) if self.at_base else 1.0

    def counts(self, part: Part) -> tuple[int, int]:
        """The number of branches on the stream of a tensor's branch, at the target and at base size.

        1 and 1 if the branch does not repeat. Streams get deeper by different ratios: in the last block of
        SD3 the stream of the text has no branch, as nothing reads it.
        """
        place = part.block, part.branch
        if any(place == (one.block, one.branch) for one in self.lone):
            return 1, 1
        if part.on_stream and part.name in self.single:
            return 1, 1
        stream = next((one.stream for one in self.at_target if place == (one.block, one.branch)), None)
        return self.of_stream(stream)

    def of_stream(self, stream: int | None) -> tuple[int, int]:
        """The branches of one stream, at the target and at base size; of all streams if it is not known."""
        here, there = (Counter(one.stream for one in held) for held in (self.at_target, self.at_base))
        if stream is None or here.keys() != there.keys():
            return here.total(), there.total()
        return here[stream], there[stream]

    def depth(self, part: Part) -> float:
        """The ratio for a tensor; 1 in a branch that does not repeat."""
        here, there = self.counts(part)
        return here / there if there else 1.0


def lone_branches(anatomy: Anatomy, others: Iterable[Anatomy]) -> frozenset[tuple[int, int]]:
    """The branches, by block and number, that do not repeat in networks of other depths."""
    return frozenset(
        (one.block, one.branch) for other in others for one in repeated_branches(anatomy, other).lone
    )


def repeated_branches(target: Anatomy, base: Anatomy) -> RepeatedBranches:
    """Find the branches that repeat with depth.

    Depth adds members to a list of modules: tensors whose names differ in a number. A branch with no tensor
    in such a list is alone, such as the positional convolution before the blocks of wav2vec 2.0. Where depth
    adds branches but no names, because blocks share their weights, every branch repeats.
    """
    here, there = _lists(target), _lists(base)
    longer = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}

    def is_in_list(name: str) -> bool:
        return any(before in longer for before, _ in _numbers(name))

    def repeats(branch: Branch) -> bool:
        return any(map(is_in_list, branch.ends or branch.parts))

    more, fewer = (tuple(filter(repeats, one.branches)) for one in (target, base))
    num_lone = len(target.branches) - len(more)
    if not more or not fewer or num_lone != len(base.branches) - len(fewer):
        return RepeatedBranches(target.branches, base.branches, ())
    lone = tuple(one for one in target.branches if not repeats(one))
    counts, counts_at_base = (Counter(map(starred, one)) for one in (target, base))
    single = (name for name in target if counts[starred(name)] == counts_at_base[starred(name)])
    return RepeatedBranches(more, fewer, lone, frozenset(single))


def _lists(names: Iterable[str]) -> dict[str, set[str]]:
    """The numbers in names, by what stands before them."""
    found: dict[str, set[str]] = {}
    for name in names:
        for before, number in _numbers(name):
            found.setdefault(before, set()).add(number)
    return found


def _numbers(name: str) -> list[tuple[str, str]]:
    """The numbers in a name, each with what stands before it.

    >>> _numbers("blocks.3.conv2.weight")
    [('blocks.', '3'), ('blocks.3.conv', '2')]
    """
    return [(name[: found.start()], found[0]) for found in re.finditer(r"\d+", name)]
