"""Batch and tokens: how learning rate, weight decay, eps and averages follow the length of training.

With `m_B` and `m_D`, batch and tokens over those at the base, the number of steps is `m_S = m_D/m_B` times as
large. A gradient is signal plus noise, whose standard deviation goes as `1/√batch`. An update of degree p,
`A(c·g) = c^p·A(g)`, moves each entry by noise of about `lr·m_B^(−p/2)`.

none       nothing changes
sde        the random walk of the weights stays: `m_S` steps of independent noise sum to the variance
           `m_S·lr²·m_B^(−p)`, which is that of the base for

               lr ∝ m_B^((1+p)/2) / √m_D

           so √(m_B/m_D) for updates of a fixed size (Adam, Lion, Muon: p = 0), and m_B/√m_D for SGD (p = 1),
           the linear rule in the batch. `lr·eps` stays, as for Adam's SDE: eps ∝ √(m_D/m_B). Averages keep
           their half-life in tokens: a decay rate β becomes β^m_B.
           Momentum that is normalised itself (Lion, Muon: A has one size however many gradients it averages)
           makes the steps depend on each other. With weights h on past gradients the sum of n steps has the
           variance n·lr²/Σh², so lr gets the further factor √(Σh² after / Σh² before): up to √m_B, for
           lr ∝ m_B/√m_D in all.
           Shampoo divides by a sum over all steps, so that its k-th step goes as 1/√k: the random walk has
           the variance lr²·log(steps), and its learning rate stays. Its sum goes as m_S/m_B, and so
           does the eps that is added to it.
power      lr ∝ m_B^b·m_D^−a with given exponents; eps and averages stay
timescale  alone or with the others: the weights are an average over `1/(lr·weight_decay)` steps of updates,
           and this stays the same share of all steps: lr·weight_decay ∝ m_B/m_D

References:
    Malladi et al., On the SDEs and scaling rules for adaptive gradient algorithms, 2022, arXiv:2205.10287.
    Mlodozeniec et al., Completed hyperparameter transfer, 2025, arXiv:2512.22382.
    Wang & Aitchison, How to set AdamW's weight decay as you scale model and dataset size, 2024,
    arXiv:2405.13698.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from theodolite.core import arguments
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers.scaling import fraction

if TYPE_CHECKING:
    from theodolite.optimizers.spec import OptimizerSpec

Rates = Literal["none", "sde", "power"]
RATES: tuple[Rates, ...] = ("none", "sde", "power")
TIMESCALE = "timescale"
FARTHEST = 100
"""Octaves by which a power may change a learning rate; products of numbers further away overflow."""


@dataclass(frozen=True)
class Stretch:
    """Batch and number of tokens over those at the base.

    >>> Stretch.between(Size(64, 2, batch=32, tokens=10**6), Size(256, 4, batch=64, tokens=8 * 10**6))
    Stretch(batch=2.0, tokens=8.0)
    """

    batch: float = 1.0
    tokens: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            arguments.positive(f"the ratio of {name}", value)

    @staticmethod
    def between(base: Size, size: Size) -> Stretch:
        """From one size to another. What the target does not say is that of the base."""
        ratios = {}
        for name in ("batch", "tokens"):
            before, after = getattr(base, name), getattr(size, name)
            if before is None and after is not None:
                raise UseError(
                    f"size has {name}={after} and base has none, so that the ratio is not known: give base "
                    f"the {name} at which the hyperparameters are right, as in "
                    f"Size({base.width}, {base.depth}, {name}=…)"
                )
            ratios[name] = 1.0 if after is None else after / before
        return Stretch(**ratios)

    @property
    def steps(self) -> float:
        """Of the number of steps."""
        return self.tokens / self.batch

    @property
    def changes(self) -> tuple[str, ...]:
        """What is not as at the base: `batch`, `tokens`."""
        return tuple(name for name, value in vars(self).items() if value != 1)


Options = Mapping[str, Any]


def powers(options: Options, batch: float) -> dict[str, Any]:
    """β^m_B for each decay rate β: an average keeps its half-life in examples.

    >>> powers({"betas": (0.5, 0.25), "momentum": 0.5}, 2)
    {'betas': (0.25, 0.0625), 'momentum': 0.25}
    """
    return {
        name: tuple(rate**batch for rate in value) if isinstance(value, tuple | list) else value**batch
        for name, value in options.items()
    }


class Memory(NamedTuple):
    """What an optimizer averages over past steps."""

    usual: Options
    """Decay rates by option, with their usual values."""
    at: Callable[[Options, float], dict[str, Any]] = powers
    """The decay rates for m_B times the batch, with which averages keep their half-life in examples."""
    summed: bool = False
    """Is it a sum of past gradients, `1/(1 − rate)` times an average?"""
    squares: Callable[[Options], float] | None = None
    """Σh² of the weights h of past gradients in an update that has the same size whatever they are; None if
    its size follows them."""


def squares_of_average(rate: float) -> float:
    """Σh² of an average, `h = (1 − β)·β^k`.

    >>> squares_of_average(0.5), squares_of_average(0.0)
    (0.3333333333333333, 1.0)
    """
    return (1 - rate) / (1 + rate)


def squares_of_momentum(options: Options) -> float:
    """Σh² of `momentum`; by default of Nesterov's form, `h = 1 − β²` of the last gradient, then that of β·M.

    >>> squares_of_momentum({"momentum": 0.5, "nesterov": False}), squares_of_momentum({"momentum": 0.5})
    (0.3333333333333333, 0.5833333333333334)
    """
    rate = options["momentum"]
    if not options.get("nesterov", True):
        return squares_of_average(rate)
    return float((1 - rate**2) ** 2 + rate**4 * squares_of_average(rate))


@dataclass(frozen=True)
class Horizon:
    """How hyperparameters follow batch and tokens. Its text is `sde`, `power(0.3, 0.5)+timescale` or alike.

    >>> Horizon.of("power(0.32, 0.5)+timescale")
    Horizon(rates='power', tokens=0.32, batch=0.5, timescale=True)
    >>> print(Horizon("sde", timescale=True))
    sde+timescale
    """

    rates: Rates = "none"
    """The rule of the learning rate: `none`, `sde` or `power`."""
    tokens: float = 0.0
    """Under `power`, a of `lr ∝ m_D^−a`."""
    batch: float = 0.0
    """Under `power`, b of `lr ∝ m_B^b`."""
    timescale: bool = False
    """Does weight decay keep the share of training that the weights average over?"""

    def __post_init__(self) -> None:
        arguments.one_of("horizon", self.rates, RATES)
        for name in ("tokens", "batch"):
            value = arguments.number(f"the exponent of {name}", getattr(self, name))
            if value and self.rates != "power":
                raise UseError(
                    f"the exponent of {name} is {value} and the rule {self.rates!r}: only power has exponents"
                )

    @staticmethod
    def of(given: Horizon | str) -> Horizon:
        """From its text."""
        if isinstance(given, Horizon):
            return given
        names = [name.strip() for name in str(given).split("+")]
        rest = [name for name in names if name != TIMESCALE]
        if len(rest) > 1 or len(names) - len(rest) > 1:
            raise UseError(f"horizon is {given!r}: give one rule, and timescale beside it, as sde+timescale")
        timescale = len(rest) < len(names)
        if not rest:
            return Horizon(timescale=True)
        found = re.fullmatch(r"power\(([^,()]+),([^,()]+)\)", rest[0])
        if found is not None:
            try:
                tokens, batch = (arguments.parse_number(text) for text in found.groups())
            except UseError as error:
                raise UseError(f"horizon is {given!r}: {error}") from None
            return Horizon("power", tokens, batch, timescale)
        if rest[0] not in RATES or rest[0] == "power":
            known = arguments.did_you_mean(rest[0], (*RATES, TIMESCALE))
            near = "" if rest[0].startswith("power") else known
            raise UseError(
                f"horizon is {given!r}.{near} It is none, sde, timescale, sde+timescale, or "
                "power(a, b) for a learning rate as tokens^-a·batch^b"
            )
        return Horizon("sde" if rest[0] == "sde" else "none", timescale=timescale)

    def __str__(self) -> str:
        rates = f"power({self.tokens:g}, {self.batch:g})" if self.rates == "power" else self.rates
        if not self.timescale:
            return rates
        return TIMESCALE if self.rates == "none" else f"{rates}+{TIMESCALE}"

    def rate(self, stretch: Stretch, degree: int = 0, *, fades: bool = False) -> float:
        """The factor on the learning rate of an update of some degree; `fades` if it goes as 1/√step.

        >>> Horizon("sde").rate(Stretch(batch=4, tokens=16)), Horizon("sde").rate(Stretch(batch=4), degree=1)
        (0.5, 4.0)
        >>> Horizon("power", tokens=0.5, batch=1.0).rate(Stretch(batch=4, tokens=16))
        1.0
        """
        if self.rates == "power":
            octaves = self.batch * math.log2(stretch.batch) - self.tokens * math.log2(stretch.tokens)
            if abs(octaves) > FARTHEST:
                raise UseError(
                    f"horizon is {self}, which multiplies learning rates by 2^{octaves:.4g} for "
                    f"{stretch.batch:g} times the batch and {stretch.tokens:g} times the tokens: "
                    "give exponents nearer to 0"
                )
            return stretch.batch**self.batch / stretch.tokens**self.tokens
        if self.rates == "sde" and not fades:
            return math.sqrt(stretch.batch ** (1 + max(degree, 0)) / stretch.tokens)
        return 1.0

    def words(self, stretch: Stretch, degree: int = 0) -> str:
        """The factor `rate` in symbols, with its value.

        >>> Horizon("sde").words(Stretch(batch=4, tokens=16))
        '√(m_B/m_D) = 1/2'
        """
        value = fraction(self.rate(stretch, degree))
        if self.rates == "power":
            return f"m_B^{self.batch:g}/m_D^{self.tokens:g} = {value}"
        symbols = {0: "√(m_B/m_D)", 1: "m_B/√m_D"}.get(max(degree, 0), f"√(m_B^{1 + degree}/m_D)")
        return f"{symbols} = {value}" if self.rates == "sde" else value


UNCHANGED = Horizon()
"""The rule `none`."""


@dataclass(frozen=True)
class HorizonFactors:
    """What the hyperparameters of a tensor are multiplied by."""

    rate: float = 1.0
    """On the learning rate of an average of gradients."""
    sums: float = 1.0
    """By how much the weights of past gradients sum to more, where momentum is a sum."""
    mixing: float = 1.0
    """On the learning rate of normalised momentum, as its steps depend on each other less or more."""
    weight_decay: float = 1.0
    eps: float = 1.0

    @property
    def lr(self) -> float:
        """On the learning rate."""
        return self.rate * self.mixing / self.sums


@dataclass(frozen=True)
class HorizonCase:
    """The rule for batch and tokens, from one size to another, for the tensors of one optimizer."""

    horizon: Horizon
    base: Size
    size: Size
    spec: OptimizerSpec | None
    """None for a rule of the user's."""
    options: Options
    """Of the optimizer at base size."""

    @functools.cached_property
    def stretch(self) -> Stretch:
        """Batch and tokens over those at the base."""
        return Stretch.between(self.base, self.size)

    @functools.cached_property
    def averages(self) -> dict[str, tuple[Any, Any]]:
        """The decay rates of averages that change, by option: at the base, and at the target."""
        memory = None if self.spec is None else self.spec.memory
        if self.horizon.rates != "sde" or self.stretch.batch == 1 or memory is None:
            return {}
        before = {name: self.options.get(name, usual) for name, usual in memory.usual.items()}
        after = memory.at(before, self.stretch.batch)
        return {name: (before[name], after[name]) for name in before if before[name]}

    @property
    def options_here(self) -> dict[str, Any]:
        """The options at the target."""
        return {**self.options, **{name: after for name, (_, after) in self.averages.items()}}

    @property
    def sums(self) -> float:
        """By how much the weights of past gradients sum to more, if momentum is a sum: `1/(1 − rate)`."""
        if self.spec is None or self.spec.memory is None or not self.spec.memory.summed:
            return 1.0
        return math.prod((1 - before) / (1 - after) for before, after in self.averages.values())

    @property
    def mixing(self) -> float:
        """`√(Σh² after / Σh² before)` of the weights h of past gradients, if momentum is normalised."""
        squares = None if self.spec is None or self.spec.memory is None else self.spec.memory.squares
        if squares is None or not self.averages:
            return 1.0
        before = squares({**self.options, **{name: value for name, (value, _) in self.averages.items()}})
        return math.sqrt(squares(self.options_here) / before)

    def factors(self, degree: int, eps_degree: int, *, independent: bool) -> HorizonFactors:
        """The factors on learning rate, weight decay and eps.

        Args:
            degree: of the update in the gradient.
            eps_degree: the power of the gradient that eps is added to.
            independent: is weight decay the part of a weight that a step takes, whatever its learning rate?
        """
        spec, stretch, horizon = self.spec, self.stretch, self.horizon
        rate = horizon.rate(stretch, degree, fades=spec is not None and spec.fades)
        # Where momentum is a sum, so is the weight decay in it.
        moved = rate * self.mixing
        decay = 1 / stretch.steps / moved if horizon.timescale else 1 / moved if independent else 1.0
        # Where gradients are differentiated, eps is added to a second derivative, which has no such noise.
        noisy = horizon.rates == "sde" and not (spec is not None and spec.second_order)
        eps = math.sqrt(stretch.steps) ** eps_degree if noisy else 1.0
        if noisy and spec is not None and spec.fades:  # it is added to a sum of squares over all steps
            eps = stretch.steps / stretch.batch
        return HorizonFactors(rate, self.sums, self.mixing, decay, eps)
