"""Does a network have the tensors a plan speaks of?"""

from __future__ import annotations

from torch import Tensor, nn

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.errors import UseError
from theodolite.planning.plan import Plan

SHOWN = 3
"""Tensors of each kind that a message names; the rest are counted."""


def matched(plan: Plan, model: nn.Module) -> dict[str, Tensor]:
    """The network's tensors by canonical name, in the order of the plan; whatever the network is wrapped in.

    A network with other tensors, or with tensors of other shapes, is refused with a message that names them.

    >>> import theodolite as th, torch
    >>> tokens = torch.zeros(1, 8, dtype=torch.long)
    >>> plan = th.plan(th.models.GPT, tokens, size=th.Size(64, 2), base=th.Size(64, 2), lr=1e-3)
    >>> matched(plan, th.models.GPT(64, 2, vocab=99))
    Traceback (most recent call last):
    theodolite.UseError: the plan is for width 64, depth 2 and does not fit this GPT.
    2 of another shape: embed.weight is (99, 64), planned (256, 64); readout.weight is (99, 64), ...
    Plan for this network, or build the network at the plan's size
    """
    if not isinstance(model, nn.Module):
        raise UseError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
    tensors = dict(canonical_parameters(model))
    missing = [name for name in plan.rows if name not in tensors]
    unknown = [name for name in tensors if name not in plan.rows]
    reshaped = [
        f"{name} is {tuple(tensors[name].shape)}, planned {row.shape}"
        for name, row in plan.rows.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(row.shape)
    ]
    if missing or unknown or reshaped:
        lines = [
            f"the plan is for width {plan.size.width}, depth {plan.size.depth} and does not fit this "
            f"{type(model).__name__}.",
            *_said("not in the network", missing, ", "),
            *_said("not in the plan", unknown, ", "),
            *_said("of another shape", reshaped, "; "),
            "Plan for this network, or build the network at the plan's size",
        ]
        raise UseError("\n".join(lines))
    return {name: tensors[name] for name in plan.rows}


def _said(heading: str, culprits: list[str], separator: str) -> list[str]:
    if not culprits:
        return []
    rest = ["…"] if len(culprits) > SHOWN else []
    return [f"{len(culprits)} {heading}: {separator.join(culprits[:SHOWN] + rest)}."]
