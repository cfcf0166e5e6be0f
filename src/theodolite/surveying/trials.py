"""Small networks to train for a few steps: of which sizes, on what, and under which plans."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from theodolite.anatomy import Anatomy, UnclassifiedError, dissect
from theodolite.anatomy.part import Role
from theodolite.anatomy.specimen import shapes_of
from theodolite.core.batches import Batch
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.planning import Plan, plan
from theodolite.planning.counterparts import lone_branches
from theodolite.surveying.batches import examples_in, first_of
from theodolite.surveying.budget import pass_work
from theodolite.surveying.finding import Value
from theodolite.surveying.site import Site
from theodolite.workloads import Workload

OPTIMIZER, LR = "adamw", 2.0**-8
"""What trial networks are trained with. A moderate learning rate; how sizes compare hardly depends on it."""
SMALLEST_WIDTH, SMALLEST_DEPTH = 64, 2
GROWTHS: Mapping[str, tuple[int, ...]] = {"width": (2, 4), "depth": (4,)}
"""How many times larger than the base trial networks are, …"""
DEEP_GROWTHS: Mapping[str, tuple[int, ...]] = {"width": (2, 4, 8), "depth": (2, 4, 8)}
"""… and where there is time."""
MOST_PARAMETERS = 30_000_000
"""Of one trial network; eight times as many where there is time."""
MOST_ENTRIES, FEWEST_EXAMPLES = 512, 4
"""Unless there is time, batches are cut to about so many numbers in their inputs, and not below so many
examples, …"""
MOST_LOGITS = 4_000_000
"""… unless each target has a large vocabulary of logits, which would take most of the time."""
MOST_WORK, MOST_LEAST_WORK = 4e9, 1.6e10
"""Unless there is time, most multiplications of a forward pass of a trial network, and of the narrowest of
the wider ones. Where one takes more, batches are cut to two examples, and then larger networks left out."""


Shapes = Mapping[str, tuple[int, ...]]


class Untried(UseError):
    """No network is small enough to be tried, or none of the small ones can be built."""


class Overworked(Untried):
    """Trial networks take too much work."""


class Unplannable(Untried):
    """No plan can be made; the message is the planner's."""


@dataclass(frozen=True)
class Trials:
    """A base size, sizes that are wider and deeper, and the workload with smaller batches."""

    site: Site = field(repr=False)
    workload: Workload
    base: Size
    widths: tuple[Size, ...]
    """The wider ones, the widest last; at least one."""
    depths: tuple[Size, ...]
    """The deeper ones; none where depth adds no residual block, or where they are too large."""
    left_out: tuple[Size, ...] = ()
    """Sizes that would be among these, but for the work that they take."""
    _kept: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def seed(self) -> int:
        """Of the initial weights and the batches."""
        return self.site.seed

    @cached_property
    def roles(self) -> dict[str, Role]:
        """Of the site's, those for tensors that a network of base size has: a pattern must match one."""
        names = list(shapes_of(self.site.build_hollow(self.base)))
        given = self.site.roles or {}
        return {pattern: role for pattern, role in given.items() if fnmatch.filter(names, pattern)}

    @property
    def ground(self) -> dict[str, Value]:
        """On what is trained, for the evidence."""
        found: dict[str, Value] = {"sizes": ", ".join(map(str, (self.base, *self.widths, *self.depths)))}
        if (examples := examples_in(self.workload.draw(self.seed, 0))) is not None:
            found["examples in a batch"] = examples
        if self.left_out:
            found["left out, too much work"] = ", ".join(map(str, self.left_out))
        return found

    @property
    def largest(self) -> tuple[Size, ...]:
        """The widest and the deepest."""
        return (*self.widths[-1:], *self.depths[-1:])

    def planned(self, size: Size, lr: float = LR) -> Plan:
        """The plan from the base size."""
        return self._plan(size, self.base, lr)

    def standard(self, size: Size, lr: float = LR) -> Plan:
        """The standard parameterization: the plan of a network that is its own base."""
        return self._plan(size, size, lr)

    def anatomy(self, size: Size) -> Anatomy:
        """What is in the network of a size."""
        if size == self.site.size and self.roles == (self.site.roles or {}):
            return self.site.anatomy
        if size not in self._kept:
            inputs = self.site.inputs
            self._kept[size] = dissect(self.workload.build, inputs, size=size, roles=self.roles)
        found: Anatomy = self._kept[size]
        return found

    def lone(self, size: Size) -> frozenset[tuple[int, int]]:
        """By block and number: the branches of the network of a size that do not repeat with depth."""
        others = [one for one in (self.base, *self.depths[-1:]) if one.depth != size.depth]
        return lone_branches(self.anatomy(size), map(self.anatomy, others))

    def _plan(self, size: Size, base: Size, lr: float) -> Plan:
        if (size, base, lr) not in self._kept:
            self._kept[size, base, lr] = plan(
                self.workload.build,
                self.site.inputs,
                size=size,
                base=base,
                optimizer=OPTIMIZER,
                lr=lr,
                roles=self.roles,
                anatomies={one: self.anatomy(one) for one in (size, base)},
            )
        found: Plan = self._kept[size, base, lr]
        return found


