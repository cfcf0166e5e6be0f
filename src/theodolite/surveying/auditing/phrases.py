"""What a fault is in a sentence, and the line that mends it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from theodolite.core.size import Size
from theodolite.present.text import listed, signed
from theodolite.surveying.auditing.exponents import ATOL, Axis, Exponent, TensorScaling
from theodolite.surveying.auditing.faults import Cause, Fault, keeps_decay, names_of
from theodolite.surveying.finding import times

MOST_NAMES = 5
"""In a remedy."""
NEAR_ROOT = 0.1
"""On the exponent −1/2 of depth-muP: what is added may be divided by the root of a sum, as in u-muP."""


def brief(exponent: float) -> str:
    """An exponent in two digits after the point, without zeros at the end.

    >>> brief(-0.5), brief(1.0), brief(-0.004)
    ('−0.5', '1', '0')
    """
    text = signed(exponent)
    return text.rstrip("0").rstrip(".") if "." in text else text


def power_of(axis: Axis, exponent: float) -> str:
    """A power of the size.

    >>> power_of("width", -0.5)
    'width^−0.5'
    """
    return f"{axis}^{brief(exponent)}"


def factor_of(axis: Axis, base: Size, exponent: float) -> str:
    """A power of the size over the base size, as one writes it.

    >>> size = Size(64, 2)
    >>> [factor_of("width", size, exponent) for exponent in (1.0, -1.0, 0.5, -0.5, 2.0)]
    ['width/64', '64/width', '√(width/64)', '√(64/width)', '(width/64)^2']
    """
    number: int = getattr(base, axis)
    ratio = f"{axis}/{number}" if exponent > 0 else f"{number}/{axis}"
    size = abs(round(exponent, 2))
    if math.isclose(size, 1):
        return ratio
    return f"√({ratio})" if math.isclose(size, 0.5) else f"({ratio})^{size:g}"


def _of_step(fault: Fault) -> str:
    names, first = names_of(fault.scalings), fault.scalings[0]
    said = f"{_at(fault)}, the steps of {listed(names)} are {off_by(fault.excess)}: "
    said += f"{_whose(names)} learning rate {_against(first, fault.axis, _lr(fault))}."
    if fault.also_of:
        said += f" {_pronoun(names)} also {_starts(names)} {off_by(fault.also)}, as if hidden."
    return said


def _mend_step(fault: Fault, base: Size) -> str:
    names, first = _code(fault), fault.scalings[0]
    lr = _lr(fault)
    factor = factor_of(fault.axis, base, abs(fault.excess))
    if fault.excess > 0 and abs(lr.rule) <= ATOL and lr.own > ATOL:
        said = f"Do not multiply the learning rate of {names} by {factor}"
    elif fault.excess > 0:
        said = f"Divide the learning rate of {names} by {factor}"
    elif abs(lr.rule) <= ATOL and lr.own < -ATOL:
        said = f"Do not divide the learning rate of {names} by {factor}"
    else:
        said = f"Multiply the learning rate of {names} by {factor}"
    if fault.also_of:
        std = factor_of(fault.axis, base, abs(fault.also))
        said += f", nor its initial std by {std}: it is an input, whatever else reads it"
    elif abs(first.multiplied) > ATOL:
        done = factor_of(fault.axis, base, first.multiplied)
        said += f": the forward pass multiplies its output by {done} already"
    return f"{said}.{_kept_decay(fault, base)}"


def _lr(fault: Fault) -> Exponent:
    """How the learning rate goes, and how it should once the multiplier is right too."""
    own = fault.scalings[0].exponent("lr").own
    return Exponent(own, own - fault.excess)


def _kept_decay(fault: Fault, base: Size) -> str:
    """The weight decay goes against the learning rate where their product should stay."""
    kept = [one for one in fault.scalings if keeps_decay(one, fault.excess)]
    if not kept:
        return ""
    verb = "Multiply" if fault.excess > 0 else "Divide"
    decaying = [one for one in fault.scalings if one.decay is not None]
    all_of_them = f"{_whose(names_of(fault.scalings))} weight decay"
    what = all_of_them if len(kept) == len(decaying) else f"the weight decay of {coded(names_of(kept))}"
    factor = factor_of(fault.axis, base, abs(fault.excess))
    return f" {verb} {what} by {factor}, so that learning rate × decay stays as it is."


def _of_start(fault: Fault) -> str:
    names, first = names_of(fault.scalings), fault.scalings[0]
    init = first.exponent("init")
    return (
        f"{_at(fault)}, the initial values of {listed(names)} are {off_by(fault.excess)}: their size "
        f"{_against(first, fault.axis, init)}."
    )


def _mend_start(fault: Fault, base: Size) -> str:
    first = fault.scalings[0]
    said = _mended_start(first.exponent("init"), fault.axis, base, fault.excess, _code(fault))
    if fault.excess < 0 and first.multiplied < -ATOL:
        place = "the branch is" if first.ends_branch else "its output is"
        said += f": {place} divided by {factor_of(fault.axis, base, -first.multiplied)} already"
    return f"{said}."


def _mended_start(init: Exponent, axis: Axis, base: Size, excess: float, names: str) -> str:
    if excess > 0:
        return f"Divide the initial std of {names} by {factor_of(axis, base, excess)}"
    if abs(init.rule) > ATOL or init.own > -ATOL:
        return f"Multiply the initial std of {names} by {factor_of(axis, base, -excess)}"
    root = axis == "depth" and abs(init.own + 0.5) <= ATOL
    what = "1/√(2·depth), or 1/√depth," if root else f"factor {factor_of(axis, base, init.own)}"
    return f"Leave out the {what} in the init of {names}"


def _of_decay(fault: Fault) -> str:
    names, first = names_of(fault.scalings), fault.scalings[0]
    decay = first.exponent("decay")
    strength = "strong" if fault.excess > 0 else "weak"
    return (
        f"{_at(fault)}, the weight decay of {listed(names)} is {times(10 ** abs(fault.excess))} times too "
        f"{strength}: learning rate × decay {_against(first, fault.axis, decay)}."
    )


def _mend_decay(fault: Fault, base: Size) -> str:
    names, first = _code(fault), fault.scalings[0]
    lr, decay = first.exponent("lr").own, first.exponent("decay").own
    if abs(lr) > ATOL and abs(decay - 2 * lr) <= ATOL:
        return (
            f"Multiply the weight decay of {names} by {factor_of(fault.axis, base, -fault.excess)}: it is "
            f"multiplied by the learning rate twice, once by you and once by {first.class_name}."
        )
    verb = "Divide" if fault.excess > 0 else "Multiply"
    factor = factor_of(fault.axis, base, abs(fault.excess))
    return f"{verb} the weight decay of {names} by {factor}."


def _of_multiplier(fault: Fault) -> str:
    names, first = names_of(fault.scalings), fault.scalings[0]
    wanted = first.multiplied - fault.excess
    said = (
        f"{_at(fault)}, what {listed(names)} {_makes(names, first)} is {off_by(fault.excess)}: the forward "
    )
    if abs(first.multiplied) <= ATOL:
        said += f"pass does not multiply it by a power of {fault.axis}, and with these initial values and "
        said += f"learning rates it should, by {power_of(fault.axis, wanted)}."
    else:
        said += f"pass multiplies it by {power_of(fault.axis, first.multiplied)}, and with these initial "
        said += f"values and learning rates that should be {power_of(fault.axis, wanted)}."
    step, start = first.exponent("lr").excess, first.exponent("init").excess
    told = [f"its start is {off_by(start)}"] if all(first.init.own) and abs(start) > ATOL else []
    told += [f"its steps are {off_by(step)}"] if abs(step) > ATOL else []
    said += f" Now {' and '.join(told)}." if told and len(names) == 1 else ""
    if is_depth_mup(fault):
        said += " (1/√depth is depth-muP. It is for branches of one layer; two or more need 1/depth.)"
    return said


def is_depth_mup(fault: Fault) -> bool:
    """Is it the branch multiplier 1/√L of depth-muP?"""
    first = fault.scalings[0]
    root = abs(first.multiplied + 0.5) <= NEAR_ROOT and abs(fault.excess - 0.5) <= NEAR_ROOT
    return fault.cause == "multiplier" and fault.axis == "depth" and first.ends_branch and root


def _mend_multiplier(fault: Fault, base: Size) -> str:
    first = fault.scalings[0]
    wanted = first.multiplied - fault.excess
    if first.role == "output" and not first.in_block:
        missing = abs(first.multiplied) <= ATOL
        what = f"the {'input of the readout' if missing else 'logits'} ({_code(fault)})"
    elif first.ends_branch and fault.axis == "depth":
        what = f"the branches that {_code(fault)} end"
    else:
        what = f"the output of {_code(fault)}"
    said = _mended_multiplier(what, fault.axis, base, first.multiplied, wanted)
    if fault.also_of:
        init = fault.also_of[0].exponent("init")
        mend = _mended_start(init, fault.axis, base, fault.also, coded(names_of(fault.also_of)))
        said += f", and {mend[0].lower()}{mend[1:]}"
    return f"{said}."


def _mended_multiplier(what: str, axis: Axis, base: Size, own: float, wanted: float) -> str:
    if abs(wanted) <= ATOL:
        return f"Do not multiply {what} by {factor_of(axis, base, own)}"
    said = f"Multiply {what} by {factor_of(axis, base, wanted)}"
    if abs(abs(wanted) - 1) <= ATOL and abs(own - 2 * wanted) <= ATOL:
        return f"{said} once, not twice"
    return said if abs(own) <= ATOL else f"{said}, not by {factor_of(axis, base, own)}"


def _of_readout(fault: Fault) -> str:
    first = fault.scalings[0]
    readout = first.exponent("readout")
    said = f"{_at(fault)}, the logits are {off_by(fault.excess)}: {listed(names_of(fault.scalings))} is the "
    said += "embedding and the readout, and the forward pass "
    wanted = power_of(fault.axis, readout.rule)
    if abs(readout.own) <= ATOL:
        return f"{said}does not multiply the logits by a power of {fault.axis}. It should, by {wanted}."
    return f"{said}multiplies the logits by {power_of(fault.axis, readout.own)} instead of {wanted}."


def _mend_readout(fault: Fault, base: Size) -> str:
    readout = fault.scalings[0].exponent("readout")
    what = f"the logits ({_code(fault)} as the readout)"
    return f"{_mended_multiplier(what, fault.axis, base, readout.own, readout.rule)}."


def _at(fault: Fault) -> str:
    return f"At ten times the {fault.axis}"


def off_by(excess: float) -> str:
    """`10 times too large`."""
    return f"{times(10 ** abs(excess))} times too {'large' if excess > 0 else 'small'}"


def _against(one: TensorScaling, axis: Axis, power: Exponent) -> str:
    """How a quantity goes with size, and how it should."""
    own = f"goes as {power_of(axis, power.own)}" if abs(power.own) > ATOL else f"does not change with {axis}"
    should = f"go as {power_of(axis, power.rule)}" if abs(power.rule) > ATOL else f"not change with {axis}"
    return f"{own}; by the rule of {one.rule} it should {should}"


def _whose(names: Sequence[str]) -> str:
    return "its" if len(names) == 1 and "*" not in names[0] else "their"


def _pronoun(names: Sequence[str]) -> str:
    return "It" if _whose(names) == "its" else "They"


def _starts(names: Sequence[str]) -> str:
    return "starts" if _whose(names) == "its" else "start"


def _makes(names: Sequence[str], first: TensorScaling) -> str:
    verb = "add" if first.ends_branch else "make"
    return f"{verb}s" if len(names) == 1 else verb


def _code(fault: Fault) -> str:
    """The patterns of its tensors as code."""
    return coded(names_of(fault.scalings))


def coded(patterns: Sequence[str]) -> str:
    """Patterns as code, the first few of many.

    >>> coded(["wte.weight", "wpe.weight"])
    '`wte.weight` and `wpe.weight`'
    """
    names = [f"`{name}`" for name in patterns]
    if len(names) > MOST_NAMES:
        return f"{', '.join(names[: MOST_NAMES - 1])} and {len(names) - MOST_NAMES + 1} more"
    return ", ".join(names[:-1]) + " and " + names[-1] if len(names) > 1 else names[0]


SENTENCES: Mapping[Cause, Callable[[Fault], str]] = {
    "step": _of_step,
    "start": _of_start,
    "decay": _of_decay,
    "multiplier": _of_multiplier,
    "readout": _of_readout,
}
REMEDIES: Mapping[Cause, Callable[[Fault, Size], str]] = {
    "step": _mend_step,
    "start": _mend_start,
    "decay": _mend_decay,
    "multiplier": _mend_multiplier,
    "readout": _mend_readout,
}
