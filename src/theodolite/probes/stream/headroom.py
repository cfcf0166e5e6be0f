"""How near the values of a forward pass come to the largest number of half precision.

float16 ends at 65504 = 2¹⁶ − 2⁵. The headroom is `log2(65504/max|v|)` over the values that would be in
float16: all that operations make, but for those that autocast leaves in float32 (powers, sums, exponentials),
for a norm's statistics and for masks, whether they are filled in or added. What is no finite number counts as
an overflow, in any dtype. bfloat16 has the range of float32, and 8 bits for the digits: there it
is not the range that runs out, but `h + f` is h where f is below 2⁻⁹ of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from theodolite.anatomy.recording.operations import JOINTS, REDUCTIONS, SOFTMAXES, VIEWS
from theodolite.anatomy.recording.trace import flat
from theodolite.probes.scaling.activation_layout import ActivationLayout

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
"""Put numbers beside others."""
ADDS = frozenset({"add", "sub", "baddbmm"})
MOVES = VIEWS | JOINTS | FILLS
"""Make no number that was not there before."""
LARGE, LOW = 1000.0, 100.0
"""From where on a negative constant is a mask, and how low what is made of it has to be to stay one."""


@dataclass(frozen=True)
class Largest:
    """The largest value of a forward pass, and what made it."""

    value: float
    """inf if there is one that is no finite number; nan if none was looked at."""
    op: str
    """The operation, by its ATen name."""
    where: str
    """`block 3, branch 1`, `before the first block` or `after the last block`."""

    @property
    def headroom(self) -> float:
        """Doublings from it to the largest number of float16; below 0 it overflows.

        >>> Largest(65504 / 4, "mm", "block 0, branch 0").headroom
        2.0
        """
        return math.log2(HALF) - math.log2(self.value) if self.value else math.inf


class Watch:
    """To be told of every value of a pass."""

    def __init__(self) -> None:
        self._made: list[tuple[str, int | None]] = []
        self._sizes: list[Tensor] = []
        self._floors: dict[int, Tensor] = {}
        """By storage: values up to this one are masked."""

    def __call__(self, op: str, given: tuple[Any, ...], made: Tensor, last: int | None) -> None:
        """A value was made; `last` is the value of the layout that was last read before."""
        if not made.numel():
            return
        floor = self._floor(op, given, made)
        if floor is None:
            self._floors.pop(_storage(made), None)
        else:
            self._floors[_storage(made)] = floor
        if op in MOVES or op in WHOLE or op.endswith("_like"):
            return
        if made.dim() > 1 and made.shape[-1] == 1:  # what a norm divides by stays in float32
            return
        sizes = made.abs() if floor is None else torch.where(made <= floor, 0, made.abs())
        self._sizes.append(sizes.amax().double())
        self._made.append((op, last))

    def largest(self, layout: ActivationLayout) -> Largest:
        """The largest of all, or the first that is not a finite number."""
        if not self._sizes:
            return Largest(math.nan, "", "")
        sizes = torch.stack(self._sizes).nan_to_num(math.inf, math.inf).tolist()
        at = max(range(len(sizes)), key=sizes.__getitem__)
        op, last = self._made[at]
        return Largest(sizes[at], op, _where(layout, last))

    def _floor(self, op: str, given: tuple[Any, ...], made: Tensor) -> Tensor | None:
        """Up to which value what was made is masked; None if no mask is on it.

        A mask is a large negative number that does not depend on a parameter, filled in or added. It stays
        one in all that is made of it entry by entry, until a softmax gives it the weight zero.
        """
        tensors = list(flat(given, Tensor))
        found = []
        for tensor in tensors:
            before = self._floors.get(_storage(tensor)) if tensor.requires_grad else None
            if before is None:
                continue
            if _storage(tensor) == _storage(made) and op in MOVES:
                found.append(before)
            elif _fits(tensor, made):
                found.append(_highest(made, tensor <= before))
            elif op in MOVES:
                found.append(before)
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


def _highest(values: Tensor, chosen: Tensor) -> Tensor:
    """The highest of the chosen entries; nan if there are none."""
    highest = torch.where(chosen, values, -math.inf).amax()
    return torch.where(chosen.any(), highest, math.nan)


def _fits(tensor: Tensor, made: Tensor) -> bool:
    """Are its entries, repeated where it has one only, those of what was made?"""
    pairs = zip(reversed(tensor.shape), reversed(made.shape), strict=False)
    return 0 < tensor.dim() <= made.dim() and all(one in (1, other) for one, other in pairs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _where(layout: ActivationLayout, last: int | None) -> str:
    """Between which values of the layout an operation is, in words."""
    index = -1
    for number, (start, ends, after) in enumerate(
        zip(layout.starts, layout.branches, layout.stream, strict=True)
    ):
        if last == start or last in ends:
            index = max(index, number)
        if last == after:
            index = max(index, number + 1)
    if index < 0:
        return "before the first block"
    if index >= len(layout.places):
        return "after the last block"
    block, branch = layout.places[index]
    return f"block {block}, branch {branch}"
