"""Is the residual stream in health where training starts?"""

from __future__ import annotations

import math
from collections.abc import Iterator

from theodolite.anatomy import UnclassifiedError
from theodolite.core.errors import UseError
from theodolite.probes.stream.stream import MASSIVE_RATIO, Stream
from theodolite.surveying.finding import Evidence, Finding, Level, Value
from theodolite.surveying.section import Section
from theodolite.surveying.sections.plan import unmeasured, untried
from theodolite.surveying.sections.stream.look import DRAWS, Look, find_look
from theodolite.surveying.site import Site
from theodolite.surveying.trials import Untried
from theodolite.surveying.wording import counted, listed, plain, times

BITS = 2.0**8
"""Of bfloat16: what is so many times smaller than the stream is rounded away in it."""
STEEP = 1.5
"""A gradient that grows or fades as a power of depth does so by at most `(1 + L)^1.5`. With branches that
read a normed stream, its square grows by the factor `1 + c·b/(1 + b·l)` in block l, where the stream's is
`1 + b·l`; all together `(1 + b·L)^c`. c is 1 where a branch passes as much back as it passes on, and 3 leaves
room for the attention of a narrow network."""
FAR = 1000.0
"""Ratio of gradients from which a finding is a warning: ten of the thirty doublings that float16 has."""
ROOM = 4.0
"""Doublings of headroom that training is likely to use up."""
ALIKE, UNMISSED = 1e-4, 1e-4
"""A block is redundant if `1 − cos` of its branches and, without it, the part of the loss are below these."""
SLEEP = ": after the last block it is zero. A readout that starts at zero makes it so, until its first step."
"""What may stand where a gradient should."""

TITLES = {
    "TH521": "Growth of the stream",
    "TH522": "Gradient along the stream",
    "TH523": "What each block is worth",
    "TH524": "Room in half precision",
}
WHY = {
    "TH521": "With a norm at the head of each branch the square of the stream grows by about the same amount "
    "in every block, and the last of L branches is 1/√L of it. Without one each block multiplies it: what "
    "holds for a few blocks overflows in many, or drowns what the first blocks have said.",
    "TH522": "The gradient of the stream is what every branch learns from. As long as it changes as a power "
    "of depth, one learning rate serves all blocks. If each block multiplies it, the first blocks of a deep "
    "network learn at another speed than the last, or in half precision not at all.",
    "TH523": "A block that can be left out costs time and memory and gives nothing. At the start it is "
    "normal that blocks are worth little, and branches that end in zeros wake with the first steps, as those "
    "before a readout of zeros do. A branch that no gradient reaches does not.",
    "TH524": "float16 ends at 65504, and values grow during training. A few entries of the stream that are "
    "thousands of times larger than the others also make quantisation hard.",
}
BRANCHES = (
    "Put a norm at the head of each branch, x + f(N x), or also at its end, x + N f(N x). Or give the "
    "branches the weight 1/L of a plan, which th.plan(…) does for every depth above its base."
)


def examine(site: Site) -> Iterator[Finding]:
    """TH521 to TH524."""
    if not site.anatomy.branches:
        said = "There are no residual branches, so there is no stream."
        yield Finding("TH521", "ok", TITLES["TH521"], said, why=WHY["TH521"])
        return
    try:
        look = find_look(site)
    except UnclassifiedError:
        raise
    except Untried as error:
        yield untried(error)
    except (UseError, RuntimeError) as error:  # of autograd, and of memory
        yield unmeasured("TH521", TITLES["TH521"], WHY["TH521"], UseError(str(error)))
    else:
        if not look.stream.finite:
            reason = UseError(f"{look.where} something is {'; '.join(look.stream.notes)}")
            yield unmeasured("TH521", TITLES["TH521"], WHY["TH521"], reason)
            return
        yield growth(look)
        yield gradient(look)
        yield worth(look)
        yield room(look)


