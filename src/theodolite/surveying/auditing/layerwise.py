"""Layer-wise decay of learning rates: by the same factor from each block to the one before it.

A deeper network has more such factors, so the learning rate of its first block falls with depth, which is
what such a decay is for. Deeper networks are compared at equal distances from the last block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from theodolite.anatomy.names import starred
from theodolite.anatomy.part import Part
from theodolite.surveying.auditing.reading import Reading

RTOL = 1e-6
"""On ratios of learning rates of adjacent blocks."""


@dataclass(frozen=True)
class LayerwiseDecay:
    """Every block has `factor` times the learning rate of the one after it."""

    factor: float

    def undone(
        self, lr: float, by_rule: float, part: Part, partner: Part, here: Reading, there: Reading
    ) -> float:
        """A learning rate, and its counterpart's at base size, as if at the same distance from the end.

        A tensor outside of the blocks may be in front of them all, or behind them.
        """
        more = here.anatomy.num_blocks - there.anatomy.num_blocks
        if part.block is not None and partner.block is not None:
            more -= part.block - partner.block
        raised: float = lr / self.factor**more
        if part.block is None and not _closer(raised, lr, by_rule):
            return lr
        return raised


def layerwise_decay(readings: Sequence[Reading]) -> LayerwiseDecay | None:
    """The layer-wise decay of the learning rates, if all sizes have the same one."""
    factors = [factor for reading in readings for factor in _steps(reading)]
    if not factors or any(math.isnan(factor) for factor in factors):
        return None
    same = all(math.isclose(factor, factors[0], rel_tol=RTOL) for factor in factors)
    return LayerwiseDecay(factors[0]) if same and not math.isclose(factors[0], 1, rel_tol=RTOL) else None


def _steps(reading: Reading) -> Iterator[float]:
    """The ratios of learning rates from block to block, of all kinds of tensors; nan if one is uneven."""
    kinds: dict[str, dict[int, float]] = {}
    for name in reading.names:
        block = reading.anatomy[name].block
        if block is not None:
            kinds.setdefault(starred(name, steps=True), {})[block] = reading.options[name].lr
    for by_block in kinds.values():
        blocks = sorted(by_block)
        for first, second in pairwise(blocks):
            ratio = by_block[first] / by_block[second] if by_block[second] else math.nan
            yield ratio ** (1 / (second - first))


def _closer(one: float, other: float, to: float) -> bool:
    if min(one, other, to) <= 0:
        return False
    return abs(math.log(one / to)) < abs(math.log(other / to))
