"""What curvature is measured on: which network, how much data, how many directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.batches import Batch, targets_in
from theodolite.core.building import in_one_line, untouched_randomness
from theodolite.core.calling import ModelLoss, OutputLoss, call, evaluate, logits
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.probes.curvature.curvature import curvature
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, hessian
from theodolite.probes.curvature.rescaling import scalable
from theodolite.surveying.budget import Budget, TooLong, Work, amount, examples_in, few, pass_work
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Value
from theodolite.surveying.trials import MOST_PARAMETERS, trials_of
from theodolite.workloads import Workload


@dataclass(frozen=True)
class CurvatureEffort:
    """How much is spent."""

    targets: int
    """In a batch, about; at least one example."""
    directions: int
    decades: tuple[float, ...]
    """Temperatures to try: powers of ten around the size of the logits."""
    near: tuple[float, ...]
    """Scales of the weights to try: powers of ten of the size of the logits, relative to that at the peak
    along the temperature."""
    probes: int
    steps: int
    """Of the density."""
    work: float
    """Multiplications of a forward pass, to which the batch is cut as far as possible."""
    logits: float
    """Most entries of the logits."""
    most: float
    """Multiplications of all measurements."""
    eigenvalues: int = 150
    """Most products for the eigenvalues of one operator."""

    @property
    def products(self) -> int:
        """Most products with the Hessian."""
        places = len(self.decades) + 1 + len(self.near)
        return self.directions * places + self.probes * self.steps + 2 * self.eigenvalues


QUICK = CurvatureEffort(
    targets=128,
    directions=50,
    decades=tuple(half / 2 for half in range(-6, 7)),
    near=(-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0),
    probes=2,
    steps=32,
    work=5e7,
    logits=1e6,
    most=3e12,
)
ROUGH = replace(
    QUICK,
    directions=12,
    decades=tuple(map(float, range(-3, 4))),
    near=(-1.0, -0.5, 0.0, 0.5, 1.0),
    probes=1,
    steps=24,
    work=2e8,
    logits=1e7,
    most=3e11,
)
"""For networks that are large even at base size, and for those that need a product for each direction."""
DEEP = replace(
    QUICK,
    targets=512,
    near=tuple(quarter / 4 for quarter in range(-8, 9)),
    probes=4,
    steps=64,
    work=5e9,
    logits=1e7,
    most=3e13,
)
HALVES = torch.float16, torch.bfloat16
FEWEST = 16
"""Fewest targets that a batch is cut to for the work of one forward pass."""
FEWEST_EXAMPLES, FEWEST_PRODUCTS = 4, 40
"""Fewest examples that a batch is cut to for the work of all products, and then fewest products for the
eigenvalues of an operator."""
EXTRA, MOST_EXTRA = 5, 1.5
"""Allowed multiples of the work of a forward pass, and of all products, if a batch cannot be cut further."""
PRODUCT = 6
"""Forward passes that a product with the Hessian takes, about."""
OTHERS = 12
"""Further products, for steps and for gradients on several batches."""


@dataclass(frozen=True)
class CurvatureSetup:
    """A new network, and a batch."""

    context: SurveyContext = field(repr=False)
    model: nn.Module = field(repr=False)
    batch: Batch = field(repr=False)
    size: Size
    effort: CurvatureEffort
    parameters: tuple[str, ...] = field(repr=False)
    """Names of those that the loss depends on."""
    work: float
    """Of a forward pass, in multiplications."""
    budget: Budget = field(repr=False)

    @property
    def workload(self) -> Workload:
        """The surveyed workload."""
        return self.context.workload

    @property
    def planned(self) -> float:
        """Most multiplications of all measurements."""
        return PRODUCT * (self.effort.products + OTHERS) * self.work

    @property
    def directions(self) -> int:
        """The number of directions, at most the number of parameters."""
        return min(self.effort.directions, self.hessian.size)

    @property
    def targets(self) -> int:
        """In the batch."""
        return targets_in(self.batch)

    @property
    def amount(self) -> int | str:
        """The number of targets, and of how many in the workload's own batch."""
        return amount(self.batch, self.context.whole_batch)

    @property
    def where(self) -> str:
        """The size, and why it differs from the surveyed one."""
        return f"{self.size}" if self.size == self.context.size else f"{self.size}, the base of the trials,"

    @property
    def setting(self) -> dict[str, Value]:
        """What was measured, for the evidence."""
        return {
            "size": str(self.size),
            "parameters": self.hessian.size,
            "targets in the batch": self.amount,
            "directions": self.directions,
        }

    @property
    def options(self) -> dict[str, Any]:
        """What every measurement of curvature is called with."""
        return {"directions": self.directions, "parameters": self.parameters, "seed": self.context.seed}

    @cached_property
    def hessian(self) -> Hessian:
        """At the start, on the batch."""
        return hessian(self.model, self.workload.loss, self.batch, parameters=self.parameters)

    @cached_property
    def logits(self) -> Tensor:
        """At the start."""
        return self.forward()

    @property
    def is_of_logits(self) -> bool:
        """Is the loss a function of the logits, so that G and S can be separated?"""
        return not isinstance(self.workload.loss, OutputLoss | ModelLoss)

    @cached_property
    def is_cross_entropy(self) -> bool:
        """Is the loss the cross-entropy of a softmax of the logits?"""
        if not self.is_of_logits:
            return False
        objective = Objective(self.model, self.workload.loss, self.batch, parameters=self.parameters)
        with objective.conditions():
            return objective.cross_entropy(self.logits, self.batch) is not None

    @cached_property
    def is_linear(self) -> bool:
        """Is the loss linear in the output, here and at zero (where no softmax or sigmoid is saturated)?"""
        objective = Objective(self.model, self.workload.loss, self.batch, parameters=self.parameters)
        places = (self.logits, torch.zeros_like(self.logits))
        with objective.conditions():
            return not any(_curves(lambda z: objective.loss(z, self.batch[1]), place) for place in places)

    @cached_property
    def is_normed(self) -> bool:
        """Are there normalisations?"""
        return len(scalable(self.model)) < sum(1 for _ in canonical_parameters(self.model))

    def forward(self) -> Tensor:
        """The logits of the weights as they are now."""
        with torch.no_grad(), untouched_randomness(self.context.seed):
            return logits(call(self.model, self.batch[0]))

    def draw(self, step: int) -> Batch:
        """Another batch, as small as the first."""
        seed = self.context.seed
        try:
            return few(_whole(self.workload.draw(seed, step)), self.targets)
        except UseError:
            raise
        except Exception as error:
            raise UseError(f"batch({seed}, {step}) failed: {in_one_line(error)}") from error

    def spend(self, products: int) -> None:
        """Count products with the Hessian that come next. Raises TooLong if they are too many."""
        try:
            self.budget.spend(PRODUCT * products * self.work)
        except TooLong as error:
            raise TooLong(f"{error}, at {self.size}") from None


