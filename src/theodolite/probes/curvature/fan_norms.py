"""Rules of normalisation, softmax and attention, whose second derivatives couple the entries of a row.

With `c = u − ū` (or u itself), `σ² = mean c² + ε`, `n = c/σ` and for each tangent `c_i`, `m_i = mean(n c_i)`:

    ṅ_i = (c_i − n m_i)/σ,    D²n[i, j] = (−c_i m_j − c_j m_i + 3 n m_i m_j − n mean(c_i c_j))/σ²

With p the softmax of u and `ũ_i = u̇_i − Σ p u̇_i`: `ṗ_i = p ũ_i`, `D²p[i, j] = p (ũ_i ũ_j − Σ p ũ_i ũ_j)`.
"""

# d directions, N rows, K entries of a row

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from theodolite.probes.curvature.fan import Fan, Rule, Unsupported
from theodolite.probes.curvature.fan_rules import (
    ARITHMETIC,
    add,
    matmul,
    multiply,
    reshape,
    structural,
    weighted,
)


def _normalised(fan: Fan, x: Tensor, dims: Sequence[int], eps: float, *, centred: bool) -> Tensor:
    """`n` over some dimensions; plainly where x does not depend on the parameters."""
    dims = [dim % x.ndim for dim in dims]
    inner = [dim + 1 for dim in dims]
    centre = x - x.mean(dims, keepdim=True) if centred else x
    spread = centre.square().mean(dims, keepdim=True).add(eps).sqrt()
    value = centre / spread
    if not fan.active(x):
        return value

    @cache
    def moved() -> tuple[Tensor, Tensor]:
        """`c_i` and `m_i`."""
        found = fan.tangents(x)
        found = found - found.mean(inner, keepdim=True) if centred else found
        return found, (value * found).mean(inner, keepdim=True)

    def tangents() -> Tensor:
        changes, along = moved()
        return (changes - value * along) / spread

    def second(adjoint: Tensor) -> Tensor:
        changes, along = moved()
        scaled = adjoint / spread.square()
        pull = (scaled * value).sum(dims, keepdim=True)
        rows = along.sum(inner).flatten(1)
        mixed = (scaled * changes).sum(inner).flatten(1) @ rows.mT
        curved = weighted(changes, (pull * pull.numel() / x.numel()).expand_as(x))
        return -mixed - mixed.mT + (rows * (3 * pull).reshape(-1)) @ rows.mT - curved

    return fan.record(value, tangents, second)


def _affine(fan: Fan, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    if weight is not None:
        x = multiply(fan, x, reshape(fan, weight, shape))
    return x if bias is None else add(fan, x, reshape(fan, bias, shape))


def _layer_norm(
    fan: Fan,
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
) -> Tensor:
    found = _normalised(fan, input, range(-len(normalized_shape), 0), eps, centred=True)
    return _affine(fan, found, weight, bias, tuple(normalized_shape))


def _rms_norm(
    fan: Fan, func: Any, input: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Tensor:
    small = torch.finfo(input.dtype).eps if eps is None else eps
    found = _normalised(fan, input, range(-len(normalized_shape), 0), small, centred=False)
    return _affine(fan, found, weight, None, tuple(normalized_shape))


def _group_norm(
    fan: Fan, func: Any, input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: Any = 1e-5
) -> Tensor:
    grouped = reshape(fan, input, (len(input), num_groups, -1))
    found = reshape(fan, _normalised(fan, grouped, [2], eps, centred=True), tuple(input.shape))
    return _affine(fan, found, weight, bias, (-1, *[1] * (input.ndim - 2)))


def _batch_norm(
    fan: Fan,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not fan.active(input):
        raise Unsupported("batch_norm of the input itself has no rule")
    shape = (-1, *[1] * (input.ndim - 2))
    if training or running_mean is None or running_var is None:
        found = _normalised(fan, input, [0, *range(2, input.ndim)], eps, centred=True)
    else:
        centred = add(fan, input, -running_mean.reshape(shape))
        found = multiply(fan, centred, (running_var + eps).rsqrt().reshape(shape))
    return _affine(fan, found, weight, bias, shape)


def _softmax(
    fan: Fan, func: Any, input: Tensor, dim: Any = None, _stacklevel: int = 3, dtype: Any = None
) -> Tensor:
    if dim is None or not fan.active(input):
        raise Unsupported("softmax of this form has no rule")
    if dtype is not None and dtype != input.dtype:
        input = structural(fan, torch.Tensor.to, input, dtype)
    dim = dim % input.ndim
    p = input.softmax(dim)

    @cache
    def centred() -> Tensor:
        moved = fan.tangents(input)
        return moved - (p * moved).sum(dim + 1, keepdim=True)

    def second(adjoint: Tensor) -> Tensor:
        return weighted(centred(), p * (adjoint - (p * adjoint).sum(dim, keepdim=True)))

    return fan.record(p, lambda: p * centred(), second)


def _attention(
    fan: Fan,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p or fan.active(attn_mask):
        raise Unsupported("attention with dropout, or with a mask that moves, has no rule")
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        times = query.shape[-3] // key.shape[-3]
        key, value = (structural(fan, torch.Tensor.repeat_interleave, one, times, -3) for one in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = matmul(fan, query, structural(fan, torch.transpose, key, -1, -2))
    scores = multiply(fan, scores, factor)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill(~attn_mask, -torch.inf)
        scores = add(fan, scores, attn_mask)
    weights = _softmax(fan, torch.softmax, scores, -1)
    return matmul(fan, weights, value)


RULES: dict[str, Rule] = {
    **ARITHMETIC,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "softmax": _softmax,
    "scaled_dot_product_attention": _attention,
}
