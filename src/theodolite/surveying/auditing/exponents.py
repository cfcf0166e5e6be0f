"""How initial values and options go with width or depth, beside the powers that the rule asks for.

With the network's own forward multipliers taken into account: a multiplier, a std and a learning rate can be
traded against each other, and only what the function and its updates see counts. So `OptimizerSpec.rule` is
asked for the numbers of a network whose own multipliers are `Ratios.own`, with all others absorbed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from theodolite.anatomy.names import gather
from theodolite.anatomy.part import Part
from theodolite.optimizers import OPTIMIZERS, Base, Hyper, Ratios
from theodolite.optimizers.condition import centre, deviation
from theodolite.optimizers.muon import SCALES
from theodolite.optimizers.scaling import GRADIENT_ENTRY
from theodolite.planning.counterparts import counterparts, repeated_branches
from theodolite.planning.factory import OwnOptions
from theodolite.planning.init_distribution import InitDistribution
from theodolite.surveying.auditing.layerwise import LayerwiseDecay, layerwise_decay
from theodolite.surveying.auditing.reading import Reading

Axis = Literal["width", "depth"]
Quantity = Literal["lr", "init", "decay", "eps", "readout"]

ATOL = 0.05
"""On exponents of numbers that are read, not measured: 12 % at ten times the size."""


@dataclass(frozen=True)
class Exponent:
    """A quantity goes as the size to the power `own`; the rule says `rule`.

    >>> Exponent(0.0, -1.0).at_ten_times
    10.0
    """

    own: float
    rule: float

    @property
    def excess(self) -> float:
        """The difference; nan where there is nothing to compare."""
        return self.own - self.rule

    @property
    def at_ten_times(self) -> float:
        """The factor by which it is off at ten times the size."""
        return math.nan if math.isnan(self.excess) else 10.0**self.excess


@dataclass(frozen=True)
class Series:
    """A quantity at each size, and what the rule makes of its value at base size."""

    own: tuple[float, ...]
    rule: tuple[float, ...]

    def exponent(self, growth: Sequence[float]) -> Exponent:
        """The powers of the growth, by least squares on logarithms.

        >>> Series((1.0, 1.0, 1.0), (1.0, 0.5, 0.25)).exponent((1, 2, 4))
        Exponent(own=0.0, rule=-1.0)
        """
        return Exponent(power(growth, self.own), power(growth, self.rule))


@dataclass(frozen=True)
class TensorScaling:
    """One tensor, or all that differ only in their block, along one axis."""

    name: str
    """A pattern of names at base size."""
    tensors: tuple[str, ...]
    role: str
    class_name: str
    """Of the optimizer."""
    rule: str
    """The name of the rule that is compared with."""
    degree: int
    """Of the optimizer's update: 0 for Adam, 1 for SGD."""
    in_block: bool
    ends_branch: bool
    scale_free: bool
    decoupled: bool | None
    sizes: tuple[int, ...]
    """Widths, or depths."""
    growth: tuple[float, ...]
    """How much wider than at base size; or how many times as many branches."""
    multiplier: tuple[float, ...]
    """By how much the network's own forward pass multiplies its output, in units of that at base size."""
    lr: Series
    init: Series
    """The root mean square of the initial values; of a gain with the number that is added to it."""
    noise: float
    """Of the exponent of `init`: 0 where the distribution is read from the source, not measured."""
    decay: Series | None = None
    """Learning rate times weight decay; None if nothing decays."""
    eps: Series | None = None
    """None if the optimizer has none."""
    readout: Series | None = None
    """Of a table that is also the readout: what multiplies the logits."""
    over_eps: float = math.nan
    """How many times eps its gradient is at base size; nan if that is not known."""
    is_query_or_key: bool = False
    """Does the trace show its multiplier as a part of the scale of attention, so that it was inferred?"""

    def exponent(self, quantity: Quantity) -> Exponent:
        """The power that a quantity goes with, and that of the rule."""
        series: Series | None = getattr(self, quantity)
        return Exponent(math.nan, math.nan) if series is None else series.exponent(self.growth)

    @property
    def multiplied(self) -> float:
        """The exponent of the forward multiplier."""
        return power(self.growth, self.multiplier)


