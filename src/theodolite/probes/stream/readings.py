"""What is read off the recorded values of a pass: the stream along each branch, and headroom in float16.

float16 ends at 65504 = 2¹⁶ − 2⁵. The headroom is `log2(65504/max|v|)` over the values that would be in
float16: the outputs of all operations, except those that autocast leaves in float32 (powers, sums,
exponentials), a norm's statistics, and masks, whether filled in or added. A value that is not finite counts
as an overflow in any dtype. bfloat16 has the range of float32 and 8 bits for the digits: its range does not
run out, but `h + f` is h where f is below 2⁻⁹ of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.anatomy.recording.operations import JOINTS, REDUCTIONS, SOFTMAXES, VIEWS
from theodolite.anatomy.recording.trace import flat
from theodolite.probes.scaling.activation_layout import ActivationLayout
from theodolite.probes.scaling.first_steps import rms

HALF = 65504.0
"""The largest number of float16."""
WHOLE = REDUCTIONS | SOFTMAXES | {
    "pow", "exp", "expm1", "log", "log1p", "rsqrt", "reciprocal", "cumsum", "prod", "cumprod", "softplus",
}  # fmt: skip
"""Operations that autocast leaves in float32."""
FILLS = frozenset({
    "masked_fill", "where", "fill", "index_fill", "scatter", "index_put", "masked_scatter", "copy",
    "slice_scatter", "cat", "constant_pad_nd",
})  # fmt: skip
"""Operations that put constants beside other values."""
ADDS = frozenset({"add", "sub", "baddbmm"})
MOVES = VIEWS | JOINTS | FILLS
"""Operations that make no new number."""
LARGE, LOW = 1000.0, 100.0
"""A constant of −LARGE or less is a mask; values derived from it stay masked up to −LOW."""


@dataclass(frozen=True)
class BranchReading:
    """The stream along one branch: h before it, h' after it, f what is added."""

    block: int
    branch: int
    """Its number within the block."""
    stream: float
    """RMS of h'."""
    added: float
    """RMS of f, including the factor of the addition."""
    share: float
    """`RMS(f)/RMS(h)`."""
    cosine: float
    """cos(h, h'), the mean over positions where neither is zero; nan if the shape changes."""
    stream_gradient: float
    """RMS of ∂L/∂h'; nan if there is none."""
    branch_gradient: float
    """RMS of ∂L/∂f; nan if there is none."""
    is_reached: bool | None
    """Does the gradient reach f? None if f was not found again in the second pass."""
    largest: float
    """max|h'|."""
    peak: float
    """max|h'|/median|h'|."""
    peak_at: tuple[int, ...]
    """Its index: example, token and channel in a transformer."""
    skipped: float | None
    """The loss without the branch minus the loss; None if it was not measured."""
    carried: float
    """RMS(h) over that of the stream as the branch before left it: not 1 where something that is no branch
    changes the stream, such as a projection of the skip or a factor; nan if it is not known."""
    before: float
    """RMS of h; nan if it is not known."""


@dataclass(frozen=True)
class LargestValue:
    """The largest value of a forward pass, and what made it."""

    value: float
    """inf if a value is not finite; nan if no value counts."""
    op: str
    """The operation, by its ATen name."""
    where: str
    """`block 3, branch 1`, `before the first block` or `after the last block`."""

    @property
    def headroom(self) -> float:
        """Doublings up to the largest number of float16; below 0 it overflows.

        >>> LargestValue(65504 / 4, "mm", "block 0, branch 0").headroom
        2.0
        """
        return math.log2(HALF) - math.log2(self.value) if self.value else math.inf


