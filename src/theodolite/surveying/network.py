"""A drawing of the network, as data: stages down the stream, branches beside it, a shape for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from theodolite.anatomy.names import ranges
from theodolite.anatomy.part import ROLES, Anatomy, Branch, Fold, Part, fold
from theodolite.present.figure import Figure, stacked_bars

LONGEST = 112.0
"""Pixels of the longest fan inside a block: lengths are in proportion to fans, areas to parameters."""
CUT = 1.25 * LONGEST
"""What is longer than this (a vocabulary) is drawn cut off."""
ROLE_COLORS = {role: f"var(--{role})" for role in ROLES}
ROLE_MEANINGS = {
    "input": "input: writes the width",
    "hidden": "hidden: reads and writes it",
    "output": "output: reads it",
    "gain": "gain: multiplies",
    "bias": "bias: is added",
    "frozen": "frozen: takes no gradient",
    "unused": "unused: nothing reads it",
}


@dataclass(frozen=True)
class DrawnTensor:
    """One tensor as a rectangle: rows are outputs, columns are inputs."""

    fold: Fold
    label: str
    width: float
    height: float

    @property
    def cut(self) -> str:
        """The sides on which it is larger than drawn."""
        return " ".join(
            name for name, length in (("cut-x", self.width), ("cut-y", self.height)) if length >= CUT
        )

    @property
    def bands(self) -> list[float]:
        """Where a fused tensor's row blocks meet, in percent from the top; none where they interleave."""
        if any(len(spans) != 1 for spans in self.part.rows):
            return []
        ends = sorted(high for ((_, high),) in self.part.rows)
        return [round(100 * end / ends[-1], 2) for end in ends[:-1]]

    @property
    def part(self) -> Part:
        """What it is."""
        return self.fold.part


@dataclass(frozen=True)
class DrawnLane:
    """One branch, or the tensors outside of all branches."""

    placement: str | None
    attention: str
    shapes: tuple[DrawnTensor, ...]


@dataclass(frozen=True)
class DrawnStage:
    """A part of the stream; equal blocks are one stage."""

    title: str
    repeats: int
    lanes: tuple[DrawnLane, ...]


def stages(anatomy: Anatomy) -> list[DrawnStage]:
    """The network from input to output, equal blocks folded."""
    draw = _Drawing(anatomy)
    outside = [part for part in anatomy.values() if part.block is None]
    blocks = _by_block(anatomy)
    if not blocks:
        return [DrawnStage("the whole network", 1, (draw.lane(outside),))]
    before, after = _ends(anatomy)
    kinds: dict[object, list[int]] = {}
    for block, parts in blocks.items():
        kinds.setdefault(_signature(parts, anatomy, block), []).append(block)
    drawn = [DrawnStage("before the blocks", 1, (draw.lane(before),))] if before else []
    for members in kinds.values():
        title = f"block {members[0]}" if len(members) == 1 else f"blocks {ranges(members)}"
        lanes = tuple(
            draw.lane([part for part in blocks[members[0]] if part.branch == branch.branch], branch)
            for branch in anatomy.branches
            if branch.block == members[0]
        )
        drawn.append(DrawnStage(title, len(members), lanes))
    if after:
        drawn.append(DrawnStage("after the blocks", 1, (draw.lane(after),)))
    return drawn


def parameters_by_block(anatomy: Anatomy) -> Figure | None:
    """Where the parameters are: a bar for each block, in the colours of the roles."""
    blocks = _by_block(anatomy)
    if not blocks:
        return None
    before, after = _ends(anatomy)
    columns: list[tuple[str, Sequence[Part]]] = [(str(block), parts) for block, parts in blocks.items()]
    columns = [("in", before), *columns, ("out", after)]
    heights = {
        role: [sum(part.numel for part in parts if part.role == role) for _, parts in columns]
        for role in ROLES
    }
    heights = {role: counts for role, counts in heights.items() if any(counts)}
    total = anatomy.num_parameters
    inside = sum(_numel(parts) for parts in blocks.values())
    share = f"{100 * inside / total:.0f} %"
    return Figure(
        caption=f"Parameters along the stream. The blocks hold {share} of {total:,}.",
        alt=f"Bars: {_numel(before):,} parameters before the blocks, about {inside // len(blocks):,} in each "
        f"of {len(blocks)} blocks, {_numel(after):,} after them.",
        panels=(stacked_bars("", [name for name, _ in columns], heights, ROLE_COLORS, x_title="block"),),
    )


