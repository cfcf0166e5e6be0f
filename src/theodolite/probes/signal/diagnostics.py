"""Where a signal says less than it seems to: samples that mislead Student's t, and what is not exact."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from theodolite.probes.signal.candidates import Candidates
from theodolite.probes.signal.sums import WIDEST

if TYPE_CHECKING:
    from theodolite.probes.signal.signal import Signal

FEWEST = 30
SKEWEST = 0.2
"""Student's t is trusted from so many held-out products on, with at most this |skewness|/√m."""
CORNERS = 0.01
"""From this share of zeros on, the stream is said to come from a ReLU."""


def misleads(products: Tensor) -> bool:
    """Are held-out products too few or too skewed for Student's t?

    >>> import torch
    >>> even = torch.linspace(-1, 1, 100)
    >>> misleads(even), misleads(even[:20]), misleads(even.exp() ** 9)
    (False, True, True)
    """
    return len(products) < FEWEST or _skewness(products) > SKEWEST * math.sqrt(len(products))


def notes(
    found: Signal, candidates: Candidates, missed: str | None, shared: int, one_class: bool
) -> Iterator[str]:
    """What has to be known besides numbers.

    Args:
        found: without notes.
        candidates: at its points.
        missed: what the units' own losses leave out of the loss of a batch.
        shared: held-out units that are among the others.
        one_class: are all held-out units of one class?
    """
    if missed is not None:
        yield missed
    if shared:
        yield (
            f"{shared} of the {found.judged_on} held-out units have inputs that are among those of "
            "the estimate: the gains are too high by what was learnt from them"
        )
    below = [one for one in found.points if one.significance < -found.threshold]
    if below:
        least = min(below, key=lambda one: one.significance)
        yield (
            f"the gain at {least.name} is {-least.significance:.3g} standard errors below zero: do the two "
            "samples differ? Shuffle the units, or give a held_out of the same kind"
        )
    yield from _unsure(found, one_class)
    yield from _remarks(candidates)


def _unsure(found: Signal, one_class: bool) -> Iterator[str]:
    seeming = [one for one in found.points if one.unsure and one.significance > found.threshold]
    if one_class:
        why = "all held-out units are of one class, and what another one would say is not known"
    elif found.judged_on < FEWEST:
        why = f"{found.judged_on} held-out units are too few to know, {FEWEST} are needed"
    else:
        why = "few held-out units make up most of the spread (the products are skewed)"
    if seeming:
        yield (
            f"at {len(seeming)} points, as at {seeming[0].name}, the gain seems to be above its noise (?), "
            f"but {why}: more units tell more"
        )


def _remarks(candidates: Candidates) -> Iterator[str]:
    whole = {candidate.point.name: name for candidate in candidates.each for name in candidate.whole}
    if whole:
        yield (
            f"at {len(whole)} points, as at {next(iter(whole))}, {next(iter(whole.values()))} is no weight "
            "of a linear map or a norm that is called as a module: its gradient is autograd's, held-out "
            "units were run one by one, and it is not preconditioned but scaled as the others are on average"
        )
    corners = [candidate for candidate in candidates.each if candidate.zeros > CORNERS]
    if corners:
        most = max(candidate.zeros for candidate in corners)
        yield (
            f"at {len(corners)} points the stream is exactly zero in up to {most:.0%} of its entries, as "
            "behind a ReLU. There a step can only add, which no gradient tells: steps change the loss by "
            "somewhat more or less than the gain, however small they are"
        )
    wide_maps = [one for candidate in candidates.each for one in candidate.sites if one.features > WIDEST]
    if wide_maps:
        yield (
            f"{len(wide_maps)} maps have more than {WIDEST} features: they are preconditioned by the "
            "diagonal of S alone"
        )


def _skewness(values: Tensor) -> float:
    away = values - values.mean()
    spread = float(away.square().mean())
    return abs(float(away.pow(3).mean())) / spread**1.5 if spread > 0 else 0.0
