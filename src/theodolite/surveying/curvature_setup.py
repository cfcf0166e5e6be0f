"""Where curvature is measured: on which network, on how much data, in how many directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from theodolite.anatomy.names import canonical_parameters
from theodolite.anatomy.specimen import shapes_of
from theodolite.core.batches import Batch
from theodolite.core.building import in_one_line, untouched_randomness
from theodolite.core.calling import ModelLoss, OutputLoss, call, evaluate, logits
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet.training import targets_in
from theodolite.probes.curvature.curvature import curvature
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.curvature.operator import Hessian, hessian
from theodolite.probes.curvature.rescaling import scalable
from theodolite.surveying.batches import amount, examples_in, few
from theodolite.surveying.budget import Budget, TooLong, Work, pass_work
from theodolite.surveying.finding import Value
from theodolite.surveying.site import Site
from theodolite.workloads import Workload


@dataclass(frozen=True)
class Effort:
    """How much is spent."""

    targets: int
    """In a batch, about; one example at least."""
    directions: int
    decades: tuple[float, ...]
    """Where the temperature is tried: powers of ten around the size of the logits."""
    near: tuple[float, ...]
    """Where the scale of the weights is tried: by how many powers of ten the logits are then larger than
    at the peak along the temperature."""
    probes: int
    steps: int
    """Of the density."""
    work: float
    """Multiplications of a forward pass, to which the batch is cut down as far as it can be, …"""
    logits: float
    """… and most entries of the logits."""
    most: float
    """Multiplications that all of it may take."""
    eigenvalues: int = 150
    """Most products for the eigenvalues of one operator."""

    @property
    def products(self) -> int:
        """Products with the Hessian that all of it takes, at most."""
        places = len(self.decades) + 1 + len(self.near)
        return self.directions * places + self.probes * self.steps + 2 * self.eigenvalues


QUICK = Effort(
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
"""For networks that are large even at base size, and for those that tangents cannot pass."""
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
"""Targets to which a batch is cut down for the work of one forward pass, …"""
FEWEST_EXAMPLES, FEWEST_PRODUCTS = 4, 40
"""… and examples to which it is for the work of all products, where that is much; then so many products are
left for the eigenvalues of an operator."""
EXTRA = 5
"""Times the work that is put up with if the batch cannot be cut down further."""
MOST_EXTRA = 1.5
"""Times the work of all products that is put up with then."""
MOST_PARAMETERS = 30_000_000
"""Above this a network is not even built to see how much work it is."""
PRODUCT = 6
"""Forward passes that a product with the Hessian takes about."""
OTHERS = 12
"""Further products: for steps and for gradients on several batches."""


@dataclass(frozen=True)
class Spot:
    """A network at its start, and a batch."""

    site: Site = field(repr=False)
    model: nn.Module = field(repr=False)
    batch: Batch = field(repr=False)
    size: Size
    effort: Effort
    parameters: tuple[str, ...] = field(repr=False)
    """Those that the loss depends on."""
    work: float
    """Of a forward pass, in multiplications."""
    budget: Budget = field(repr=False)

    @property
    def workload(self) -> Workload:
        """What the site surveys."""
        return self.site.workload

    @property
    def planned(self) -> float:
        """Multiplications that all of it takes, at most."""
        return PRODUCT * (self.effort.products + OTHERS) * self.work

    @property
    def directions(self) -> int:
        """As many as there is time for, if the network has so many parameters."""
        return min(self.effort.directions, self.hessian.size)

    @property
    def targets(self) -> int:
        """In the batch."""
        return targets_in(self.batch)

    @property
    def amount(self) -> int | str:
        """The number of targets, and of how many in the workload's own batch."""
        return amount(self.batch, self.site.whole_batch)

    @property
    def where(self) -> str:
        """The size, and why it is another than the site's."""
        return f"{self.size}" if self.size == self.site.size else f"{self.size}, the base of the trials,"

    @property
    def ground(self) -> dict[str, Value]:
        """What is measured on, for the evidence."""
        return {
            "size": str(self.size),
            "parameters": self.hessian.size,
            "targets in the batch": self.amount,
            "directions": self.directions,
        }

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
        """Is the loss a function of the logits, so that its curvature can be told from theirs?"""
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
        """Is the loss linear in the output, here and at zero, where no softmax or sigmoid is saturated?"""
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
        with torch.no_grad(), untouched_randomness(self.site.seed):
            return logits(call(self.model, self.batch[0]))

    def draw(self, step: int) -> Batch:
        """Another batch, as small as the first."""
        seed = self.site.seed
        try:
            return few(_whole(self.workload.draw(seed, step)), self.targets)
        except UseError:
            raise
        except Exception as error:
            raise UseError(f"batch({seed}, {step}) failed: {in_one_line(error)}") from error

    def spend(self, products: int) -> None:
        """Count so many products with the Hessian, which are to be made next; raise TooLong if too many."""
        try:
            self.budget.spend(PRODUCT * products * self.work)
        except TooLong as error:
            raise TooLong(f"{error}, at {self.size}") from None


