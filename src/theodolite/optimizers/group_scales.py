"""Factors in parameter groups that a training loop or a schedule multiplies in.

`lr_scale` is timm's and nanoGPT-mup's, `lr_mult` and `wd_mult` are Megatron's. No optimizer of torch reads
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

from theodolite.core.arguments import is_number
from theodolite.optimizers.planned import set_lr

SCALES = {"lr_scale": "lr", "lr_mult": "lr", "wd_mult": "weight_decay"}
"""By the name of a factor: the option that it multiplies."""


def apply_group_scales(optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
    """Multiply the factors in, in place, and give the names of those that change something.

    A factor becomes 1, so that it is not multiplied in again. Options that the optimizer itself has are its
    own business.

    >>> import torch
    >>> group = {"params": [torch.nn.Parameter(torch.ones(2))], "lr_scale": 0.5}
    >>> made = torch.optim.AdamW([group], lr=0.1)
    >>> apply_group_scales([made]), made.param_groups[0]["lr"]
    (('lr_scale',), 0.05)
    """
    found: dict[str, None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for name, option in SCALES.items():
                factor: Any = group.get(name)
                if not is_number(factor) or group.get(option) is None or name in optimizer.defaults:
                    continue
                if factor != 1:
                    found[name] = None
                group[name] = 1.0
                if option == "lr":
                    set_lr(group, float(group["lr"]) * float(factor))
                else:
                    group[option] = float(group[option]) * float(factor)
    return tuple(found)


def note_of_scales(names: Iterable[str]) -> str:
    """What was assumed; empty if there are no such factors."""
    names = list(names)
    if not names:
        return ""
    options = list(dict.fromkeys(SCALES[name] for name in names))
    return (
        f"The groups have {' and '.join(names)}, which no optimizer reads: {' and '.join(options)} "
        f"{'are' if len(options) > 1 else 'is'} taken times it, as if your training loop or schedule "
        "multiplied it in before each step. Check that it does."
    )