class _Drawing:
    """Holds the scale that all shapes of one drawing share."""

    def __init__(self, anatomy: Anatomy) -> None:
        inside = [part for part in anatomy.values() if part.block is not None] or list(anatomy.values())
        self.longest = max(max(part.fan_in, part.fan_out) for part in inside)

    def lane(self, parts: Iterable[Part], branch: Branch | None = None) -> DrawnLane:
        attention = ""
        if branch is not None and branch.attention is not None:
            attention = f"attends, {branch.attention.head_dim} per head"
        folds = fold(_in_order(list(parts)))
        shapes = tuple(
            DrawnTensor(one, label, *self.extent(one.part))
            for one, label in zip(folds, _labels(folds), strict=True)
        )
        return DrawnLane(branch.placement if branch else None, attention, shapes)

    def extent(self, part: Part) -> tuple[float, float]:
        if part.kind != "weight":
            return 4.0, self.length(max(part.shape, default=1))
        return self.length(part.fan_in), self.length(part.fan_out)

    def length(self, fan: int) -> float:
        return round(min(CUT, max(4.0, LONGEST * fan / self.longest)), 1)


def _in_order(parts: Sequence[Part]) -> list[Part]:
    """A branch's norm before what it feeds and after what it bounds, wherever its module was registered."""
    places: dict[str, int] = {}
    for part in parts:
        if part.op == "norm" and part.norm is not None and (part.norm == "input" or part.ends_branch):
            places[_owner(part)] = 2 if part.ends_branch else 0
    return sorted(parts, key=lambda part: places.get(_owner(part), 1))


def _owner(part: Part) -> str:
    return part.name.rpartition(".")[0] or part.name


def _by_block(anatomy: Anatomy) -> dict[int, list[Part]]:
    blocks: dict[int, list[Part]] = {}
    for part in anatomy.values():
        if part.block is not None:
            blocks.setdefault(part.block, []).append(part)
    return dict(sorted(blocks.items()))


def _ends(anatomy: Anatomy) -> tuple[list[Part], list[Part]]:
    """The tensors outside of the blocks, before and after them."""
    parts = list(anatomy.values())
    first = next(index for index, part in enumerate(parts) if part.block is not None)
    before: list[Part] = []
    after: list[Part] = []
    for index, part in enumerate(parts):
        if part.block is None:
            (before if index < first and part.role != "output" else after).append(part)
    return before, after


def _numel(parts: Iterable[Part]) -> int:
    return sum(part.numel for part in parts)


def _signature(parts: Sequence[Part], anatomy: Anatomy, block: int) -> object:
    branches = [branch for branch in anatomy.branches if branch.block == block]
    return (
        tuple((part.branch, part.role, part.op, part.shape, part.norm, part.ends_branch) for part in parts),
        tuple((branch.branch, branch.placement, branch.attention) for branch in branches),
    )


def _labels(folds: Sequence[Fold]) -> list[str]:
    """The shortest ends of the names that still tell them apart within one lane."""
    names = [one.pattern.removesuffix(".weight").split(".") for one in folds]
    return [_shortest(name, [other for other in names if other is not name]) for name in names]


def _shortest(name: list[str], others: Sequence[list[str]]) -> str:
    least = 2 if name[-1] == "bias" else 1
    for length in range(least, len(name)):
        if all(other[-length:] != name[-length:] for other in others):
            return ".".join(name[-length:]).removeprefix("*.")
    return ".".join(name)
