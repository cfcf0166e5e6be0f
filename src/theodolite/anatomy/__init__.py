"""What is in a network: `dissect` finds out, `Anatomy` holds it, one `Part` per parameter tensor."""

from theodolite.anatomy.dissection import dissect
from theodolite.anatomy.part import (
    Anatomy,
    AnatomyError,
    AttentionHeads,
    Branch,
    Part,
    UnclassifiedError,
    assumed,
)

__all__ = [
    "Anatomy",
    "AnatomyError",
    "AttentionHeads",
    "Branch",
    "Part",
    "UnclassifiedError",
    "assumed",
    "dissect",
]
