"""Why a tensor goes to its optimizer, in a few words, and what one built model leaves open.

A ready module shows one width. Which of its dimensions would grow with width is then inferred from the
position of each tensor; for most tensors there is no doubt. `doubts` names those for which there is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part, fold
from theodolite.optimizers.decay_policies import kind_of

UNTRAINED_WORDS = {
    "frozen": "takes no gradient (requires_grad is False)",
    "unused": "nothing in the forward pass reads it",
}


def why(part: Part, anatomy: Anatomy) -> str:
    """Why the tensor goes where it goes.

    >>> why(Part("w", (8, 4), "linear", "hidden", 4, 8, True, True, (1,), (0,)), Anatomy({}, ()))
    'both fans follow the width'
    """
    if not part.trained:
        return UNTRAINED_WORDS[part.role]
    if part.role == "bias":
        return "bias"
    if part.role == "gain":
        return kind_of(part) if part.norm else "gain"
    return {"input": _input, "hidden": _hidden, "output": _output}[part.role](part, anatomy)


def _input(part: Part, anatomy: Anatomy) -> str:
    if part.readout:
        return "tied table: a lookup and the readout"
    if part.op == "embedding":
        return "table: its rows are looked up"
    if part.op == "conv" and part.in_axes and part.shape[part.in_axes[0]] == 1:
        return "kernel with one input channel"
    if part.op in ("linear", "conv"):
        return "its inputs do not grow, as the data do not"
    return "table: added or joined to the signal"


def _hidden(part: Part, anatomy: Anatomy) -> str:
    kinds = {"fused": bool(part.rows), "a stack": part.stack > 1, "a kernel": part.op == "conv"}
    return ", ".join(["both fans follow the width", *(kind for kind, applies in kinds.items() if applies)])


def _output(part: Part, anatomy: Anatomy) -> str:
    if part.block is None:
        return "readout: its outputs do not grow"
    homes = [branch for branch in anatomy.branches if part.name in branch.parts]
    dims = [branch.attention.head_dim for branch in homes if branch.attention]
    if dims and part.fan_out % dims[0] == 0:
        return f"{part.fan_out // dims[0]} heads at every width: its outputs do not grow"
    return "router or gate: its outputs do not grow"


Doubt = tuple[tuple[str, str], str]
"""What is assumed of a tensor of a ready module and what it may be otherwise; and the tensor's numbers."""

NARROW = "a narrow side follows the width", "it is fixed, and they are inputs or readouts"
DATA = "the data they read have a fixed size", "it follows the width, and they are hidden"
RESULT = "the results they make have a fixed size", "it follows the width, and they are hidden"
LEADING = "the leading dimension counts outputs", "it counts a stack, of matrices by themselves"


def doubts(anatomy: Anatomy) -> dict[str, Doubt]:
    """By tensor: the assumption and what it may be otherwise, and the numbers of the tensor.

    There are none if the anatomy compares two widths. A hidden weight with a side of at most half of the
    stream may be a bottleneck of fixed size. One that reads the data, or makes the result, is hidden if its
    data are as wide as the stream because they follow the width.
    """
    if anatomy.size is not None:
        return {}
    streams = stream_widths(anatomy)
    tables = {part.shape[0] for part in anatomy.values() if part.op == "embedding"}
    return {
        part.name: found
        for part in anatomy.trained
        if (sides := _channels(part)) and (found := _doubt(part, sides, anatomy, streams, tables))
    }


def _doubt(
    part: Part, sides: tuple[int, int], anatomy: Anatomy, streams: set[int], tables: set[int]
) -> Doubt | None:
    if part.role == "hidden":
        near = _stream_of(part, anatomy, streams)
        narrow = [side for side in sides if side not in streams and 2 * side <= near]
        if narrow:
            return NARROW, f"{min(narrow)} beside {near}"
        if part.op == "linear" and len(part.out_axes) > 1 and part.out_axes[0] == 0:
            return LEADING, f"{part.shape[0]}"
    if part.role == "input" and part.op == "linear" and sides[0] in streams:
        return DATA, f"{sides[0]}"
    if part.role == "output" and part.block is None and sides[1] in streams - tables:
        return RESULT, f"{sides[1]}"
    return None


def assumptions(anatomy: Anatomy, found: Mapping[str, Doubt]) -> Iterator[str]:
    """The doubts as a note, and how to settle them."""
    if not found:
        return
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in found.values()):
        alike = fold(anatomy[name] for name in found if found[name][0] == kind)
        named = ", ".join(f"{one.pattern} ({found[one.part.name][1]})" for one in alike[:6])
        more = f" and {len(alike) - 6} more" if len(alike) > 6 else ""
        lines.append(f"Assumed: {kind[0]}: {named}{more}. Else {kind[1]}.")
    lines.append(
        "One built model does not show what follows the width. A build function does, and then nothing is "
        "assumed: theodolite.groups(build, inputs, size=theodolite.Size(width, depth), …)."
    )
    yield "\n".join(lines)


def stream_widths(anatomy: Anatomy) -> set[int]:
    """The widths of the residual streams; without branches, the most frequent input of the hidden weights."""
    ends = [anatomy[name] for branch in anatomy.branches for name in branch.ends]
    if found := {sides[1] for part in ends if (sides := _channels(part))}:
        return found
    hidden = [sides for part in anatomy.values() if part.role == "hidden" and (sides := _channels(part))]
    counts = Counter(fan_in for fan_in, _ in hidden)
    return {max(counts, key=lambda side: (counts[side], side))} if counts else {0}


def _stream_of(part: Part, anatomy: Anatomy, streams: set[int]) -> int:
    """The width of the stream that the tensor's branch adds to; the smallest outside of all branches."""
    for branch in anatomy.branches:
        if part.name in branch.parts:
            widths = [sides[1] for name in branch.ends if (sides := _channels(anatomy[name]))]
            return max(widths, default=min(streams))
    return min(streams)


def _channels(part: Part) -> tuple[int, int] | None:
    """Input and output channels: of a kernel without its positions, of fused rows the smallest block's."""
    if not part.in_axes or not part.out_axes:
        return None
    outputs = [sum(stop - start for start, stop in ranges) for ranges in part.rows]
    fan_in = part.shape[part.in_axes[0]] if part.op == "conv" else part.fan_in
    return fan_in, min(outputs, default=part.fan_out)
