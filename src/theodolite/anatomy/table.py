"""An Anatomy for reading in a terminal."""

from __future__ import annotations

import shutil
import textwrap

from rich import box
from rich.console import Console
from rich.table import Table

from theodolite.anatomy.folding import Fold, fold, left_alone
from theodolite.anatomy.part import Anatomy, Part


def table(anatomy: Anatomy, width: int | None = None) -> str:
    """A table that fits a terminal; equal tensors of equal blocks are one row."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    rows.add_column("tensor", overflow="fold")
    rows.add_column("role", no_wrap=True)
    rows.add_column("shape", no_wrap=True, justify="right")
    rows.add_column("block", no_wrap=True)
    rows.add_column("notes", overflow="fold")
    for one in fold(anatomy.values()):
        part = one.part
        rows.add_row(one.pattern, part.role, _shape(part), _place(one), _notes(part))
    width = width or min(max(shutil.get_terminal_size((100, 24)).columns, 40), 140)
    console = Console(width=width, no_color=True, highlight=False, emoji=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(rows)
    size = f" at {anatomy.size}" if anatomy.size else ""
    head = (
        f"{anatomy.num_parameters:,} parameters in {_count(len(anatomy), 'tensor')}{size}, "
        f"{_count(anatomy.num_blocks, 'residual block')}, {_count(len(anatomy.branches), 'branch', 'es')}"
    )
    body = "\n".join(line.rstrip() for line in captured.get().splitlines())
    legend = "* grows with width    block.branch    ends: ends its branch    norms: who reads the gain"
    left = left_alone(anatomy.values())
    lines = textwrap.fill(f"{left}: not trained.", width) if left else ""
    return "\n\n".join(filter(None, (head, body, lines, legend)))


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _shape(part: Part) -> str:
    """The shape, dimensions that grow with width marked."""
    sizes = [f"{size}*" if axis in part.grown_axes else str(size) for axis, size in enumerate(part.shape)]
    return "×".join(sizes) or "scalar"


def _place(one: Fold) -> str:
    return f"{one.blocks}.{one.part.branch}" if one.part.block is not None else ""


def _notes(part: Part) -> str:
    notes = [] if part.op in ("linear", "norm", "add") or part.role == "unused" else [part.op]
    if part.ends_branch:
        notes.append("ends")
    if part.norm and part.op == "norm":
        notes.append(f"{part.norm} norm")
    if part.scale_free:
        notes.append("scale-free")
    if part.stack > 1 and part.role not in ("bias", "gain", "unused"):
        notes.append(f"stack of {part.stack}")
    if part.rows:
        sizes = [sum(stop - start for start, stop in block) for block in part.rows]
        notes.append(f"rows {'+'.join(map(str, sizes))}")
    if part.tied:
        notes.append(f"tied: {', '.join(part.tied)}")
    return ", ".join(notes)
