"""The scale of attention logits, over the widths: does it follow the head dimension?

The trace shows what queries, keys and the scale multiply the logits by together. If queries and keys have
multipliers of their own, as the `1/√fan-in` on every weight of u-muP, the scale seems to fall with width, and
their initial values and learning rates seem not to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from theodolite.anatomy import AttentionHeads
from theodolite.surveying.auditing.exponents import ATOL, Series, TensorScaling, power
from theodolite.surveying.auditing.reading import Reading


@dataclass(frozen=True)
class HeadScale:
    """A kind of attention, and the exponents of the scale of its logits.

    In the head dimension where that grows, else in the width.
    """

    heads: AttentionHeads
    own: float
    rule: float

    @property
    def excess(self) -> float:
        """The power by which trained logits are too large."""
        return self.own - self.rule


def heads_off(widths: Sequence[int], attentions: Sequence[Sequence[AttentionHeads]]) -> tuple[HeadScale, ...]:
    """Kinds of attention whose scale does not follow the head dimension, over networks of these widths."""
    counts = {len(each) for each in attentions}
    found: dict[tuple[int, float], HeadScale] = {}
    for kinds in zip(*attentions, strict=False) if len(counts) == 1 else ():
        scales = [kind.scale for kind in kinds]
        known = [scale for scale in scales if scale]
        if len(known) < len(scales):
            continue
        dims = [kind.head_dim for kind in kinds]
        grows = len(set(dims)) > 1
        one = HeadScale(kinds[0], power(dims if grows else widths, known), -1.0 if grows else 0.0)
        if abs(one.excess) > ATOL:
            found.setdefault((dims[0], round(one.own, 2)), one)
    return tuple(found.values())


def judged_heads(
    readings: Sequence[Reading], width: Sequence[TensorScaling]
) -> tuple[tuple[TensorScaling, ...], tuple[HeadScale, ...]]:
    """The tensors with the multipliers of queries and keys, and the scales that are off besides.

    Where a scale is too small, and exactly two weights of each attention have start and steps that are too
    large by one power, these are its queries and keys, and the power is that of their own multiplier.
    """
    base = readings[0].anatomy
    widths = [reading.size.width for reading in readings]
    off = heads_off(widths, [reading.anatomy.attentions for reading in readings])
    if len(off) != 1 or off[0].excess > 0:
        return tuple(width), off
    attending = [set(branch.parts) for branch in base.branches if branch.attention is not None]
    found = {id(one): by for one in width if (by := _multiplier(one)) and _within(one, attending)}
    names = {name for one in width if id(one) in found for name in one.tensors}
    powers = list(found.values())
    alike = powers and max(powers) - min(powers) <= ATOL
    if not alike or any(len(names & parts) != 2 for parts in attending):
        return tuple(width), off
    by = sum(powers) / len(powers)
    rest = replace(off[0], own=off[0].own + 2 * by)
    traded = (_multiplied(one, by) if id(one) in found else one for one in width)
    return tuple(traded), (rest,) if abs(rest.excess) > ATOL else ()


def _within(one: TensorScaling, attending: Sequence[set[str]]) -> bool:
    return all(any(name in parts for parts in attending) for name in one.tensors)


def _multiplier(one: TensorScaling) -> float:
    """The power by which start and steps are too large, as without a multiplier that falls; else 0."""
    if one.role not in ("hidden", "output") or one.scale_free or one.degree == -1:
        return 0.0
    start, step = one.exponent("init").excess, one.exponent("lr").excess / (1 + one.degree)
    agree = not all(one.init.own) or abs(start - step) <= ATOL + one.noise
    return step if step > ATOL and agree else 0.0


def _multiplied(one: TensorScaling, by: float) -> TensorScaling:
    """The tensor with a forward multiplier that falls by this power, and the rule for that."""
    grown = [growth**by for growth in one.growth]

    def times(series: Series, power: int) -> Series:
        values = (value * each**power for value, each in zip(series.rule, grown, strict=True))
        return Series(series.own, tuple(values))

    return replace(
        one,
        multiplier=tuple(value / each for value, each in zip(one.multiplier, grown, strict=True)),
        lr=times(one.lr, 1 + one.degree),
        init=times(one.init, 1),
        eps=None if one.eps is None else times(one.eps, -1),
        is_query_or_key=True,
    )
