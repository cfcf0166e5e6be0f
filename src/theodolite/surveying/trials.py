"""Small networks to train for a few steps: which sizes, batches, plans and learning rates."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils._pytree import tree_leaves

from theodolite.anatomy import Anatomy, UnclassifiedError, dissect
from theodolite.anatomy.part import Role
from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.planning import Plan, plan
from theodolite.planning.counterparts import lone_branches
from theodolite.present.text import listed
from theodolite.surveying.budget import examples_in, first_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Finding, Value
from theodolite.workloads import Workload

OPTIMIZER, LR = "adamw", 2.0**-8
"""What trial networks are trained with. A moderate learning rate; comparing sizes hardly depends on it."""
TRAINED: dict[str, Value] = {"optimizer": OPTIMIZER, "learning rate": LR}
"""The same, for the evidence."""
SMALLEST_WIDTH, SMALLEST_DEPTH = 64, 2
GROWTHS: Mapping[str, tuple[int, ...]] = {"width": (2, 4), "depth": (4,)}
"""How many times larger than the base trial networks are."""
DEEP_GROWTHS: Mapping[str, tuple[int, ...]] = {"width": (2, 4, 8), "depth": (2, 4, 8)}
MOST_PARAMETERS = 30_000_000
"""Of one trial network; eight times as many if the survey is deep."""
MOST_ENTRIES, FEWEST_EXAMPLES = 512, 4
"""Unless the survey is deep, batches are cut to about this number of input entries, but not below this number
of examples, …"""
MOST_LOGITS = 4_000_000
"""… unless a large vocabulary makes the logits take most of the time."""
MOST_WORK, MOST_LEAST_WORK = 4e9, 1.6e10
"""Unless the survey is deep: most multiplications in a forward pass of a trial network, and of the narrowest
of the wider ones. Beyond that batches are cut to two examples, and then larger networks are left out."""
OPTIMIZER_WORK = 60
"""Work of an AdamW step for each parameter, in multiplications."""
MOST_SCHEDULE_STEPS, UNKNOWN_SCHEDULE_STEPS = 20_000, 1000
"""Steps to which a schedule is followed, and if its end is not known."""


class Untried(UseError):
    """No network is small enough to be trained, or none of the small ones can be built."""


class Unplannable(Untried):
    """No plan can be made; the message is the planner's."""


class PlannedRates(NamedTuple):
    """The learning rates that training is to use."""

    first: float
    highest: float


@dataclass(frozen=True)
class Trials:
    """A base size, wider and deeper sizes, and the workload with smaller batches."""

    context: SurveyContext = field(repr=False)
    workload: Workload
    base: Size
    widths: tuple[Size, ...]
    """The wider ones, in order; at least one."""
    depths: tuple[Size, ...]
    """The deeper ones; none if depth adds no residual block, or if they are too large."""
    left_out: tuple[Size, ...] = ()
    """Sizes that were left out because they take too much work."""
    _kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def seed(self) -> int:
        """Of the initial weights and the batches."""
        return self.context.seed

    @property
    def larger(self) -> tuple[Size, ...]:
        """The wider and the deeper ones."""
        return (*self.widths, *self.depths)

    @property
    def largest(self) -> tuple[Size, ...]:
        """The widest and the deepest."""
        return (*self.widths[-1:], *self.depths[-1:])

    @cached_property
    def roles(self) -> dict[str, Role]:
        """The roles given for tensors that a network of base size has."""
        return self.context.roles_among(self.context.shapes(self.base))

    @property
    def setting(self) -> dict[str, Value]:
        """What is trained, for the evidence."""
        found: dict[str, Value] = {"sizes": ", ".join(map(str, (self.base, *self.larger)))}
        if (examples := examples_in(self.workload.draw(self.seed, 0))) is not None:
            found["examples in a batch"] = examples
        if self.left_out:
            found["left out, too much work"] = ", ".join(map(str, self.left_out))
        return found

    def noted(self, finding: Finding) -> Finding:
        """The finding with what it was measured on, and a sentence about sizes that were left out."""
        said = finding.sentence
        if self.left_out:
            are = "was" if len(self.left_out) == 1 else "were"
            said += f" {listed([str(size) for size in self.left_out])} {are} left out: too much work."
        evidence = dataclasses.replace(finding.evidence, numbers={**finding.evidence.numbers, **self.setting})
        return dataclasses.replace(finding, sentence=said, evidence=evidence)

    def planned(self, size: Size, lr: float = LR) -> Plan:
        """The plan from the base size."""
        return self._plan(size, self.base, lr)

    def standard(self, size: Size, lr: float = LR) -> Plan:
        """The standard parameterization: the plan of a network that is its own base."""
        return self._plan(size, size, lr)

    def anatomy(self, size: Size) -> Anatomy:
        """The anatomy at a size."""
        if size == self.context.size and self.roles == (self.context.roles or {}):
            return self.context.anatomy
        if size not in self._kept:
            inputs = self.context.inputs
            self._kept[size] = dissect(self.workload.build, inputs, size=size, roles=self.roles)
        found: Anatomy = self._kept[size]
        return found

    def lone(self, size: Size) -> frozenset[tuple[int, int]]:
        """The (block, branch) pairs at a size that do not repeat with depth."""
        others = [one for one in (self.base, *self.depths[-1:]) if one.depth != size.depth]
        return lone_branches(self.anatomy(size), map(self.anatomy, others))

    def forward_work(self, size: Size, workload: Workload | None = None) -> float:
        """Work of a forward pass, in multiplications."""
        batch = (workload or self.workload).draw(self.seed, 0)
        return self.context.forward_work(self.context.build(size), batch).total

    def step_work(self, size: Size, workload: Workload) -> float:
        """Work of one training step, about, in multiplications."""
        return 3 * self.forward_work(size, workload) + OPTIMIZER_WORK * self.context.num_parameters(size)

    def _plan(self, size: Size, base: Size, lr: float) -> Plan:
        if (size, base, lr) not in self._kept:
            self._kept[size, base, lr] = plan(
                self.workload.build,
                self.context.inputs,
                size=size,
                base=base,
                optimizer=OPTIMIZER,
                lr=lr,
                roles=self.roles,
                anatomies={one: self.anatomy(one) for one in (size, base)},
            )
        found: Plan = self._kept[size, base, lr]
        return found