def growth(look: Look) -> Finding:
    """TH521: by an addition in each block, or by a factor?"""
    found = look.growth
    blocks = counted(found.blocks, "block")
    level: Level = "ok"
    title, remedy = TITLES["TH521"], ""
    if found.kind == "exponential":
        level = "warn" if found.ratio >= BITS else "note"
        title, remedy = "A stream that grows exponentially", BRANCHES
        said = (
            f"{look.where} each block multiplies the stream by {found.factor:.3g}: {_times(found.ratio)} "
            f"times over {blocks}, and {_times(found.ratio**4)} times over four times as many."
        )
    elif found.kind == "unclear":
        said = (
            f"{look.where} the stream is {_times(found.ratio)} times its start after {blocks}; "
            "whether it grows by an addition or by a factor in each cannot be told."
        )
    elif found.kind == "linear":
        said = (
            f"{look.where} the stream grows {_times(found.ratio)} times over {blocks}, "
            f"its square by {found.rise:.2g} of its start in each."
        )
    else:
        said = f"{look.where} the stream is {_times(found.ratio)} times its start after the last block."
    numbers = look.ground | {
        "initialisations": DRAWS,
        "law": found.kind,
        "factor in each block": found.factor,
        "ΔAIC for the exponential law": found.evidence,
    }
    rows = tuple(_rows(look.stream))
    evidence = Evidence(numbers, rows, (look.stream.figure(),))
    return Finding("TH521", level, title, said, why=WHY["TH521"], remedy=remedy, evidence=evidence)


def gradient(look: Look) -> Finding:
    """TH522: does the gradient change more with depth than as a power of it?"""
    found = look.stream.backward
    ratio, bound = found.ratio, (1 + found.blocks) ** STEEP
    numbers = look.ground | {"first over last": ratio, "power law": f"{1 / bound:.2g} to {bound:.3g}"}
    why = WHY["TH522"]
    if math.isnan(ratio):
        said = f"{look.where} there is no gradient to follow{SLEEP if _is_asleep(look.stream) else '.'}"
        said += _noted(look.stream)
        return Finding("TH522", "note", TITLES["TH522"], said, why=why, evidence=Evidence(numbers))
    more = max(ratio, 1 / ratio)
    explodes = ratio > 1
    said = (
        f"{look.where} the gradient of the stream before the first block is {_times(more)} times "
        f"{'larger' if explodes else 'smaller'} than after the last"
    )
    if more <= bound:
        said += f", which {counted(found.blocks, 'block')} with a norm each may bring."
        return Finding("TH522", "ok", TITLES["TH522"], said, why=why, evidence=Evidence(numbers))
    each = more ** (1 / found.blocks)
    return Finding(
        "TH522",
        "warn" if more >= FAR else "note",
        "A gradient that explodes" if explodes else "A gradient that fades",
        f"{said}: a factor of {each:.3g} in each block, where a power of depth stays below {_times(bound)}.",
        why=why,
        remedy=BRANCHES,
        evidence=Evidence(numbers),
    )


def worth(look: Look) -> Finding:
    """TH523: blocks that can be left out, and branches that cannot learn."""
    seen, why = look.stream, WHY["TH523"]
    asleep = _is_asleep(seen)
    dead = [
        one for one in seen.branches if one.is_reached is False or (one.branch_gradient == 0 and not asleep)
    ]
    unknown = [one for one in seen.branches if one.is_reached is None]
    silent = {one.block for one in seen.branches} - {one.block for one in seen.branches if one.added != 0}
    alike = {one.block for one in seen.branches} - {
        one.block for one in seen.branches if not 1 - one.cosine < ALIKE
    }
    unmissed = {
        block
        for block, more in enumerate(seen.skipped_blocks)
        if more is not None and abs(more) <= UNMISSED * abs(seen.loss)
    }
    redundant = sorted((alike & unmissed) - silent)
    changes = [abs(more) for more in seen.skipped_blocks if more is not None]
    numbers = look.ground | {"loss": seen.loss, "least change of the loss": min(changes, default=None)}
    evidence = Evidence(numbers)
    reached = "a gradient reaches every branch."
    if unknown:
        reached = f"of {counted(len(unknown), 'branch')} it is not known whether a gradient reaches them."
    if asleep:
        reached = f"no branch has a gradient yet{SLEEP}"
    if dead:
        names = listed([f"block {one.block}, branch {one.branch}" for one in dead])
        return Finding(
            "TH523",
            "warn",
            "Branches that no gradient reaches",
            f"{look.where} the loss has no gradient at all in {names}, so that they never learn."
            + _noted(seen),
            why=why,
            remedy="Look for what stops it: a factor of zero behind the branch, a detach, a loss that does "
            "not depend on it.",
            evidence=evidence,
        )
    if silent:
        said = (
            f"{look.where} nothing is added yet by {len(silent)} of "
            f"{counted(len(seen.skipped_blocks), 'block')}. "
            "Branches that end in zeros are normal at the start: "
            f"{'a gradient reaches them.' if not unknown and not asleep else reached}"
        )
        return Finding("TH523", "note", "Blocks that start silent", said, why=why, evidence=evidence)
    if redundant:
        names = listed([f"block {block}" for block in redundant])
        return Finding(
            "TH523",
            "note",
            "Blocks that change nothing yet",
            f"{look.where} the loss is the same without {names}, and the stream keeps its direction there."
            + _noted(seen),
            why=why,
            remedy="Look again after some training, with th.probes.stream(model, loss, batch). If it stays "
            "so, a network of fewer blocks does as well.",
            evidence=evidence,
        )
    said = f"{look.where} {reached}"
    if changes and not asleep:
        said += (
            f" Without one of {counted(len(changes), 'block')} the loss changes by {min(changes):.2g} to "
            f"{max(changes):.2g}."
        )
    elif not changes and not seen.notes:
        said += " Leaving blocks out would have taken too long."
    level: Level = "note" if asleep or unknown else "ok"
    return Finding("TH523", level, TITLES["TH523"], said + _noted(seen), why=why, evidence=evidence)