class HeadroomWatch:
    """Finds the largest value of a pass; called with every value."""

    def __init__(self) -> None:
        self._made: list[tuple[str, int | None]] = []
        self._sizes: list[Tensor] = []
        self._floors: dict[int, Tensor] = {}
        """By storage: values up to this one are masked."""

    def __call__(self, op: str, given: tuple[Any, ...], made: Tensor, last: int | None) -> None:
        """Take a value; `last` is the value of the layout that was read last."""
        if not made.numel():
            return
        floor = self._floor(op, given, made)
        self._floors.pop(_storage(made), None)
        if floor is not None:
            self._floors[_storage(made)] = floor
        is_statistic = made.dim() > 1 and made.shape[-1] == 1  # of a norm: it stays in float32
        if op in MOVES or op in WHOLE or op.endswith("_like") or is_statistic:
            return
        sizes = made.abs() if floor is None else torch.where(made <= floor, 0, made.abs())
        self._sizes.append(sizes.amax().double())
        self._made.append((op, last))

    def largest(self, layout: ActivationLayout) -> LargestValue:
        """The largest of all, or the first that is not finite."""
        if not self._sizes:
            return LargestValue(math.nan, "", "")
        sizes = torch.stack(self._sizes).nan_to_num(math.inf, math.inf).tolist()
        at = max(range(len(sizes)), key=sizes.__getitem__)
        op, last = self._made[at]
        return LargestValue(sizes[at], op, _where(layout, last))

    def _floor(self, op: str, given: tuple[Any, ...], made: Tensor) -> Tensor | None:
        """The value up to which entries of `made` are masked; None without a mask.

        A mask is a large negative number that does not depend on a parameter, filled in or added. Entries
        computed from it stay masked until a softmax gives them zero weight.
        """
        tensors = list(flat(given, Tensor))
        found = []
        for tensor in tensors:
            before = self._floors.get(_storage(tensor)) if tensor.requires_grad else None
            if before is None:
                continue
            same = _storage(tensor) == _storage(made)
            if op in MOVES and (same or not _fits(tensor, made)):
                found.append(before)
            elif _fits(tensor, made):
                found.append(_highest(made, tensor <= before))
        constants = [
            one for one in tensors if one.is_floating_point() and not one.requires_grad and one.numel()
        ]
        if op in FILLS:
            constants += [made.new_tensor(one) for one in (*flat(given, float), *flat(given, int))]
            found += [_highest(one.to(made), one <= -LARGE) for one in constants]
        elif op in ADDS:
            found += [_highest(made, one.abs() >= LARGE) for one in constants if _fits(one, made)]
        floors = [one.to(made) for one in found if bool(one <= -LOW)]
        return torch.stack(floors).amax() if floors else None


def read_branch(
    layout: ActivationLayout,
    index: int,
    values: Mapping[int, Tensor],
    gradients: Mapping[int, Tensor],
    skipped: float | None,
) -> BranchReading:
    """One branch of a layout."""
    start, after, ends = layout.starts[index], layout.stream[index], layout.branches[index]
    before = size_of(start, values)
    added, known = math.nan, all(end in values for end in ends)
    if known:
        (added,) = rms(layout.added(index, {end: values[end].double() for end in ends}))
    largest, peak, peak_at = _peak(values[after]) if after in values else (math.nan, math.nan, ())
    block, branch = layout.places[index]
    return BranchReading(
        block=block,
        branch=branch,
        stream=size_of(after, values),
        added=added,
        share=added / before if before else math.nan,
        cosine=_cosine(values.get(start), values.get(after), layout.channels[index]),
        stream_gradient=size_of(after, gradients),
        # Each term of a sum has the gradient of the sum.
        branch_gradient=size_of(ends[0], gradients) / (abs(layout.factors[index][0]) or 1.0),
        is_reached=ends[0] in gradients if known else None,
        largest=largest,
        peak=peak,
        peak_at=peak_at,
        skipped=skipped,
        carried=_carried(layout, index, values),
        before=before,
    )


def size_of(value: int, tensors: Mapping[int, Tensor]) -> float:
    """Its root mean square; nan if it is missing."""
    return rms(tensors[value])[0] if value in tensors else math.nan


def _carried(layout: ActivationLayout, index: int, values: Mapping[int, Tensor]) -> float:
    """What happens to the size of a stream between a branch and the one before it on the same stream."""
    if layout.is_routed:  # it reads a mixture
        return math.nan
    stream, start = layout.streams[index], layout.starts[index]
    previous = [number for number in range(index) if layout.streams[number] == stream]
    if not previous or start in (layout.starts[previous[-1]], layout.stream[previous[-1]]):
        return 1.0
    before = size_of(layout.stream[previous[-1]], values)
    return size_of(start, values) / before if before else math.nan


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


def _highest(values: Tensor, chosen: Tensor) -> Tensor:
    """The highest of the chosen entries; nan if there are none."""
    highest = torch.where(chosen, values, -math.inf).amax()
    return torch.where(chosen.any(), highest, math.nan)


def _fits(tensor: Tensor, made: Tensor) -> bool:
    """Does it broadcast to the shape of `made`?"""
    pairs = zip(reversed(tensor.shape), reversed(made.shape), strict=False)
    return 0 < tensor.dim() <= made.dim() and all(one in (1, other) for one, other in pairs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _where(layout: ActivationLayout, last: int | None) -> str:
    """Where in the network an operation is, in words."""
    index = -1
    for number, ends in enumerate(layout.branches):
        if last == layout.stream[number]:
            index = number + 1
        elif last == layout.starts[number] or last in ends:
            index = max(index, number)
    if index < 0:
        return "before the first block"
    if index >= len(layout.places):
        return "after the last block"
    block, branch = layout.places[index]
    return f"block {block}, branch {branch}"
