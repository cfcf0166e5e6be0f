"""The networks of the scale-vector study: one GPT, its scale vectors in seven states.

All of them compute the same function at the start, from the same seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from theodolite.models import GPT
from theodolite.models.transformer import Placement
from theodolite.surgery.converting import convert
from theodolite.surgery.edits import Edits, held
from theodolite.surgery.gains import find_gains
from theodolite.workloads import Workload, next_token_loss
from theodolite_studies.framework.texts import batch_of


@dataclass(frozen=True)
class Structure:
    """Where the norms are, and what is done to their gains."""

    placement: Placement = "pre"
    removed: bool = False
    options: tuple[tuple[str, Any], ...] | None = None
    """Of `theodolite.surgery.scale_vectors`; None leaves the gains as they are."""


def _changed(**changes: Any) -> Structure:
    """Only what is named differs from the usual gain: one vector for all readers, before them, plain."""
    options = {"heterogeneous": False, "placement": "input", "reparameterization": None, **changes}
    return Structure(options=tuple(options.items()))


STRUCTURES: Mapping[str, Structure] = {
    "plain": Structure(),
    "removed": Structure(removed=True),
    "heterogeneous": _changed(heterogeneous=True),
    "both": _changed(placement="both"),
    "direction": _changed(reparameterization="direction"),
    "all": _changed(heterogeneous=True, placement="both", reparameterization="direction"),
    "peri": Structure("peri"),
}


def workload(structure: str, *, text: str, num: int, length: int) -> Workload:
    """A structure on a text, `num` sequences of `length` bytes in a batch.

    >>> workload("all", text="sotu", num=2, length=16).batch(0, 0)[0].shape
    torch.Size([2, 16])
    """
    return Workload(
        name_of(structure, text),
        partial(build, structure, length),
        partial(batch_of, text, "train", num, length),
        next_token_loss,
        held_out=partial(batch_of, text, "validation", num, length),
    )


def name_of(structure: str, text: str) -> str:
    """What ledgers call it."""
    return f"scale-vectors-{structure}-{text}"


def build(structure: str, context: int, width: int, depth: int) -> nn.Module:
    """A gated byte-level GPT with the structure's scale vectors."""
    chosen = STRUCTURES[structure]
    model = GPT(width, depth, vocab=256, context=context, gated=True, norm_placement=chosen.placement)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    if chosen.removed:
        # At one they need not be folded, as `remove_gains` would: weights keep the law they are drawn by.
        for gain in find_gains(model, tokens).found:
            Edits().freeze(held(model, gain.name), 1.0)
        return model
    if chosen.options is not None:
        return convert(model, tokens, **dict(chosen.options))
    return model
