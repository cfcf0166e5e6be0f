"""The stream along one branch, in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.probes.scaling.activation_layout import ActivationLayout
from theodolite.probes.scaling.first_steps import rms


@dataclass(frozen=True)
class Reach:
    """The stream along one branch: h before it, h' after it, f what is added."""

    block: int
    branch: int
    """Which branch of the block it is."""
    stream: float
    """RMS of h'."""
    added: float
    """RMS of f; where the addition multiplies it by a number, with that number."""
    share: float
    """`RMS(f)/RMS(h)`."""
    cosine: float
    """cos(h, h'), the mean over positions where neither is zero; nan where the shape changes."""
    stream_gradient: float
    """RMS of ∂L/∂h'; nan where there is none."""
    branch_gradient: float
    """RMS of ∂L/∂f; nan where there is none."""
    is_reached: bool | None
    """Does autograd have a way from the loss to f? None where f was not found again in the second pass."""
    largest: float
    """max|h'|."""
    peak: float
    """max|h'|/median|h'|."""
    peak_at: tuple[int, ...]
    """Where that is: in a transformer example, token, channel."""
    skipped: float | None
    """The loss without the branch minus the loss; None if it was not asked for or cannot be had."""


def reaches(
    layout: ActivationLayout,
    values: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    skipped: Sequence[float | None],
) -> tuple[Reach, ...]:
    """One for each branch of a layout."""
    return tuple(_reach(layout, index, values, gradients, without) for index, without in enumerate(skipped))


def size_of(value: int, tensors: Mapping[int, Tensor]) -> float:
    """Its root mean square; nan if it is not there."""
    return rms(tensors[value])[0] if value in tensors else math.nan


def _reach(
    layout: ActivationLayout,
    index: int,
    values: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    skipped: float | None,
) -> Reach:
    start, after, ends = layout.starts[index], layout.stream[index], layout.branches[index]
    before, stream = size_of(start, values), size_of(after, values)
    added, known = math.nan, all(end in values for end in ends)
    if known:
        (added,) = rms(layout.added(index, {end: values[end].double() for end in ends}))
    largest, peak, peak_at = _peak(values[after]) if after in values else (math.nan, math.nan, ())
    block, branch = layout.places[index]
    return Reach(
        block=block,
        branch=branch,
        stream=stream,
        added=added,
        share=added / before if before else math.nan,
        cosine=_cosine(values.get(start), values.get(after), layout.channels[index]),
        stream_gradient=size_of(after, gradients),
        # Of a sum, each term has the gradient of the sum.
        branch_gradient=size_of(ends[0], gradients) / (abs(layout.factors[index][0]) or 1.0),
        is_reached=ends[0] in gradients if known else None,
        largest=largest,
        peak=peak,
        peak_at=peak_at,
        skipped=skipped,
    )


def _cosine(before: Tensor | None, after: Tensor | None, channels: int) -> float:
    if before is None or after is None or before.shape != after.shape:
        return math.nan
    before, after = before.double(), after.double()
    # Padding may be zeros, which have no direction.
    there = before.abs().amax(channels).gt(0) & after.abs().amax(channels).gt(0)
    return float(torch.cosine_similarity(before, after, dim=channels)[there].mean())


def _peak(stream: Tensor) -> tuple[float, float, tuple[int, ...]]:
    sizes = stream.abs().flatten().float()
    if not bool(sizes.isfinite().all()):
        return math.inf, math.inf, ()
    largest, at = sizes.max(dim=0)
    middle = float(sizes.median())
    place = tuple(int(one) for one in torch.unravel_index(at, stream.shape))
    return float(largest), float(largest) / middle if middle else math.inf, place
