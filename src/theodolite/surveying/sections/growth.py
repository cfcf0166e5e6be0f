"""Do all tensors grow with width, does depth add blocks, and do attention heads grow correctly?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from theodolite.anatomy.names import ranges
from theodolite.anatomy.part import Anatomy, AttentionHeads, fold
from theodolite.core.size import Size
from theodolite.present.text import counted, listed, signed
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import LEVELS, Check, Finding, Level, Value
from theodolite.surveying.section import Section

WIDTH = Check(
    "TH105",
    "Width in the blocks",
    "Hyperparameters tuned on a small network carry over only if all of it grows together. A matrix with one "
    "fixed side becomes a narrower bottleneck relative to the rest: its share of the capacity falls with "
    "width, and its fan-in or fan-out follows another rule.",
)
DEPTH = Check(
    "TH105",
    "Depth and blocks",
    "Rules for depth count residual blocks: each of L branches has weight 1/L, so that their sum stays "
    "finite. If a larger depth adds no block, there is nothing to count.",
)
HEADS = Check(
    "TH106",
    "Attention heads and width",
    "At initialisation queries and keys are unrelated, and their product over d entries grows as √d. After a "
    "few training steps they align, and it grows as d. With heads of fixed size either scale is a constant. "
    "With heads that grow, 1/√d lets the attention logits grow as √d with width; 1/d does not.",
)
_SCALE_YOURSELF = "If heads grow with width, make sure that their logits are scaled by 1/d, not by 1/√d."


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH105 (width and depth) and TH106."""
    yield width_followed(context.anatomy)
    yield depth_followed(context.anatomy, added_tensors(context))
    yield head_size(context.anatomy)


def width_followed(anatomy: Anatomy) -> Finding:
    """TH105: matrices inside the blocks with a side that does not grow with width."""
    matrices = [part for part in anatomy.trained if part.role not in ("gain", "bias")]
    growing = [part for part in matrices if part.width_in or part.width_out]
    numbers = {"matrices": len(matrices), "grow with width": len(growing)}
    if not growing:
        return WIDTH.finding(
            "fail",
            f"None of {counted(len(matrices), 'weight matrix')} grows with width.",
            title="No tensor grows with width",
            remedy="Let the first argument of build set the size of the hidden layers.",
            numbers=numbers,
        )
    stuck = fold(
        part for part in matrices if part.block is not None and not (part.width_in and part.width_out)
    )
    if not stuck:
        return WIDTH.finding(
            "ok",
            f"{len(growing)} of {counted(len(matrices), 'weight matrix')} "
            f"{'grows' if len(growing) == 1 else 'grow'} with width"
            f"{', those inside the blocks on both sides' if anatomy.num_blocks else ''}.",
            numbers=numbers,
        )
    count = sum(len(one.parts) for one in stuck)
    names = listed([one.pattern for one in stuck])
    return WIDTH.finding(
        "note",
        f"{counted(count, 'matrix')} inside the blocks {'has' if count == 1 else 'have'} a side that does "
        f"not grow with width: {names}.",
        title="Sides that do not grow with width",
        remedy="If this is intended (routers, key/value heads shared by many queries, low-rank adapters), "
        "leave it: a plan gives these tensors a row of their own. If not, derive the fixed number from the "
        "width.",
        rows=[
            {
                "tensor": one.pattern,
                "blocks": one.blocks,
                "in": one.part.fan_in,
                "in grows": one.part.width_in,
                "out": one.part.fan_out,
                "out grows": one.part.width_out,
            }
            for one in stuck
        ],
    )


def added_tensors(context: SurveyContext) -> int:
    """How many tensors twice the depth adds; 0 for a ready module, or if it adds blocks."""
    grown = context.anatomy.grown_blocks
    if grown is None or grown > context.anatomy.num_blocks:
        return 0
    deeper = Size(context.size.width, 2 * context.size.depth)
    return len(context.shapes(deeper)) - len(context.shapes(context.size))


