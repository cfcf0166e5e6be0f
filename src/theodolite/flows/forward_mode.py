"""Derivatives in forward mode that exist, and whose own gradients are right, for common layers."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from theodolite.core.higher_order import FLEX, plain_operators


def derivative(
    function: Callable[..., Tensor], at: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The value of a function and its derivative along tangents, by `torch.func.jvp`.

    Attention is computed by its definition, as its fused kernels have no forward mode; so are
    normalisations, whose derivatives have wrong gradients in torch.

    >>> derivative(torch.square, (torch.tensor(3.0),), (torch.tensor(1.0),))
    (tensor(9.), tensor(6.))
    """
    with _forward_mode():
        found = jvp(function, at, tangents)
    return found[0], found[1]


@contextlib.contextmanager
def _forward_mode() -> Iterator[None]:
    """Conditions in which derivatives in forward mode exist and have the right gradients."""
    _load_rules()
    plain = plain_operators() if FLEX in sys.modules else contextlib.nullcontext()
    with sdpa_kernel(SDPBackend.MATH), plain, _PlainNorms():
        yield


@functools.cache
def _load_rules() -> None:
    """Let torch load its rules of forward mode, which it does by a deprecated function."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


class _PlainNorms(TorchFunctionMode):
    """Normalisations and GLU by their definitions.

    Torch's rules treat means and variances as constants in the gradient of a derivative (up to 2.13), and the
    derivative of GLU has no gradient.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if plain := _DEFINITIONS.get(func):
            return plain(*args, **kwargs)
        return func(*args, **kwargs)


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return _affine(_normalised(x, tuple(range(-len(normalized_shape), 0)), eps), weight, bias)


def _native_layer_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(-len(normalized_shape), 0))
    rstd = (x.var(dims, unbiased=False, keepdim=True) + eps).rsqrt()
    return _layer_norm(x, normalized_shape, weight, bias, eps), x.mean(dims, keepdim=True), rstd


def _batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    return _per_channel(_normalised(x, (0, *range(2, x.ndim)), eps), weight, bias)


def _instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    return _per_channel(_normalised(x, tuple(range(2, x.ndim)), eps), weight, bias)


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    """In float32 for half precision, and rounded again, except where autocast would not."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dims, keepdim=True)
    found = centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()
    widened = x.is_cuda and torch.is_autocast_enabled("cuda")
    return found if widened else found.to(x.dtype)


def _per_channel(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *[1] * (x.ndim - 2))
    return _affine(x, *(None if one is None else one.reshape(shape) for one in (weight, bias)))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _glu(x: Tensor, dim: int = -1) -> Tensor:
    value, gate = x.chunk(2, dim)
    return value * gate.sigmoid()


def _weights_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of `torch.nn.functional` with the order of arguments that the one of `torch` has."""

    def of_torch(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Tensor:
        return norm(x, running_mean, running_var, weight, bias, training, momentum, eps)

    return of_torch


_DEFINITIONS: dict[Any, Callable[..., Any]] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    torch.native_layer_norm: _native_layer_norm,
    F.batch_norm: _batch_norm,
    torch.batch_norm: _weights_first(_batch_norm),
    F.instance_norm: _instance_norm,
    torch.instance_norm: _weights_first(_instance_norm),
    F.glu: _glu,
}
