"""Scale vectors inside a weight: `W_eff = diag(b)·W·diag(γ)`, each vector in one of four forms.

They are parametrizations of torch. The network's code stays as it is, whatever module or stack of experts
holds the weight, and the norm before it is computed once. A product with the weight also costs less than one
with the activations of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Form = Literal["plain", "direction", "product", "exp"]
Ranges = tuple[tuple[int, int], ...]


class GainVector(nn.Module):
    """A scale vector γ: itself, or a magnitude β and a direction α.

    | form | γ | starts with |
    |---|---|---|
    | `plain` | γ | γ |
    | `direction` | β·α/rms(α) | β = rms(γ), α = γ |
    | `product` | β·α | β = 1, α = γ |
    | `exp` | e^β·α | β = 0, α = γ |

    A stack of vectors, one for each expert, has a magnitude for each.

    Args:
        gain: the initial γ.
        form: a row of the table.
        dim: the dimension of γ; the other dimensions are a stack.

    >>> vector = GainVector(torch.tensor([3.0, 4.0]), "direction")
    >>> vector(), vector.magnitude ** 2
    (tensor([3., 4.], grad_fn=<...>), tensor([12.5000], grad_fn=<...>))
    """

    def __init__(self, gain: Tensor, form: Form = "plain", dim: int = -1) -> None:
        super().__init__()
        self.form, self.dim = form, dim
        gain = gain.detach().clone()
        if form == "plain":
            self.gain = nn.Parameter(gain)
        else:
            self.direction = nn.Parameter(gain)
            self.magnitude = nn.Parameter(first_magnitude(gain, form, dim))

    def forward(self) -> Tensor:
        """γ."""
        if self.form == "plain":
            return self.gain
        return joined(self.magnitude, self.direction, self.form, self.dim)

    def extra_repr(self) -> str:
        """Its form."""
        return self.form


@dataclass(frozen=True)
class WeightShape:
    """Which dimensions of a weight are inputs and outputs, and its blocks of rows."""

    in_axis: int
    out_axis: int
    stack: tuple[int, ...]
    """Dimensions of independent matrices: experts."""
    rows: tuple[Ranges, ...]
    """Half-open ranges along the outputs for each block: one block, or q, k and v, or gate and up."""
    sizes: tuple[int, ...]
    """Of the weight."""

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """All ranges of rows in order, each with the block it belongs to."""
        return sorted((low, high, block) for block, rows in enumerate(self.rows) for low, high in rows)

    def vector_sizes(self, axis: int, length: int) -> tuple[int, ...]:
        """The shape of vectors along an axis, one for each matrix of a stack."""
        return tuple(length if one == axis else self.sizes[one] for one in sorted({axis, *self.stack}))

    def spread(self, vector: Tensor, axis: int) -> Tensor:
        """A vector along an axis, shaped to be multiplied with the weight."""
        sizes = [1] * len(self.sizes)
        for one, size in zip(sorted({axis, *self.stack}), vector.shape, strict=True):
            sizes[one] = size
        return vector.view(sizes)

    def dim(self, axis: int) -> int:
        """The dimension of such a vector that runs along the axis."""
        return sorted({axis, *self.stack}).index(axis)


class ScaledWeight(nn.Module):
    """The parametrization `W → diag(b)·W·diag(γ)`, with separate vectors for each block of rows.

    Args:
        shape: how the weight's dimensions are used.
        inputs: a γ for each block of rows, or none.
        outputs: a b for each block of rows, or none.
        weight, gain, shift: the names of the weight, the norm's gain and its shift, for folding later.
        norm: the names of the norm's parameters, in order.

    >>> shape = WeightShape(in_axis=1, out_axis=0, stack=(), rows=(((0, 1),), ((1, 2),)), sizes=(2, 3))
    >>> inputs = [GainVector(torch.tensor([1.0, 2.0, 3.0])), GainVector(torch.tensor([4.0, 5.0, 6.0]))]
    >>> ScaledWeight(shape, inputs, [])(torch.ones(2, 3))
    tensor([[1., 2., 3.],
            [4., 5., 6.]], grad_fn=<...>)
    """

    def __init__(
        self,
        shape: WeightShape,
        inputs: Sequence[GainVector],
        outputs: Sequence[GainVector],
        *,
        weight: str = "",
        gain: str = "",
        shift: str | None = None,
        norm: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.shape = shape
        self.weight, self.gain, self.shift, self.norm = weight, gain, shift, tuple(norm)
        self.order: tuple[str, ...] = ()
        self.inputs = nn.ModuleList(inputs)
        self.outputs = nn.ModuleList(outputs)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight that the network uses."""
        return self.scaled(weight, [one() for one in self.inputs], [one() for one in self.outputs])

    def scaled(self, weight: Tensor, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Tensor:
        """The product with given vectors."""
        scaled = weight
        for vectors, axis in ((outputs, self.shape.out_axis), (inputs, self.shape.in_axis)):
            if vectors:
                scaled = scaled * self.spread(vectors, axis)
        return scaled.to(weight.dtype)

    def spread(self, vectors: Sequence[Tensor], axis: int) -> Tensor:
        """The factor on every entry of the weight, up to broadcasting, by its vectors along an axis."""
        spread = [self.shape.spread(vector, axis) for vector in vectors]
        if len(spread) == 1:
            return spread[0]
        out_axis, taken, pieces = self.shape.out_axis, [0] * len(spread), []
        for low, high, block in self.shape.ranges:
            piece = spread[block]
            if axis == out_axis:
                piece = piece.narrow(axis, taken[block], high - low)
                taken[block] += high - low
            sizes = list(piece.shape)
            sizes[out_axis] = high - low
            pieces.append(piece.expand(sizes))
        return torch.cat(pieces, out_axis)


class ScaledGain(nn.Module):
    """The parametrization of a norm's own gain: the norm's parameter becomes the direction.

    Args:
        gain: the initial γ.
        form: any but `plain`.
        offset: what the norm adds to its gain, 1 if it is zero-centred.
    """

    def __init__(self, gain: Tensor, form: Form, offset: float) -> None:
        super().__init__()
        self.form, self.offset = form, offset
        self.order: tuple[str, ...] = ()
        self.magnitude = nn.Parameter(first_magnitude(gain.detach(), form, -1))

    def forward(self, direction: Tensor) -> Tensor:
        """The gain that the norm uses."""
        gain = joined(self.magnitude, direction, self.form, -1)
        return gain - self.offset if self.offset else gain


def first_magnitude(gain: Tensor, form: Form, dim: int) -> Tensor:
    """The β with which a direction that starts as γ gives γ."""
    if form == "direction":
        return _rms(gain, dim).to(gain.dtype)
    return torch.full_like(gain.narrow(dim, 0, 1), 0.0 if form == "exp" else 1.0)


def joined(magnitude: Tensor, direction: Tensor, form: Form, dim: int) -> Tensor:
    """γ from a magnitude and a direction."""
    if form == "exp":
        return magnitude.exp() * direction
    if form == "product":
        return magnitude * direction
    return (magnitude * (direction / _rms(direction, dim))).to(direction.dtype)


def _rms(x: Tensor, dim: int) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(dim, keepdim=True).sqrt()
