"""A drawing of the network, as data: stages down the stream, branches beside it, a shape for each tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from theodolite.anatomy.names import ranges
from theodolite.anatomy.part import ROLES, Anatomy, Branch, Fold, Part, fold
from theodolite.present.figure import Figure, stacked_bars
from theodolite.present.text import counted

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
        sides = {"cut-x": self.width, "cut-y": self.height}
        return " ".join(name for name, length in sides.items() if length >= CUT)

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
    before, blocks, after = _in_blocks(anatomy)
    inside = [part for parts in blocks.values() for part in parts] or list(anatomy.values())
    scale = LONGEST / max(max(part.fan_in, part.fan_out) for part in inside)
    if not blocks:
        return [DrawnStage("the whole network", 1, (_lane(after, scale),))]
    kinds: dict[object, list[int]] = {}
    for block, parts in blocks.items():
        kinds.setdefault(_signature(parts, anatomy, block), []).append(block)
    drawn = [DrawnStage("before the blocks", 1, (_lane(before, scale),))] if before else []
    for first, *others in kinds.values():
        title = f"blocks {ranges((first, *others))}" if others else f"block {first}"
        lanes = tuple(
            _lane([part for part in blocks[first] if part.branch == branch.branch], scale, branch)
            for branch in anatomy.branches
            if branch.block == first
        )
        drawn.append(DrawnStage(title, 1 + len(others), lanes))
    if after:
        drawn.append(DrawnStage("after the blocks", 1, (_lane(after, scale),)))
    return drawn


def parameters_by_block(anatomy: Anatomy) -> Figure | None:
    """Where the parameters are: a bar for each block, in the colours of the roles."""
    before, blocks, after = _in_blocks(anatomy)
    if not blocks:
        return None
    columns = {"in": before, **{str(block): parts for block, parts in blocks.items()}, "out": after}
    heights = {
        role: [_numel(part for part in parts if part.role == role) for parts in columns.values()]
        for role in ROLES
    }
    heights = {role: counts for role, counts in heights.items() if any(counts)}
    total, inside = anatomy.num_parameters, sum(map(_numel, blocks.values()))
    share = f"{100 * inside / total:.0f} %"
    return Figure(
        caption=f"Parameters along the stream. The blocks hold {share} of {total:,}.",
        alt=f"Bars: {_numel(before):,} parameters before the blocks, about {inside // len(blocks):,} in each "
        f"of {counted(len(blocks), 'block')}, {_numel(after):,} after them.",
        panels=(stacked_bars("", list(columns), heights, ROLE_COLORS, x_title="block"),),
    )


def _lane(parts: Sequence[Part], scale: float, branch: Branch | None = None) -> DrawnLane:
    """A lane; `scale` is that of all lengths in the drawing."""

    def length(fan: int) -> float:
        return round(min(CUT, max(4.0, scale * fan)), 1)

    shapes = []
    folds = fold(_in_order(parts))
    for one, label in zip(folds, _labels(folds), strict=True):
        part = one.part
        fans = (part.fan_in, part.fan_out) if part.kind == "weight" else (0, max(part.shape, default=1))
        shapes.append(DrawnTensor(one, label, *map(length, fans)))
    heads = branch.attention if branch else None
    attention = f"attends, {heads.head_dim} per head" if heads else ""
    return DrawnLane(branch.placement if branch else None, attention, tuple(shapes))


def _in_order(parts: Sequence[Part]) -> list[Part]:
    """A branch's norm before what it feeds and after what it bounds, wherever its module was registered."""
    places: dict[str, int] = {}
    for part in parts:
        if part.op == "norm" and part.norm is not None and (part.norm == "input" or part.ends_branch):
            places[_owner(part)] = 2 if part.ends_branch else 0
    return sorted(parts, key=lambda part: places.get(_owner(part), 1))


def _owner(part: Part) -> str:
    return part.name.rpartition(".")[0] or part.name


def _in_blocks(anatomy: Anatomy) -> tuple[list[Part], dict[int, list[Part]], list[Part]]:
    """The tensors before the blocks, in each of them, and after them; without blocks all are after."""
    before: list[Part] = []
    blocks: dict[int, list[Part]] = {}
    after: list[Part] = []
    has_blocks = any(part.block is not None for part in anatomy.values())
    for part in anatomy.values():
        if part.block is not None:
            blocks.setdefault(part.block, []).append(part)
        else:
            (before if has_blocks and not blocks and part.role != "output" else after).append(part)
    return before, dict(sorted(blocks.items())), after


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
    labels = []
    for name in names:
        length = 2 if name[-1] == "bias" else 1
        while length < len(name) and sum(other[-length:] == name[-length:] for other in names) > 1:
            length += 1
        label = ".".join(name[-length:])
        labels.append(label.removeprefix("*.") if length < len(name) else label)
    return labels