def trials_of(context: SurveyContext) -> Trials:
    """The trial networks of a survey, found once."""
    return context.once(find_trials)


def find_trials(context: SurveyContext) -> Trials:
    """The narrowest networks that can be built and planned for.

    Raises Unplannable if no plan can be made at any width, Untried if no trial can be built or all are too
    large, and UnclassifiedError if the anatomy is not known.
    """
    grown = context.anatomy.grown_blocks or 0
    has_depth = grown > context.anatomy.num_blocks > 0
    workload = context.workload if context.deep else _lighter(context.workload, context.anatomy)
    problem: UseError | None = None
    for base in _bases(context, has_depth):
        try:
            widths = _grown(context, base, "width")
            depths = _grown(context, base, "depth") if has_depth else ()
            if not widths:
                raise UseError(f"networks wider than {base} have over {_most(context):,} parameters")
            return _plannable(_affordable(Trials(context, workload, base, widths, depths)))
        except UseError as error:
            problem = problem if isinstance(problem, Unplannable) else error
    raise problem if isinstance(problem, Unplannable) else Untried(str(problem))


def planned_rates(context: SurveyContext) -> PlannedRates:
    """The first and the highest learning rate: the trials', or what the workload's schedule makes of it."""
    rates = [LR]
    if context.workload.schedule is not None:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)
        # The section on schedules reports a schedule that fails here or warns.
        with warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            rates = [rate for (rate,) in follow_schedule(optimizer, context.workload.schedule)]
    return PlannedRates(rates[0], max(rates))


def follow_schedule(
    optimizer: torch.optim.Optimizer, attach: Callable[[torch.optim.Optimizer], LRScheduler]
) -> Iterator[list[float]]:
    """The learning rates of all groups at each step of a schedule, to its end if it has one."""
    schedule = attach(optimizer)
    if not hasattr(schedule, "step"):
        raise UseError(
            f"it returned a {type(schedule).__name__}, not a scheduler of torch.optim.lr_scheduler"
        )
    end = getattr(schedule, "T_max", None) or getattr(schedule, "total_steps", None)
    for _ in range(min(int(end) + 1, MOST_SCHEDULE_STEPS) if end else UNKNOWN_SCHEDULE_STEPS):
        yield [float(group["lr"]) for group in optimizer.param_groups]
        optimizer.step()  # without gradients it moves nothing
        try:
            # A plateau is told a constant loss.
            schedule.step(0.0) if isinstance(schedule, ReduceLROnPlateau) else schedule.step()
        except ValueError:
            if isinstance(schedule, OneCycleLR):  # it raises at its end
                return
            raise


def _plannable(trials: Trials) -> Trials:
    """The trials, if plans for their largest networks can be made."""
    try:
        for size in trials.largest:
            trials.planned(size)
    except UnclassifiedError:  # at the surveyed size all was clear
        raise
    except UseError as error:
        raise Unplannable(str(error)) from error
    return trials


