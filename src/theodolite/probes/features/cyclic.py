"""Rows of weights over a cyclic axis: read from any tensor, checked, and written as waves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from theodolite.core.arguments import whole
from theodolite.core.errors import UseError
from theodolite.present.text import counted

SHORTEST = 3
"""Least length of a cyclic axis: on a shorter one no frequency has a phase."""


def rows_of(name: str, weights: Any, axis: int) -> Tensor:
    """Weights as rows over an axis, (N, p) in float64 on the CPU; raises `UseError` if they cannot be used.

    >>> rows_of("table", torch.zeros(5, 2), 0).shape
    torch.Size([2, 5])
    """
    values = _values(name, weights)
    if not values.ndim:
        raise UseError(f"{name} is a single number: give weights with one row for each neuron")
    whole("out_axis" if name == "w_out" else "axis", axis, least=-values.ndim, most=values.ndim - 1)
    shape = "×".join(map(str, values.shape))
    rows = values.movedim(axis, -1).flatten(0, -2) if values.ndim > 1 else values[None]
    if rows.shape[1] < SHORTEST:
        raise UseError(
            f"the cyclic axis of {name} (axis {axis} of {shape}) has length {rows.shape[1]}: give at least "
            f"{SHORTEST}"
        )
    if not len(rows):
        raise UseError(f"{name} has no rows: its shape is {shape}. Give at least one")
    if broken := int((~rows.isfinite()).any(1).sum()):
        raise UseError(
            f"{name} has entries that are nan or infinite, in {broken} of {counted(len(rows), 'row')}: leave "
            "these out"
        )
    return rows


def both_rows(w_in: Any, w_out: Any, axis: int, out_axis: int) -> tuple[Tensor, Tensor]:
    """Input and output weights of the same neurons as rows over an axis."""
    rows, answer = rows_of("w_in", w_in, axis), rows_of("w_out", w_out, out_axis)
    if answer.shape != rows.shape:
        raise UseError(
            f"w_in has {counted(len(rows), 'row')} of length {rows.shape[1]} and w_out "
            f"{counted(len(answer), 'row')} of length {answer.shape[1]}: give weights of the same neurons "
            f"over the same axis, or the axis of w_out as out_axis, which is {out_axis}"
        )
    return rows, answer


def waves(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Amplitude, phase and energy of each frequency 1 … ⌊p/2⌋ in rows (N, p); each (N, ⌊p/2⌋).

    The phase of Nyquist's frequency is 0, or π if the first entry is negative.

    >>> amplitude, phase, energy = waves(torch.tensor([[3.0, -1.0, -1.0, -1.0]]).double())
    >>> amplitude, energy  # 2 cos(πj/2) + cos(πj)
    (tensor([[2., 1.]], dtype=torch.float64), tensor([[8., 4.]], dtype=torch.float64))
    """
    length = rows.shape[1]
    coefficients = torch.fft.rfft(rows - rows.mean(1, keepdim=True), dim=1)[:, 1:]
    pairs = torch.full((length // 2,), 2.0, dtype=rows.dtype)
    if length % 2 == 0:
        pairs[-1] = 1.0
    sizes = coefficients.abs()
    return pairs * sizes / length, coefficients.angle(), pairs * sizes.square() / length


def wrapped_angle(angles: Tensor) -> Tensor:
    """Angles moved to −π … π by multiples of 2π.

    >>> wrapped_angle(torch.tensor([3 * math.pi / 2, -1.0]))
    tensor([-1.5708, -1.0000])
    """
    return torch.remainder(angles + math.pi, 2 * math.pi) - math.pi


def _values(name: str, weights: Any) -> Tensor:
    wanted = "give a tensor or an array of real numbers"
    if isinstance(weights, nn.Module):
        raise UseError(f"{name} is a {type(weights).__name__}: give its weights, such as layer.weight")
    try:
        values = weights.detach() if isinstance(weights, Tensor) else np.asarray(weights)
        is_complex = values.is_complex() if isinstance(values, Tensor) else values.dtype.kind == "c"
        if is_complex:
            raise UseError(
                f"{name} is complex: {wanted}, such as its real and its imaginary part by themselves"
            )
        if isinstance(values, Tensor):
            return values.to("cpu").to_dense().to(torch.float64)
        if values.dtype.kind in "USMm" or weights is None:  # texts and dates
            raise TypeError
        return torch.from_numpy(values.astype(np.float64))
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, UseError):
            raise
        raise UseError(
            f"{name} is a {type(weights).__name__} without numbers that can be read: {wanted}"
        ) from error