def depth_followed(anatomy: Anatomy, added: int = 0) -> Finding:
    """TH105: does more depth mean more blocks? `added` is the number of tensors that twice the depth adds."""
    blocks, grown = anatomy.num_blocks, anatomy.grown_blocks
    depth = anatomy.size.depth if anatomy.size else None
    numbers: dict[str, Value] = {"depth": depth, "blocks": blocks, "blocks at twice the depth": grown}
    if added:
        numbers["tensors that twice the depth adds"] = added
    finding = partial(DEPTH.finding, numbers=numbers)
    if grown is None:
        return finding(
            "note",
            f"The network has {counted(blocks, 'residual block') if blocks else 'no residual block'}. A "
            "ready module cannot be built at another depth.",
            remedy="Pass build(width, depth) instead of a module.",
        )
    if grown <= blocks and added > 0:
        return finding(
            "warn",
            f"Twice the depth adds {counted(added, 'tensor')} but no residual block ({blocks} before, "
            f"{grown} after). Rules for depth have nothing to act on, and a plan covers the width alone.",
            title="Depth that adds layers but no blocks",
            remedy="Put the added layers into residual branches x + f(x), or keep the depth and scale this "
            "network in width only.",
        )
    if grown <= blocks:
        return finding(
            "note",
            f"Twice the depth adds no tensor and no residual block ({blocks} before, {grown} after): build "
            "ignores depth, and the network can be scaled in width only.",
            title="Depth that changes nothing",
            remedy="To scale in depth, let the second argument of build set the number of residual blocks.",
        )
    said = f"{blocks} at depth {depth}, {grown} at twice that."
    if grown == 2 * blocks:
        return finding("ok", f"Depth adds blocks: {said}")
    return finding(
        "note",
        f"Blocks do not double with depth: {said} Rules for depth use the ratio of the blocks, not of the "
        "depths.",
        remedy="Choose depths by the number of blocks they give.",
    )


def head_size(anatomy: Anatomy) -> Finding:
    """TH106: do heads grow in number or in size, and does the attention scale follow?"""
    kinds: dict[AttentionHeads, list[int]] = {attention: [] for attention in anatomy.attentions}
    for branch in anatomy.branches:
        if branch.attention is not None:
            kinds[branch.attention].append(branch.block)
    if not kinds:
        return HEADS.finding("ok", "The network has no attention, so there is no attention scale.")
    judged = {kind: _judge(kind) for kind in kinds}
    worst = max(kinds, key=lambda kind: LEVELS.index(judged[kind][0]))
    level, sentence, remedy = judged[worst]
    rows: list[dict[str, Value]] = [
        {
            "blocks": ranges(blocks) or "none",
            "head dimension": kind.head_dim,
            "grows": kind.head_dim_grows,
            "scale": kind.scale,
            "scale at twice the width": kind.scale_at_double_width,
            "scale × √d": None if kind.scale is None else kind.scale * kind.head_dim**0.5,
        }
        for kind, blocks in kinds.items()
    ]
    title = "Attention scale that does not follow the heads" if level == "warn" else ""
    return HEADS.finding(level, sentence, title=title, remedy=remedy, rows=rows)


def _judge(kind: AttentionHeads) -> tuple[Level, str, str]:
    heads = f"Heads have {kind.head_dim} entries"
    if kind.scale is None:
        return "note", f"{heads}. The scale of their logits could not be found.", _SCALE_YOURSELF
    if kind.scale_at_double_width is None:
        sentence = f"{heads} and a scale of {kind.scale:.4g}. There was no other width to compare with."
        return "note", sentence, "Pass build(width, depth) instead of a module."
    ratio = kind.scale_at_double_width / kind.scale
    if not kind.head_dim_grows and abs(ratio - 1) < 0.01:
        return "ok", f"{heads} at every width and grow in number. Their scale stays {kind.scale:.4g}.", ""
    if not kind.head_dim_grows:
        sentence = f"{heads} at every width, but doubling the width multiplies their scale by {ratio:.2f}."
        return "warn", sentence, "Let the scale depend on the head dimension only."
    if ratio < 0.55:
        return "ok", f"{heads} here and grow with width. Their scale falls with them as 1/d.", ""
    return (
        "warn",
        f"{heads} here and grow with width, but the attention scale changes as d to the power "
        f"{signed(math.log2(ratio))}: doubling the width multiplies it by {ratio:.2f} instead of 0.50.",
        "Keep the head dimension fixed and let the number of heads grow with width; or scale the logits by "
        + (
            f"√d₀/d, where d₀ is the base head dimension (at d = d₀ = {kind.head_dim} nothing changes)."
            if math.isclose(kind.scale**2 * kind.head_dim, 1, rel_tol=0.01)
            else f"{kind.scale * kind.head_dim:.4g}/d (at d = {kind.head_dim} nothing changes)."
        ),
    )


section = Section("Width and depth", 20, examine)
