"""The one multiplier that cannot be absorbed: on the readout of a tied embedding.

One tensor is the table that tokens are looked up in and the weight of the readout. As a table it has to start
and to move by Θ(1) at every width, as a readout by 1/width. It follows the rule of the table, and what the
readout reads is multiplied by `1/r`, r the ratio of widths. Where the network's own forward pass multiplies
the readout by numbers that change with size, that much less; and what the tensor absorbs for such numbers
behind the table, the readout takes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import nn

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.planning.multiplier import attach_multipliers
from theodolite.planning.plan import Plan


def readouts(target: Anatomy, partners: Mapping[str, Part]) -> tuple[dict[str, float], dict[str, float]]:
    """Multipliers on the inputs of modules by their names, and the same by the name of the tied tensor."""
    by_module: dict[str, float] = {}
    by_tensor: dict[str, float] = {}
    for part in target.trained:
        partner = partners[part.name]
        table, readout = part.factor / partner.factor, part.readout_factor / partner.readout_factor
        multiplier = partner.fan_out / part.fan_out * table / readout
        if not part.readout or math.isclose(multiplier, 1):
            continue
        for name in part.readout:
            module = name.rpartition(".")[0]
            if not module or _does_more(target, module, part):
                raise UseError(
                    f"{part.name} is both the table that is looked up in and the weight of a readout that "
                    f"has no module of its own, so the readout's multiplier {multiplier:.4g} has no place. "
                    "Read out by a module that shares the weight: "
                    "head = nn.Linear(width, vocab, bias=False) and head.weight = embed.weight; or untie them"
                )
            by_module[module] = multiplier
        by_tensor[part.name] = multiplier
    return by_module, by_tensor


def attach(plan: Plan, model: nn.Module) -> nn.Module:
    """Put the plan's multipliers on a network, in place of those of any other plan.

    Doing it again changes nothing. Copies of the network have them too; a network that is built anew and gets
    its weights from a checkpoint has to be attached to, unless they are baked (`Plan.bake`). In the whole
    process `torch.compile` is told to look at hooks (`skip_nnmodule_hook_guards`): compiled networks are
    compiled again where they changed.
    """
    attach_multipliers(model, plan.multipliers)
    return model


def _does_more(target: Anatomy, module: str, readout: Part) -> bool:
    """Does a module hold anything but the readout's weight and bias?"""
    prefix = f"{module}." if module else ""
    return any(
        name.startswith(prefix)
        for part in target.values()
        if part is not readout and part.role != "bias"
        for name in (part.name, *part.tied)
    )
