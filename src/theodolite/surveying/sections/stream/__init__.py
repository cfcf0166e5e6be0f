"""Is the residual stream healthy at the start of training?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from theodolite.core.errors import UseError
from theodolite.present.text import counted, listed
from theodolite.probes.stream.result import MASSIVE_RATIO
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Level, times
from theodolite.surveying.section import Section, measuring
from theodolite.surveying.sections.stream.differences import between_examples
from theodolite.surveying.sections.stream.measurement import StreamMeasurement, measure, measure_awake

BITS = 2.0**8
"""Of bfloat16: what is so many times smaller than the stream is lost in it by rounding."""
STEEP = 1.5
"""A gradient that changes as a power of depth does so by at most `(1 + L)^1.5`. With branches that read a
normalised stream, its square grows by the factor `1 + c·b/(1 + b·l)` in block l, where the stream's is
`1 + b·l`; all together `(1 + b·L)^c`. c is 1 if a branch passes as much back as forward, and 3 leaves room
for the attention of a narrow network."""
LESS = 3.0
"""With norms the gradient grows towards the first block. If it is so many times smaller there than after the
last, something else acts on the stream. Two streams, as in T5, differ by up to 4 anyway."""
FAR = 1000.0
"""Ratio of gradients from which a finding is a warning: ten of the thirty doublings that float16 has."""
ROOM = 4.0
"""Doublings of headroom that training is likely to use."""
ALIKE, UNMISSED = 1e-4, 1e-4
"""A block is redundant if `1 − cos` of its branches and the relative change of the loss without it are below
these."""

GROWTH = Check(
    "TH521",
    "Growth of the stream",
    "With a norm at the start of each branch, the square of the stream grows by about the same amount in "
    "every block, and the last of L branches is 1/√L of the stream. Without norms each block multiplies "
    "it: what works for a few blocks overflows in many, or drowns the output of the first blocks.",
)
GRADIENT = Check(
    "TH522",
    "Gradient along the stream",
    "Every branch learns from the gradient of the stream. As long as it changes as a power of depth, one "
    "learning rate fits all blocks. If each block multiplies it, the first blocks of a deep network learn at "
    "another speed than the last, or not at all in half precision.",
)
WORTH = Check(
    "TH523",
    "What each block contributes",
    "A block that can be left out costs time and memory for nothing. At the start it is normal that blocks "
    "contribute little. Branches that end in zeros become active with the first steps, as do those before a "
    "readout of zeros. A branch without a gradient does not.",
)
ROOM_LEFT = Check(
    "TH524",
    "Headroom in half precision",
    "The largest number in float16 is 65504, and values grow during training. A few entries of the stream "
    "that are thousands of times larger than the others also make quantisation hard.",
)
BRANCHES = (
    "Put a norm at the start of each branch, x + f(N x), or also at its end, x + N f(N x). Or give the "
    "branches weight 1/L, which th.plan(…) does for every depth above its base."
)
PROJECTIONS = (
    "Look at what the stream passes through at that place, such as a projection of a concatenation or a "
    "factor: it shrinks the gradient on its way back, too. Initialise a projection so that its output is as "
    "large as its input."
)


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH521 to TH524, and TH525 if examples have a number."""
    if not context.anatomy.branches:
        yield GROWTH.finding("ok", "The network has no residual branches, so there is no stream.")
        return
    with measuring(GROWTH, (UseError, RuntimeError)):  # of autograd, and of memory
        start = measure(context)
        if not start.stream.finite:
            raise UseError(f"{start.where} something is {'; '.join(start.stream.notes)}")
        awake = measure_awake(context, start)
    forward = awake if start.stream.silent else start
    yield growth(forward)
    yield gradient(awake)
    yield contribution(awake)
    yield headroom(forward)
    yield from between_examples(context, awake)


