"""Factors in parameter groups that a training loop multiplies in.

`lr_scale` is timm's and nanoGPT-mup's, `lr_mult` and `wd_mult` are Megatron's. No optimizer of torch reads
them: a schedule or the training loop multiplies them in before each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from theodolite.core.arguments import is_number
from theodolite.optimizers.planned import set_lr
from theodolite.planning.factory import MakeOptimizer, make_optimizers

SCALES = {"lr_scale": "lr", "lr_mult": "lr", "wd_mult": "weight_decay"}
"""By the name of a factor: the option that it multiplies."""


def apply_group_scales(optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
    """Multiply the factors in, in place, and give the names of those that change something."""
    found: dict[str, None] = {}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for name, option in SCALES.items():
            factor: Any = group.get(name)
            if not is_number(factor) or option not in group or name in _options(optimizers):
                continue
            if factor != 1:
                found[name] = None
            group[name] = 1.0  # so that it is not multiplied in again
            if option == "lr":
                set_lr(group, float(group["lr"]) * float(factor))
            else:
                group[option] = float(group[option]) * float(factor)
    return tuple(found)


def with_group_scales(make: MakeOptimizer) -> MakeOptimizer:
    """A factory of the same optimizers with these factors multiplied in."""

    def made(model: nn.Module) -> list[Any]:
        optimizers = make_optimizers(make, model).optimizers
        apply_group_scales(optimizers)
        return list(optimizers)

    return made


def note_of_scales(names: Iterable[str]) -> str:
    """What was assumed; empty if there are no such factors."""
    names = list(names)
    if not names:
        return ""
    options = " and ".join(dict.fromkeys(SCALES[name] for name in names))
    return (
        f"The groups have {' and '.join(names)}, which no optimizer reads: {options} "
        f"{'is' if ' and ' not in options else 'are'} taken times it, as if your training loop or schedule "
        "multiplied it in before each step. Check that it does."
    )


def _options(optimizers: Sequence[Optimizer]) -> set[str]:
    """Options that the optimizers themselves know."""
    return {name for optimizer in optimizers for name in optimizer.defaults}