def power(growth: Sequence[float], values: Sequence[float]) -> float:
    """The exponent of a power law; 0 where all values are zero, nan where some are or are not known.

    >>> power((1, 2, 4), (3, 1.5, 0.75)), power((1, 2), (0, 1))
    (-1.0, nan)
    """
    if not any(values):
        return 0.0
    if not all(value > 0 and math.isfinite(value) for value in values) or len(set(growth)) < 2:
        return math.nan
    x, y = np.log2(np.asarray(growth, dtype=float)), np.log2(np.asarray(values, dtype=float))
    slope = ((x - x.mean()) @ (y - y.mean())) / ((x - x.mean()) @ (x - x.mean()))
    return round(float(slope), 9) + 0.0


def scalings(
    readings: Sequence[Reading], axis: Axis, gradients: Mapping[str, float] | None = None
) -> tuple[TensorScaling, ...]:
    """How every tensor with a known rule goes along an axis. The first reading is that of the base size."""
    base, *larger = readings
    judged = {name for name in base.names if base.options[name].rule and base.options[name].lr > 0}
    found: dict[str, list[_Values]] = {name: [_at_base(base, name)] for name in judged}
    growth = [1.0]
    layers = layerwise_decay(readings) if axis == "depth" else None
    for reading in larger:
        branches = repeated_branches(reading.anatomy, base.anatomy)
        wider = reading.size.width / base.size.width
        growth.append(wider if axis == "width" else branches.ratio)
        alike: dict[str, list[_Values]] = {name: [] for name in judged}
        for name, partner in counterparts(reading.anatomy, base.anatomy).items():
            if partner.name in judged and name in reading.names:
                part = reading.anatomy[name]
                ratios = Ratios(
                    part.fan_in / partner.fan_in,
                    part.fan_out / partner.fan_out,
                    branches.depth(part),
                    part.factor / partner.factor,
                )
                made = _at(reading, base, part, partner, ratios)
                if layers is not None:
                    made = _undone(layers, made, part, partner, reading, base)
                alike[partner.name].append(made)
        for name, values in alike.items():
            found[name].append(_mean(values))
    sizes = tuple(getattr(reading.size, axis) for reading in readings)
    each = [
        _scaling(base, name, sizes, growth, values, (gradients or {}).get(name, math.nan))
        for name, values in found.items()
    ]
    return _folded(each, base)


@dataclass(frozen=True)
class _Values:
    """One tensor at one size: its own numbers, and those of the rule."""

    lr: tuple[float, float]
    init: tuple[float, float]
    decay: tuple[float, float]
    eps: tuple[float, float]
    readout: tuple[float, float]
    multiplier: float
    measured: float
    """The relative error of the initial size, 0 if it is exact."""


def _at_base(base: Reading, name: str) -> _Values:
    part, own = base.anatomy[name], base.options[name]
    start = _start(part, base.inits[name])
    rate = own.lr * own.weight_decay
    eps = own.eps or 0.0
    return _Values(
        (own.lr, own.lr), (start, start), (rate, rate), (eps, eps), (1.0, 1.0), 1.0, _error(base, name)
    )


