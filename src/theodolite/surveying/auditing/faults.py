"""From exponents that are off to mistakes: each tensor's deviations, by what causes them.

A mistake shows in several numbers. A multiplier that is missing or counted twice moves the size of the start
by x, and the size of the steps by (1 + p)·x, p the degree of the update; it is one fault, not two.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from theodolite.surveying.auditing.exponents import ATOL, Axis, Quantity, TensorScaling

Cause = Literal["step", "start", "decay", "multiplier", "readout"]
_QUANTITIES: Mapping[Cause, Quantity] = {
    "step": "lr",
    "start": "init",
    "decay": "decay",
    "readout": "readout",
}
HARMLESS = 0.5
"""The exponent up to which the start of an output inside a block may be too large: its values keep their
size, as those of a hidden weight do. The rule asks for less, which holds after training too."""


@dataclass(frozen=True)
class Fault:
    """Tensors that are off for the same reason, by the same power."""

    cause: Cause
    axis: Axis
    excess: float
    """The power of the size by which the step, the start, the decay or the multiplier is too large."""
    scalings: tuple[TensorScaling, ...]
    also: float = math.nan
    """For a multiplier: what is left of the excess of the start once it is mended. For a step: the excess of
    the start, of tensors that start and step as if they had another role. Else nan."""
    also_of: tuple[TensorScaling, ...] = ()
    """The tensors that this is said of."""

    @property
    def at_ten_times(self) -> float:
        """How many times too large at ten times the size."""
        return 10.0**self.excess


def find_faults(scalings: Sequence[TensorScaling], axis: Axis) -> tuple[Fault, ...]:
    """The faults of all tensors along one axis, alike ones together; the largest first."""
    hidden = _of_hidden(scalings, axis)
    each = [(one, *fault) for one in scalings for fault in _faults_of(one, axis, hidden.get(one.rule, 0.0))]
    shared = {(one.multiplied, excess) for one, cause, excess, _ in each if cause == "multiplier"}
    found: dict[tuple[Cause, float, float, str, int], list[tuple[TensorScaling, float, float]]] = {}
    for one, cause, excess, also in each:
        amount = excess / (1 + one.degree) if one.degree != -1 else math.nan
        if cause == "step" and _is_zero(one) and _is_one_of(one.multiplied, amount, shared):
            cause, excess = "multiplier", amount  # it has the multiplier of others that are off
        apart = 0.0 if cause == "multiplier" or math.isnan(also) else round(also, 1)
        key = (cause, round(excess, 1), apart, *_told(one, cause))
        found.setdefault(key, []).append((one, excess, also))
    faults = [_fault(cause, axis, members) for (cause, *_), members in found.items()]
    return tuple(sorted(faults, key=lambda one: -abs(one.excess)))


def _told(one: TensorScaling, cause: Cause) -> tuple[str, int]:
    """What a sentence says of all tensors of a fault beside the excess, so that it must be the same."""
    quantity = _QUANTITIES.get(cause)
    power = one.multiplied if quantity is None else one.exponent(quantity).own
    return (one.rule if quantity else "", round(2 * power))


def _fault(cause: Cause, axis: Axis, members: Sequence[tuple[TensorScaling, float, float]]) -> Fault:
    """One fault of several tensors."""
    more = [(one, also) for one, _, also in members if not math.isnan(also)]
    return Fault(
        cause,
        axis,
        sum(excess for _, excess, _ in members) / len(members),
        tuple(one for one, _, _ in members),
        sum(also for _, also in more) / len(more) if more else math.nan,
        tuple(one for one, _ in more),
    )


def step_excess(one: TensorScaling) -> float:
    """The power by which its steps are too large; of a direction, in units of its own size.

    >>> from theodolite.surveying.auditing.exponents import Series
    >>> flat, halved = (1.0, 1.0), (1.0, 0.5)
    >>> step = Series(flat, halved)
    >>> common = dict(class_name="Adam", rule="adamw", degree=0, in_block=True, ends_branch=False)
    >>> more = dict(decoupled=True, sizes=(64, 128), growth=(1.0, 2.0), multiplier=flat, noise=0.0)
    >>> weight = TensorScaling("w", ("w",), "hidden", **common, **more, scale_free=False, lr=step, init=step)
    >>> step_excess(weight)
    1.0
    """
    excess = one.exponent("lr").excess
    if one.scale_free:  # any factor on it is without effect, and a factor on its steps is one of its start
        start = one.exponent("init").excess
        excess -= (1 + one.degree) * (0.0 if math.isnan(start) else start)
    return excess


def start_excess(one: TensorScaling) -> float:
    """The power by which it starts too large; nan of a tensor whose start is not compared.

    Not compared are zeros, and directions. Biases and readouts may start as small as they like.
    """
    if one.scale_free or _is_zero(one):
        return math.nan
    excess = one.exponent("init").excess
    may_be_small = one.role == "bias" or (one.role == "output" and not one.in_block)
    if may_be_small and excess < 0:
        return 0.0
    if one.role == "output" and one.in_block and 0 < excess <= HARMLESS + ATOL:
        return 0.0
    return excess


def decay_excess(one: TensorScaling) -> float:
    """The power by which a step takes too large a part of the weight; nan if it has no decay of its own."""
    if one.decay is None or not (one.decoupled or one.degree == 1):
        return math.nan
    return one.exponent("decay").excess


def keeps_decay(one: TensorScaling, wrong_lr: float) -> bool:
    """Does it decay, and would mending its learning rate spoil the part of it that a step takes?"""
    decay = decay_excess(one)
    return not math.isnan(decay) and not _near(decay, wrong_lr)


def lone_decay_excess(one: TensorScaling, wrong_lr: float) -> float:
    """`decay_excess`; nan if the decay is off as its learning rate is, and comes right with it."""
    decay = decay_excess(one)
    return math.nan if _off(wrong_lr) and not keeps_decay(one, wrong_lr) else decay


def steps_limited(one: TensorScaling, times: float, at: float) -> bool:
    """Is its gradient below so many times eps, where the size is `at` times that of the base?"""
    reached = over_eps_at(one, at)
    return math.isfinite(reached) and reached < times


def over_eps_at(one: TensorScaling, at: float) -> float:
    """How many times eps its gradient is at `at` times the base size, by the rule's exponents."""
    eps = one.exponent("eps")
    return one.over_eps * at ** (0.0 if math.isnan(eps.excess) else -eps.excess)


