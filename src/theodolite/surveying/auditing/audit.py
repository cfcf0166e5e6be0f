"""`audit`: is a parameterization that somebody wrote by hand right?"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from theodolite.anatomy.part import Role, untrained
from theodolite.core import arguments
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, part, silent
from theodolite.core.size import Size
from theodolite.optimizers.group_scales import note_of_scales
from theodolite.planning.factory import MakeOptimizer, check_pure
from theodolite.present.text import listed
from theodolite.probes.scaling.coordinates import coordinates
from theodolite.probes.scaling.spectral import Spectral, spectral
from theodolite.surveying.auditing.exponents import ATOL, TensorScaling, scalings
from theodolite.surveying.auditing.heads import judged_heads
from theodolite.surveying.auditing.layerwise import layerwise_decay
from theodolite.surveying.auditing.reading import MOST_PARAMETERS, Reading, check_rules, gradient_sizes, read
from theodolite.surveying.auditing.report import Audit
from theodolite.surveying.auditing.verdicts import judge
from theodolite.surveying.context import SurveyContext
from theodolite.workloads import Workload
from theodolite.workloads import workload as look_up

GROWTHS = (1, 2, 4)
"""How many times the base size the others are by default."""
MOST_TRAINED = 30_000_000
"""Parameters of the largest network that is trained."""


@exclusive()
def audit(
    workload: Workload | str,
    *,
    optimizer: MakeOptimizer | None = None,
    base: Size | None = None,
    widths: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    train: bool = True,
    steps: int = 4,
    seeds: int | Sequence[int] = 2,
    rules: Mapping[str, str] | None = None,
    roles: Mapping[str, Role] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Audit a hand-written parameterization: the network's own initial values, multipliers and optimizer.

    At several widths and depths the network is built and its optimizer is made, and how initial values,
    learning rates, decay and eps go with size is held against the rule of each tensor's optimizer. A
    multiplier in the forward pass, a std and a learning rate can be traded against each other; only what the
    function and its updates see counts. Then small networks train for a few steps.

    Args:
        workload: a Workload, or its name, as in `theodolite.survey`.
        optimizer: your function `make_optimizer(model)`, which returns an optimizer or several; the
            workload's own by default.
        base: the size at which your numbers are right; the workload's own by default.
        widths: to compare, the base width among them; by default it, twice and four times it.
        depths: the same with depth; by default one depth alone where depth adds no residual block.
        train: train networks of these sizes for a few steps too?
        steps: of training.
        seeds: of the coordinate check, their number or the seeds; the first one is that of everything else.
        rules: for optimizers that are not known here, the rule that fits, by the name of the class.
        roles: roles of tensors that `dissect` cannot classify, by name pattern.
        progress: called with a title and the fraction done.

    >>> import torch, theodolite as th
    >>> make = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> found = audit("mlp-mixture", optimizer=make, base=th.Size(32, 2), train=False)
    >>> [finding.code for finding in found.at("fail")]
    ['TH206', 'TH207', 'TH209']
    """
    if not isinstance(workload, Workload | str):
        raise UseError(
            f"an audit takes a Workload or the name of one, not {type(workload).__name__}: "
            "theodolite.Workload(name, build, batch, loss, optimizer=make_optimizer)"
        )
    workload = look_up(workload) if isinstance(workload, str) else workload
    make = workload.optimizer if optimizer is None else optimizer
    if make is None:
        raise UseError(
            f"workload {workload.name!r} says nothing of its optimizer: give optimizer=make_optimizer, your "
            "function (model) -> Optimizer, or Workload(…, optimizer=make_optimizer); on the command line "
            "--optimizer file.py:make_optimizer"
        )
    arguments.whole("steps", steps, least=1)
    chosen = arguments.seeds("seeds", seeds)
    given = check_rules(rules)
    if not isinstance(base, Size | None):
        raise UseError(f"base is {base!r}: give a Size, for example Size(256, 4)")
    start = workload.size.network if base is None else base
    context = SurveyContext(workload, start, chosen[0], roles=roles)
    tell = progress or silent
    with untouched_randomness(chosen[0]):
        tell("one network", 0.0)
        check_pure(make, workload.build, start)
        sizes = audited_sizes(context, widths, depths)
        readings: dict[Size, Reading] = {}
        for size in sizes.all:
            tell(f"reading {size}", 0.4 * len(readings) / len(sizes.all))
            readings[size] = read_at(context, make, size, given)
        _check_used(given, readings.values())
        found = held_against_rules(context, make, sizes, readings, steps=steps if train else 1)
        if not train:
            return found
        return _trained(found, context, make, sizes, steps, chosen, part(progress, 0.45, 1.0))


