"""Do width and depth reach everything they should, and nothing they should not?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from theodolite.anatomy.names import ranges
from theodolite.anatomy.part import Anatomy, AttentionHeads, fold
from theodolite.anatomy.specimen import shapes_of
from theodolite.core.size import Size
from theodolite.present.figure import signed
from theodolite.surveying.finding import LEVELS, Evidence, Finding, Level, Value
from theodolite.surveying.section import Section
from theodolite.surveying.site import Site
from theodolite.surveying.wording import counted

WHY_WIDTH = (
    "What is tuned on a small network carries over only along directions in which everything grows "
    "together. A matrix with one side that stays put becomes, relative to the rest, an ever narrower neck: "
    "its share of the capacity falls with width, and its fan-in or fan-out follows another rule."
)
WHY_DEPTH = (
    "Rules for depth count residual blocks: each branch is weighed by 1/L so that L of them add up to "
    "something finite. Where a larger depth adds no block, there is nothing to count."
)
WHY_HEADS = (
    "At initialisation queries and keys are unrelated and their product over d entries grows as √d; after "
    "a few steps of training they align and it grows as d. With heads of fixed size either scale is a "
    "constant. With heads that grow, 1/√d lets the attention logits grow as √d with width; 1/d does not."
)

_SCALE_YOURSELF = "If heads grow with width, see to it that their logits are scaled by 1/d, not by 1/√d."


def examine(site: Site) -> Iterator[Finding]:
    """TH105 (width and depth) and TH106."""
    yield width_followed(site.anatomy)
    yield depth_followed(site.anatomy, added_tensors(site))
    yield head_size(site.anatomy)


def width_followed(anatomy: Anatomy) -> Finding:
    """TH105: matrices inside the blocks with a side that width does not reach."""
    title = "Width in the blocks"
    matrices = [part for part in anatomy.trained if part.role not in ("gain", "bias")]
    growing = [part for part in matrices if part.width_in or part.width_out]
    numbers = {"matrices": len(matrices), "grow with width": len(growing)}
    if not growing:
        return Finding(
            "TH105",
            "fail",
            "Width that no tensor follows",
            f"Of {counted(len(matrices), 'weight matrix')} none grows with width.",
            why=WHY_WIDTH,
            remedy="Let the first argument of build set the size of the hidden layers.",
            evidence=Evidence(numbers),
        )
    stuck = fold(
        part for part in matrices if part.block is not None and not (part.width_in and part.width_out)
    )
    if not stuck:
        return Finding(
            "TH105",
            "ok",
            title,
            f"{len(growing)} of {counted(len(matrices), 'weight matrix')} "
            f"{'grows' if len(growing) == 1 else 'grow'} with width"
            f"{', those inside the blocks on both sides' if anatomy.num_blocks else ''}.",
            why=WHY_WIDTH,
            evidence=Evidence(numbers),
        )
    rows: tuple[dict[str, Value], ...] = tuple(
        {
            "tensor": one.pattern,
            "blocks": one.blocks,
            "in": one.part.fan_in,
            "in grows": one.part.width_in,
            "out": one.part.fan_out,
            "out grows": one.part.width_out,
        }
        for one in stuck
    )
    count = sum(len(one.parts) for one in stuck)
    names = ", ".join(one.pattern for one in stuck[:3]) + (", …" if len(stuck) > 3 else "")
    return Finding(
        "TH105",
        "note",
        "Sides that width does not reach",
        f"{counted(count, 'matrix')} inside the blocks "
        f"{'has' if count == 1 else 'have'} a side that stays fixed while the width grows: {names}.",
        why=WHY_WIDTH,
        remedy="Meant, for routers, key/value heads shared by many queries, or low-rank adapters: leave "
        "them, and a plan gives them a row of their own. Not meant: derive the fixed number from the width.",
        evidence=Evidence(rows=rows),
    )


def added_tensors(site: Site) -> int:
    """How many tensors twice the depth adds; not counted for a ready module, or where it adds blocks."""
    grown = site.anatomy.grown_blocks
    if grown is None or grown > site.anatomy.num_blocks:
        return 0
    deeper = site.build_hollow(Size(site.size.width, 2 * site.size.depth))
    return len(shapes_of(deeper)) - len(shapes_of(site.build_hollow(site.size)))


def depth_followed(anatomy: Anatomy, added: int = 0) -> Finding:
    """TH105: does more depth mean more blocks? `added` is how many tensors twice the depth adds."""
    title = "Depth and blocks"
    blocks, grown = anatomy.num_blocks, anatomy.grown_blocks
    depth = anatomy.size.depth if anatomy.size else None
    numbers: dict[str, Value] = {"depth": depth, "blocks": blocks, "blocks at twice the depth": grown}
    if added:
        numbers["tensors that twice the depth adds"] = added
    level: Level = "ok"
    remedy = ""
    if grown is None:
        level = "note"
        sentence = (
            f"The network has {counted(blocks, 'residual block') if blocks else 'no residual block'}; "
            "a ready module cannot be built at another depth."
        )
        remedy = "Hand over build(width, depth) instead of a module."
    elif grown <= blocks and added > 0:
        level, title = "warn", "Depth that adds layers and no block"
        sentence = (
            f"Twice the depth adds {counted(added, 'tensor')} and no residual block ({blocks} before, "
            f"{grown} after), so rules for depth have nothing to act on: a plan is for the width alone."
        )
        remedy = (
            "Put the layers that depth adds into residual branches x + f(x), or keep the depth and scale "
            "this network in width only."
        )
    elif grown <= blocks:
        level, title = "note", "Depth that changes nothing"
        sentence = (
            f"Twice the depth adds no tensor and no residual block ({blocks} before, {grown} after): build "
            "ignores depth, and the network can be scaled in width only."
        )
        remedy = "To scale it in depth, let the second argument of build set the number of residual blocks."
    else:
        sentence = f"Depth adds blocks: {blocks} at depth {depth}, {grown} at twice that."
        if grown != 2 * blocks:
            level = "note"
            sentence = (
                f"Blocks do not double with depth: {blocks} at depth {depth}, {grown} at twice that. "
                "The ratio that rules for depth use is that of the blocks, not of the depths."
            )
            remedy = "Choose depths by the number of blocks they give."
    return Finding("TH105", level, title, sentence, why=WHY_DEPTH, remedy=remedy, evidence=Evidence(numbers))


def head_size(anatomy: Anatomy) -> Finding:
    """TH106: do heads grow in number or in size, and does the attention scale follow?"""
    title = "Attention heads and width"
    kinds: dict[AttentionHeads, list[int]] = {attention: [] for attention in anatomy.attentions}
    for branch in anatomy.branches:
        if branch.attention is not None:
            kinds[branch.attention].append(branch.block)
    if not kinds:
        return Finding(
            "TH106", "ok", title, "Nothing attends, so there is no attention scale.", why=WHY_HEADS
        )
    judged = {kind: _judge(kind) for kind in kinds}
    worst = max(kinds, key=lambda kind: LEVELS.index(judged[kind][0]))
    level, sentence, remedy = judged[worst]
    if level == "warn":
        title = "Attention scale that does not follow the heads"
    rows: tuple[dict[str, Value], ...] = tuple(
        {
            "blocks": ranges(blocks) or "none",
            "head dimension": kind.head_dim,
            "grows": kind.head_dim_grows,
            "scale": kind.scale,
            "scale at twice the width": kind.scale_at_double_width,
            "scale × √d": None if kind.scale is None else kind.scale * kind.head_dim**0.5,
        }
        for kind, blocks in kinds.items()
    )
    return Finding(
        "TH106", level, title, sentence, why=WHY_HEADS, remedy=remedy, evidence=Evidence(rows=rows)
    )


def _judge(kind: AttentionHeads) -> tuple[Level, str, str]:
    heads = f"Heads have {kind.head_dim} entries"
    if kind.scale is None:
        return "note", f"{heads}; what their logits are scaled by could not be seen.", _SCALE_YOURSELF
    if kind.scale_at_double_width is None:
        sentence = f"{heads} and a scale of {kind.scale:.4g}; there was no other width to compare with."
        return "note", sentence, "Hand over build(width, depth) instead of a module."
    ratio = kind.scale_at_double_width / kind.scale
    if not kind.head_dim_grows and abs(ratio - 1) < 0.01:
        return "ok", f"{heads} at every width and grow in number; their scale stays {kind.scale:.4g}.", ""
    if not kind.head_dim_grows:
        sentence = f"{heads} at every width, yet doubling the width multiplies their scale by {ratio:.2f}."
        return "warn", sentence, "Let the scale depend on the head dimension only."
    if ratio < 0.55:
        return "ok", f"{heads} here and grow with width; their scale falls with them as 1/d.", ""
    return (
        "warn",
        f"{heads} here and grow with width, while the attention scale goes as d to the "
        f"{signed(math.log2(ratio))}: doubling the width multiplies it by {ratio:.2f} where 0.50 is needed.",
        "Keep the head dimension fixed and let the number of heads grow with width; or scale the logits by "
        + (
            f"√d₀/d, where d₀ is the base head dimension (at d = d₀ = {kind.head_dim} nothing changes)."
            if math.isclose(kind.scale**2 * kind.head_dim, 1, rel_tol=0.01)
            else f"{kind.scale * kind.head_dim:.4g}/d (at d = {kind.head_dim} nothing changes)."
        ),
    )


section = Section("Width and depth", 20, examine)
