"""A network after a few steps of AdamW, for what a new one does not show yet.

Where a gate or the readout starts at zero, branches add nothing or have no gradient until the first steps. A
section that would find nothing there looks at the network that `wake` gives, and says so in its finding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from theodolite.core.batches import Batch
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.surveying.budget import ENTRY, OPERATION, TooLong, examples_in, first_of
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Value
from theodolite.surveying.trials import LR

RATES = LR, LR / 4, LR / 16
"""Learning rates: the next is tried if one does not lower the loss."""
STEPS = 8
"""Steps of `wake`. Three suffice for a gradient everywhere behind gates and a readout of zeros: the first
moves the readout, the second the gates, the third the rest."""
WORK, DEEP_WORK = 2e10, 2e11
"""Multiplications of these steps, to which batches are cut as far as possible."""
EXTRA = 10
"""Allowed multiple of the work, if a batch cannot be cut further."""
FEWEST_EXAMPLES, MOST_EXAMPLES = 4, 64
"""In a batch of `wake`."""


@dataclass(frozen=True)
class ShortTraining:
    """A network after a few steps of AdamW."""

    model: nn.Module = field(repr=False)
    size: Size
    rate: float
    losses: tuple[float, ...]
    """Before each step."""

    @property
    def before(self) -> float:
        """The loss on the first batch."""
        return self.losses[0]

    @property
    def after(self) -> float:
        """The mean loss of the last quarter of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 4) :])

    @property
    def learns(self) -> bool:
        """Has the loss fallen?"""
        return self.after < self.before

    @property
    def numbers(self) -> dict[str, Value]:
        """What was trained, for the evidence."""
        return {
            "steps of AdamW": len(self.losses),
            "learning rate": self.rate,
            "loss at the start": self.before,
            "loss after the steps": self.after,
        }


def train(
    context: SurveyContext, size: Size, batches: Iterable[Batch], rates: Sequence[float] = RATES
) -> ShortTraining:
    """A new network, trained at the first of the rates that lowers the loss, or at the last if none does.

    The batches are read once for each rate.
    """
    for rate in rates:
        model = context.build(size)
        found = ShortTraining(model, size, rate, tuple(_steps(context, model, rate, batches)))
        if found.learns:
            break
    return found


def wake(context: SurveyContext, size: Size, rates: Sequence[float] = RATES) -> ShortTraining:
    """The network of this size after `STEPS` steps, on batches after the first, which is not trained on.

    It is trained once for all sections. Raises TooLong if that takes too much work, and UseError if the loss
    does not stay finite.
    """
    return context.once(_wake, size, tuple(rates))


def _wake(context: SurveyContext, size: Size, rates: tuple[float, ...]) -> ShortTraining:
    examples = _affordable(context, size)
    batches = [context.draw(step) for step in range(1, STEPS + 1)]
    found = train(context, size, [first_of(batch, examples) for batch in batches], rates)
    if not math.isfinite(found.after):
        raise UseError(f"the loss is {found.losses[-1]} after {len(found.losses) - 1} steps of AdamW")
    return found


def _affordable(context: SurveyContext, size: Size) -> int:
    """Examples in a batch, as the work allows."""
    limit = (DEEP_WORK if context.deep else WORK) / (3 * STEPS)
    examples = examples_in(context.batch) or 1
    few = min(examples, FEWEST_EXAMPLES)
    work = context.forward_work(context.build(size), first_of(context.batch, few))
    if work.total > EXTRA * limit:
        raise TooLong(
            f"{STEPS} steps of {size} would take {3 * STEPS * work.total:.1g} multiplications, more than "
            f"{3 * STEPS * EXTRA * limit:.1g}"
        )
    each = (work.multiplications + ENTRY * work.entries) / few
    return min(MOST_EXAMPLES, max(few, int((limit - OPERATION * work.operations) / each)))


def _steps(
    context: SurveyContext, model: nn.Module, rate: float, batches: Iterable[Batch]
) -> Iterator[float]:
    """The loss before each step of AdamW, up to one that is not finite."""
    trainable = [tensor for tensor in model.parameters() if tensor.requires_grad]
    if not trainable:
        raise UseError("no parameter requires a gradient, so nothing is trained")
    optimizer = torch.optim.AdamW(trainable, lr=rate, weight_decay=0.0)
    model.train()
    with untouched_randomness(context.seed), torch.enable_grad():
        for batch in batches:
            optimizer.zero_grad()
            loss = context.workload.evaluate(model, batch)
            yield float(loss.detach())
            if not loss.isfinite():
                return
            loss.backward()
            optimizer.step()