def _curves(loss: Callable[[Tensor], Tensor], place: Tensor) -> bool:
    """Has the loss a second derivative there, in a random direction?"""
    place = place.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(place), place, create_graph=True)
    if not slope.requires_grad:
        return False
    (change,) = torch.autograd.grad(
        slope, place, torch.randn_like(slope), allow_unused=True, materialize_grads=True
    )
    return bool(change.any())


def find_spot(site: Site) -> Spot:
    """The surveyed network itself if it is small, otherwise the base of the trials.

    Raises TooLong where that is too large as well, and whatever keeps the trials from being found.
    """
    best = DEEP if site.deep else QUICK
    found = _spot(site, site.size, best)
    if found is None:
        base = site.trials.base
        found = _spot(site, base, best) or _spot(site, base, ROUGH, limit=EXTRA)
    if found is None:
        raise TooLong(f"networks of {base} are too large for it")
    if not _is_swept(found):
        return _affordable(_rougher(found))
    return _affordable(found) if found.effort == ROUGH else found


def _spot(site: Site, size: Size, effort: Effort, *, limit: float = 1.01) -> Spot | None:
    """A network of this size; None if it takes more than `limit` times the work."""
    if sum(math.prod(shape) for shape in shapes_of(site.build_hollow(size)).values()) > MOST_PARAMETERS:
        return None
    model = site.build(size)
    if any(parameter.dtype in HALVES for parameter in model.parameters()):
        model.float()  # second derivatives are beyond what halves can hold
    batch = few(_whole(site.batch), effort.targets)
    work, entries = _measured(site, model, batch)
    if work.multiplications > effort.work:
        share = effort.work / work.multiplications
        batch = few(batch, max(FEWEST, int(targets_in(batch) * share)))
        work, entries = _measured(site, model, batch)
    if work.multiplications > limit * effort.work or entries > effort.logits:
        return None
    budget = Budget(effort.most, deep=site.deep)
    used = _used(site, model, batch)
    return Spot(site, model, batch, size, effort, used, work.total, budget)


def _whole(batch: Batch) -> Batch:
    """The batch in float32, where it comes in halves."""
    found: Batch = tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf, batch
    )
    return found


def _measured(site: Site, model: nn.Module, batch: Batch) -> tuple[Work, int]:
    """What a forward pass takes, and how many entries the logits have."""
    entries = 0

    def run() -> None:
        nonlocal entries
        loss = site.workload.loss
        if isinstance(loss, OutputLoss | ModelLoss):
            entries = evaluate(loss, model, batch).numel()
        else:
            entries = logits(call(model, batch[0])).numel()

    with untouched_randomness(site.seed), torch.no_grad():
        work = pass_work(run)
    return work, entries


def _used(site: Site, model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Names of the parameters that the loss depends on."""
    tensors = {name: tensor for name, tensor in canonical_parameters(model) if tensor.requires_grad}
    if not tensors:
        raise UseError("no parameter requires a gradient, so there is no curvature")
    with untouched_randomness(site.seed), torch.enable_grad():
        loss = site.workload.evaluate(model, batch)
        if not loss.requires_grad:
            raise UseError("the loss depends on no parameter, so it has no curvature")
        found: Sequence[Tensor | None] = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    return tuple(name for name, one in zip(tensors, found, strict=True) if one is not None)


def _is_swept(spot: Spot) -> bool:
    """Do all directions go through the network at once? A few of them show it."""
    loss, names = spot.workload.loss, spot.parameters
    return curvature(spot.model, loss, spot.batch, parameters=names, directions=3).route == "tangents"


def _rougher(spot: Spot) -> Spot:
    """As rough as ROUGH in what takes a product for each direction."""
    effort = spot.effort
    most = effort.most if spot.site.deep else min(effort.most, ROUGH.most)
    rough = min(effort.directions, ROUGH.directions)
    effort = replace(effort, directions=rough, decades=ROUGH.decades, near=ROUGH.near, most=most)
    return replace(spot, effort=effort, budget=Budget(most, deep=spot.site.deep))


def _affordable(spot: Spot) -> Spot:
    """The spot with as many examples, and then eigenvalues, as there is work for; some at least."""
    share = spot.effort.most / spot.planned
    if share >= 1:
        return spot
    each = math.ceil(spot.targets / (examples_in(spot.batch) or 1))
    batch = few(spot.batch, max(int(share * spot.targets), min(FEWEST_EXAMPLES * each, spot.targets)))
    work, _ = _measured(spot.site, spot.model, batch)
    spot = replace(spot, batch=batch, parameters=_used(spot.site, spot.model, batch), work=work.total)
    over = math.ceil((spot.planned - spot.effort.most) / (PRODUCT * spot.work))
    if over > 0:
        fewer = max(FEWEST_PRODUCTS, spot.effort.eigenvalues - math.ceil(over / 2))
        spot = replace(spot, effort=replace(spot.effort, eigenvalues=fewer))
    if spot.planned > MOST_EXTRA * spot.effort.most:
        raise TooLong(f"networks of {spot.size} are too large for it")
    return replace(spot, budget=Budget(max(spot.planned, spot.effort.most), deep=spot.site.deep))
