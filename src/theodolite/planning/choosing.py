"""Why a tensor goes to its optimizer, in a few words, and what one built model leaves open.

A ready module shows one width. Which of its dimensions would grow with width is then inferred from the
position of each tensor; for most tensors there is no doubt. `doubts` names those for which there is.
"""

from __future__ import annotations

from collections import Counter

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part
from theodolite.optimizers.decay_policies import kind_of

UNTRAINED_WORDS = {
    "frozen": "takes no gradient (requires_grad is False)",
    "unused": "nothing in the forward pass reads it",
}


def why(part: Part, anatomy: Anatomy, doubt: str | None = None) -> str:
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
    words = {"input": _input, "hidden": _hidden, "output": _output}[part.role](part, anatomy)
    return f"{words}; {doubt}" if doubt else words


def _input(part: Part, anatomy: Anatomy) -> str:
    if part.readout:
        return "tied table: a lookup and the readout"
    if part.op == "embedding":
        return "table: its rows are looked up"
    if part.op == "conv" and part.in_axes and part.shape[part.in_axes[0]] == 1:
        return "kernel with one input channel"
    if part.op in ("linear", "conv"):
        return "reads the data: its inputs do not grow"
    return "table: added or joined to the signal"


def _hidden(part: Part, anatomy: Anatomy) -> str:
    pieces = ["both fans follow the width"]
    if part.rows:
        pieces.append(f"{len(part.rows)} fused matrices")
    if part.stack > 1:
        pieces.append(f"a stack of {part.stack}")
    return ", ".join(pieces)


def _output(part: Part, anatomy: Anatomy) -> str:
    if part.block is None:
        return "readout: its outputs do not grow"
    dims = [
        branch.attention.head_dim
        for branch in anatomy.branches
        if branch.attention and part.name in branch.parts
    ]
    if dims and part.fan_out % dims[0] == 0:
        return f"{part.fan_out // dims[0]} heads at every width: its outputs do not grow"
    return "router or gate: its outputs do not grow"


def doubts(anatomy: Anatomy) -> dict[str, str]:
    """By tensor: what is assumed of it, where the anatomy is that of a ready module and it may be otherwise.

    A hidden weight with a fan of at most half of the stream may be a bottleneck of fixed width; one that
    reads the data, or makes the result, is hidden if the data are as wide as the stream as they grow with it.
    """
    if anatomy.size is not None:
        return {}
    streams = stream_widths(anatomy)
    if not streams:
        return {}
    found = {}
    for part in anatomy.trained:
        near = _stream_of(part, anatomy, streams)
        sides = _channels(part)
        if sides is None:
            continue
        narrow = [side for side in sides if side not in streams and 2 * side <= near]
        if part.role == "hidden" and narrow:
            found[part.name] = f"assumed of {min(narrow)} beside {near}"
        elif part.role == "input" and part.op == "linear" and sides[0] in streams:
            found[part.name] = f"assumed of its {sides[0]} inputs"
        elif part.role == "output" and part.block is None and sides[1] in streams:
            found[part.name] = f"assumed of its {sides[1]} outputs"
    return found


def stream_widths(anatomy: Anatomy) -> set[int]:
    """The widths of the residual streams; without branches, the most frequent fan of the hidden weights."""
    found = {
        sides[1]
        for branch in anatomy.branches
        for name in branch.ends
        if (sides := _channels(anatomy[name])) is not None
    }
    if found:
        return found
    hidden = [sides for part in anatomy.values() if part.role == "hidden" and (sides := _channels(part))]
    counts = Counter(side for sides in hidden for side in sides)
    return {max(counts, key=lambda side: (counts[side], side))} if counts else set()


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