def _affordable(trials: Trials) -> Trials:
    """The trials with fewer examples, or fewer sizes, if a forward pass takes much work."""
    if trials.context.deep:
        return trials
    base, larger = trials.base, trials.larger
    most = MOST_WORK / trials.forward_work(base)
    # An upper bound in units of the base's work; for most networks it is enough.
    if all((size.width / base.width) ** 2 * size.depth / base.depth <= most for size in trials.largest):
        return trials
    works = {size: trials.forward_work(size) for size in larger}
    if max(works.values()) > MOST_WORK and (examples_in(trials.workload.draw(trials.seed, 0)) or 0) > 2:
        workload = trials.workload
        halved = dataclasses.replace(
            workload, batch=lambda seed, step: first_of(workload.draw(seed, step), 2)
        )
        trials = dataclasses.replace(trials, workload=halved)
        works = {size: trials.forward_work(size) for size in larger}
    narrowest = trials.widths[0]
    if works[narrowest] > MOST_LEAST_WORK:
        raise UseError(
            f"a forward pass of {narrowest} takes {works[narrowest]:.1g} multiplications, more than the "
            f"limit of {MOST_LEAST_WORK:.1g} for trial networks"
        )
    fitting = [size for size in larger if size == narrowest or works[size] <= MOST_WORK]
    return dataclasses.replace(
        trials,
        widths=tuple(size for size in trials.widths if size in fitting),
        depths=tuple(size for size in trials.depths if size in fitting),
        left_out=tuple(size for size in larger if size not in fitting),
    )


def _bases(context: SurveyContext, has_depth: bool) -> Iterator[Size]:
    """The narrowest and shallowest first."""
    depths = (SMALLEST_DEPTH, context.size.depth) if has_depth else (context.size.depth,)
    for depth in dict.fromkeys(depths):
        for width in trial_widths(context.size.width):
            yield Size(width, depth)


def trial_widths(width: int) -> list[int]:
    """Halves of a width down to 64, the narrowest first; the width itself if it has none.

    >>> trial_widths(384), trial_widths(48)
    ([96, 192, 384], [48])
    """
    halves = [width >> k for k in range(12) if width % (1 << k) == 0]
    return sorted(half for half in halves if half >= SMALLEST_WIDTH) or [width]


def _grown(context: SurveyContext, base: Size, axis: Literal["width", "depth"]) -> tuple[Size, ...]:
    """The larger sizes along an axis that are not too large."""
    factors = (DEEP_GROWTHS if context.deep else GROWTHS)[axis]
    if axis == "depth":
        sizes = [Size(base.width, base.depth * factor) for factor in factors]
        return tuple(size for size in sizes if context.num_parameters(size) <= _most(context))
    anatomy, here = context.anatomy, context.shapes(base)
    found = []
    for factor in factors:
        size = Size(base.width * factor, base.depth)
        shapes = context.shapes(size)
        # Do the same dimensions grow as at the surveyed size? A narrow network may have too few heads.
        if any(
            length != before * (factor if axis in anatomy[name].grown_axes else 1)
            for name in here
            if name in anatomy and anatomy[name].trained and name in shapes
            for axis, (before, length) in enumerate(zip(here[name], shapes[name], strict=True))
        ):
            raise UseError(f"the tensors of {base} and {size} do not all grow as those at {context.size} do")
        if sum(map(math.prod, shapes.values())) <= _most(context):
            found.append(size)
    return tuple(found)


def _most(context: SurveyContext) -> int:
    return MOST_PARAMETERS * (8 if context.deep else 1)


def _lighter(workload: Workload, anatomy: Anatomy) -> Workload:
    """The workload with fewer examples in a batch, if they are the first dimension of all its tensors."""
    outside = (part for part in anatomy.values() if part.block is None)
    reads_width = (part for part in outside if part.width_in and not part.width_out)
    ends = (*reads_width, *(part for part in anatomy.values() if part.tied))
    vocabulary = max((max(part.fan_in, part.fan_out) for part in ends), default=1)

    def batch(seed: int, step: int) -> Batch:
        drawn = workload.draw(seed, step)
        if examples_in(drawn) is None:
            return drawn
        entries, targets = (
            max((leaf[0].numel() for leaf in tree_leaves(half) if isinstance(leaf, Tensor)), default=1)
            for half in drawn
        )
        kept = max(FEWEST_EXAMPLES, MOST_ENTRIES // entries)
        kept = max(1, min(kept, MOST_LOGITS // (targets * vocabulary)))
        return first_of(drawn, kept)

    return dataclasses.replace(workload, batch=batch)
