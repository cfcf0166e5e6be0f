"""Why a tensor goes to its optimizer, in a few words, and what one built model leaves open.

A ready module shows one width. Which of its dimensions would grow with width is then inferred from the
position of each tensor, and what is not sure of that is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part, fold
from theodolite.anatomy.position import POSITIONS_STAY, RANK_STAYS
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
    if part.assumed == RANK_STAYS:
        return "its inputs, of low rank, do not grow"
    if part.assumed == POSITIONS_STAY:
        return "its inputs are positions, which do not grow"
    if part.op in ("linear", "conv"):
        return "its inputs do not grow, as the data do not"
    return "table: added or joined to the signal"


def _hidden(part: Part, anatomy: Anatomy) -> str:
    kinds = {"fused": bool(part.rows), "a stack": part.stack > 1, "a kernel": part.op == "conv"}
    return ", ".join(["both fans follow the width", *(kind for kind, applies in kinds.items() if applies)])


def _output(part: Part, anatomy: Anatomy) -> str:
    if part.assumed == RANK_STAYS:
        return "its outputs, of low rank, do not grow"
    if part.assumed == POSITIONS_STAY:
        return "its outputs are positions, which do not grow"
    if part.block is None:
        return "readout: its outputs do not grow"
    homes = [branch for branch in anatomy.branches if part.name in branch.parts]
    dims = [branch.attention.head_dim for branch in homes if branch.attention]
    if dims and part.fan_out % dims[0] == 0:
        return f"{part.fan_out // dims[0]} heads at every width: its outputs do not grow"
    return "router or gate: its outputs do not grow"


Doubt = tuple[tuple[str, str], str]
"""What is assumed of a tensor of a ready module and what it may be otherwise; and the tensor's numbers."""


def assumed(part: Part) -> str:
    """What was assumed of a tensor of a ready module, as a clause; empty where one network shows all."""
    if part.assumed:
        return part.assumed
    several = part.op == "linear" and len(part.out_axes) > 1 and part.out_axes[0] == 0
    if part.role == "hidden" and several:
        return f"the leading dimension of {part.shape[0]} counts outputs, not a stack of matrices"
    return ""


def assumptions(anatomy: Anatomy) -> Iterator[str]:
    """What was assumed of a ready module, as one note, and how to settle it."""
    if anatomy.size is not None:
        return
    found: dict[str, list[Part]] = {}
    for part in anatomy.trained:
        if clause := assumed(part):
            found.setdefault(clause, []).append(part)
    if not found:
        return
    lines = []
    for clause, parts in found.items():
        patterns = [one.pattern for one in fold(parts)]
        more = f" and {len(patterns) - 6} more" if len(patterns) > 6 else ""
        lines.append(f"Assumed: {clause} ({', '.join(patterns[:6])}{more}).")
    lines.append(
        "One built model does not show what grows with width. A build function does, and then nothing is "
        "assumed: theodolite.groups(build, inputs, size=theodolite.Size(width, depth), …)."
    )
    yield "\n".join(lines)
