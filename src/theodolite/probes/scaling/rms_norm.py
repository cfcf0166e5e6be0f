"""How large a tensor is as an operator: `‖A‖_R = √(n_in/n_out)·‖A‖₂`, the RMS operator norm.

It is the largest factor by which a layer can change the root mean square of what it is given. What is no
matrix is measured by the same idea:

    a bias or a gain     its root mean square (a matrix with one input)
    an embedding         the root mean square of its rows that are not zero: one-hot inputs read single rows,
                         and a step moves those that were read
    a stack of experts   the largest of its matrices
    a convolution        its kernel as one matrix from all it reads to one position
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from theodolite.anatomy.part import Part
from theodolite.optimizers.matrices import as_matrices
from theodolite.probes.scaling.spectral_norm import spectral_norm

MOST_STACKED = 1 << 24
"""Matrices of one shape are measured together up to this many entries: a copy of 64 MiB."""


def rms_norms(tensors: Mapping[str, Tensor], parts: Mapping[str, Part]) -> dict[str, tuple[float, bool]]:
    """`‖A‖_R` of each tensor, and whether the iteration converged.

    >>> part = Part("w", (4, 16), "linear", "hidden", 16, 4, True, True, (1,), (0,))
    >>> rms_norms({"w": torch.eye(4, 16)}, {"w": part})     # √(16/4)·1
    {'w': (2.0, True)}
    """
    found: dict[str, tuple[float, bool]] = {}
    alike: dict[tuple[tuple[int, ...], torch.device], list[tuple[str, Tensor]]] = {}
    for name, tensor in tensors.items():
        part = parts[name]
        if is_matrix(part):
            matrices = as_matrices(tensor.detach(), (part.in_axes, part.out_axes))
            alike.setdefault((tuple(matrices.shape), matrices.device), []).append((name, matrices))
        else:
            value = _entries(tensor, part)
            found[name] = value, math.isfinite(value)
    for members in alike.values():
        at_once = max(1, MOST_STACKED // max(1, members[0][1].numel()))
        for first in range(0, len(members), at_once):
            together = members[first : first + at_once]
            # A view where there is only one: large matrices are not copied.
            stack = together[0][1][None] if len(together) == 1 else torch.stack([one for _, one in together])
            norms = spectral_norm(stack)
            for (name, _), values in zip(together, norms.value, strict=True):
                scale = math.sqrt(parts[name].fan_in / parts[name].fan_out)
                found[name] = scale * values.max().item(), norms.converged
    return {name: found[name] for name in tensors}


def is_matrix(part: Part) -> bool:
    """Is it measured by its largest singular value?"""
    return bool(part.in_axes) and bool(part.out_axes) and part.op != "embedding"


def _entries(tensor: Tensor, part: Part) -> float:
    """The root mean square of the entries; in an embedding, of those in rows that are not zero."""
    squares = tensor.detach().float().square()
    if part.op == "embedding":
        rows = squares.mean(part.out_axes)
        used = rows[rows != 0]  # keeps nan
        return used.mean().sqrt().item() if len(used) else 0.0
    return squares.mean().sqrt().item()