def _curves(loss: Callable[[Tensor], Tensor], place: Tensor) -> bool:
    """Does the loss have a second derivative there, in a random direction?"""
    place = place.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(place), place, create_graph=True)
    if not slope.requires_grad:
        return False
    (change,) = torch.autograd.grad(
        slope, place, torch.randn_like(slope), allow_unused=True, materialize_grads=True
    )
    return bool(change.any())


def find_setup(context: SurveyContext) -> CurvatureSetup:
    """The surveyed network itself if it is small, otherwise the base of the trials.

    Raises TooLong if that is too large as well.
    """
    best = DEEP if context.deep else QUICK
    found = _setup(context, context.size, best)
    if found is None:
        base = trials_of(context).base
        found = _setup(context, base, best) or _setup(context, base, ROUGH, limit=EXTRA)
    if found is None:
        raise TooLong(f"networks of {base} are too large")
    if not _is_swept(found):
        return _affordable(_rougher(found))
    return _affordable(found) if found.effort == ROUGH else found


def _setup(
    context: SurveyContext, size: Size, effort: CurvatureEffort, *, limit: float = 1.01
) -> CurvatureSetup | None:
    """A network of this size; None if it takes more than `limit` times the work."""
    if context.num_parameters(size) > MOST_PARAMETERS:
        return None
    model = context.build(size)
    if any(parameter.dtype in HALVES for parameter in model.parameters()):
        model.float()  # half precision is too coarse for second derivatives
    batch = few(_whole(context.batch), effort.targets)
    work, entries = _measured(context, model, batch)
    if work.multiplications > effort.work:
        share = effort.work / work.multiplications
        batch = few(batch, max(FEWEST, int(targets_in(batch) * share)))
        work, entries = _measured(context, model, batch)
    if work.multiplications > limit * effort.work or entries > effort.logits:
        return None
    budget = Budget(effort.most, deep=context.deep)
    used = _used(context, model, batch)
    return CurvatureSetup(context, model, batch, size, effort, used, work.total, budget)


