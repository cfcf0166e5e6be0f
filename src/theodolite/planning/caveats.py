"""What a plan cannot do for a network, and what its reader should know beside the numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import fold, untrained
from theodolite.core.errors import UseError
from theodolite.planning.repeating import Repeating
from theodolite.present.figure import signed


def refuse_endless(branches: Repeating) -> None:
    """Raise if the network gets deeper and there is a branch that repeats and whose size no tensor sets."""
    for branch in branches.here:
        if branches.ratio != 1 and not branch.ends:
            inside = f" (it holds {branch.parts[0]})" if branch.parts else ""
            raise UseError(
                f"branch {branch.branch} of block {branch.block}{inside} ends in no tensor that scales it, "
                f"so its weight 1/{branches.ratio:g} at this depth has no place. End the branch with a "
                "linear map or a norm that has a gain; or keep the depth of the base"
            )


def caveats(
    target: Anatomy, base: Anatomy, branches: Repeating, own_depth: Mapping[str, float]
) -> Iterator[str]:
    """One sentence each.

    `branches` are those that repeat with depth, and those that do not. `own_depth` says for which tensors the
    network's own initial std changes with depth: by what factor at twice the depth.
    """
    yield from _layers_outside(target, base)
    yield from _free_readouts(target, base)
    if left := untrained(target.values()):
        yield f"{left}: not trained, and left as built."
    held = [one for one in branches.here if one.ends and not any(target[end].trained for end in one.ends)]
    if held and branches.ratio != 1:
        yield (
            f"{len(held)} of {len(branches.here)} residual branches end in tensors that are not trained: "
            "the plan does not scale them with depth."
        )
    if branches.lone and branches.ratio != 1:
        count, some = len(branches.lone), ", ".join(one.parts[0] for one in branches.lone[:3] if one.parts)
        more = ", …" if count > 3 else ""
        yield (
            f"{count} residual {'branch does' if count == 1 else 'branches do'} not repeat with depth ({some}"
            f"{more}): the plan scales the other {len(branches.here)} with depth, and leaves "
            f"{'it' if count == 1 else 'them'} alone."
        )
    here, there = (Counter(one.stream for one in held) for held in (branches.here, branches.there))
    ratios = [here[stream] / there[stream] for stream in here if stream in there]
    if len(here) == len(there) and max(ratios, default=1.0) > min(ratios, default=1.0) * (1 + 1e-9):
        listed = ", ".join(f"{there[stream]} to {here[stream]}" for stream in here)
        yield (
            f"The network has {len(here)} residual streams, and their numbers of branches go from {listed}. "
            f"The plan takes one ratio for all, {branches.ratio:.4g}: each stream wants its own."
        )
    if own_depth:
        named = [one.pattern for one in fold(part for part in base.values() if part.name in own_depth)]
        exponents = sorted({round(math.log2(factor), 2) for factor in own_depth.values()})
        yield (
            f"The network's own initialisation of {', '.join(named)} goes with depth to the "
            f"{', '.join(signed(value) for value in exponents)}. The plan starts from its value at the base "
            "depth, so that depth counts once."
        )
    yield from _fixed_heads(target, base)
    for attention in [one for one in target.attentions if one.head_dim_grows][:1]:
        before, after = attention.scale, attention.scale_at_double_width
        if before is None or after is None or abs(after / before - 0.5) > 0.01:
            yield (
                f"Heads have {attention.head_dim} entries and grow with width, which wants attention logits "
                "scaled by 1/d, not 1/√d: see TH106. The plan leaves the forward pass alone."
            )


LOUD = "Warning: "
"""What begins with it is printed above the table."""


def _layers_outside(target: Anatomy, base: Anatomy) -> Iterator[str]:
    """Layers that depth adds to no residual branch: nothing scales them with depth."""
    if not target.size or not base.size or target.size.depth == base.size.depth:
        return
    added = [
        part
        for part in target.values()
        if part.role == "hidden" and part.block is None and not part.on_stream and part.name not in base
    ]
    if not target.branches:
        which = f": {', '.join(one.pattern for one in fold(added)[:3])}" if added else ""
        yield (
            f"{LOUD}no residual branch is seen in the network{which}. The plan is for its width alone. "
            "Nothing here keeps a plain stack of layers trainable when it gets deeper; and if layers are "
            "added to a stream in a way that is not seen, their sum grows with depth."
        )
    elif added:
        yield (
            f"{LOUD}depth adds {', '.join(one.pattern for one in fold(added)[:3])} outside of every residual "
            "branch that is seen. The plan does not scale them with depth."
        )


def _free_readouts(target: Anatomy, base: Anatomy) -> Iterator[str]:
    """Readouts whose size nothing sets: divided by a norm of themselves, with no gain on them."""
    if not target.size or not base.size or target.size.width == base.size.width:
        return
    scaled = {part.beside for part in target.values() if part.role == "gain"}
    free = [
        part
        for part in target.values()
        if part.role == "output" and part.scale_free and part.block is None and part.name not in scaled
    ]
    if free:
        yield (
            f"{', '.join(one.pattern for one in fold(free))}: a readout that is divided by a norm of itself "
            "has the same size at every width, where it should become smaller. The change of its outputs "
            "grows up to as the square root of the width. Multiply it by a gain, as weight_norm does."
        )


def _fixed_heads(target: Anatomy, base: Anatomy) -> Iterator[str]:
    """Key and value heads that do not become more with width, as in grouped-query attention."""
    heads = [
        (target[name], branch.attention.head_dim)
        for branch in target.branches
        if branch.attention is not None
        for name in branch.parts
        if target[name].role == "output" and target[name].fan_out % branch.attention.head_dim == 0
    ]
    if not heads or not target.size or not base.size or target.size.width == base.size.width:
        return
    (first, dim), ratio = heads[0], target.size.width / base.size.width
    count, named = first.fan_out // dim, ", ".join(one.pattern for one in fold(part for part, _ in heads))
    yield (
        f"{named}: {count} head{'s' * (count != 1)} of {dim} entries at every width, as in grouped-query "
        "attention. As their outputs do not grow with width, these weights are planned as readouts are (role "
        f"output): at {ratio:.4g} times the width their initial std is {1 / ratio:.4g} times that at base "
        f"size, and that of hidden weights {ratio**-0.5:.4g} times. Let num_key_value_heads grow with width "
        "to have them planned as hidden weights."
    )
