"""Rules of elementwise operations, products, convolutions and pooling: tangents and second derivatives.

For `y = f(u)` a rule gives the tangents `ẏ_i = Df[u̇_i]` and, where f is not linear, the matrix
`⟨δ, D²f[u̇_i, u̇_j]⟩`, in which δ is the derivative of the result by y.
"""

# d directions, N rows, O outputs, I inputs

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.probes.curvature.fan import Fan, Rule, Unsupported


def structural(fan: Fan, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Linear in one tensor or in a list of them: views, sums, casts, cat."""
    if any(isinstance(one, Tensor) for one in tree_leaves(kwargs)):
        raise Unsupported(f"{getattr(func, '__name__', func)} with tensors by keyword has no rule")
    value = func(*args, **kwargs)
    outputs = value if isinstance(value, (tuple, list)) else (value,)
    if fan.curved is not None:
        for output in outputs:
            fan.spread(output, lambda: value)
        return value

    def moving(leaf: Any) -> tuple[Any, Any]:
        """The tangents of an argument, or itself, and its dimension in vmap."""
        if isinstance(leaf, (tuple, list)) and any(isinstance(item, Tensor) for item in leaf):
            values, dims = zip(*map(moving, leaf), strict=True)
            return type(leaf)(values), type(leaf)(dims)
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf, None
        constant = leaf.new_zeros(()).expand(fan.num, *leaf.shape)
        return fan.tangents(leaf) if fan.active(leaf) else constant, 0

    inputs, dims = zip(*map(moving, args), strict=True)
    found = torch.vmap(lambda *inner: func(*inner, **kwargs), in_dims=dims)(*inputs)
    several = found if isinstance(found, (tuple, list)) else (found,)
    for output, tangents in zip(outputs, several, strict=True):
        fan.spread(output, lambda tangents=tangents: tangents)  # type: ignore[misc]
    return value


def reshape(fan: Fan, x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same entries in another shape."""
    if not fan.active(x):
        return x.reshape(*shape)
    found: Tensor = structural(fan, torch.reshape, x, tuple(shape))
    return found


def _getitem(fan: Fan, func: Any, x: Tensor, index: Any) -> Tensor:
    value = x[index]
    whole = index if isinstance(index, tuple) else (index,)

    def tangents() -> Tensor:
        found = fan.tangents(x)[(slice(None), *whole)]
        if found.shape[1:] != value.shape:
            raise Unsupported("indexing of this form has no rule")
        return found

    return fan.spread(value, tangents)


def _masked_fill(fan: Fan, func: Any, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    if fan.active(value):
        raise Unsupported("masked_fill with a moving value has no rule")
    return fan.spread(func(x, mask, value), lambda: fan.tangents(x).masked_fill(mask, 0.0))


def _pad(
    fan: Fan, func: Any, input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    filled = None if mode != "constant" else 0.0
    return fan.spread(
        func(input, pad, mode, value),
        lambda: torch.vmap(lambda one: func(one, pad, mode, filled))(fan.tangents(input)),
    )


def _where(fan: Fan, func: Any, condition: Tensor, x: Any, y: Any) -> Tensor:
    value = torch.where(condition, x, y)

    def tangents() -> Tensor:
        zero = value.new_zeros(())
        parts = [lifted(fan, one, value.ndim) if fan.active(one) else zero for one in (x, y)]
        found: Tensor = torch.where(condition, parts[0], parts[1])
        return found.expand(fan.num, *value.shape)

    return fan.spread(value, tangents)


def _dropout(
    fan: Fan, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if inplace:
        raise Unsupported("dropout in place has no rule")
    if not training or p == 0:
        return fan.spread(x.clone(), lambda: fan.tangents(x))
    mask = nn.functional.dropout(torch.ones_like(x), p, training)
    return fan.spread(x * mask, lambda: fan.tangents(x) * mask)


def add(fan: Fan, x: Any, y: Any, alpha: float = 1) -> Tensor:
    """`x + alpha·y`, with broadcasting."""
    value = x + y if alpha == 1 else x - y if alpha == -1 else x + alpha * y

    def tangents() -> Tensor:
        parts = [
            lifted(fan, one, value.ndim) * factor if factor != 1 else lifted(fan, one, value.ndim)
            for one, factor in ((x, 1), (y, alpha))
            if fan.active(one)
        ]
        return _total(parts).expand(fan.num, *value.shape)

    return fan.spread(value, tangents)


def multiply(fan: Fan, x: Any, y: Any) -> Tensor:
    """`x ∘ y`, with broadcasting."""
    value = x * y

    def tangents() -> Tensor:
        parts = [lifted(fan, one, value.ndim) * other for one, other in ((x, y), (y, x)) if fan.active(one)]
        return _total(parts).expand(fan.num, *value.shape)

    def second(adjoint: Tensor) -> Tensor:
        one = (lifted(fan, x, value.ndim) * adjoint).expand(fan.num, *value.shape)
        return both_ways(one, lifted(fan, y, value.ndim).expand(fan.num, *value.shape))

    if fan.active(x) and fan.active(y):
        fan.bend(value, second)
    return fan.spread(value, tangents)


def _divide(fan: Fan, func: Any, x: Any, y: Any, *, rounding_mode: Any = None) -> Tensor:
    if rounding_mode is not None:
        raise Unsupported("div with rounding has no rule")
    if fan.active(y):
        return multiply(fan, x, _smooth(fan, torch.reciprocal, y))
    return fan.spread(x / y, lambda: lifted(fan, x, max(x.ndim, getattr(y, "ndim", 0))) / y)


def matmul(fan: Fan, x: Tensor, y: Tensor) -> Tensor:
    """`x y`, batches of matrices."""
    if min(x.ndim, y.ndim) < 2:
        raise Unsupported("products with a vector have no rule")
    columns = fan.columns(y)
    if y.ndim == 2 and (columns is not None or not fan.active(y)):
        return _linear_map(fan, x, y.mT, None if columns is None else columns.transposed)
    value = x @ y

    def tangents() -> Tensor:
        parts = [lifted(fan, x, value.ndim) @ y] if fan.active(x) else []
        return _total([*parts, x @ lifted(fan, y, value.ndim)] if fan.active(y) else parts)

    def second(adjoint: Tensor) -> Tensor:
        other = lifted(fan, y, value.ndim)
        pulled = lifted(fan, x, value.ndim).mT @ adjoint
        shape = torch.broadcast_shapes(pulled.shape, other.shape)
        return both_ways(pulled.expand(shape), other.expand(shape))

    if fan.active(x) and fan.active(y):
        fan.bend(value, second)
    return fan.spread(value, tangents)


def _linear(fan: Fan, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    columns = fan.columns(weight)
    if fan.active(weight) and columns is None:
        value = matmul(fan, input, structural(fan, torch.transpose, weight, 0, 1))
    else:
        value = _linear_map(fan, input, weight, columns)
    return value if bias is None else add(fan, value, bias)


def _addmm(
    fan: Fan, func: Any, bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if beta != 1 or alpha != 1:
        raise Unsupported("addmm with factors has no rule")
    return add(fan, matmul(fan, x, y), bias)


def _linear_map(fan: Fan, x: Tensor, weight: Tensor, columns: Any) -> Tensor:
    """`x Wᵀ` for a weight (O, I) that is a parameter or constant."""
    value = nn.functional.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])

    # Transposed, (d, O, N), as sparse products give it: no copy is needed.
    def moved() -> Tensor:
        return fan.tangents(x).reshape(fan.num, *rows.shape).mT

    def tangents() -> Tensor:
        if columns is None:
            found = weight @ moved()
        else:
            found = columns.apply(rows)
            if fan.active(x):
                found.baddbmm_(weight.expand(fan.num, *weight.shape), moved())
        return found.mT.reshape(fan.num, *value.shape)

    def second(adjoint: Tensor) -> Tensor:
        pulled = columns.transposed.apply(adjoint.reshape(-1, adjoint.shape[-1]))
        return both_ways(pulled, moved())

    if columns is not None and fan.active(x):
        fan.bend(value, second, weight=weight)
    return fan.spread(value, tangents)


def _embedding(
    fan: Fan,
    func: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if func is not nn.functional.embedding or max_norm is not None or scale_grad_by_freq:
        raise Unsupported("an embedding of this form has no rule")
    columns = fan.columns(weight)

    def tangents() -> Tensor:
        found = fan.tangents(weight)[:, input] if columns is None else columns.rows(input)
        if padding_idx is None:
            return found
        # Autograd gives the padding row no gradient.
        return found * (input != padding_idx % len(weight))[..., None]

    return fan.spread(nn.functional.embedding(input, weight, padding_idx), tangents)


def _convolution(
    fan: Fan,
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    places = weight.ndim - 2
    if groups != 1 or isinstance(padding, str) or input.ndim != weight.ndim:
        raise Unsupported("a convolution in groups, or with padding by name, has no rule")
    stride, padding, dilation = (
        (one,) * places if isinstance(one, int) else tuple(one) for one in (stride, padding, dilation)
    )
    options = {"stride": stride, "padding": padding, "dilation": dilation}
    value = func(input, weight, None, **options)
    outputs, inputs = weight.shape[:2]

    def tangents() -> Tensor:
        parts = []
        if fan.active(weight):
            stacked = fan.tangents(weight).flatten(0, 1)
            parts.append(
                func(input, stacked, None, **options).unflatten(1, (fan.num, outputs)).transpose(0, 1)
            )
        if fan.active(input):
            moved = func(fan.tangents(input).flatten(0, 1), weight, None, **options)
            parts.append(moved.unflatten(0, (fan.num, len(input))))
        return _total(parts)

    def second(adjoint: Tensor) -> Tensor:
        back = {1: nn.functional.conv_transpose1d, 2: nn.functional.conv_transpose2d}[places]
        extra = [
            size - ((out - 1) * step - 2 * pad + spread * (kernel - 1) + 1)
            for size, out, step, pad, spread, kernel in zip(
                input.shape[2:], value.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
            )
        ]
        stacked = fan.tangents(weight).transpose(0, 1).flatten(1, 2)  # (O, d·I, …)
        pulled = back(adjoint, stacked, None, stride, padding, extra, 1, dilation)
        return both_ways(pulled.unflatten(1, (fan.num, inputs)).transpose(0, 1), fan.tangents(input))

    if fan.active(weight) and fan.active(input):
        fan.bend(value, second, weight=weight)
    fan.spread(value, tangents)
    if bias is None:
        return value
    return add(fan, value, reshape(fan, bias, (-1, *[1] * places)))


def _max_pool(fan: Fan, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if kwargs.pop("return_indices", False):
        raise Unsupported("pooling that returns indices has no rule")
    pool = {3: nn.functional.max_pool1d, 4: nn.functional.max_pool2d}.get(input.ndim)
    if pool is None:
        raise Unsupported("pooling of this form has no rule")
    value, index = pool(input, *args, return_indices=True, **kwargs)
    flat = index.flatten(2)

    def tangents() -> Tensor:
        found = fan.tangents(input).flatten(3).gather(3, flat.expand(fan.num, *flat.shape))
        return found.reshape(fan.num, *value.shape)

    return fan.spread(value, tangents)


def _average_pool(fan: Fan, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    value = func(input, *args, **kwargs)
    return fan.spread(
        value,
        lambda: func(fan.tangents(input).flatten(0, 1), *args, **kwargs).unflatten(0, (fan.num, len(input))),
    )


def _straight(fan: Fan, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Elementwise and piecewise linear, such as ReLU."""
    _require_one_moving(fan, func, args, kwargs)
    return fan.spread(
        func(x, *args, **kwargs),
        lambda: fan.tangents(x) * _derivatives(func, x, args, kwargs, second=False)[0],
    )


def _smooth(fan: Fan, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Elementwise: `ẏ = f′ u̇`, `⟨δ, D²f⟩ = Σ δ f″ u̇_i u̇_j`."""
    _require_one_moving(fan, func, args, kwargs)
    value = func(x, *args, **kwargs)
    derivatives = cache(lambda: _derivatives(func, x, args, kwargs, second=True))
    fan.bend(value, lambda adjoint: weighted(fan.tangents(x), adjoint * derivatives()[1]))
    return fan.spread(value, lambda: fan.tangents(x) * derivatives()[0])


def _require_one_moving(fan: Fan, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    name = getattr(func, "__name__", func)
    if any(fan.active(one) for one in (*args, *kwargs.values())):
        raise Unsupported(f"{name} of two moving values has no rule")
    if kwargs.get("inplace"):
        raise Unsupported(f"{name} in place has no rule")


def _derivatives(
    func: Any, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any], *, second: bool
) -> tuple[Tensor, Tensor]:
    """`f′`, and `f″` if it is asked for."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(func(point, *args, **kwargs).sum(), point, create_graph=second)
        if not second or not slope.requires_grad:
            return slope.detach(), torch.zeros_like(slope)
        (bend,) = torch.autograd.grad(slope.sum(), point)
    return slope.detach(), bend


def _power(fan: Fan, func: Any, x: Any, exponent: Any) -> Tensor:
    if isinstance(exponent, Tensor) and exponent.numel() == 1 and not fan.active(exponent):
        exponent = exponent.item()
    if not isinstance(exponent, (int, float)):
        raise Unsupported("a moving exponent has no rule")
    return _smooth(fan, torch.pow, x, exponent)


def lifted(fan: Fan, x: Tensor, ndim: int) -> Tensor:
    """Tangents (d, 1, …, *shape) that broadcast with values of more dimensions."""
    tangents = fan.tangents(x)
    return tangents.reshape(fan.num, *[1] * (ndim - x.ndim), *x.shape) if ndim > x.ndim else tangents


def both_ways(one: Tensor, other: Tensor) -> Tensor:
    """`M + Mᵀ` of `M_ij = ⟨one_i, other_j⟩`."""
    order = _in_memory(one)
    found = one.permute(order).reshape(len(one), -1) @ other.permute(order).reshape(len(other), -1).mT
    return found + found.mT


def weighted(tangents: Tensor, weights: Tensor) -> Tensor:
    """`Σ w u̇_i u̇_j`."""
    order = _in_memory(tangents)
    flat = tangents.permute(order).reshape(len(tangents), -1)
    return (flat * weights[None].permute(order).reshape(-1)) @ flat.mT


def _in_memory(tangents: Tensor) -> list[int]:
    """All dimensions but the first in memory order, in which flattening needs no copy."""
    strides = tangents.stride()
    return [0, *sorted(range(1, tangents.ndim), key=lambda dim: -strides[dim])]


def _total(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _named(rule: Any) -> Rule:
    """A rule that does not need to know which function was called."""
    return lambda fan, func, *args, **kwargs: rule(fan, *args, **kwargs)


_STRUCTURAL = (
    "view reshape flatten unflatten transpose permute T mT t contiguous expand expand_as unsqueeze squeeze "
    "chunk split tensor_split split_with_sizes unbind cat concat stack sum mean neg to type float double "
    "type_as clone repeat repeat_interleave narrow select movedim swapaxes roll flip tril triu cumsum "
    "view_as reshape_as broadcast_to index_select"
)
_SMOOTH = (
    "gelu silu tanh sigmoid softplus exp log sqrt rsqrt square reciprocal sin cos elu selu celu mish erf "
    "logsigmoid log1p expm1 softsign"
)
_STRAIGHT = (
    "relu leaky_relu abs clamp clamp_min clamp_max relu6 hardtanh hardshrink softshrink threshold _threshold"
)
ARITHMETIC: dict[str, Rule] = {
    **dict.fromkeys(_STRUCTURAL.split(), structural),
    **dict.fromkeys(_SMOOTH.split(), _smooth),
    **dict.fromkeys(_STRAIGHT.split(), _straight),
    "getitem": _getitem,
    "masked_fill": _masked_fill,
    "where": _where,
    "pad": _pad,
    "dropout": _dropout,
    **dict.fromkeys(("add", "radd"), _named(add)),
    "sub": lambda fan, func, x, y, *, alpha=1: add(fan, x, y, -alpha),
    "rsub": lambda fan, func, x, y, *, alpha=1: add(fan, y, x, -alpha),
    **dict.fromkeys(("mul", "rmul", "multiply"), _named(multiply)),
    **dict.fromkeys(("div", "truediv", "true_divide"), _divide),
    **dict.fromkeys(
        ("rtruediv", "rdiv"), lambda fan, func, x, y: multiply(fan, _smooth(fan, torch.reciprocal, x), y)
    ),
    **dict.fromkeys(("matmul", "bmm", "mm"), _named(matmul)),
    "linear": _linear,
    "addmm": _addmm,
    "embedding": _embedding,
    **dict.fromkeys(("conv1d", "conv2d"), _convolution),
    **dict.fromkeys(("max_pool1d", "max_pool2d"), _max_pool),
    **dict.fromkeys(
        ("avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"), _average_pool
    ),
    "pow": _power,
}
