"""One tensor of a plan: a rule's numbers, checked, with the multiplier absorbed, and the row they make."""

from __future__ import annotations

import math
from dataclasses import replace

from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.optimizers import Base, Hyper, Policy, Ratios, Rule
from theodolite.optimizers.condition import centre, deviation
from theodolite.optimizers.decay_policies import decayed
from theodolite.planning.explaining import reasons
from theodolite.planning.law import Law
from theodolite.planning.plan import Row
from theodolite.planning.quantities import Case


def settled(
    rule: Rule, name: str, part: Part, ratios: Ratios, base: Base, policy: Policy
) -> tuple[Hyper, Hyper]:
    """What a rule gives under a decay policy: with the multiplier beside the weight, and absorbed."""
    explicit = rule(part, ratios, base)
    if not explicit.lr > 0:
        raise UseError(
            f"{part.name}: the rule {name} gives it the learning rate {explicit.lr!r}. Give a "
            "positive one; what is not to be trained is left out by plan.optimizer(model, skip=[…])"
        )
    explicit = replace(explicit, weight_decay=decayed(policy, part, explicit, base.weight_decay))
    hyper = explicit.absorbed()
    if not all(map(math.isfinite, (hyper.lr, hyper.weight_decay, hyper.eps, hyper.std, hyper.extent))):
        raise UseError(
            f"{part.name}: lr {base.lr!r}, weight decay {base.weight_decay!r} or eps {base.eps!r} is beyond "
            "what a number can hold at this size. Check the values at base size"
        )
    return explicit, hyper


def kept_row(part: Part) -> Row:
    """The row of a tensor that is not trained."""
    frozen = part.role == "frozen"
    why = "takes no gradient (requires_grad is False)" if frozen else "is used by nothing in the forward pass"
    return Row(
        name=part.name,
        shape=part.shape,
        role=part.role,
        block=part.block,
        fan_in=part.fan_in,
        fan_out=part.fan_out,
        in_axes=part.in_axes,
        out_axes=part.out_axes,
        rows=part.rows,
        scale_free=part.scale_free,
        rule="",
        multiplier=1.0,
        init=Law("kept"),
        lr=0.0,
        weight_decay=0.0,
        eps=0.0,
        extent=1.0,
        reasons={
            "tensor": f"of shape {'×'.join(map(str, part.shape)) or '()'}; it {why}, and the plan leaves it "
            "as it is",
            "init": "what build makes of it at this size",
            "lr": "none: no optimizer has it",
        },
    )


def make_row(case: Case) -> Row:
    """The row of a tensor, with its reasons."""
    part, hyper = case.part, case.hyper
    return Row(
        name=part.name,
        shape=part.shape,
        role=part.role,
        block=part.block,
        fan_in=part.fan_in,
        fan_out=part.fan_out,
        in_axes=part.in_axes,
        out_axes=part.out_axes,
        rows=part.rows,
        scale_free=part.scale_free,
        rule=case.rule,
        multiplier=case.readout,
        init=_init(case),
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        extent=hyper.extent,
        reasons=reasons(case),
    )


def _init(case: Case) -> Law:
    part, law, factor = case.part, case.law, case.hyper.std
    if part.role in ("bias", "gain"):
        # What multiplies is offset + gain: that is what an absorbed multiplier scales.
        return law.scaled(factor).shifted(part.offset * (factor - 1))
    return law.scaled(factor, mean=factor / deviation(part, case.ratios) * centre(part, case.ratios))