@dataclasses.dataclass(frozen=True)
class AuditedSizes:
    """The sizes of an audit: along each axis the base size first."""

    base: Size
    widths: tuple[Size, ...]
    """At least two, or none."""
    depths: tuple[Size, ...]

    @property
    def all(self) -> tuple[Size, ...]:
        """Each once, the base first."""
        return tuple(dict.fromkeys((self.base, *self.widths, *self.depths)))


def audited_sizes(
    context: SurveyContext, widths: Sequence[int] | None = None, depths: Sequence[int] | None = None
) -> AuditedSizes:
    """The sizes to compare: those given, or the base, twice and four times it."""
    base = context.size
    if depths is None:
        grown = context.anatomy.grown_blocks or 0
        adds_blocks = grown > context.anatomy.num_blocks > 0
        depths = [base.depth * factor for factor in GROWTHS] if adds_blocks else [base.depth]
    if widths is None:
        widths = [base.width * factor for factor in GROWTHS]
    wide = tuple(Size(width, base.depth) for width in _along("widths", widths, base.width))
    deep = tuple(Size(base.width, depth) for depth in _along("depths", depths, base.depth))
    if len(wide) < 2 and len(deep) < 2:
        raise UseError(
            f"widths are {list(widths)} and depths {list(depths)}: give at least two of one of them, to see "
            "how numbers go with size"
        )
    return AuditedSizes(base, wide if len(wide) > 1 else (), deep if len(deep) > 1 else ())


def read_at(
    context: SurveyContext, make: MakeOptimizer, size: Size, rules: Mapping[str, str] | None = None
) -> Reading:
    """Read the workload of a survey's context and its optimizer at one size."""
    # At its own size every pattern has to match, which `dissect` checks.
    known = context.roles if size == context.size else context.roles_among(context.shapes(size))
    return read(context.workload, make, size, batch=context.batch, roles=known, rules=rules)


def held_against_rules(
    context: SurveyContext,
    make: MakeOptimizer,
    sizes: AuditedSizes,
    readings: Mapping[Size, Reading],
    *,
    steps: int = 1,
) -> Audit:
    """What was read, against the rules; the gradients of so many steps say whether eps matters."""
    base = readings[sizes.base]
    with context.calling():
        gradients = gradient_sizes(context.workload, make, sizes.base, seed=context.seed, steps=steps)
    wide, deep = ([readings[size] for size in along] for along in (sizes.widths, sizes.depths))
    width, heads = judged_heads(wide, scalings(wide, "width", gradients)) if wide else ((), ())
    depth = scalings(deep, "depth", gradients) if deep else ()
    return Audit(
        workload=context.workload.name,
        base=sizes.base,
        widths=tuple(size.width for size in sizes.widths),
        depths=tuple(size.depth for size in sizes.depths),
        width=width,
        depth=depth,
        findings=judge(base, wide[1:], deep[1:], width, depth, heads),
        notes=tuple(_notes(base, sizes, readings, deep, width)),
    )