def _of_hidden(scalings: Iterable[TensorScaling], axis: Axis) -> dict[str, float]:
    """By rule: the excess of the steps of hidden weights that end no branch; that of most kinds of them."""
    found: dict[str, Counter[float]] = {}
    for one in scalings:
        if one.role == "hidden" and not one.ends_branch and (axis == "width" or one.in_block):
            found.setdefault(one.rule, Counter())[round(step_excess(one), 2)] += 1
    return {rule: counts.most_common(1)[0][0] for rule, counts in found.items()}


def _faults_of(one: TensorScaling, axis: Axis, hidden: float) -> Iterator[tuple[Cause, float, float]]:
    """What is wrong with one tensor, by how much, and `Fault.also`.

    `hidden` is the excess of the steps of hidden weights.
    """
    step, start = step_excess(one), start_excess(one)
    if one.readout is not None and _off(one.exponent("readout").excess):
        yield "readout", one.exponent("readout").excess, math.nan
    wrong_lr = one.exponent("lr").excess
    multiplier = _multiplier_fault(one, axis, hidden)
    if multiplier is not None:
        left = _raw_start(one) - multiplier
        shows = (
            not math.isnan(left) and abs(left) > ATOL + one.noise and not (left < 0 and _may_be_small(one))
        )
        yield "multiplier", multiplier, left if shows else math.nan
        step, start = step - (1 + one.degree) * multiplier, math.nan
        wrong_lr = step
    if _as_hidden(one, axis, step, start):
        yield "step", step, start
        step = start = math.nan
    if _off(step):
        yield "step", step, math.nan
    if _off(start, one.noise):
        yield "start", start, math.nan
    decay = lone_decay_excess(one, wrong_lr)
    if _off(decay):
        yield "decay", decay, math.nan


def _multiplier_fault(one: TensorScaling, axis: Axis, hidden: float) -> float | None:
    """The power by which the forward multiplier is too large, if that explains start and steps."""
    excess, start = one.exponent("lr").excess, _raw_start(one)
    if one.scale_free or one.degree == -1:
        return None
    amount = excess / (1 + one.degree)
    missing = abs(one.multiplied) <= ATOL  # nothing in the forward pass follows the size
    reads_out = axis == "width" and one.role == "output" and not one.in_block
    closes = axis == "depth" and one.ends_branch
    if _off(amount) and _near(start, amount, one.noise) and (reads_out or not (missing or closes)):
        return amount
    if closes:  # steps that are off as those of all hidden weights have another cause
        amount = (excess - hidden) / (1 + one.degree)
        if _off(amount) and _near(start, amount, one.noise):
            return amount
    alone = reads_out and not _near(excess, hidden)
    healed = math.isnan(start) or ATOL < start < amount + ATOL
    return amount if missing and (closes or alone) and amount > ATOL and healed else None


def _as_hidden(one: TensorScaling, axis: Axis, step: float, start: float) -> bool:
    """Is an input treated as hidden weights are, in the start too?"""
    same = abs(one.exponent("lr").rule) <= ATOL
    return axis == "width" and one.role == "input" and same and step < -ATOL and _near(start, step / 2)


def _raw_start(one: TensorScaling) -> float:
    """The excess of the start as it is; nan of zeros."""
    return math.nan if _is_zero(one) else one.exponent("init").excess


def _is_zero(one: TensorScaling) -> bool:
    """Does it start at zero, at one of the sizes?"""
    return not all(one.init.own)


def _is_one_of(multiplied: float, excess: float, known: Iterable[tuple[float, float]]) -> bool:
    return abs(multiplied) > ATOL and any(_near(multiplied, one) and _near(excess, two) for one, two in known)


def _may_be_small(one: TensorScaling) -> bool:
    return one.role == "bias" or (one.role == "output" and not one.in_block)


def _off(excess: float, noise: float = 0.0) -> bool:
    return abs(excess) > ATOL + noise  # False for nan


def _near(one: float, other: float, noise: float = 0.0) -> bool:
    return abs(one - other) <= ATOL + noise


def names_of(scalings: Iterable[TensorScaling]) -> list[str]:
    """The patterns of tensors, each once."""
    return list(dict.fromkeys(one.name for one in scalings))