def _whole(batch: Batch) -> Batch:
    """The batch in float32, where it comes in halves."""
    found: Batch = tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf, batch
    )
    return found


def _measured(context: SurveyContext, model: nn.Module, batch: Batch) -> tuple[Work, int]:
    """Work of a forward pass, and the number of entries of the logits."""
    entries = 0

    def run() -> None:
        nonlocal entries
        loss = context.workload.loss
        if isinstance(loss, OutputLoss | ModelLoss):
            entries = evaluate(loss, model, batch).numel()
        else:
            entries = logits(call(model, batch[0])).numel()

    with untouched_randomness(context.seed), torch.no_grad():
        work = pass_work(run)
    return work, entries


def _used(context: SurveyContext, model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Names of the parameters that the loss depends on."""
    tensors = {name: tensor for name, tensor in canonical_parameters(model) if tensor.requires_grad}
    if not tensors:
        raise UseError("no parameter requires a gradient, so there is no curvature")
    with untouched_randomness(context.seed), torch.enable_grad():
        loss = context.workload.evaluate(model, batch)
        if not loss.requires_grad:
            raise UseError("the loss depends on no parameter, so it has no curvature")
        found: Sequence[Tensor | None] = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return tuple(name for name, one in zip(tensors, found, strict=True) if one is not None)


def _is_swept(setup: CurvatureSetup) -> bool:
    """Are all directions measured in one pass? Three of them show it."""
    loss, names = setup.workload.loss, setup.parameters
    return curvature(setup.model, loss, setup.batch, parameters=names, directions=3).route == "tangents"


def _rougher(setup: CurvatureSetup) -> CurvatureSetup:
    """With the directions and places of ROUGH, which take a product each."""
    effort = setup.effort
    most = effort.most if setup.context.deep else min(effort.most, ROUGH.most)
    rough = min(effort.directions, ROUGH.directions)
    effort = replace(effort, directions=rough, decades=ROUGH.decades, near=ROUGH.near, most=most)
    return replace(setup, effort=effort, budget=Budget(most, deep=setup.context.deep))


def _affordable(setup: CurvatureSetup) -> CurvatureSetup:
    """With as many examples, and then products for eigenvalues, as the work allows."""
    share = setup.effort.most / setup.planned
    if share >= 1:
        return setup
    each = math.ceil(setup.targets / (examples_in(setup.batch) or 1))
    batch = few(setup.batch, max(int(share * setup.targets), min(FEWEST_EXAMPLES * each, setup.targets)))
    work, _ = _measured(setup.context, setup.model, batch)
    setup = replace(setup, batch=batch, parameters=_used(setup.context, setup.model, batch), work=work.total)
    over = math.ceil((setup.planned - setup.effort.most) / (PRODUCT * setup.work))
    if over > 0:
        fewer = max(FEWEST_PRODUCTS, setup.effort.eigenvalues - math.ceil(over / 2))
        setup = replace(setup, effort=replace(setup.effort, eigenvalues=fewer))
    if setup.planned > MOST_EXTRA * setup.effort.most:
        raise TooLong(f"networks of {setup.size} are too large")
    return replace(setup, budget=Budget(max(setup.planned, setup.effort.most), deep=setup.context.deep))
