"""What a plan cannot do for a network, as notes and refusals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part, fold, untrained
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers.horizon import Horizon, Stretch
from theodolite.optimizers.scaling import fraction
from theodolite.planning.counterparts import RepeatedBranches
from theodolite.present.text import counted, signed

WARNING = "Warning: "
"""Notes that begin with it are printed above the table."""


def refuse_unscalable(branches: RepeatedBranches) -> None:
    """Refuse another depth if a branch that repeats ends in no tensor that sets its size."""
    for branch in branches.at_target:
        here, there = branches.of_stream(branch.stream)
        if here != there and not branch.ends:
            inside = f" (it holds {branch.parts[0]})" if branch.parts else ""
            raise UseError(
                f"branch {branch.branch} of block {branch.block}{inside} ends in no tensor that scales it, "
                f"so it cannot be multiplied by 1/{here / there:g} for this depth. End the branch with a "
                "linear map or a norm that has a gain; or keep the depth of the base"
            )


def caveats(
    target: Anatomy, base: Anatomy, branches: RepeatedBranches, own_depth: Mapping[str, float]
) -> Iterator[str]:
    """Notes for the reader of a plan, one or two sentences each.

    `own_depth` holds the tensors whose own initial std changes with depth, and by what factor at twice the
    depth.
    """
    wider = bool(target.size and base.size and target.size.width != base.size.width)
    deeper = bool(target.size and base.size and target.size.depth != base.size.depth)
    if deeper:
        yield from _layers_outside(target, base)
    if wider:
        yield from _unscaled_readouts(target)
    if left := untrained(target.values()):
        yield f"{left}: not trained, and left as built."
    if branches.ratio != 1:
        yield from _unscaled_branches(target, branches)
    if own_depth:
        exponents = sorted({round(math.log2(factor), 2) for factor in own_depth.values()})
        yield (
            f"The network's own initialisation of {_patterns(base[name] for name in own_depth)} goes with "
            f"depth to the {', '.join(signed(value) for value in exponents)}. The plan starts from its value "
            "at the base depth, so that depth counts once."
        )
    if wider:
        yield from _fixed_heads(target, base)
    for attention in [one for one in target.attentions if one.head_dim_grows][:1]:
        before, after = attention.scale, attention.scale_at_double_width
        if before is None or after is None or abs(after / before - 0.5) > 0.01:
            yield (
                f"Heads have {attention.head_dim} entries and grow with width, which needs attention logits "
                "scaled by 1/d, not 1/√d: see TH106. The plan does not change the forward pass."
            )


def horizon_caveats(base: Size, size: Size, horizon: Horizon) -> Iterator[str]:
    """What a plan for another batch or number of tokens does about it."""
    stretch = Stretch.between(base, size)
    changed = " and ".join(f"{name} × {fraction(getattr(stretch, name))}" for name in stretch.changes)
    if not changed:
        return
    if horizon.rates == "none":
        beside = " Only weight decay follows." if horizon.timescale else ""
        yield (
            f"{WARNING}TH210: {changed}, and the learning rate is that of the base, as no rule was asked "
            f"for.{beside} The best rate usually changes with both. Give horizon='sde+timescale', or the "
            "rule that a sweep over batches and tokens measured."
        )
    elif stretch.batch > 1:
        yield (
            f"batch × {fraction(stretch.batch)}: the rule holds up to the critical batch, which "
            "theodolite.probes.noise measures. Beyond it larger batches stop saving steps."
        )


def _unscaled_branches(target: Anatomy, branches: RepeatedBranches) -> Iterator[str]:
    """Branches that the plan does not scale with depth."""
    num = len(branches.at_target)
    ended = [one for one in branches.at_target if one.ends]
    frozen = [one for one in ended if not any(target[end].trained for end in one.ends)]
    if frozen:
        yield (
            f"{len(frozen)} of {num} residual branches end in tensors that are not trained: the plan does "
            "not scale them with depth."
        )
    if branches.lone:
        some = ", ".join(one.parts[0] for one in branches.lone[:3] if one.parts)
        more = ", …" if len(branches.lone) > 3 else ""
        verb, them = ("does", "it") if len(branches.lone) == 1 else ("do", "them")
        yield (
            f"{counted(len(branches.lone), 'residual branch')} {verb} not repeat with depth ({some}{more}): "
            f"the plan scales the other {num} with depth, and leaves {them} alone."
        )


def _layers_outside(target: Anatomy, base: Anatomy) -> Iterator[str]:
    """Layers that depth adds outside of residual branches: nothing scales them with depth."""
    added = [
        part
        for part in target.values()
        if part.role == "hidden" and part.block is None and not part.on_stream and part.name not in base
    ]
    named = ", ".join(one.pattern for one in fold(added)[:3])
    if not target.branches:
        yield (
            f"{WARNING}no residual branch is seen in the network{': ' if named else ''}{named}. The plan is "
            "for its width alone. It does not keep a plain stack of layers trainable as it gets deeper; and "
            "if layers are added to a stream in a way that is not seen, their sum grows with depth."
        )
    elif added:
        yield (
            f"{WARNING}depth adds {named} outside of every residual branch that is seen. The plan does not "
            "scale them with depth."
        )


def _unscaled_readouts(target: Anatomy) -> Iterator[str]:
    """Readouts that are divided by a norm of themselves and have no gain."""
    scaled = {part.beside for part in target.values() if part.role == "gain"}
    free = [
        part
        for part in target.values()
        if part.role == "output" and part.scale_free and part.block is None and part.name not in scaled
    ]
    if free:
        yield (
            f"{_patterns(free)}: a readout that is divided by a norm of itself has the same size at every "
            "width, where it should become smaller. The change of its outputs grows up to as the square root "
            "of the width. Multiply it by a gain, as weight_norm does."
        )


def _fixed_heads(target: Anatomy, base: Anatomy) -> Iterator[str]:
    """Key and value heads whose number does not grow with width, as in grouped-query attention."""
    heads = [
        (target[name], branch.attention.head_dim)
        for branch in target.branches
        if branch.attention is not None
        for name in branch.parts
        if target[name].role == "output" and target[name].fan_out % branch.attention.head_dim == 0
    ]
    if not heads or not target.size or not base.size:
        return
    (first, dim), ratio = heads[0], target.size.width / base.size.width
    yield (
        f"{_patterns(part for part, _ in heads)}: {counted(first.fan_out // dim, 'head')} of {dim} entries "
        "at every width, as in grouped-query attention. As their outputs do not grow with width, these "
        f"weights are planned as readouts are (role output): at {ratio:.4g} times the width their initial "
        f"std is {1 / ratio:.4g} times that at base size, that of hidden weights {ratio**-0.5:.4g} times. "
        "Let num_key_value_heads grow with width to have them planned as hidden weights."
    )


def _patterns(parts: Iterable[Part]) -> str:
    return ", ".join(dict.fromkeys(one.pattern for one in fold(parts)))