def room(look: Look) -> Finding:
    """TH524: how far the largest value is from the end of float16."""
    seen, largest = look.stream, look.stream.largest
    peak = max(seen.branches, key=lambda one: one.peak)
    numbers = look.ground | {
        "largest value": largest.value,
        "made by": f"{largest.op}, {largest.where}",
        "doublings of headroom": largest.headroom,
        "largest entry of the stream over the median": peak.peak,
    }
    said = f"{look.where} the largest value is {largest.value:.3g} ({largest.op}, {largest.where})"
    level: Level = "warn" if largest.headroom < 0 else "ok" if largest.headroom >= ROOM else "note"
    title, remedy = TITLES["TH524"], ""
    if math.isnan(largest.value):
        said = f"{look.where} no value was looked at, so that the largest is not known.{_noted(seen)}"
        return Finding("TH524", level, title, said, why=WHY["TH524"], evidence=Evidence(numbers))
    if math.isinf(largest.value):
        title = "Values that overflow"
        said = (
            f"{look.where} there are values that are no finite numbers (first {largest.op}, {largest.where})."
        )
    elif level == "warn":
        title, said = "Values that overflow", f"{said}, above the 65504 at which float16 ends."
    else:
        said += f", {largest.headroom:.1f} doublings below the 65504 at which float16 ends."
    if level != "ok":
        remedy = "Train in bfloat16 or float32, and keep the values down: see TH521 for the stream."
    if seen.massive:
        peak = max(seen.massive, key=lambda one: one.peak)
        level = "note" if level == "ok" else level
        said += (
            f" Block {peak.block} has a massive entry at {peak.peak_at}, {peak.peak:.0f} times the median "
            f"(more than {MASSIVE_RATIO:.0f})."
        )
    return Finding("TH524", level, title, said, why=WHY["TH524"], remedy=remedy, evidence=Evidence(numbers))


def _is_asleep(seen: Stream) -> bool:
    """Does the loss not change with the stream at all, as where the readout starts at zero?"""
    return seen.branches[-1].stream_gradient == 0


def _noted(seen: Stream) -> str:
    """What could not be measured, as a sentence to follow another."""
    return f" ({'; '.join(seen.notes)}.)" if seen.notes else ""


def _times(factor: float) -> str:
    return times(factor) if factor < 1000 else plain(factor)


def _rows(seen: Stream) -> Iterator[dict[str, Value]]:
    for one in seen.branches:
        yield {
            "block": one.block,
            "branch": one.branch,
            "stream": one.stream,
            "added": one.added,
            "cosine": one.cosine,
            "gradient": one.stream_gradient,
            "loss without it": one.skipped,
        }


section = Section("Residual stream", 45, examine, measures=True)
