"""Unbiased estimates of Tr Σ and |g|² from mean gradients of independent units, and a bootstrap over them.

Σ is the covariance of the gradients of single examples and g their mean. A unit u is one example or several;
its mean gradient G_u over b_u examples has `E⟨G_u, G_v⟩ = |g|²` for u ≠ v and `E|G_u|² = |g|² + Tr Σ/b_u`. So

    signal  = Σ_{u≠v} b_u b_v ⟨G_u, G_v⟩ / Σ_{u≠v} b_u b_v       estimates |g|²
    noise   = Σ_u b_u (|G_u|² − signal) / N                       estimates Tr Σ, with N units

are unbiased whatever the sizes of the units; for equal sizes the first is `|mean|² − noise/n`. The critical
batch is the ratio of the two, each a sum over all tensors and units: a ratio of averages.

The bootstrap draws units with repetition, and leaves out the products of a unit with its own copies, whose
expectation is larger. Where more units come than gradients can be kept, they are added up in folds, which are
then what is drawn: a product of two units of a fold counts as often as the fold.
"""

# T tensors, J folds, R draws

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DRAWS = 1000
LEVEL = 0.95
COLUMNS = 2**15
"""Entries of a tensor whose products are taken at a time: those of 32 gradients fit into a cache."""


@dataclass(frozen=True)
class Interval:
    """An estimate of noise and signal with the 95 % intervals of the signal and of their ratio."""

    noise: float
    signal: float
    signal_low: float
    signal_high: float
    low: float
    """Of the ratio; infinite if hardly any draw has a signal above 0."""
    high: float | None
    """None if the signal cannot be told from 0."""

    @property
    def ratio(self) -> float | None:
        """Noise over signal; None if the signal is not above 0."""
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else None


def interval(noise: float, signal: float, noises: Tensor, signals: Tensor) -> Interval:
    """Percentiles of the draws (R,). A draw whose signal is not above 0 counts as an infinite ratio.

    >>> draws = torch.linspace(1.0, 3.0, 1001).double()
    >>> found = interval(8.0, 2.0, 0 * draws + 8, draws)
    >>> round(found.low, 2), found.ratio, round(found.high, 2)
    (2.71, 4.0, 7.62)
    >>> interval(8.0, 2.0, 0 * draws + 8, draws - 1.5).high
    """
    ratios = torch.where(signals > 0, noises.clamp(min=0) / signals.clamp(min=1e-300), math.inf)
    (low, high), around = _ends(ratios), _ends(signals)
    bounded = signal > 0 and math.isfinite(high)
    return Interval(noise, signal, *around, low, high if bounded else None)


def _ends(draws: Tensor) -> tuple[float, float]:
    ordered, tail = draws.sort().values, (1 - LEVEL) / 2
    first, last = (round(share * (len(draws) - 1)) for share in (tail, 1 - tail))
    return float(ordered[first]), float(ordered[last])