def growth(found: StreamMeasurement) -> Finding:
    """TH521: does the stream grow linearly or exponentially?"""
    law, where = found.growth, found.where
    blocks = counted(law.blocks, "block")
    level: Level = "ok"
    title = remedy = ""
    if law.kind == "exponential":
        level = "warn" if law.ratio >= BITS else "note"
        title, remedy = "A stream that grows exponentially", BRANCHES
        said = (
            f"{where} each block multiplies the stream by {law.factor:.3g}: {times(law.ratio)} times over "
            f"{blocks}, and {times(law.ratio**4)} times over four times as many."
        )
    else:
        said = f"{where} the stream is {times(law.ratio)} times its start after {blocks}."
        if math.isnan(law.ratio):
            said = f"{where} the growth of the stream is not known ({found.stream.growth_in_words})."
        elif law.kind == "unclear":
            said += " Whether it grows linearly or exponentially is unclear."
        elif law.kind == "linear":
            said += f" Its square grows by {law.rise:.2g} of its start in each block."
    said += narrowed(found)
    return GROWTH.finding(
        level,
        said,
        title=title,
        remedy=remedy,
        numbers=found.setting
        | {
            "initialisations": found.draws,
            "law": law.kind,
            "factor in each block": law.factor,
            "ΔAIC for the exponential law": law.evidence,
        },
        rows=[
            {
                "block": one.block,
                "branch": one.branch,
                "stream": one.stream,
                "added": one.added,
                "cosine": one.cosine,
                "gradient": one.stream_gradient,
                "loss without it": one.skipped,
            }
            for one in found.stream.branches
        ],
        figures=[found.stream.figure()],
    )


def gradient(found: StreamMeasurement) -> Finding:
    """TH522: does the gradient change more with depth than as a power of it, or shrink towards the start?"""
    law = found.stream.backward
    ratio, bound = law.ratio, (1 + law.blocks) ** STEEP
    numbers = found.setting | {"first over last": ratio, "power law": f"{1 / bound:.2g} to {bound:.3g}"}
    if math.isnan(ratio):
        words = found.stream.gradient_in_words
        said = f"{found.where} there is no gradient to follow ({words}).{found.noted}"
        return GRADIENT.finding("note", said, numbers=numbers)
    more = max(ratio, 1 / ratio)
    explodes = ratio > 1
    said = (
        f"{found.where} the gradient of the stream before the first block is {times(more)} times "
        f"{'larger' if explodes else 'smaller'} than after the last"
    )
    layout = found.stream.layout
    is_one = layout is None or len(set(layout.streams)) == 1
    if more <= bound and (explodes or more < LESS or not is_one):
        expected = f", no more than expected of {counted(law.blocks, 'block')}" if explodes else ""
        return GRADIENT.finding("ok", f"{said}{expected}.", numbers=numbers)
    place = "" if explodes else narrowed(found)
    if place or more <= bound:
        said += f". With norms it would be larger.{place}"
    else:
        each = more ** (1 / law.blocks)
        said += f": a factor of {each:.3g} in each block, while a power of depth stays below {times(bound)}."
    return GRADIENT.finding(
        "warn" if more >= FAR else "note",
        said,
        title="A gradient that explodes" if explodes else "A gradient that vanishes",
        remedy=PROJECTIONS if place else BRANCHES,
        numbers=numbers,
    )


def narrowed(found: StreamMeasurement) -> str:
    """Where the stream shrinks most without any branch, to follow a sentence; empty if it does nowhere."""
    at = found.stream.narrowing
    if at is None:
        return ""
    return (
        f" Between block {at.block}, branch {at.branch} and the branch before it, the stream shrinks to "
        f"{times(at.carried)} of its size: by no branch, but by what is done to the stream itself."
    )