def _at(reading: Reading, base: Reading, part: Part, partner: Part, ratios: Ratios) -> _Values:
    own, there = reading.options[part.name], base.options[partner.name]
    hyper = rule_for(there, part, ratios)
    decay = there.lr * there.weight_decay * hyper.lr * hyper.weight_decay
    table = part.factor / partner.factor
    return _Values(
        lr=(own.lr, there.lr * hyper.lr),
        init=(
            _start(part, reading.inits[part.name]),
            _start_by_rule(part, partner, ratios, hyper, base.inits[partner.name]),
        ),
        decay=(own.lr * own.weight_decay, decay),
        eps=(own.eps or 0.0, (there.eps or 0.0) * hyper.eps),
        readout=(
            part.readout_factor / partner.readout_factor,
            partner.fan_out / part.fan_out * table,
        ),
        multiplier=ratios.own,
        measured=_error(reading, part.name),
    )


def _undone(
    layers: LayerwiseDecay, made: _Values, part: Part, partner: Part, here: Reading, there: Reading
) -> _Values:
    """The values with the learning rate as if at the same distance from the last block."""
    lr = layers.undone(*made.lr, part, partner, here, there)
    decay = made.decay[0] * (lr / made.lr[0] if made.lr[0] else 1.0)
    return replace(made, lr=(lr, made.lr[1]), decay=(decay, made.decay[1]))


def rule_for(own: OwnOptions, part: Part, ratios: Ratios) -> Hyper:
    """By which factors the rule of a tensor's optimizer changes its numbers, all multipliers absorbed."""
    spec = OPTIMIZERS[own.rule or ""]
    hyper = spec.rule(part, ratios, Base(1.0, 1.0, 1.0)).absorbed()
    if not own.stored_shape or part.in_axes >= part.out_axes:
        return hyper
    turned = _turned(SCALES[spec.fixed["scale"]], part, ratios)
    return replace(hyper, lr=hyper.lr / turned, weight_decay=hyper.weight_decay * turned)


def _turned(scale: Callable[[float, float], float], part: Part, ratios: Ratios) -> float:
    """The growth of the factor of the stored shape (in, out), over that of the matrix."""
    at_base = part.fan_in / ratios.fan_in, part.fan_out / ratios.fan_out
    here, there = (
        scale(fan_out, fan_in) / scale(fan_in, fan_out)
        for fan_in, fan_out in ((part.fan_in, part.fan_out), at_base)
    )
    return here / there


def _start(part: Part, init: InitDistribution) -> float:
    """The root mean square of what multiplies, or is added."""
    return math.hypot(init.std, init.mean + (part.offset if part.role == "gain" else 0.0))


def _start_by_rule(part: Part, partner: Part, ratios: Ratios, hyper: Hyper, base: InitDistribution) -> float:
    """The same by the rule, from the distribution at base size."""
    if part.role in ("bias", "gain"):
        return _start(partner, base) * hyper.std
    base = base.without_chance(partner.numel)
    mean = hyper.std / deviation(part, ratios) * centre(part, ratios)
    return math.hypot(base.std * hyper.std, base.mean * mean)


def _error(reading: Reading, name: str) -> float:
    """The relative standard error of an initial size that was measured; 0 of one that was read."""
    is_measured = reading.inits[name].kind == "own"
    return 1 / math.sqrt(2 * reading.anatomy[name].numel) if is_measured else 0.0


def _mean(values: Sequence[_Values]) -> _Values:
    """Of the tensors that correspond to one at base size: geometric means."""

    def pair(quantity: str) -> tuple[float, float]:
        pairs = [getattr(one, quantity) for one in values]
        return _geometric(own for own, _ in pairs), _geometric(rule for _, rule in pairs)

    return _Values(
        lr=pair("lr"),
        init=pair("init"),
        decay=pair("decay"),
        eps=pair("eps"),
        readout=pair("readout"),
        multiplier=_geometric(one.multiplier for one in values),
        measured=max((one.measured for one in values), default=0.0) / math.sqrt(max(len(values), 1)),
    )


def _geometric(numbers: Iterable[float]) -> float:
    """The geometric mean; nan of numbers that are not finite, and 0 if one is.

    >>> _geometric([2.0, 8.0]), _geometric([2.0, 0.0])
    (4.0, 0.0)
    """
    held = list(numbers)
    if not held or not all(map(math.isfinite, held)):
        return math.nan
    return math.exp(sum(map(math.log, held)) / len(held)) if min(held) > 0 else 0.0


