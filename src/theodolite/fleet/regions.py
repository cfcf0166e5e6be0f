"""Compiling the block that a network repeats, for many models at once.

A compiled function is not entered from inside `torch.vmap`. A custom autograd function with a rule of its own
for vmap is: the rule gets the stacked tensors, outside vmap, and calls there what was compiled for a stack of
models, `compile(vmap(block))`. The blocks of all depths share one compilation.

On an H200 a step of 24 GPTs of width 128 and depth 4 (32 × 256 bytes, bfloat16) takes 32 ms as a CUDA graph
and 13 ms as a graph of compiled blocks and updates (`python benchmarks/fleet.py --device cuda`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.utils._pytree import tree_flatten, tree_unflatten


def compile_blocks(model: nn.Module) -> int:
    """Replace the forward passes of repeated blocks, in place; the number of blocks that were replaced."""
    count = 0
    for blocks in repeated(model):
        region = _Region(blocks[0])
        for block in blocks:
            block.forward = _Entry(region, block)
            count += 1
    return count


def repeated(model: nn.Module) -> list[list[nn.Module]]:
    """Lists of two or more modules that differ in nothing but the values of their tensors.

    >>> blocks = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    >>> [len(found) for found in repeated(nn.Sequential(nn.Linear(2, 4), nn.ModuleList(blocks)))]
    [3]
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            start = f"{name}." if name else ""
            kinds = {_traits(block, f"{start}{place}.") for place, block in enumerate(module)}
            if len(kinds) == 1 and len(list(module[0].parameters())) > 1:
                found.append(list(module))
    return found


class _Entry:
    """The forward pass of one block."""

    def __init__(self, region: _Region, block: nn.Module) -> None:
        self.region, self.block = region, block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = {**dict(self.block.named_parameters()), **dict(self.block.named_buffers())}
        leaves, spec = tree_flatten((own, args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # Judging is not worth a compilation, and takes other ways: batch norm's, dropout's.
        if not self.block.training or not any(map(torch._C._functorch.is_batchedtensor, tensors)):
            return type(self.block).forward(self.block, *args, **kwargs)
        places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        others = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return _Compiled.apply(self.region, (spec, places, others), *tensors)


class _Region:
    """A block, and what was compiled of it: one function for each way its arguments are stacked."""

    def __init__(self, block: nn.Module) -> None:
        self.block = copy.deepcopy(block)
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def stacked(self, layout: Any, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]) -> Tensor:
        spec, places, others = layout
        key = str(spec), others, in_dims
        if key not in self._compiled:
            block = self.block

            def call(*tensors: Tensor) -> Any:
                leaves = list(others)
                for place, tensor in zip(places, tensors, strict=True):
                    leaves[place] = tensor
                own, args, kwargs = tree_unflatten(leaves, spec)
                return functional_call(block, own, args, kwargs)

            self._compiled[key] = torch.compile(
                torch.vmap(call, in_dims=in_dims), fullgraph=True, dynamic=False
            )
        return self._compiled[key](*tensors)


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(region: _Region, layout: Any, *tensors: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError

    @staticmethod
    def vmap(info: Any, in_dims: Any, region: _Region, layout: Any, *tensors: Tensor) -> Any:
        return region.stacked(layout, in_dims[2:], tensors), 0


_MODULE = frozenset(vars(nn.Module()))


def _traits(block: nn.Module, prefix: str) -> tuple[Any, ...]:
    """Classes, shapes, and all other attributes by what they print: a scale by layer makes blocks differ.

    Names of tensors within the block, which begin with its own, do not.
    """

    def shown(value: Any) -> str:
        return repr(value).replace(f"'{prefix}", "'")

    return tuple(
        (
            name,
            type_before_parametrizations(module),  # each parametrized module has a class of its own
            tuple((key, tuple(tensor.shape)) for key, tensor in module.named_parameters(recurse=False)),
            tuple(sorted((key, shown(value)) for key, value in vars(module).items() if key not in _MODULE)),
        )
        for name, module in block.named_modules()
    )
