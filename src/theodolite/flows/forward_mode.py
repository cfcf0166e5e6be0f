"""Derivatives in forward mode that exist, and whose own gradients are right, for common layers."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from theodolite.core.errors import UseError
from theodolite.core.higher_order import FLEX, plain_operators, without_checkpoints


def derivative(
    function: Callable[..., Tensor], at: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The value of a function and its derivative along tangents, by `torch.func.jvp`.

    Attention is computed by its definition, as its fused kernels have no forward mode; so are
    normalisations, whose derivatives have wrong gradients in torch. Activation checkpointing is off, as it
    would repeat the forward pass without the derivative.

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
    with sdpa_kernel(SDPBackend.MATH), plain, without_checkpoints(), _PlainOperations():
        yield


@functools.cache
def _load_rules() -> None:
    """Let torch load its rules of forward mode, which it does by a deprecated function."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.*")
        jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


class _PlainOperations(TorchFunctionMode):
    """Normalisations, GLU and attention by their definitions, also as operators of exported networks.

    Torch's rules treat means and variances as constants in the gradient of a derivative (up to 2.13), and the
    derivative of GLU has no gradient. Attention is told its kernel here too, as a network may choose another.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = getattr(func, "overloadpacket", func)
        if plain := _DEFINITIONS.get(func) or _DEFINITIONS.get(operation):
            return plain(*args, **kwargs)
        if (name := getattr(operation, "__name__", "")) in _REFUSED and _in_training(args, kwargs):
            raise UseError(
                f"the network calls torch.{name} in train mode, whose derivative has wrong gradients in "
                "torch: let it call torch.nn.functional.batch_norm, or use progressive-midpoint, which needs "
                "no derivative"
            )
        with sdpa_kernel(SDPBackend.MATH) if operation in _ATTENTION else contextlib.nullcontext():
            return func(*args, **kwargs)


def _in_training(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """The flag of a batch norm, which is the first of its flags; those without it only train.

    >>> _in_training((torch.ones(2, 3), None, None, None, None, False, 0.1, 1e-5, True), {})
    False
    """
    return bool(kwargs.get("training", next((one for one in args if isinstance(one, bool)), True)))


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = False,
) -> Tensor:
    return _affine(_normalised(input, tuple(range(-len(normalized_shape), 0)), eps), weight, bias)


def _native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(-len(normalized_shape), 0))
    rstd = (input.var(dims, unbiased=False, keepdim=True) + eps).rsqrt()
    return _layer_norm(input, normalized_shape, weight, bias, eps), input.mean(dims, keepdim=True), rstd


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _per_channel(_normalised(input, (0, *range(2, input.ndim)), eps), weight, bias)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not use_input_stats:
        return F.instance_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _per_channel(_normalised(input, tuple(range(2, input.ndim)), eps), weight, bias)


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


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    value, gate = input.chunk(2, dim)
    return value * gate.sigmoid()


def _view(input: Tensor, *size: Any, **kwargs: Any) -> Tensor:
    """A view where the memory layout allows one, else a copy; as another dtype always a view."""
    if kwargs.keys() - {"size"} or (size and isinstance(size[0], torch.dtype)):
        return input.view(*size, **kwargs)
    return input.reshape(*size, *kwargs.values())


def _weights_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of `torch.nn.functional` with the order of arguments that the one of `torch` has."""

    def of_torch(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
        cudnn_enabled: bool = False,
        *,
        use_input_stats: bool = True,
    ) -> Tensor:
        own = training and use_input_stats  # the name of the flag depends on the norm
        return norm(input, running_mean, running_var, weight, bias, own, momentum, eps)

    return of_torch


_ATEN = torch.ops.aten

_DEFINITIONS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm, _ATEN.layer_norm), _layer_norm),
    **dict.fromkeys((torch.native_layer_norm, _ATEN.native_layer_norm), _native_layer_norm),
    F.batch_norm: _batch_norm,
    **dict.fromkeys((torch.batch_norm, _ATEN.batch_norm), _weights_first(_batch_norm)),
    F.instance_norm: _instance_norm,
    **dict.fromkeys((torch.instance_norm, _ATEN.instance_norm), _weights_first(_instance_norm)),
    **dict.fromkeys((F.glu, _ATEN.glu), _glu),
    # Views may fit only the memory layout of the attention kernel that a network uses by itself.
    **dict.fromkeys((Tensor.view, _ATEN.view.default), _view),
}

_REFUSED = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_batch_norm_impl_index",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "cudnn_batch_norm",
    "miopen_batch_norm",
}
"""What `batch_norm` calls, as do exported networks after decompositions; in eval mode they are right."""

_ATTENTION = {
    F.scaled_dot_product_attention,
    F.multi_head_attention_forward,  # inside it no function is seen
    _ATEN.scaled_dot_product_attention,
}
