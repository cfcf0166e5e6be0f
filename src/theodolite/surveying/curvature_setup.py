"""What curvature is measured on: which network, how much data, how many directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.anatomy.names import canonical_parameters
from theodolite.core.batches import Batch, targets_in
from theodolite.core.building import untouched_randomness
from theodolite.core.calling import ModelLoss, OutputLoss, call, logits
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.present.text import counted
from theodolite.probes.curvature.curvature import curvature
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, hessian
from theodolite.probes.curvature.rescaling import scalable
from theodolite.surveying.budget import Budget, TooLong, Work, amount, examples_in, few
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
    size: Size
    effort: CurvatureEffort
    model: nn.Module = field(repr=False)
    batch: Batch = field(repr=False)

    @property
    def workload(self) -> Workload:
        """The surveyed workload."""
        return self.context.workload

    @cached_property
    def work(self) -> Work:
        """Of a forward pass."""
        return self.context.forward_work(self.model, self.batch)

    @property
    def planned(self) -> float:
        """Most multiplications of all measurements."""
        return PRODUCT * (self.effort.products + OTHERS) * self.work.total

    @cached_property
    def budget(self) -> Budget:
        """For all measurements."""
        return Budget(self.effort.most, deep=self.context.deep)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that the loss depends on."""
        tensors = {name: one for name, one in canonical_parameters(self.model) if one.requires_grad}
        if not tensors:
            raise UseError("no parameter requires a gradient, so there is no curvature")
        with untouched_randomness(self.context.seed), torch.enable_grad():
            loss = self.workload.evaluate(self.model, self.batch)
            if not loss.requires_grad:
                raise UseError("the loss depends on no parameter, so it has no curvature")
            found = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        return tuple(name for name, one in zip(tensors, found, strict=True) if one is not None)

    @property
    def directions(self) -> int:
        """The number of directions, at most the number of parameters."""
        return min(self.effort.directions, self.hessian.size)

    @property
    def targets(self) -> int:
        """The number of targets in the batch."""
        return targets_in(self.batch)

    @property
    def where(self) -> str:
        """Begins a sentence."""
        return self.context.where(self.size)

    @property
    def setting(self) -> dict[str, Value]:
        """What was measured, for the evidence."""
        return {
            "size": str(self.size),
            "parameters": self.hessian.size,
            "targets in the batch": amount(self.batch, self.context.whole_batch),
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
    def objective(self) -> Objective:
        """The loss on the batch."""
        return Objective(self.model, self.workload.loss, self.batch, parameters=self.parameters)

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
        with self.objective.conditions():
            return self.objective.cross_entropy(self.logits, self.batch) is not None

    @cached_property
    def is_linear(self) -> bool:
        """Is the loss linear in the output, here and at zero (where no softmax or sigmoid is saturated)?"""
        places = (self.logits, torch.zeros_like(self.logits))
        with self.objective.conditions():
            return not any(_curves(lambda z: self.objective.loss(z, self.batch[1]), at) for at in places)

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
        return few(_whole(self.context.draw(step)), self.targets)

    def spend(self, products: int) -> None:
        """Count products with the Hessian that come next. Raises TooLong if they are too many."""
        try:
            self.budget.spend(PRODUCT * products * self.work.total)
        except TooLong as error:
            raise TooLong(f"{error}, at {self.size}") from None


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
        raise TooLong(_why_too_large(context, base))
    loss, batch, names = context.workload.loss, found.batch, found.parameters
    # Are all directions measured in one pass? Three of them show it.
    if curvature(found.model, loss, batch, parameters=names, directions=3).route == "tangents":
        return _affordable(found) if found.effort == ROUGH else found
    effort = replace(
        found.effort,
        directions=min(found.effort.directions, ROUGH.directions),
        decades=ROUGH.decades,
        near=ROUGH.near,
        most=found.effort.most if context.deep else min(found.effort.most, ROUGH.most),
    )
    return _affordable(replace(found, effort=effort))


def _setup(
    context: SurveyContext, size: Size, effort: CurvatureEffort, *, limit: float = 1.01
) -> CurvatureSetup | None:
    """A network of this size; None if it takes more than `limit` times the work."""
    if context.num_parameters(size) > MOST_PARAMETERS:
        return None
    model = context.build(size)
    if any(parameter.dtype in HALVES for parameter in model.parameters()):
        model.float()  # half precision is too coarse for second derivatives
    setup = CurvatureSetup(context, size, effort, model, few(_whole(context.batch), effort.targets))
    share = effort.work / max(effort.work, setup.work.multiplications)
    if share < 1:
        setup = replace(setup, batch=few(setup.batch, max(FEWEST, int(setup.targets * share))))
    too_large = setup.work.multiplications > limit * effort.work
    too_large = too_large or (setup.is_of_logits and setup.logits.numel() > effort.logits)
    return None if too_large else setup


def _why_too_large(context: SurveyContext, size: Size) -> str:
    """What of a network, its loss or its logits is too large even for a rough look."""
    count = context.num_parameters(size)
    if count > MOST_PARAMETERS:
        return f"networks of {size} are too large, with {count:,} parameters"
    setup = _setup(context, size, replace(ROUGH, logits=math.inf), limit=math.inf)
    assert setup is not None
    if setup.work.multiplications > EXTRA * ROUGH.work:
        return f"at {size} the loss of {_examples(setup)} takes {_shown(setup.work)}, which is too much"
    entries = setup.logits.numel()
    return f"at {size} the logits of {_examples(setup)} have {entries:,} entries, which is too much"


def _examples(setup: CurvatureSetup) -> str:
    """The examples of a batch that cannot be cut further."""
    number = examples_in(setup.batch)
    return "a batch, which cannot be cut," if number is None else counted(number, "example")


def _shown(work: Work) -> str:
    return f"{work.operations:,} operations with {work.multiplications:.2g} multiplications"


def _affordable(setup: CurvatureSetup) -> CurvatureSetup:
    """With as many examples, and then products for eigenvalues, as the work allows."""
    effort, targets = setup.effort, setup.targets
    share = effort.most / setup.planned
    if share >= 1:
        return setup
    each = math.ceil(targets / (examples_in(setup.batch) or 1))
    fewer = few(setup.batch, max(int(share * targets), min(FEWEST_EXAMPLES * each, targets)))
    setup = replace(setup, batch=fewer)
    over = math.ceil((setup.planned - effort.most) / (PRODUCT * setup.work.total))
    if over > 0:
        products = max(FEWEST_PRODUCTS, effort.eigenvalues - math.ceil(over / 2))
        setup = replace(setup, effort=replace(effort, eigenvalues=products))
    if setup.planned > MOST_EXTRA * effort.most:
        raise TooLong(
            f"products with the Hessian at {setup.size} take {setup.planned / effort.most:.2g} times the "
            f"work that is allowed, as the loss of {_examples(setup)} takes {_shown(setup.work)}"
        )
    return replace(setup, effort=replace(setup.effort, most=max(setup.planned, effort.most)))


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


def _whole(batch: Batch) -> Batch:
    """The batch in float32, where it comes in halves."""
    found: Batch = tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf, batch
    )
    return found