def _trained(
    found: Audit,
    context: SurveyContext,
    make: MakeOptimizer,
    sizes: AuditedSizes,
    steps: int,
    seeds: Sequence[int],
    progress: Progress,
) -> Audit:
    """The audit with what a few steps of training say."""
    small = [size for size in sizes.all if context.num_parameters(size) <= MOST_TRAINED]
    large = [size for size in sizes.all if size not in small]
    workload = dataclasses.replace(context.workload, optimizer=make)
    notes = list(found.notes)
    if large:
        notes.append(
            f"Not trained: {listed([str(size) for size in large])}, which have over {MOST_TRAINED:,} "
            "parameters. Give a smaller base to train them."
        )
    if len(small) < 2 or sizes.base not in small:
        return dataclasses.replace(found, notes=tuple(notes))
    roles: dict[str, Any] = {"roles": context.roles} if context.roles else {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(context.calling())
        checked = coordinates(
            workload,
            small,
            parameterization="own",
            steps=steps,
            seeds=seeds,
            progress=part(progress, 0.0, 0.7),
            **roles,
        )
        conditions: list[Spectral] = []
        for axis in (sizes.widths, sizes.depths):
            last = next((size for size in reversed(axis) if size in small and size != sizes.base), None)
            if last is not None:
                progress(f"spectral condition of {last}", 0.7 + 0.15 * len(conditions))
                conditions.append(
                    spectral(
                        workload,
                        last,
                        base=sizes.base,
                        parameterization="own",
                        steps=steps,
                        seed=seeds[0],
                        **roles,
                    )
                )
    return dataclasses.replace(found, coordinates=checked, spectral=tuple(conditions), notes=tuple(notes))


def _check_used(rules: Mapping[str, str], readings: Iterable[Reading]) -> None:
    """Refuse a rule for a class that trains nothing."""
    classes = dict.fromkeys(one.class_name for each in readings for one in each.options.values())
    there = [name for name in classes if name]
    for name in rules:
        if name not in there:
            raise UseError(f"rules[{name!r}]: no optimizer is of this class; there is {listed(there)}")


def _along(name: str, given: Any, base: int) -> list[int]:
    """Sizes along an axis, the base first and the others in order."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise UseError(f"{name} is {given!r}: give a list, as in [64, 128, 256]")
    numbers = [arguments.whole(name, one, least=1) for one in given]
    return [base, *sorted(set(numbers) - {base})]


def _is_standard(width: Sequence[TensorScaling]) -> bool:
    """Do hidden weights need a learning rate that follows the width, and does nothing follow it?"""
    rates = [one.exponent("lr") for one in width]
    alone = all(abs(rate.own) <= ATOL for rate in rates) and all(abs(one.multiplied) <= ATOL for one in width)
    tied = any(one.readout is not None and abs(one.exponent("readout").own) > ATOL for one in width)
    return alone and not tied and any(abs(rate.excess) > ATOL for rate in rates)


def _notes(
    base: Reading,
    sizes: AuditedSizes,
    readings: Mapping[Size, Reading],
    deep: Sequence[Reading],
    width: Sequence[TensorScaling],
) -> Iterator[str]:
    yield from (f"Beside the optimizer: {note}." for note in base.notes)
    if left := untrained(base.parts):
        yield f"{left}: not trained, and not judged."
    if not sizes.depths:
        yield "One depth was read: nothing is said about depth."
    if not sizes.widths:
        yield "One width was read: nothing is said about width."
    if _is_standard(width):
        yield (
            "No learning rate and no multiplier follows the width. That is the standard parameterization, as "
            "most training code has it; theodolite.plan gives every tensor numbers that follow it."
        )
    if sum(part.numel for part in base.anatomy.values()) > MOST_PARAMETERS:
        yield (
            f"Gradients were not computed, as the network has over {MOST_PARAMETERS:,} parameters: whether "
            "eps limits steps is not known."
        )
    scales = dict.fromkeys(name for one in readings.values() for name in one.scales)
    if note := note_of_scales(scales):
        yield note
    if deep and (layers := layerwise_decay(deep)) is not None:
        yield (
            f"Every block has {layers.factor:.3g} times the learning rate of the one after it. Depths are "
            "compared at equal distances from the last block."
        )
