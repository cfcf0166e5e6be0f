"""Everything the project knows about an optimizer, in one record, and the records there are.

To add an optimizer, write a module in this folder with a tuple `SPECS` of `OptimizerSpec`s.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from theodolite.anatomy.part import Part
from theodolite.core.arguments import did_you_mean
from theodolite.core.errors import UseError
from theodolite.core.optional import find_by_name
from theodolite.optimizers.borrowed import Borrowed
from theodolite.optimizers.condition import Base, Hyper, Ratios, meet
from theodolite.optimizers.horizon import Memory
from theodolite.optimizers.scaling import Scaling

Make = Callable[[list[dict[str, Any]]], Optimizer]
"""Parameter groups to an optimizer."""


class Eps(NamedTuple):
    """The eps of an optimizer."""

    compared: Scaling
    """What it is added to."""
    usual: float = 1e-8
    option: str = "eps"
    degree: int = 1
    """The power of the gradient that it is added to."""


class Extent(NamedTuple):
    """An option in units of the weight."""

    option: str
    usual: float | None
    scaling: Scaling | None = None
    """What it follows; None if only multipliers change it."""


class Slot(NamedTuple):
    """One parameter of M models in training."""

    shape: tuple[int, ...]
    """Of the parameter of one model."""
    shared: Mapping[str, Any]
    """Options that are the same for all models."""
    fused: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    """Compiles a function of entries into one kernel, where programs are compiled."""


State = dict[str, Tensor]
Hypers = Mapping[str, Tensor]
"""By name, (M, 1), on the device of the weights."""


@dataclass(frozen=True)
class Vectorised:
    """A step for M models at once: a parameter is (M, n), each hyperparameter one number for each model.

    The step agrees with the optimizer's own to rounding.
    """

    step: Callable[[Tensor, Tensor, State, Hypers, Tensor, Slot], None]
    """Changes the weight in place, given gradient, state, hyperparameters and which models are alive."""
    state: tuple[str, ...]
    """Names of the tensors (M, n) that are kept between steps; they start at zero."""
    numbers: Mapping[str, Any]
    """Options that may differ between models, with their usual values."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Options that are the same for all models, with their usual values."""
    without: Mapping[str, Any] = field(default_factory=dict)
    """Options it does not have: the only values of them with which it agrees with the optimizer."""


def by_entries(step: Callable[[Tensor, Tensor, State, Hypers, Tensor], None]) -> Any:
    """A vectorised step from a function of the entries alone."""

    def made(weight: Tensor, grad: Tensor, state: State, hyper: Hypers, alive: Tensor, slot: Slot) -> None:
        slot.fused(step)(weight, grad, state, hyper, alive)

    return made


@dataclass(frozen=True)
class OptimizerSpec:
    """One optimizer. Without options it does `W ← W − lr·(A + weight_decay·W)`."""

    name: str
    """The name that plans, runs and the command line know it by."""
    implementation: type[Optimizer] | Borrowed
    update: Scaling
    """The size `‖A‖_R` of its update, from which its rule follows."""
    degree: int = 0
    """`A(c·∇W) = c^degree·A(∇W)`; −1 if A has the units of the weight."""
    eps: Eps | None = None
    """None if it has no eps."""
    extent: Extent | None = None
    """Its option in units of the weight, if it has one."""
    matrices_only: bool = False
    """AdamW trains what is not a matrix beside it."""
    layout: tuple[str, ...] = ()
    """What its groups must say about matrices: `axes`, `rows`."""
    decays: bool = True
    """False if its tensors have no weight decay."""
    decoupled: bool = True
    """Is weight decay a term of the step? False if it is added to the gradient."""
    keeps_squares: bool = False
    """Does it keep squares of gradients? These must be finite too."""
    takes_sparse: bool = False
    """Does it take sparse gradients?"""
    averages: bool = False
    """Does it average weights instead of following a schedule?"""
    memory: Memory | None = None
    """The decay rates of its averages over steps, if it has any."""
    fades: bool = False
    """Does it divide by a sum over all steps, so that its steps go as 1/√step?"""
    second_order: bool = False
    """Does it differentiate gradients?"""
    shares_work: bool = False
    """Can replicas divide its work among them?"""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options that the rule depends on."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Options that break the rule, and why."""
    vectorised: Vectorised | None = None

    @property
    def class_name(self) -> str:
        """The name of the optimizer's class."""
        given = self.implementation
        return given.name if isinstance(given, Borrowed) else given.__name__

    @property
    def source(self) -> str:
        """The package that its class is from: `torch`, `pytorch_optimizer` or `theodolite`."""
        given = self.implementation
        return "pytorch_optimizer" if isinstance(given, Borrowed) else given.__module__.partition(".")[0]

    def rule(self, part: Part, ratios: Ratios, base: Base) -> Hyper:
        """The hyperparameters of a tensor at the target size, by the spectral condition.

        >>> weight = Part("w", (64, 64), "linear", "hidden", 64, 64, True, True, (1,), (0,))
        >>> find_optimizers()["adamw"].rule(weight, Ratios(4, 4), Base(lr=0.5)).lr
        0.125
        """
        met = meet(
            part,
            ratios,
            base,
            update=self.update.value(part, ratios),
            degree=self.degree,
            floor=1.0 if self.eps is None else self.eps.compared.value(part, ratios),
            floor_degree=1 if self.eps is None else self.eps.degree,
        )
        scaling = None if self.extent is None else self.extent.scaling
        return replace(
            met,
            weight_decay=met.weight_decay if self.decays else 0.0,
            extent=1.0 if scaling is None else scaling.value(part, ratios),
        )

    def maker(self, options: Mapping[str, Any], *, shared_over: Any = None) -> Make:
        """A function from parameter groups to the optimizer, with checked options.

        >>> find_optimizers()["sgd"].maker({"momentun": 0.9})
        Traceback (most recent call last):
        theodolite.UseError: 'momentun' is no option of SGD. Did you mean 'momentum'?
        """
        if isinstance(self.implementation, Borrowed):
            optimizer = self.implementation.load(self.name)
        else:
            optimizer = self.implementation
        known = set(inspect.signature(optimizer).parameters) - {"params", "kwargs"}
        planned = {"lr", "weight_decay", "axes", "rows", "shared_over", *self.fixed}
        if self.eps is not None:
            planned.add(self.eps.option)
        for option in options:
            if option in self.refused:
                why = self.refused[option]
                raise UseError(f"{option!r} cannot be used with {self.name}: {why}. Leave it out")
            if option in planned:
                raise UseError(
                    f"{option!r} of {self.class_name} is set for each tensor. Leave it out of the options"
                )
            if option not in known:
                hint = did_you_mean(option, known) or f" It has {', '.join(sorted(known - planned))}"
                raise UseError(f"{option!r} is no option of {self.class_name}.{hint}")
        shared = {"shared_over": shared_over} if self.shares_work else {}
        return functools.partial(optimizer, **options, **self.fixed, **shared)


@functools.cache
def find_optimizers() -> Mapping[str, OptimizerSpec]:
    """Every optimizer there is, by name: the `SPECS` of the modules in this folder."""
    return find_by_name("theodolite.optimizers", "SPECS")