def find_trials(site: Site) -> Trials:
    """The narrowest networks that can be built and planned for.

    Raises Unplannable where no plan can be made at any width, Untried where no trial can be built or all are
    too large, and UnclassifiedError like everyone who asks for the anatomy.
    """
    grown = site.anatomy.grown_blocks or 0
    has_depth = grown > site.anatomy.num_blocks > 0
    workload = site.workload if site.deep else _lighter(site.workload, site.anatomy)
    problem: UseError | None = None
    for base in _bases(site, has_depth):
        try:
            widths = _grown(site, base, "width")
            depths = _grown(site, base, "depth") if has_depth else ()
            if not widths:
                raise UseError(f"networks wider than {base} have over {_most(site):,} parameters")
        except UseError as error:
            problem = problem if isinstance(problem, Unplannable) else error
            continue
        try:
            trials = _affordable(Trials(site, workload, base, widths, depths))
        except Overworked as error:
            problem = problem if isinstance(problem, Unplannable) else error
            continue
        try:
            for size in trials.largest:
                trials.planned(size)
        except UnclassifiedError as error:  # at the surveyed size all was clear
            problem = problem if isinstance(problem, Unplannable) else error
            continue
        except UseError as error:
            problem = Unplannable(str(error))
            continue
        return trials
    raise problem if isinstance(problem, Unplannable) else Untried(str(problem))


def _affordable(trials: Trials) -> Trials:
    """The trials with fewer examples, or fewer sizes, where a forward pass takes much work."""
    if trials.site.deep:
        return trials
    here = _forward(trials, trials.base)
    if all(here * _times(trials.base, size) <= MOST_WORK for size in trials.largest):
        return trials
    larger = (*trials.widths, *trials.depths)
    works = {size: _forward(trials, size) for size in larger}
    if max(works.values()) > MOST_WORK and (examples_in(trials.workload.draw(trials.seed, 0)) or 0) > 2:
        workload = trials.workload
        halved = dataclasses.replace(
            workload, batch=lambda seed, step: first_of(workload.draw(seed, step), 2)
        )
        trials = dataclasses.replace(trials, workload=halved)
        works = {size: _forward(trials, size) for size in larger}
    narrowest = trials.widths[0]
    if works[narrowest] > MOST_LEAST_WORK:
        raise Overworked(
            f"a forward pass of {narrowest} takes {works[narrowest]:.1g} multiplications, and trials of more "
            f"than {MOST_LEAST_WORK:.1g} are not made"
        )
    fitting = [size for size in larger if size == narrowest or works[size] <= MOST_WORK]
    return dataclasses.replace(
        trials,
        widths=tuple(size for size in trials.widths if size in fitting),
        depths=tuple(size for size in trials.depths if size in fitting),
        left_out=tuple(size for size in larger if size not in fitting),
    )


def _forward(trials: Trials, size: Size) -> float:
    """What a forward pass takes, in multiplications."""
    model, batch = trials.site.build(size), trials.workload.draw(trials.seed, 0)
    with untouched_randomness(trials.seed), torch.no_grad():
        return pass_work(lambda: trials.workload.evaluate(model, batch)).total


def _times(base: Size, size: Size) -> float:
    """How many times the work of the base a forward pass takes at most."""
    return (size.width / base.width) ** 2 * size.depth / base.depth


def _bases(site: Site, has_depth: bool) -> Iterator[Size]:
    """The narrowest and shallowest first."""
    halvings = [site.size.width >> k for k in range(12) if site.size.width % (1 << k) == 0]
    widths = sorted(width for width in halvings if width >= SMALLEST_WIDTH) or [site.size.width]
    depths = (SMALLEST_DEPTH, site.size.depth) if has_depth else (site.size.depth,)
    for depth in dict.fromkeys(depths):
        for width in widths:
            yield Size(width, depth)


def _grown(site: Site, base: Size, axis: Literal["width", "depth"]) -> tuple[Size, ...]:
    """The larger sizes along an axis that are not too large."""
    factors = (DEEP_GROWTHS if site.deep else GROWTHS)[axis]
    if axis == "depth":
        sizes = [Size(base.width, base.depth * factor) for factor in factors]
        return tuple(size for size in sizes if _count(_shapes(site, size)) <= _most(site))
    here = _shapes(site, base)
    found = []
    for factor in factors:
        size = Size(base.width * factor, base.depth)
        shapes = _shapes(site, size)
        if not _in_proportion(site.anatomy, here, shapes, factor):
            raise UseError(f"the tensors of {base} and {size} do not all grow as those at {site.size} do")
        if _count(shapes) <= _most(site):
            found.append(size)
    return tuple(found)


def _in_proportion(anatomy: Anatomy, here: Shapes, grown: Shapes, factor: int) -> bool:
    """Do the same dimensions grow by the factor that grow at the surveyed size? Heads can be too few to."""
    return all(
        size == before * (factor if axis in anatomy[name].grown_axes else 1)
        for name in here
        if name in anatomy and anatomy[name].trained and name in grown
        for axis, (before, size) in enumerate(zip(here[name], grown[name], strict=True))
    )


def _shapes(site: Site, size: Size) -> Shapes:
    return shapes_of(site.build_hollow(size))


def _count(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes.values()))


def _most(site: Site) -> int:
    return MOST_PARAMETERS * (8 if site.deep else 1)


def _lighter(workload: Workload, anatomy: Anatomy) -> Workload:
    """The workload with fewer examples in a batch, if all its tensors have them along the first dimension."""
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
