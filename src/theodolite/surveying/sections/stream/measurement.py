"""What the findings on the stream rest on: which network, at the start or after a few steps, which batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.core.batches import Batch, targets_in
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.present.text import counted
from theodolite.probes.stream.growth import GrowthLaw, fit_growth
from theodolite.probes.stream.result import Stream
from theodolite.probes.stream.stream import stream
from theodolite.surveying.budget import amount, examples_in, few, first_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Value
from theodolite.surveying.section import reason
from theodolite.surveying.short_training import ShortTraining, wake
from theodolite.surveying.trials import trials_of

TARGETS, ENTRIES = 512, 65_536
"""In a batch, about: targets, and entries of its tensors."""
FEWEST = 16
"""Fewest targets that a batch is cut to, …"""
MOST_PASS, FEWEST_EXAMPLES = 4e9, 4
"""… and fewest examples, if a forward pass takes more multiplications than this."""
MOST_PARAMETERS = 30_000_000
"""Above this a small network of the trials is measured instead."""
WORK, DEEP_WORK = 8e10, 2.4e12
"""Most multiplications for skipping blocks."""
OPERATION = 3e6
"""Cost of following one operation, in multiplications: about 150 µs."""
DRAWS = 3
"""Initialisations over which the growth of the stream is averaged. In one draw of few blocks the last may add
more than the first by chance, and linear growth looks exponential: in 3 of 36 draws of a GPT with 4 blocks,
and in none of 34 means over 3 of them."""


@dataclass(frozen=True)
class StreamMeasurement:
    """The stream of a network, and what it was measured on."""

    stream: Stream
    size: Size
    where: str
    """Begins a sentence."""
    targets: int | str
    """In the batch; and of how many, if it was cut."""
    growth: GrowthLaw
    """Of the stream, averaged over a few initialisations."""
    model: nn.Module = field(repr=False)
    batch: Batch = field(repr=False)
    draws: int = 1
    """How many initialisations."""
    training: ShortTraining | None = None
    """The steps before it was measured; None at the start."""
    unwoken: str = ""
    """Why a network that shows nothing at the start was not measured after a few steps."""

    @property
    def setting(self) -> dict[str, Value]:
        """What was measured, for the evidence."""
        found: dict[str, Value] = {
            "size": str(self.size),
            "blocks": len(self.stream.skipped_blocks),
            "targets in the batch": self.targets,
        }
        return found if self.training is None else found | self.training.numbers

    @property
    def noted(self) -> str:
        """What could not be measured, to follow a sentence."""
        notes = [*self.stream.notes]
        if self.unwoken:
            notes.append(f"It was not measured after a few steps: {self.unwoken}")
        return f" ({'; '.join(notes)}.)" if notes else ""


def measure(context: SurveyContext) -> StreamMeasurement:
    """The stream of the surveyed network if it is small, otherwise of the deepest of the trials."""
    size = context.size
    if context.num_parameters(size) > MOST_PARAMETERS:
        trials = trials_of(context)
        size = trials.depths[-1] if trials.depths else trials.base
    model, batch = context.build(size), cut(context.batch)
    work, examples = context.forward_work(model, batch).total, examples_in(batch)
    if not context.deep and examples is not None and work > MOST_PASS:
        batch = first_of(batch, max(FEWEST_EXAMPLES, int(examples * MOST_PASS / work)))
    seen = _measured(context, model, batch)
    profiles = [seen.profile]
    for other in _other_draws(context):
        found = stream(other.build(size), context.workload.loss, batch, skip=False, layout=seen.layout)
        profiles.append(found.profile)
    return StreamMeasurement(
        stream=seen,
        size=size,
        where=context.where(size),
        targets=amount(batch, context.whole_batch),
        growth=_mean_growth(profiles),
        draws=len(profiles),
        model=model,
        batch=batch,
    )


def measure_awake(context: SurveyContext, start: StreamMeasurement) -> StreamMeasurement:
    """The same after a few steps, if at the start branches add nothing or the stream has no gradient."""
    seen = start.stream
    if not seen.silent and not seen.is_asleep:
        return start
    why = "no gradient reaches the stream"
    if seen.silent:
        why = f"{len(seen.silent)} of {counted(len(seen.branches), 'branch')} add nothing"
    try:
        training = wake(context, start.size)
        found = _measured(context, training.model, start.batch)
        if not found.finite:
            raise UseError(f"something is {'; '.join(found.notes)}")
    except (UseError, RuntimeError) as error:  # of autograd, and of memory
        return replace(start, unwoken=reason(error))
    profiles = [found.profile]
    if seen.silent:  # otherwise the growth is measured at the start
        profiles += _profiles_awake(context, training, start.batch, found)
    where = context.where(start.size).removesuffix(",")
    return replace(
        start,
        stream=found,
        where=f"{where}, after {len(training.losses)} steps of AdamW (at the start {why}),",
        growth=_mean_growth(profiles),
        draws=len(profiles),
        model=training.model,
        training=training,
    )


def cut(batch: Batch) -> Batch:
    """The batch with about as many targets and entries as a section takes."""
    entries = sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    wanted = min(TARGETS, int(targets_in(batch) * ENTRIES / max(1, entries)))
    return few(batch, max(FEWEST, wanted))


def _measured(context: SurveyContext, model: nn.Module, batch: Batch) -> Stream:
    """Blocks are skipped if that is affordable: a forward pass for each branch and for each block."""
    loss = context.workload.loss
    first = stream(model, loss, batch, skip=False)
    assert first.layout is not None
    each = context.forward_work(model, batch).total + OPERATION * len(first.layout.graph.nodes)
    passes = len(first.branches) + len(first.skipped_blocks)
    if passes * each > (DEEP_WORK if context.deep else WORK):
        return first
    return stream(model, loss, batch, layout=first.layout)


def _profiles_awake(
    context: SurveyContext, training: ShortTraining, batch: Batch, seen: Stream
) -> list[tuple[float, ...]]:
    """The sizes of the stream in networks of other seeds, after the same steps."""
    loss = context.workload.loss
    models = [wake(other, training.size, [training.rate]).model for other in _other_draws(context)]
    return [stream(one, loss, batch, skip=False, layout=seen.layout).profile for one in models]


def _other_draws(context: SurveyContext) -> list[SurveyContext]:
    return [replace(context, seed=(context.seed + more) % 2**63) for more in range(1, DRAWS)]


def _mean_growth(profiles: Sequence[tuple[float, ...]]) -> GrowthLaw:
    """Growth of the geometric mean of the sizes."""
    same = [profile for profile in profiles if len(profile) == len(profiles[0])]
    with np.errstate(divide="ignore"):  # a stream that starts at zero has no growth
        return fit_growth(np.exp(np.log(np.asarray(same)).mean(0)).tolist())
