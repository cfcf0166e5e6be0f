"""Forward passes by plain operations that leave the network as it was."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from theodolite.core.building import untouched_randomness
from theodolite.core.calling import call, with_tensors
from theodolite.core.higher_order import plain_operators


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode; attention and recurrent layers by plain operations; no compilation, no inference mode.

    Fused sums (`lerp`, `addcmul`, `addmm`, a sum over a stack) run as plain additions.

    Restored afterwards: modes, switches of torch, attributes that a forward pass sets (a mask or a cache),
    and buffers, which are copies meanwhile. Not restored: what is written into other objects that the network
    holds, such as a list that it appends to or a plain tensor that it changes in place.

    >>> norm = nn.BatchNorm1d(2).train()
    >>> with undisturbed(norm):
    ...     _ = norm.train()(torch.ones(3, 2))
    >>> norm.num_batches_tracked, norm.training
    (tensor(0), True)
    """
    attributes = {module: dict(vars(module)) for module in model.modules()}
    registries = [
        held[name] for held in attributes.values() for name in ("_parameters", "_buffers", "_modules")
    ]
    registered = [dict(registry) for registry in registries]
    fast = torch.backends.mha.get_fastpath_enabled()
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    copies: dict[int, Tensor] = {}
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        torch._C._set_mkldnn_enabled(False)
        torch._C._set_cudnn_enabled(False)  # it fuses recurrent layers into one operation
        with (
            warnings.catch_warnings(action="ignore"),
            torch.inference_mode(False),
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            torch.compiler.set_stance("force_eager"),
            plain_operators(),
            _ByDefinition(),
        ):
            for module in attributes:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)
        for module, held in attributes.items():
            vars(module).clear()
            vars(module).update(held)
        for registry, entries in zip(registries, registered, strict=True):
            registry.clear()
            registry.update(entries)


def run_under(mode: TorchDispatchMode, model: nn.Module, inputs: Any, *, gradients: bool = False) -> Any:
    """Run the model on its own weights under a dispatch mode, and return its output.

    Dropout is off. A batch norm in training mode uses the statistics of the batch. With `gradients`, copies
    of the parameters require gradients; the model's own parameters get none.
    """
    batch_norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    names = model.named_parameters(remove_duplicate=False)
    with untouched_randomness(), undisturbed(model), torch.set_grad_enabled(gradients):
        stand_ins = {id(tensor): _stand_in(tensor, gradients) for tensor in model.parameters()}
        swapped = {name: stand_ins[id(tensor)] for name, tensor in names}
        inputs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        for module in batch_norms:
            module.training = True
        with mode:
            return with_tensors(model, swapped, call, inputs, tied=False)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under every name they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _stand_in(tensor: Tensor, gradients: bool) -> Tensor:
    """The same numbers, as a leaf of the autograd graph."""
    leaf = tensor.detach().clone() if tensor.is_inference() else tensor.detach()
    return leaf.requires_grad_(gradients and (tensor.is_floating_point() or tensor.is_complex()))


class _ByDefinition(TorchFunctionMode):
    """Runs fused additions as plain ones, above autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.stacks: dict[int, _Stack] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DEFINITIONS and "out" not in kwargs:
            defined = _DEFINITIONS[func](*args, **kwargs)
            if defined is not None:
                return defined
        if func in _AVERAGES and args and (terms := self._terms(*args, **kwargs)) is not None:
            total = functools.reduce(torch.add, terms)
            return total / len(terms) if _AVERAGES[func] else total
        made = func(*args, **kwargs)
        if func is torch.stack and isinstance(made, Tensor) and made.is_floating_point():
            terms = list(args[0] if args else kwargs["tensors"])
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            key = id(made)
            held = weakref.ref(made, lambda _: self.stacks.pop(key, None))
            self.stacks[key] = _Stack(held, terms, dim % made.dim(), _versions(made, *terms))
        return made

    def _terms(self, stacked: Any, dim: Any = None, *others: Any, **options: Any) -> list[Tensor] | None:
        """The tensors of a stack, if it is summed over just the dimension it was stacked along."""
        known = self.stacks.get(id(stacked))
        if known is None or others or options or len(known.terms) < 2:
            return None
        dims = [dim] if isinstance(dim, int) else list(dim or ())
        same = known.versions == _versions(stacked, *known.terms)  # nothing was written since
        return known.terms if same and [one % stacked.dim() for one in dims] == [known.dim] else None


class _Stack(NamedTuple):
    """What was stacked, and along which dimension."""

    made: weakref.ref[Tensor]
    terms: list[Tensor]
    dim: int
    versions: tuple[int, ...]


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _lerp(input: Tensor, end: Tensor, weight: Any) -> Tensor:
    return (1 - weight) * input + weight * end


def _addcmul(input: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: float = 1) -> Tensor:
    product = tensor1 * tensor2
    return input + (product if value == 1 else value * product)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    if input.dim() < 2:  # the bias of a linear map
        return None
    product = mat1 @ mat2
    product = product if alpha == 1 else alpha * product
    return product if beta == 0 else (input if beta == 1 else beta * input) + product


def _in_place(define: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        made = define(tensor, *args, **kwargs)
        return None if made is None else tensor.copy_(made)

    return run


def _baddbmm(input: Tensor, batch1: Tensor, batch2: Tensor, **numbers: float) -> Tensor | None:
    return _addmm(input, batch1, batch2, **numbers)


_DEFINED: dict[str, Callable[..., Tensor | None]] = {
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
}
_DEFINITIONS: dict[Any, Callable[..., Tensor | None]] = {
    form: define
    for name, define in _DEFINED.items()
    for form in (getattr(torch, name), getattr(Tensor, name))
} | {getattr(Tensor, f"{name}_"): _in_place(define) for name, define in _DEFINED.items()}
_AVERAGES: dict[Any, bool] = {torch.sum: False, Tensor.sum: False, torch.mean: True, Tensor.mean: True}
"""Sums over a dimension: do they divide by the number of terms?"""
