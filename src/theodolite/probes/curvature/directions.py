"""Random sparse orthonormal directions: every parameter belongs to one of them.

`R` (P × d) has one entry in each row, `±1/√s` with s the number of parameters in its column, so that its
columns are always orthonormal. It is stored as two numbers for each parameter; products with the rows of R
that belong to one weight are products with a sparse matrix.
"""

# P parameters, d directions, O outputs, I inputs

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from theodolite.core.arguments import whole

MOST = 2**15 - 1
"""The largest number of directions: a column index is an int16."""
MANY = 100
"""Parameters for each direction from which on columns are drawn independently, with unequal counts."""


@dataclass(frozen=True)
class Columns:
    """The rows of R that belong to one tensor: the column and the value of each entry."""

    column: Tensor
    value: Tensor
    num: int

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor."""
        return self.value.shape

    @cached_property
    def dense(self) -> Tensor:
        """The d tangents of the tensor, (d, *shape)."""
        found = self.value.new_zeros((self.num, *self.shape))
        return found.scatter_(0, self.column[None].long(), self.value[None])

    @cached_property
    def transposed(self) -> Columns:
        """The same for the transposed matrix."""
        return Columns(self.column.mT, self.value.mT, self.num)

    def gathered(self, entries: Tensor) -> Tensor:
        """The sum of the entries in each column, (d,)."""
        return entries.new_zeros(self.num).index_add_(0, self._index, entries.flatten())

    @cached_property
    def _index(self) -> Tensor:
        return self.column.flatten().int()

    def rows(self, index: Tensor) -> Tensor:
        """Tangents of `weight[index]`, (d, *index.shape, …)."""
        column, value = self.column[index], self.value[index]
        return value.new_zeros((self.num, *value.shape)).scatter_(0, column[None].long(), value[None])

    def apply(self, vectors: Tensor) -> Tensor:
        """`V_i x` for the matrices V_1 … V_d (O × I) and vectors (N, I): (d, O, N)."""
        if vectors.dtype not in (torch.float32, torch.float64):  # torch has no sparse products for these
            return self.dense @ vectors.mT
        product = vectors.new_empty((self.num * self.shape[0], len(vectors)))
        # `@` would fill the memory with zeros first.
        torch.addmm(product, self._stacked, vectors.mT.contiguous(), beta=0, out=product)
        return product.unflatten(0, (self.num, self.shape[0]))

    @cached_property
    def _stacked(self) -> Tensor:
        """The matrices stacked, (d·O, I), sparse."""
        outputs, inputs = self.shape
        column = self.column.contiguous().flatten()
        if column.device.type == "cpu":  # numpy sorts short integers by radix, which is many times faster
            order = torch.from_numpy(np.argsort(column.numpy(), kind="stable"))
        else:
            order = column.argsort(stable=True)
        row = column.int().mul_(outputs).view(outputs, inputs)
        row += torch.arange(outputs, device=column.device, dtype=torch.int32)[:, None]
        counts = torch.bincount(row.flatten(), minlength=self.num * outputs)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        value = self.value.contiguous().flatten()[order]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Ss]parse.*")
            # MKL would convert long indices to short ones in every product.
            return torch.sparse_csr_tensor(
                starts.int(), order.int().remainder_(inputs), value, (self.num * outputs, inputs)
            )


@dataclass(frozen=True)
class Directions:
    """The matrix R over named parameters. Made by `draw`."""

    columns: Mapping[str, Columns]
    num: int
    counts: Tensor
    """s, the number of parameters in each column, (d,)."""

    def pulled(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """`Rᵀ g` for a gradient by name, (d,)."""
        parts = [one.gathered(gradients[name] * one.value) for name, one in self.columns.items()]
        return torch.stack(parts).double().sum(0)

    @property
    def matrix(self) -> Tensor:
        """R, dense, (P, d)."""
        return torch.cat([one.dense.reshape(self.num, -1) for one in self.columns.values()], dim=1).mT


def draw(
    shapes: Mapping[str, torch.Size],
    num: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Directions:
    """Random directions over parameters of these shapes; a seed gives the same on every device.

    >>> R = draw({"w": torch.Size([4, 3]), "b": torch.Size([4])}, 5, dtype=torch.float64).matrix
    >>> torch.allclose(R.mT @ R, torch.eye(5, dtype=torch.float64))
    True
    """
    size = sum(shape.numel() for shape in shapes.values())
    whole("directions", num, least=3, most=min(size, MOST))
    random = np.random.default_rng(seed)
    if size >= MANY * num:
        column = random.integers(0, num, size, dtype=np.uint16)
    else:  # independent draws could leave a column empty
        column = random.permutation(size).astype(np.uint16) % num
    counts = torch.from_numpy(np.bincount(column, minlength=num))
    value = counts.double().rsqrt().numpy()[column]
    value[random.integers(0, 2, size, dtype=bool)] *= -1
    columns = torch.from_numpy(column.astype(np.int16)).to(device)
    values = torch.from_numpy(value).to(device, dtype)
    sizes = [shape.numel() for shape in shapes.values()]
    pieces = zip(shapes.items(), columns.split(sizes), values.split(sizes), strict=True)
    return Directions(
        {name: Columns(one.view(shape), other.view(shape), num) for (name, shape), one, other in pieces},
        num,
        counts,
    )
