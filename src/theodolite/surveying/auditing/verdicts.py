"""TH206 to TH209: what is wrong with a parameterization written by hand, and the line that mends it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from theodolite.anatomy.names import gather
from theodolite.core.size import Size
from theodolite.present.text import counted, listed
from theodolite.probes.scaling.small_gradients import NEAR_EPS
from theodolite.surveying.auditing.exponents import (
    ATOL,
    Quantity,
    TensorScaling,
)
from theodolite.surveying.auditing.faults import (
    Cause,
    Fault,
    decay_excess,
    find_faults,
    names_of,
    over_eps_at,
    start_excess,
    step_excess,
    steps_limited,
)
from theodolite.surveying.auditing.heads import HeadScale
from theodolite.surveying.auditing.phrases import (
    REMEDIES,
    SENTENCES,
    brief,
    coded,
    factor_of,
    is_depth_mup,
    off_by,
    power_of,
)
from theodolite.surveying.auditing.reading import Reading
from theodolite.surveying.finding import Check, Finding, Level, Value, times

STEP = Check(
    "TH206",
    "Learning rates and size",
    "How far a tensor moves what follows it depends on its fan-in, on its place in the network and on the "
    "optimizer. A learning rate that does not follow them is right at one size alone: at another, this "
    "tensor learns too fast or not at all, and the best learning rate of the whole network moves.",
)
START = Check(
    "TH207",
    "Initial values and size",
    "A sum over n inputs of independent weights grows as √n, and L branches add up. Initial values that do "
    "not follow let signals grow or vanish with size, before anything is learnt.",
)
DECAY = Check(
    "TH208",
    "Weight decay, eps and size",
    "A step takes the fraction (learning rate × weight decay) of a weight. If this fraction changes with "
    "size, larger networks are regularised differently. And eps is added to what falls with size: where it "
    "comes near the gradient, steps shorten.",
)
MULTIPLIER = Check(
    "TH209",
    "Forward multipliers and size",
    "Multipliers in the forward pass, such as width_base/width on the logits, are one half of most "
    "parameterizations; the initial values and learning rates are the other. If one half is missing or is "
    "there twice, start and steps are off together.",
)
BY_CAUSE: Mapping[Cause, Check] = {
    "step": STEP,
    "start": START,
    "decay": DECAY,
    "multiplier": MULTIPLIER,
    "readout": MULTIPLIER,
}
SEVERE = 0.2
"""The power of the size from which a size that is too large is a failure: 1.6 times at ten times the size."""
UNTRAINED = "Learning rates that are zero or not known"
COUPLED = "which adds weight_decay·W to the gradient and then divides by the gradient's size"


def judge(
    base: Reading,
    wider: Sequence[Reading],
    deeper: Sequence[Reading],
    width: Sequence[TensorScaling],
    depth: Sequence[TensorScaling],
    heads: Sequence[HeadScale],
) -> tuple[Finding, ...]:
    """All findings: at least one of each code. `heads` are those whose scale is off."""
    faults = [*find_faults(width, "width"), *find_faults(depth, "depth")]
    found = [_finding(kind, alike, base.size) for kind, alike in _joined(faults)]
    found += [*_left_out(base), *_unjudged(base), *_changing([base, *wider, *deeper])]
    found += [*_limited(base, width, depth), *_coupled(width or depth)]
    found += [_heads(off, base.size) for off in heads]
    bad = {finding.code for finding in found if finding.level in ("warn", "fail")}
    for check in (STEP, START, DECAY, MULTIPLIER):
        if check.code not in bad and (width or depth):
            found.append(_fine(check, *(_others(along, faults, check) for along in (width, depth))))
    return tuple(sorted(found, key=lambda finding: finding.code))


def _joined(faults: Iterable[Fault]) -> list[tuple[Cause, list[Fault]]]:
    """The faults of one kind and the same tensors together: a mistake may show along both axes."""
    found: dict[tuple[Cause, frozenset[str]], list[Fault]] = {}
    for fault in faults:
        tensors = frozenset(name for one in fault.scalings for name in one.tensors)
        found.setdefault((fault.cause, tensors), []).append(fault)
    return [(cause, alike) for (cause, _), alike in found.items()]


def _finding(cause: Cause, faults: Sequence[Fault], base: Size) -> Finding:
    """What is wrong with some tensors, along one axis or both."""
    severe = any(fault.excess > SEVERE and not is_depth_mup(fault) for fault in faults)
    level: Level = "fail" if severe else "warn"
    sentences, remedies = [], []
    for fault in faults:
        sentences.append(SENTENCES[cause](fault))
        remedies.append(REMEDIES[cause](fault, base))
    return BY_CAUSE[cause].finding(
        level,
        " ".join(sentences),
        title=_TITLES[cause],
        remedy=" ".join(dict.fromkeys(remedies)),
        numbers={
            f"times too large at ten times the {fault.axis}": _three(fault.at_ten_times) for fault in faults
        },
        rows=[row for fault in faults for row in _rows(fault)],
    )


_TITLES: Mapping[Cause, str] = {
    "step": "Learning rates that do not follow the size",
    "start": "Initial values that do not follow the size",
    "decay": "Weight decay that does not follow the size",
    "multiplier": "A forward multiplier missing or counted twice",
    "readout": "A readout multiplier missing or counted twice",
}


def _heads(off: HeadScale, base: Size) -> Finding:
    """TH209 of an attention scale."""
    heads, own = off.heads, off.own
    level: Level = "fail" if off.excess > SEVERE else "warn"
    if not off.rule:
        return MULTIPLIER.finding(
            level,
            f"Heads have {heads.head_dim} entries at every width, but the scale of their logits goes as "
            f"width^{brief(own)}.",
            title="An attention scale that does not follow the heads",
            remedy="Let the scale depend on the head dimension only.",
        )
    scale = heads.scale or math.nan
    return MULTIPLIER.finding(
        level,
        f"Heads grow with width, from {heads.head_dim} entries at width {base.width}, and the scale of their "
        f"logits goes as head_dim^{brief(own)} instead of head_dim^−1: at ten times the head dimension "
        f"trained logits are {off_by(off.excess)}.",
        title="An attention scale that does not follow the heads",
        remedy=f"Scale the attention logits by {scale * heads.head_dim:.3g}/head_dim, which is the same at "
        f"width {base.width}.",
        numbers={"times too large at ten times the head dimension": _three(10**off.excess)},
    )


def _left_out(base: Reading) -> Iterator[Finding]:
    """TH206 of tensors in no group, or in several."""
    states = {part.name: base.options[part.name].state for part in base.anatomy.trained}
    frozen = [part.name for part in base.parts if part.role == "frozen"]
    aside = f" Frozen tensors need none ({_patterns(base, frozen)})." if frozen else ""
    for state, said, title, remedy in (
        (
            "absent",
            "in no parameter group, so no optimizer trains {them}: {shown}.",
            "Tensors that no optimizer trains",
            "Put {names} into a group; or freeze {them} by requires_grad_(False), if {they_are} meant to "
            "stay.",
        ),
        (
            "twice",
            "in parameter groups several times, so each step moves {them} several times: {shown}.",
            "Tensors that are trained several times",
            "Put {names} into one group only, once.",
        ),
    ):
        names = [name for name, one in states.items() if one == state]
        if names:
            one = len(names) == 1
            words = {"them": "it" if one else "them", "they_are": "it is" if one else "they are"}
            count = f"{counted(len(names), 'tensor')} {'is' if one else 'are'}"
            yield STEP.finding(
                "fail",
                f"{count} {said.format(shown=_patterns(base, names), **words)}{aside}",
                title=title,
                remedy=remedy.format(names=coded(_gathered(base, names)), **words),
            )


def _unjudged(base: Reading) -> Iterator[Finding]:
    """TH206 of tensors whose optimizer has no known rule."""
    kinds: dict[str, list[str]] = {}
    for name in base.names:
        if base.options[name].rule is None:
            kinds.setdefault(base.options[name].class_name, []).append(name)
    for kind, names in kinds.items():
        yield STEP.finding(
            "note",
            f"Not judged: {_patterns(base, names)}. How large the steps of {kind} are is not known here.",
            title="Steps of an unknown size",
            remedy=f'If {kind} steps like a known optimizer, say so: rules={{"{kind}": "adamw"}}, or '
            f"--rule {kind}=adamw.",
        )
    still = [name for name in base.names if base.options[name].rule and not base.options[name].lr > 0]
    if still:
        yield STEP.finding(
            "note",
            f"Not judged: {_patterns(base, still)}, whose learning rate at {base.size} is not a positive "
            "number.",
            title=UNTRAINED,
        )


def _changing(readings: Sequence[Reading]) -> Iterator[Finding]:
    """TH206 of tensors that get another optimizer at another size."""
    base, *others = readings
    for other in others:
        both = [name for name in other.names if name in base.names]
        rules = {name: (base.options[name].rule, other.options[name].rule) for name in both}
        names = [name for name, (one, two) in rules.items() if one != two]
        if names:
            one, two = (side.options[names[0]].class_name for side in (base, other))
            yield STEP.finding(
                "fail",
                f"{_patterns(base, names)} {'is' if len(names) == 1 else 'are'} trained by {one} at "
                f"{base.size} and by {two} at {other.size}.",
                title="Another optimizer at another size",
                remedy="Choose the optimizer of a tensor by what it does, not by its shape.",
            )
            return


def _limited(
    base: Reading, width: Sequence[TensorScaling], depth: Sequence[TensorScaling]
) -> Iterator[Finding]:
    """TH208 of steps that eps limits, now or at ten times the size."""
    for scalings, axis, at in ((width, "width", 10.0), (depth, "depth", 10.0)):
        limited = [one for one in scalings if steps_limited(one, NEAR_EPS, at)]
        if not limited:
            continue
        now = [one for one in limited if steps_limited(one, NEAR_EPS, 1.0)]
        least = min(limited, key=lambda one: over_eps_at(one, at))
        eps = least.exponent("eps")
        there = over_eps_at(least, at)
        said = (
            f"eps limits the steps of {listed(names_of(now))} already at {base.size}: gradients there are as "
            f"small as {times(min(one.over_eps for one in now))} times eps."
            if now
            else f"At ten times the {axis}, eps limits the steps of {listed(names_of(limited))}: gradients "
            f"that are {times(least.over_eps)} times eps at {base.size} are {times(there)} times eps there, "
            f"as eps goes as {axis}^{brief(eps.own)} and they as {axis}^{brief(eps.rule)}."
        )
        own = base.options[least.tensors[0]].eps or 0.0
        by_depth = f" and, inside the blocks, by {factor_of('depth', base.size, 1.0)}"
        inside = by_depth if base.anatomy.num_blocks else ""
        small = f"{own * there / NEAR_EPS / 10:.0e}"
        yield DECAY.finding(
            "warn",
            said,
            title="An eps that limits the steps",
            remedy=f"Take a smaller eps at every size, such as {small}."
            if now
            else f"Divide eps by {factor_of('width', base.size, 1.0)}{inside}; or take a smaller one at "
            f"every size, such as {small}.",
            numbers={f"gradient over eps at ten times the {axis}": _three(there)},
            rows=[
                {
                    "tensor": one.name,
                    "gradient over eps": _three(one.over_eps),
                    f"at ten times the {axis}": _three(over_eps_at(one, at)),
                }
                for one in limited
            ],
        )
        return  # one mistake, whatever the axis


def _coupled(scalings: Sequence[TensorScaling]) -> Iterator[Finding]:
    """TH208 of decay that adaptive optimizers add to the gradient."""
    coupled = [one for one in scalings if one.decay is not None and one.decoupled is False and not one.degree]
    if coupled:
        kind = coupled[0].class_name
        yield DECAY.finding(
            "note",
            f"The weight decay of {listed(names_of(coupled))} is not judged: it is an option of {kind}, "
            f"{COUPLED}. That is no decay: how far it shrinks a weight does not follow from its number.",
            title="A weight decay that is none",
            remedy=f"Take {kind}W, or the option for decoupled weight decay."
            if kind == "Adam"
            else "Take an optimizer with decoupled weight decay, such as AdamW.",
        )


def _others(scalings: Sequence[TensorScaling], faults: Sequence[Fault], check: Check) -> list[TensorScaling]:
    """Those whose start and steps are not off because of a multiplier, which has a finding of its own."""
    if check not in (STEP, START):
        return list(scalings)
    off = {
        name
        for fault in faults
        for one in fault.scalings
        for name in one.tensors
        if fault.cause == "multiplier" or (fault.cause == "step" and fault.also_of)
    }
    return [one for one in scalings if not off & set(one.tensors)]


def _fine(check: Check, width: Sequence[TensorScaling], depth: Sequence[TensorScaling]) -> Finding:
    """That a check was made, and found nothing."""
    along = " and ".join(axis for axis, held in (("width", width), ("depth", depth)) if held)
    every = [*width, *depth]
    count = len({name for one in every for name in one.tensors})
    if check in (STEP, START):
        what = "learning rates" if check is STEP else "initial values"
        steepest = _steepest((step_excess if check is STEP else start_excess)(one) for one in every)
        said = f"The {what} of {counted(count, 'tensor')} go with {along} as their rules say{steepest}."
    elif check is DECAY:
        decaying = [one for one in every if not math.isnan(decay_excess(one))]
        said = (
            f"Learning rate × weight decay goes with {along} as the rules say."
            if decaying
            else "No tensor has a weight decay to judge."
        )
        said += _about_eps(every)
    else:
        said = _about_multipliers(width, depth)
    return check.finding("ok", said)


def _about_eps(scalings: Sequence[TensorScaling]) -> str:
    """A word on eps where it does not follow the gradients, but stays far below them."""
    alone = [one for one in scalings if one.eps is not None and one.exponent("eps").excess > ATOL]
    if not alone:
        return " eps follows the gradients." if any(one.eps for one in scalings) else ""
    known = [over_eps_at(one, 10.0) for one in alone if math.isfinite(one.over_eps)]
    if not known:
        return " eps does not fall with the gradients; how far below them it is was not measured."
    return (
        f" eps does not fall with the gradients, but at ten times the size they are still "
        f"{times(float(f'{min(known):.2g}'))} times eps or more."
    )


def _about_multipliers(width: Sequence[TensorScaling], depth: Sequence[TensorScaling]) -> str:
    said = []
    for axis, scalings in (("width", width), ("depth", depth)):
        powers: dict[str, list[str]] = {}
        for one in scalings:
            if abs(one.multiplied) > ATOL:
                powers.setdefault(power_of(axis, one.multiplied), []).append(one.name)  # type: ignore[arg-type]
            if one.readout is not None and abs(tied := one.exponent("readout").own) > ATOL:
                powers.setdefault(power_of(axis, tied), []).append(f"{one.name} (as the readout)")  # type: ignore[arg-type]
        said += [f"{power} on {listed(names)}" for power, names in powers.items()]
    if not said:
        return "No forward multiplier follows the size, and none is needed with these numbers."
    return f"The forward multipliers suit the other numbers: {'; '.join(said)}."


def _steepest(excesses: Iterable[float]) -> str:
    known = [one for one in excesses if not math.isnan(one)]
    return f" (largest difference of exponents {max(map(abs, known)):.2f})" if known else ""


def _patterns(base: Reading, names: Sequence[str]) -> str:
    return listed(_gathered(base, names))


def _gathered(base: Reading, names: Sequence[str]) -> list[str]:
    parts = [base.anatomy[name] for name in names]
    return [pattern for pattern, _ in gather(parts, lambda part: part.role)]


def _three(value: float) -> float:
    return float(f"{value:.3g}")


def _rows(fault: Fault) -> Iterator[dict[str, Value]]:
    """The exponents of each tensor of a fault."""
    quantities: tuple[tuple[Quantity, str], ...] = (("lr", "lr"), ("init", "init"), ("decay", "lr × decay"))
    for one in fault.scalings:
        row: dict[str, Value] = {"tensor": one.name, "axis": fault.axis, "role": one.role, "rule": one.rule}
        for quantity, title in quantities:
            exponent = one.exponent(quantity)
            if not math.isnan(exponent.own):
                row[f"{title} goes as"] = round(exponent.own, 3)
                row[f"{title}, by the rule"] = None if math.isnan(exponent.rule) else round(exponent.rule, 3)
        row["multiplier goes as"] = round(one.multiplied, 3)
        yield row
