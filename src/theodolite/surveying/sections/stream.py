"""Is the residual stream healthy at the start of training?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.core.batches import Batch, targets_in
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.present.text import counted, listed
from theodolite.probes.stream.growth import GrowthLaw, fit_growth
from theodolite.probes.stream.stream import MASSIVE_RATIO, Stream, stream
from theodolite.surveying.budget import amount, examples_in, few, first_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Level, Value, times
from theodolite.surveying.section import Section, measuring
from theodolite.surveying.trials import trials_of

TARGETS, ENTRIES = 512, 65_536
"""In a batch, about: targets, and entries of its tensors."""
FEWEST = 16
"""Fewest targets that a batch is cut to, …"""
MOST_PASS, FEWEST_EXAMPLES = 4e9, 4
"""… and fewest examples, if a forward pass takes more multiplications than this."""
MOST_PARAMETERS = 30_000_000
"""Above this a small network of the trials is measured instead."""
WORK, DEEP_WORK = 8e10, 2.4e12
"""Most multiplications for skipping blocks."""
OPERATION = 3e6
"""Cost of following one operation, in multiplications: about 150 µs."""
DRAWS = 3
"""Initialisations over which the growth of the stream is averaged. In one draw of few blocks the last may add
more than the first by chance, and linear growth looks exponential: in 3 of 36 draws of a GPT with 4 blocks,
and in none of 34 means over 3 of them."""
BITS = 2.0**8
"""Of bfloat16: what is so many times smaller than the stream is lost in it by rounding."""
STEEP = 1.5
"""A gradient that changes as a power of depth does so by at most `(1 + L)^1.5`. With branches that read a
normalised stream, its square grows by the factor `1 + c·b/(1 + b·l)` in block l, where the stream's is
`1 + b·l`; all together `(1 + b·L)^c`. c is 1 if a branch passes as much back as forward, and 3 leaves room
for the attention of a narrow network."""
FAR = 1000.0
"""Ratio of gradients from which a finding is a warning: ten of the thirty doublings that float16 has."""
ROOM = 4.0
"""Doublings of headroom that training is likely to use."""
ALIKE, UNMISSED = 1e-4, 1e-4
"""A block is redundant if `1 − cos` of its branches and the relative change of the loss without it are below
these."""
SLEEP = (
    ": after the last block it is zero, as with a readout that is initialised to zero, until its first step."
)

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


@dataclass(frozen=True)
class StreamMeasurement:
    """The stream at the start, and what it was measured on."""

    stream: Stream
    size: Size
    where: str
    """Begins a sentence."""
    targets: int | str
    """In the batch; and of how many, if it was cut."""
    growth: GrowthLaw
    """Of the stream, averaged over a few initialisations."""

    @property
    def setting(self) -> dict[str, Value]:
        """What was measured, for the evidence."""
        return {
            "size": str(self.size),
            "blocks": len(self.stream.skipped_blocks),
            "targets in the batch": self.targets,
        }

    @property
    def is_asleep(self) -> bool:
        """Does the loss not depend on the stream at all, as with a readout of zeros?"""
        return self.stream.branches[-1].stream_gradient == 0

    @property
    def noted(self) -> str:
        """What could not be measured, to follow a sentence."""
        return f" ({'; '.join(self.stream.notes)}.)" if self.stream.notes else ""


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH521 to TH524."""
    if not context.anatomy.branches:
        yield GROWTH.finding("ok", "The network has no residual branches, so there is no stream.")
        return
    with measuring(GROWTH, (UseError, RuntimeError)):  # of autograd, and of memory
        found = measure(context)
        if not found.stream.finite:
            raise UseError(f"{found.where} something is {'; '.join(found.stream.notes)}")
    yield growth(found)
    yield gradient(found)
    yield contribution(found)
    yield headroom(found)


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
        if law.kind == "unclear":
            said += " Whether it grows linearly or exponentially is unclear."
        elif law.kind == "linear":
            said += f" Its square grows by {law.rise:.2g} of its start in each block."
    return GROWTH.finding(
        level,
        said,
        title=title,
        remedy=remedy,
        numbers=found.setting
        | {
            "initialisations": DRAWS,
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
    """TH522: does the gradient change more with depth than as a power of it?"""
    law = found.stream.backward
    ratio, bound = law.ratio, (1 + law.blocks) ** STEEP
    numbers = found.setting | {"first over last": ratio, "power law": f"{1 / bound:.2g} to {bound:.3g}"}
    if math.isnan(ratio):
        said = f"{found.where} there is no gradient to follow{SLEEP if found.is_asleep else '.'}{found.noted}"
        return GRADIENT.finding("note", said, numbers=numbers)
    more = max(ratio, 1 / ratio)
    explodes = ratio > 1
    said = (
        f"{found.where} the gradient of the stream before the first block is {times(more)} times "
        f"{'larger' if explodes else 'smaller'} than after the last"
    )
    if more <= bound:
        said += f", as expected of {counted(law.blocks, 'block')} with norms."
        return GRADIENT.finding("ok", said, numbers=numbers)
    each = more ** (1 / law.blocks)
    return GRADIENT.finding(
        "warn" if more >= FAR else "note",
        f"{said}: a factor of {each:.3g} in each block, while a power of depth stays below {times(bound)}.",
        title="A gradient that explodes" if explodes else "A gradient that vanishes",
        remedy=BRANCHES,
        numbers=numbers,
    )


def contribution(found: StreamMeasurement) -> Finding:
    """TH523: blocks that can be left out, and branches that cannot learn."""
    seen, where, asleep = found.stream, found.where, found.is_asleep
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
        reached = f"no branch has a gradient yet{SLEEP}"
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
    if silent:
        said = (
            f"{where} {len(silent)} of {counted(len(seen.skipped_blocks), 'block')} add nothing yet. This is "
            "normal for branches that end in zeros: "
            f"{'they have a gradient.' if not unknown and not asleep else reached}"
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
    elif not changes and not seen.notes:
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


def measure(context: SurveyContext) -> StreamMeasurement:
    """The stream of the surveyed network if it is small, otherwise of the deepest of the trials."""
    size = context.size
    if context.num_parameters(size) > MOST_PARAMETERS:
        trials = trials_of(context)
        size = trials.depths[-1] if trials.depths else trials.base
    model, batch = context.build(size), _cut(context.batch)
    work, examples = context.forward_work(model, batch).total, examples_in(batch)
    if not context.deep and examples is not None and work > MOST_PASS:
        batch = first_of(batch, max(FEWEST_EXAMPLES, int(examples * MOST_PASS / work)))
    seen = _measured(context, model, batch)
    cut = amount(batch, context.whole_batch)
    return StreamMeasurement(seen, size, context.where(size), cut, _growth(context, size, batch, seen))


def _cut(batch: Batch) -> Batch:
    entries = sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    wanted = min(TARGETS, int(targets_in(batch) * ENTRIES / max(1, entries)))
    return few(batch, max(FEWEST, wanted))


def _measured(context: SurveyContext, model: nn.Module, batch: Batch) -> Stream:
    """Blocks are skipped if that is affordable: a forward pass for each branch and for each block."""
    loss = context.workload.loss
    first = stream(model, loss, batch, skip=False)
    assert first.layout is not None
    each = context.forward_work(model, batch).total + OPERATION * len(first.layout.graph.nodes)
    passes = len(first.branches) + len(first.skipped_blocks)
    if passes * each > (DEEP_WORK if context.deep else WORK):
        return first
    return stream(model, loss, batch, layout=first.layout)


def _growth(context: SurveyContext, size: Size, batch: Batch, seen: Stream) -> GrowthLaw:
    """Growth of the geometric mean over initialisations, one of which is measured already."""
    profiles = [seen.profile]
    for more in range(1, DRAWS):
        model = replace(context, seed=(context.seed + more) % 2**63).build(size)
        profiles.append(stream(model, context.workload.loss, batch, skip=False, layout=seen.layout).profile)
    same = [profile for profile in profiles if len(profile) == len(seen.profile)]
    with np.errstate(divide="ignore"):  # a stream that starts at zero has no growth
        return fit_growth(np.exp(np.log(np.asarray(same)).mean(0)).tolist())


section = Section("Residual stream", 45, examine, measures=True)