@dataclass(frozen=True)
class Moments:
    """Sums over the units of each fold, in float64 on the CPU."""

    products: Tensor
    """(T, J, J): `Σ b_u b_v ⟨G_u, G_v⟩` over units u of one fold and v ≠ u of another, or of the same."""
    squares: Tensor
    """(T, J): `Σ b_u |G_u|²`."""
    examples: Tensor
    """(J,): `Σ b_u`."""
    pairs: Tensor
    """(J, J): `Σ b_u b_v`, over the same units as in `products`."""
    units: Tensor
    """(J,): how many there are."""

    def estimates(self, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Noise and signal of every tensor, (T, R), with each fold counted so often, (R, J); once if None."""
        if counts is None:
            counts = torch.ones(1, len(self.units), dtype=torch.float64)
        pairs = _paired(counts, self.pairs)
        signal = torch.stack([_paired(counts, one) for one in self.products]) / pairs
        noise = (self.squares @ counts.T - signal * (counts @ self.examples)) / (counts @ self.units)
        return noise, signal

    def draws(self) -> Tensor:
        """How often each fold is drawn, (R, J), without draws of one unit alone."""
        counts = drawn(len(self.units))
        return counts[_paired(counts, self.pairs) > 0]


def drawn(number: int) -> Tensor:
    """How often each of several things comes in each draw of a bootstrap, (R, number)."""
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(number, (DRAWS, number), generator=generator)
    counts = torch.zeros(DRAWS, number, dtype=torch.float64)
    return counts.scatter_add_(1, chosen, torch.ones_like(counts))


def _paired(counts: Tensor, products: Tensor) -> Tensor:
    """`Σ c_f c_f' products_ff'` over f ≠ f', and `Σ c_f products_ff`, (R,)."""
    own = products.diagonal()
    return ((counts @ (products - own.diag())) * counts).sum(1) + counts @ own


@dataclass
class _Fold:
    """Sums over some units."""

    sums: list[Tensor]
    """`Σ b_u G_u` over `scale`, by tensor."""
    scale: int
    units: int
    examples: int
    own: int
    """`Σ b_u²`."""
    squares: list[Tensor] = field(default_factory=list)
    """`Σ b_u |G_u|²` and `Σ b_u² |G_u|²` by tensor, (T,); none for one unit, whose products have them."""


class FoldSums:
    """Adds up gradients of units in at most so many folds. A unit that is alone in its fold is not copied.

    >>> sums = FoldSums(most=2)
    >>> for value in (1.0, 3.0, 2.0):
    ...     sums.add([torch.tensor([value])], examples=1)
    >>> [float(one) for one in sums.moments().estimates()]  # the variance, and the mean of products of two
    [1.0, 3.6666...]
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.units = 0
        self._folds: list[_Fold] = []

    def add(self, gradients: Sequence[Tensor], examples: int) -> None:
        """Add one unit: its mean gradient by tensor. The tensors are kept; nobody may change them."""
        at = self.units % self.most
        self.units += 1
        if at == len(self._folds):
            self._folds.append(_Fold(list(gradients), examples, 1, examples, examples**2))
            return
        fold = self._folds[at]
        if fold.units == 1:
            own = squares(fold.sums)
            fold.squares = [fold.scale * own, fold.scale**2 * own]
            fold.sums = [fold.scale * one.to(_wide(one.dtype)) for one in fold.sums]
            fold.scale = 1
        own = squares(gradients)
        fold.squares = [fold.squares[0] + examples * own, fold.squares[1] + examples**2 * own]
        for total, one in zip(fold.sums, gradients, strict=True):
            total.add_(one, alpha=examples)
        fold.units += 1
        fold.examples += examples
        fold.own += examples**2

    def moments(self, group: Any = None) -> Moments:
        """What estimates are made of; over the units of all processes of a group."""
        number, device = len(self._folds[0].sums), self._folds[0].sums[0].device
        products = torch.stack(
            [self._products([fold.sums[at] for fold in self._folds], group) for at in range(number)]
        )
        zero = torch.zeros(2, number, dtype=torch.float64, device=device)
        numbers = torch.tensor(
            [[fold.examples, fold.units, fold.own] for fold in self._folds],
            dtype=torch.float64,
            device=device,
        )
        own = torch.stack([torch.stack(fold.squares) if fold.squares else zero for fold in self._folds])
        examples, units, pairs = gathered(numbers, group).cpu().T
        own = gathered(own, group).cpu()
        diagonal, alone = products.diagonal(dim1=1, dim2=2).clone(), units == 1
        # The products of a unit with itself are no estimate of |g|².
        products.diagonal(dim1=1, dim2=2).copy_(torch.where(alone, 0.0, diagonal - own[:, 1].T))
        among = torch.outer(examples, examples)
        among.diagonal().copy_(examples.square() - pairs)
        return Moments(products, torch.where(alone, diagonal / examples, own[:, 0].T), examples, among, units)

    def _products(self, tensors: Sequence[Tensor], group: Any) -> Tensor:
        """The inner products of one tensor's sums in all folds, (J, J)."""
        flat = [one.reshape(-1) for one in tensors]
        scales = torch.tensor([fold.scale for fold in self._folds], dtype=torch.float64)
        wide = _wide(flat[0].dtype)
        if flat[0].is_cuda:
            wide = torch.float64  # products in float32 may be rounded to 10 bits there
        columns = COLUMNS if group is None and not flat[0].is_cuda else 32 * COLUMNS
        total: Tensor = torch.zeros((), dtype=torch.float64)
        buffer: Tensor | None = None  # memory that is used again costs less than new memory
        for start in range(0, flat[0].numel(), columns):
            parts = [one[start : start + columns].to(wide) for one in flat]
            if buffer is None or buffer.shape[1] != len(parts[0]):
                buffer = parts[0].new_empty(len(parts), len(parts[0]))
            rows = torch.stack(parts, out=buffer)
            rows = rows if group is None else gathered(rows * scales.to(rows)[:, None], group)
            total = total + (rows @ rows.T).double().cpu()
        return total if group is not None else total * scales[:, None] * scales


@torch.no_grad()
def squares(gradients: Sequence[Tensor]) -> Tensor:
    """The squared norm of each tensor, (T,), in float32 or float64."""
    return squared([norm(one) for one in gradients])


def norm(gradient: Tensor) -> Tensor:
    """The norm of a tensor, in float32 or float64."""
    found: Tensor = torch.linalg.vector_norm(gradient, dtype=_wide(gradient.dtype))
    return found


def squared(norms: Sequence[Tensor]) -> Tensor:
    """The squares of norms in float64, on the device of the first; by few operations, as they are small."""
    device, dtype = norms[0].device, max((one.dtype for one in norms), key=lambda one: one.itemsize)
    return torch.stack([one.to(device, dtype) for one in norms]).double().square()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def gathered(rows: Tensor, group: Any) -> Tensor:
    """The rows of all processes of a group, which may have different numbers of them."""
    if group is None:
        return rows
    world = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world)]
    dist.all_gather(lengths, torch.tensor([len(rows)], device=rows.device), group=group)
    longest = max(int(one) for one in lengths)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: len(rows)] = rows
    every = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(every, padded, group=group)
    return torch.cat([one[: int(length)] for one, length in zip(every, lengths, strict=True)])
