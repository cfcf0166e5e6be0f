"""Does every tensor fall under a rule, and does any serve twice?"""

from __future__ import annotations

from collections.abc import Iterator

from theodolite.anatomy.part import ROLES, Anatomy, Part, fold, untrained
from theodolite.surveying.finding import Evidence, Finding, Value
from theodolite.surveying.section import Section
from theodolite.surveying.site import Site
from theodolite.surveying.stopped import WHY_RULED
from theodolite.surveying.wording import all_of, counted

WHY_TIED = (
    "A plan for larger sizes leaves the forward pass alone by absorbing each layer's multiplier into its "
    "initialisation, learning rate and decay. A tensor that is both embedding and head needs two multipliers "
    "at once (1 at the input, 1/width at the output), which no single learning rate can give."
)


def examine(site: Site) -> Iterator[Finding]:
    """TH101 and TH107."""
    yield everything_ruled(site.anatomy)
    yield tied_head(site.anatomy)


def tied_head(anatomy: Anatomy) -> Finding:
    """TH101: is one tensor both embedding and head?"""
    title = "Embedding and head"
    tied = [part for part in anatomy.values() if part.tied]
    heads = [part for part in tied if part.op == "embedding" and "weight" in part.uses]
    if heads:
        head = heads[0]
        return Finding(
            "TH101",
            "note",
            title,
            f"{head.name} {_shape(head)} is both the embedding and the head ({', '.join(head.tied)}): "
            f"{_share(head, anatomy)} of the parameters serve two ends.",
            why=WHY_TIED,
            remedy="Untie the two if you can afford the parameters, or train under th.plan, which treats the "
            "tensor as an input weight and multiplies what the readout reads by base width / width; by hand, "
            "do the same. The final norm belongs to the Output-Norms then, which should not decay.",
            evidence=Evidence(rows=tuple(_row(part) for part in tied)),
        )
    if tied:
        return Finding(
            "TH101",
            "note",
            title,
            f"{counted(len(tied), 'tensor')} {'serves' if len(tied) == 1 else 'serve'} in more than one "
            f"place ({', '.join(one.pattern for one in fold(tied)[:3])}), though none is both embedding and "
            "head.",
            why=WHY_TIED,
            remedy="Check that all uses of a shared tensor have the same role; then nothing is lost.",
            evidence=Evidence(rows=tuple(_row(part) for part in tied)),
        )
    outputs = [part for part in anatomy.values() if part.role == "output" and part.block is None]
    if not outputs:
        sentence = "No tensor is shared, and no weight reads the width alone: there is no head."
    else:
        names = ", ".join(f"{part.name} {_shape(part)}" for part in outputs[:2])
        sentence = f"The head is a tensor of its own ({names}): it can have its own initialisation and step."
    return Finding("TH101", "ok", title, sentence, why=WHY_TIED)


def everything_ruled(anatomy: Anatomy) -> Finding:
    """TH107, when the dissection went through: how many tensors of each role."""
    rows: list[dict[str, Value]] = []
    for role in ROLES:
        parts = [part for part in anatomy.values() if part.role == role]
        if parts:
            rows.append(
                {"role": role, "tensors": len(parts), "parameters": sum(part.numel for part in parts)}
            )
    trained = anatomy.trained
    return Finding(
        "TH107",
        "ok",
        "A rule for every parameter",
        f"{all_of(len(trained), 'tensor')}, {counted(sum(part.numel for part in trained), 'parameter')}, "
        f"{'has' if len(trained) == 1 else 'have'} a role that a rule covers."
        + (f" {left}: not trained, and left as built." if (left := untrained(anatomy.values())) else ""),
        why=WHY_RULED,
        evidence=Evidence(rows=tuple(rows)),
    )


def _row(part: Part) -> dict[str, Value]:
    return {
        "tensor": part.name,
        "also": ", ".join(part.tied),
        "shape": _shape(part),
        "role": part.role,
        "parameters": part.numel,
    }


def _share(part: Part, anatomy: Anatomy) -> str:
    return f"{100 * part.numel / anatomy.num_parameters:.0f} %"


def _shape(part: Part) -> str:
    return " × ".join(map(str, part.shape))


section = Section("Anatomy", 10, examine)