def _scaling(
    base: Reading,
    name: str,
    sizes: tuple[int, ...],
    growth: Sequence[float],
    values: Sequence[_Values],
    gradient: float,
) -> TensorScaling:
    part, own = base.anatomy[name], base.options[name]

    def series(quantity: str) -> Series:
        pairs = [getattr(one, quantity) for one in values]
        return Series(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))

    decays, eps, spec = series("decay"), series("eps"), OPTIMIZERS[own.rule or ""]
    compared = spec.eps is not None and spec.eps.compared is GRADIENT_ENTRY
    spread = math.log(max(growth)) if max(growth) > 1 else math.inf
    return TensorScaling(
        name=name,
        tensors=(name,),
        role=part.role,
        class_name=own.class_name,
        rule=own.rule or "",
        degree=spec.degree,
        in_block=part.block is not None,
        ends_branch=part.ends_branch,
        scale_free=part.scale_free,
        decoupled=own.decoupled,
        sizes=sizes,
        growth=tuple(growth),
        multiplier=tuple(one.multiplier for one in values),
        lr=series("lr"),
        init=series("init"),
        noise=4 * math.hypot(values[0].measured, values[-1].measured) / spread,
        decay=decays if any(decays.own) and own.state != "unknown" else None,
        eps=eps if any(eps.own) and compared else None,
        readout=series("readout") if part.readout else None,
        over_eps=gradient / own.eps if own.eps and compared else math.nan,
    )


@dataclass(frozen=True)
class _Placed:
    """A scaling where its tensor stands, to be gathered under a pattern."""

    name: str
    block: int | None
    scaling: TensorScaling


def _folded(each: Iterable[TensorScaling], base: Reading) -> tuple[TensorScaling, ...]:
    """One for all tensors that differ only in their block and go alike."""
    order = {name: place for place, name in enumerate(base.anatomy)}
    placed = [_Placed(one.name, base.anatomy[one.name].block, one) for one in each]
    placed.sort(key=lambda one: order[one.name])

    def key(one: _Placed) -> object:
        held = one.scaling
        quantities: tuple[Quantity, ...] = ("lr", "decay", "eps", "readout")
        powers = [held.exponent(quantity) for quantity in quantities]
        if not held.noise:
            powers.append(held.exponent("init"))
        rounded = tuple((_rounded(one.own), _rounded(one.rule)) for one in powers)
        return (
            held.role,
            held.rule,
            held.class_name,
            held.ends_branch,
            held.scale_free,
            held.decoupled,
            _rounded(held.multiplied),
            rounded,
        )

    return tuple(
        _joined(pattern, [one.scaling for one in members]) for pattern, members in gather(placed, key)
    )


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 2) + 0.0


def _joined(pattern: str, members: Sequence[TensorScaling]) -> TensorScaling:
    """Members that go alike, as one: geometric means."""

    def mean(rows: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
        return tuple(map(_geometric, zip(*rows, strict=True)))

    def series(name: str) -> Series | None:
        held = [one for member in members if (one := getattr(member, name)) is not None]
        if len(held) < len(members):
            return None
        return Series(mean(one.own for one in held), mean(one.rule for one in held))

    known = [one.over_eps for one in members if math.isfinite(one.over_eps)]
    lr, init = series("lr"), series("init")
    assert lr is not None
    assert init is not None
    return replace(
        members[0],
        name=pattern,
        tensors=tuple(member.name for member in members),
        multiplier=mean(one.multiplier for one in members),
        lr=lr,
        init=init,
        noise=max(one.noise for one in members) / math.sqrt(len(members)),
        decay=series("decay"),
        eps=series("eps"),
        readout=series("readout"),
        over_eps=min(known, default=math.nan),
    )
