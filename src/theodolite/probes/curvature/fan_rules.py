"""Rules of elementwise operations, products, convolutions and pooling: tangents and second derivatives.

For `y = f(u)` a rule gives the tangents `ẏ_i = Df[u̇_i]` and, where f is not linear, the matrix
`⟨δ, D²f[u̇_i, u̇_j]⟩`, in which δ is the derivative of the result by y.
"""

# d directions, N rows, O outputs, I inputs

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.probes.curvature.fan import Fan, Rule, Unsupported, operation_name


def structural(fan: Fan, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Linear in one tensor or in a list of them: views, sums, casts, cat."""
    if any(isinstance(one, Tensor) for one in tree_leaves(kwargs)):
        raise Unsupported(f"{getattr(func, '__name__', func)} with tensors by keyword has no rule")

    def moving(leaf: Any) -> tuple[Any, Any]:
        """The tangents of an argument, or itself, and its dimension in vmap."""
        if isinstance(leaf, (tuple, list)) and any(isinstance(item, Tensor) for item in leaf):
            values, dims = zip(*map(moving, leaf), strict=True)
            return type(leaf)(values), type(leaf)(dims)
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf, None
        constant = leaf.new_zeros(()).expand(fan.num, *leaf.shape)
        return fan.tangents(leaf) if fan.active(leaf) else constant, 0

    @cache
    def moved() -> Any:
        inputs, dims = zip(*map(moving, args), strict=True)
        return torch.vmap(lambda *inner: func(*inner, **kwargs), in_dims=dims)(*inputs)

    value = func(*args, **kwargs)
    if not isinstance(value, (tuple, list)):
        return fan.record(value, moved)
    for index, output in enumerate(value):
        fan.record(output, lambda index=index: moved()[index])  # type: ignore[misc]
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

    return fan.record(value, tangents)


def _masked_fill(fan: Fan, func: Any, x: Tensor, mask: Tensor, value: Any) -> Tensor:
    if fan.active(value):
        raise Unsupported("masked_fill with a moving value has no rule")
    return fan.record(func(x, mask, value), lambda: fan.tangents(x).masked_fill(mask, 0.0))


def _pad(
    fan: Fan, func: Any, input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    filled = None if mode != "constant" else 0.0
    return fan.record(
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

    return fan.record(value, tangents)


def _dropout(
    fan: Fan, func: Any, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if inplace:
        raise Unsupported("dropout in place has no rule")
    if not training or p == 0:
        return fan.record(x.clone(), lambda: fan.tangents(x))
    mask = nn.functional.dropout(torch.ones_like(x), p, training)
    return fan.record(x * mask, lambda: fan.tangents(x) * mask)


def add(fan: Fan, x: Any, y: Any, alpha: float = 1) -> Tensor:
    """`x + alpha·y`, with broadcasting."""
    value = x + alpha * y

    def tangents() -> Tensor:
        parts = [lifted(fan, x, value.ndim)] if fan.active(x) else []
        if fan.active(y):
            moved = lifted(fan, y, value.ndim)
            parts.append(moved if alpha == 1 else alpha * moved)
        return _total(parts).expand(fan.num, *value.shape)

    return fan.record(value, tangents)


def multiply(fan: Fan, x: Any, y: Any) -> Tensor:
    """`x ∘ y`, with broadcasting."""
    value = x * y
    ndim = value.ndim
    parts = lambda: lifted(fan, x, ndim) * y, lambda: lifted(fan, y, ndim) * x
    return _product(fan, value, x, y, parts, lambda adjoint: lifted(fan, x, ndim) * adjoint)


def _product(
    fan: Fan,
    value: Tensor,
    x: Any,
    y: Any,
    parts: tuple[Callable[[], Tensor], Callable[[], Tensor]],
    pulled: Callable[[Tensor], Tensor],
    *,
    weight: Tensor | None = None,
) -> Tensor:
    """`f(x, y)`, linear in both, with parts `f(ẋ, y)` and `f(x, ẏ)`; `⟨δ, f(ẋ, ẏ)⟩ = ⟨pulled(δ), ẏ⟩`."""

    def tangents() -> Tensor:
        return _total([part() for one, part in zip((x, y), parts, strict=True) if fan.active(one)])

    def second(adjoint: Tensor) -> Tensor:
        return both_ways(*torch.broadcast_tensors(pulled(adjoint), lifted(fan, y, value.ndim)))

    bilinear = fan.active(x) and fan.active(y)
    return fan.record(value, tangents, second if bilinear else None, weight=weight)


def _divide(fan: Fan, func: Any, x: Any, y: Any, *, rounding_mode: Any = None) -> Tensor:
    if rounding_mode is not None:
        raise Unsupported("div with rounding has no rule")
    if fan.active(y):
        return multiply(fan, x, _elementwise(fan, torch.reciprocal, y))
    return fan.record(x / y, lambda: lifted(fan, x, max(x.ndim, getattr(y, "ndim", 0))) / y)


def matmul(fan: Fan, x: Tensor, y: Tensor) -> Tensor:
    """`x y`, batches of matrices."""
    if min(x.ndim, y.ndim) < 2:
        raise Unsupported("products with a vector have no rule")
    columns = fan.columns(y)
    if y.ndim == 2 and (columns is not None or not fan.active(y)):
        return _linear_map(fan, x, y.mT, None if columns is None else columns.transposed)
    value = x @ y
    ndim = value.ndim
    parts = lambda: lifted(fan, x, ndim) @ y, lambda: x @ lifted(fan, y, ndim)
    return _product(fan, value, x, y, parts, lambda adjoint: lifted(fan, x, ndim).mT @ adjoint)


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

    bilinear = columns is not None and fan.active(x)
    return fan.record(value, tangents, second if bilinear else None, weight=weight)


def _embedding(fan: Fan, func: Any, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
    if func is not nn.functional.embedding or options["max_norm"] or options["scale_grad_by_freq"]:
        raise Unsupported("an embedding of this form has no rule")
    columns, padding = fan.columns(weight), options["padding_idx"]

    def tangents() -> Tensor:
        found = fan.tangents(weight)[:, input] if columns is None else columns.rows(input)
        if padding is None:
            return found
        # Autograd gives the padding row no gradient.
        return found * (input != padding % len(weight))[..., None]

    return fan.record(nn.functional.embedding(input, weight, padding), tangents)


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

    def by_weight() -> Tensor:
        found = func(input, fan.tangents(weight).flatten(0, 1), None, **options)
        return found.unflatten(1, (fan.num, outputs)).transpose(0, 1)

    def by_input() -> Tensor:
        found = func(fan.tangents(input).flatten(0, 1), weight, None, **options)
        return found.unflatten(0, (fan.num, len(input)))

    def pulled(adjoint: Tensor) -> Tensor:
        back = {1: nn.functional.conv_transpose1d, 2: nn.functional.conv_transpose2d}[places]
        extra = [
            size - ((out - 1) * step - 2 * pad + spread * (kernel - 1) + 1)
            for size, out, step, pad, spread, kernel in zip(
                input.shape[2:], value.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True
            )
        ]
        stacked = fan.tangents(weight).transpose(0, 1).flatten(1, 2)  # (O, d·I, …)
        found = back(adjoint, stacked, None, stride, padding, extra, 1, dilation)
        return found.unflatten(1, (fan.num, inputs)).transpose(0, 1)

    _product(fan, value, weight, input, (by_weight, by_input), pulled, weight=weight)
    return value if bias is None else add(fan, value, reshape(fan, bias, (-1, *[1] * places)))


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

    return fan.record(value, tangents)


def _elementwise(fan: Fan, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`ẏ = f′ u̇`; unless f is piecewise linear, `⟨δ, D²f⟩ = Σ δ f″ u̇_i u̇_j`."""
    name = operation_name(func)
    if any(fan.active(one) for one in (*args, *kwargs.values())):
        raise Unsupported(f"{name} of two moving values has no rule")
    if kwargs.get("inplace"):
        raise Unsupported(f"{name} in place has no rule")
    smooth = name not in _PIECEWISE_LINEAR.split()

    @cache
    def derivatives() -> tuple[Tensor, Tensor]:
        """`f′` and `f″`."""
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(func(point, *args, **kwargs).sum(), point, create_graph=smooth)
            if not slope.requires_grad:
                return slope, torch.zeros_like(slope)
            return slope.detach(), torch.autograd.grad(slope.sum(), point)[0]

    def second(adjoint: Tensor) -> Tensor:
        return weighted(fan.tangents(x), adjoint * derivatives()[1])

    value = func(x, *args, **kwargs)
    return fan.record(value, lambda: fan.tangents(x) * derivatives()[0], second if smooth else None)


def _power(fan: Fan, func: Any, x: Any, exponent: Any) -> Tensor:
    if isinstance(exponent, Tensor) and exponent.numel() == 1 and not fan.active(exponent):
        exponent = exponent.item()
    if not isinstance(exponent, (int, float)):
        raise Unsupported("a moving exponent has no rule")
    return _elementwise(fan, torch.pow, x, exponent)


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
    "view_as reshape_as broadcast_to index_select avg_pool1d avg_pool2d adaptive_avg_pool1d "
    "adaptive_avg_pool2d"
)
_SMOOTH = (
    "gelu silu tanh sigmoid softplus exp log sqrt rsqrt square reciprocal sin cos elu selu celu mish erf "
    "logsigmoid log1p expm1 softsign"
)
_PIECEWISE_LINEAR = (
    "relu leaky_relu abs clamp clamp_min clamp_max relu6 hardtanh hardshrink softshrink threshold _threshold"
)
ARITHMETIC: dict[str, Rule] = {
    **dict.fromkeys(_STRUCTURAL.split(), structural),
    **dict.fromkeys((*_SMOOTH.split(), *_PIECEWISE_LINEAR.split()), _elementwise),
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
        ("rtruediv", "rdiv"), lambda fan, func, x, y: multiply(fan, _elementwise(fan, torch.reciprocal, x), y)
    ),
    **dict.fromkeys(("matmul", "bmm", "mm"), _named(matmul)),
    "linear": _linear,
    "addmm": _addmm,
    "embedding": _embedding,
    **dict.fromkeys(("conv1d", "conv2d"), _convolution),
    **dict.fromkeys(("max_pool1d", "max_pool2d"), _max_pool),
    "pow": _power,
}
