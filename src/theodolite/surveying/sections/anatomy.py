"""Does every tensor have a role, and is any tensor used twice?"""

from __future__ import annotations

from collections.abc import Iterator

from theodolite.anatomy.part import ROLES, Anatomy, Part, fold, untrained
from theodolite.present.text import counted
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value, all_of
from theodolite.surveying.section import ROLES as RULED
from theodolite.surveying.section import Section

HEAD = Check(
    "TH101",
    "Embedding and head",
    "A plan for larger sizes leaves the forward pass unchanged: it absorbs each layer's multiplier into its "
    "initialisation, learning rate and weight decay. A tensor that is both embedding and head needs two "
    "multipliers at once (1 at the input, 1/width at the output), which no single learning rate can give.",
)


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH107 and TH101."""
    yield everything_ruled(context.anatomy)
    yield tied_head(context.anatomy)


def tied_head(anatomy: Anatomy) -> Finding:
    """TH101: is one tensor both embedding and head?"""
    tied = [part for part in anatomy.values() if part.tied]
    heads = [part for part in tied if part.op == "embedding" and "weight" in part.uses]
    rows: list[dict[str, Value]] = [
        {
            "tensor": part.name,
            "also": ", ".join(part.tied),
            "shape": _shape(part),
            "role": part.role,
            "parameters": part.numel,
        }
        for part in tied
    ]
    if heads:
        head = heads[0]
        share = 100 * head.numel / anatomy.num_parameters
        return HEAD.finding(
            "note",
            f"{head.name} {_shape(head)} is both the embedding and the head ({', '.join(head.tied)}). It "
            f"holds {share:.0f} % of the parameters.",
            remedy="Untie the two if you can afford the parameters, or train under th.plan, which treats the "
            "tensor as an input weight and multiplies the readout's input by base width / width. Without a "
            "plan, do the same by hand. The final norm is then an Output-Norm, which should not decay.",
            rows=rows,
        )
    if tied:
        names = ", ".join(one.pattern for one in fold(tied)[:3])
        return HEAD.finding(
            "note",
            f"{counted(len(tied), 'tensor')} {'is' if len(tied) == 1 else 'are'} used in more than one place "
            f"({names}), but none is both embedding and head.",
            remedy="Check that all uses of a shared tensor have the same role. If they do, nothing is lost.",
            rows=rows,
        )
    outputs = [part for part in anatomy.values() if part.role == "output" and part.block is None]
    if not outputs:
        return HEAD.finding(
            "ok", "No tensor is shared, and there is no head: no weight outside the blocks reads the width."
        )
    names = ", ".join(f"{part.name} {_shape(part)}" for part in outputs[:2])
    return HEAD.finding(
        "ok", f"The head is a separate tensor ({names}), with its own initialisation and learning rate."
    )


def everything_ruled(anatomy: Anatomy) -> Finding:
    """TH107, when the dissection succeeded: the number of tensors of each role."""
    rows: list[dict[str, Value]] = []
    for role in ROLES:
        parts = [part for part in anatomy.values() if part.role == role]
        if parts:
            rows.append(
                {"role": role, "tensors": len(parts), "parameters": sum(part.numel for part in parts)}
            )
    trained = anatomy.trained
    left = untrained(anatomy.values())
    return RULED.finding(
        "ok",
        f"{all_of(len(trained), 'tensor')} ({counted(sum(part.numel for part in trained), 'parameter')}) "
        f"{'has' if len(trained) == 1 else 'have'} a role that a rule covers."
        + (f" {left}: not trained, and left as built." if left else ""),
        rows=rows,
    )


def _shape(part: Part) -> str:
    return " × ".join(map(str, part.shape))


section = Section("Anatomy", 10, examine)
