"""How near the values of a forward pass come to the largest number of half precision.

float16 ends at 65504 = 2¹⁶ − 2⁵. The headroom is `log2(65504/max|v|)` over the values that would be in
float16: all that operations make, but for those that autocast leaves in float32 (powers, sums, exponentials),
for a norm's statistics and for masks. bfloat16 has the range of float32, and 8 bits for the digits: there it
is not the range that runs out, but `h + f` is h where f is below 2⁻⁹ of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from theodolite.anatomy.operations import REDUCTIONS, SOFTMAXES, VIEWS
from theodolite.probes.sighting import Layout

HALF = 65504.0
"""The largest number of float16."""
WHOLE = REDUCTIONS | SOFTMAXES | {
    "pow", "exp", "expm1", "log", "log1p", "rsqrt", "reciprocal", "cumsum", "prod", "cumprod", "softplus",
}  # fmt: skip
"""Operations that autocast leaves in float32."""


@dataclass(frozen=True)
class Largest:
    """The largest value of a forward pass, and what made it."""

    value: float
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
        return math.log2(HALF / self.value) if self.value > 0 else math.inf


class Watch:
    """To be told of every value of a pass."""

    def __init__(self) -> None:
        self._made: list[tuple[str, int | None]] = []
        self._sizes: list[Tensor] = []

    def __call__(self, op: str, tensor: Tensor, last: int | None) -> None:
        """A value was made; `last` is the value of the layout that was last read before."""
        if op in VIEWS or op in WHOLE or op.endswith("_like") or not tensor.numel():
            return
        if tensor.dim() > 1 and tensor.shape[-1] == 1:  # what a norm divides by stays in float32
            return
        sizes = tensor.abs()
        # Masks are filled with infinities or with the largest number there is.
        masked = torch.where(sizes < torch.finfo(tensor.dtype).max / 2, sizes, torch.zeros_like(sizes))
        self._sizes.append(masked.amax().double())
        self._made.append((op, last))

    def largest(self, layout: Layout) -> Largest:
        """The largest of all."""
        if not self._sizes:
            return Largest(0.0, "", "")
        sizes = torch.stack(self._sizes).nan_to_num(0.0).tolist()
        at = max(range(len(sizes)), key=sizes.__getitem__)
        op, last = self._made[at]
        return Largest(sizes[at], op, _where(layout, last))


def _where(layout: Layout, last: int | None) -> str:
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