def contribution(found: StreamMeasurement) -> Finding:
    """TH523: blocks that can be left out, and branches that cannot learn."""
    seen, where = found.stream, found.where
    asleep = seen.is_asleep and found.training is None
    branches = seen.branches
    dead = [one for one in branches if one.is_reached is False or (one.branch_gradient == 0 and not asleep)]
    unknown = [one for one in branches if one.is_reached is None]
    every = {one.block for one in branches}
    silent = every - {one.block for one in branches if one.added != 0}
    alike = every - {one.block for one in branches if not 1 - one.cosine < ALIKE}
    unmissed = {
        block
        for block, more in enumerate(seen.skipped_blocks)
        if more is not None and abs(more) <= UNMISSED * abs(seen.loss)
    }
    redundant = sorted((alike & unmissed) - silent)
    changes = [abs(more) for more in seen.skipped_blocks if more is not None]
    numbers = found.setting | {"loss": seen.loss, "least change of the loss": min(changes, default=None)}
    reached = "every branch has a gradient."
    if unknown:
        reached = f"it is not known whether {counted(len(unknown), 'branch')} have a gradient."
    if asleep:
        reached = f"there is {seen.gradient_in_words}."
    if dead:
        names = listed([f"block {one.block}, branch {one.branch}" for one in dead])
        return WORTH.finding(
            "warn",
            f"{where} the loss has no gradient in {names}, so they never learn.{found.noted}",
            title="Branches without a gradient",
            remedy="Look for what stops it: a factor of zero after the branch, a detach, a loss that does "
            "not depend on it.",
            numbers=numbers,
        )
    if seen.silent and found.training is not None:
        names = listed([f"block {one.block}, branch {one.branch}" for one in seen.silent])
        return WORTH.finding(
            "warn",
            f"{where} {names} still {'adds' if len(seen.silent) == 1 else 'add'} nothing.{found.noted}",
            title="Branches that stay at zero",
            remedy="Look for what keeps them there: a factor of zero, a product of two zeros, a tensor that "
            "is not trained.",
            numbers=numbers,
        )
    if silent:
        reached = "They have a gradient." if not unknown and not asleep else reached[0].upper() + reached[1:]
        said = (
            f"{where.removesuffix(',')}, {len(silent)} of {counted(len(every), 'block')} add nothing yet. "
            f"This is normal for branches that end in zeros. {reached}{found.noted}"
        )
        return WORTH.finding("note", said, title="Blocks that add nothing yet", numbers=numbers)
    if redundant:
        names = listed([f"block {block}" for block in redundant])
        return WORTH.finding(
            "note",
            f"{where} the loss is the same without {names}, and the stream keeps its direction there."
            + found.noted,
            title="Blocks that change nothing yet",
            remedy="Measure again after some training, with th.probes.stream(model, loss, batch). If nothing "
            "changes, a network of fewer blocks does as well.",
            numbers=numbers,
        )
    said = f"{where} {reached}"
    if changes and not asleep:
        said += (
            f" Leaving out one of {counted(len(changes), 'block')} changes the loss by {min(changes):.2g} to "
            f"{max(changes):.2g}."
        )
    elif not changes and not found.noted:
        said += " Leaving blocks out would take too long."
    return WORTH.finding("note" if asleep or unknown else "ok", said + found.noted, numbers=numbers)


def headroom(found: StreamMeasurement) -> Finding:
    """TH524: how far the largest value is from the end of float16."""
    seen, largest = found.stream, found.stream.largest
    peak = max(seen.branches, key=lambda one: one.peak)
    made = f"{largest.op}, {largest.where}"
    numbers = found.setting | {
        "largest value": largest.value,
        "made by": made,
        "doublings of headroom": largest.headroom,
        "largest entry of the stream over the median": peak.peak,
    }
    level: Level = "warn" if largest.headroom < 0 else "ok" if largest.headroom >= ROOM else "note"
    if math.isnan(largest.value):
        said = f"{found.where} no value was measured, so the largest is not known.{found.noted}"
        return ROOM_LEFT.finding(level, said, numbers=numbers)
    said = f"{found.where} the largest value is {largest.value:.3g} ({made})"
    if math.isinf(largest.value):
        said = f"{found.where} there are values that are not finite (first {made})."
    elif level == "warn":
        said += ", beyond 65504, the largest number in float16."
    else:
        said += f", {largest.headroom:.1f} doublings below 65504, the largest number in float16."
    title = "Values that overflow" if math.isinf(largest.value) or level == "warn" else ""
    remedy = "" if level == "ok" else "Train in bfloat16 or float32, and keep values small: see TH521."
    if seen.massive:
        peak = max(seen.massive, key=lambda one: one.peak)
        level = "note" if level == "ok" else level
        said += (
            f" Block {peak.block} has a massive entry at {peak.peak_at}, {peak.peak:.0f} times the median "
            f"(more than {MASSIVE_RATIO:.0f})."
        )
    return ROOM_LEFT.finding(level, said, title=title, remedy=remedy, numbers=numbers)


section = Section("Residual stream", 45, examine, measures=True)
