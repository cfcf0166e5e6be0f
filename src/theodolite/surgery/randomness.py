"""Random numbers of a forward pass: the same ones before an edit and after.

Some networks draw in eval mode too: injected noise, stochastic depth, dropout without `self.training`. Passes
that are compared begin with the same state of all generators, and what a new block draws is taken back, so
that the blocks behind it draw the same numbers as before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from theodolite.core.building import seed_generators


def remembered(model: nn.Module) -> Callable[[], None]:
    """A function that restores the current state of all generators, also of those that modules hold."""
    restores: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
    ]
    on_gpus = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    for generator in (torch.default_generator, *on_gpus, *_held(model)):
        if isinstance(generator, torch.Generator):
            restores.append(partial(generator.set_state, generator.get_state()))
        elif isinstance(generator, random.Random):
            restores.append(partial(generator.setstate, generator.getstate()))
        else:
            bits = generator.bit_generator
            restores.append(partial(setattr, bits, "state", bits.state))

    def restore() -> None:
        for each in restores:
            each()

    return restore


@contextmanager
def kept_randomness(model: nn.Module) -> Iterator[None]:
    """Restore all generators at the end, also those that modules hold."""
    restore = remembered(model)
    try:
        yield
    finally:
        restore()


def change_randomness(model: nn.Module) -> None:
    """Put all generators into another state."""
    seed_generators(1)
    for generator in _held(model):
        if isinstance(generator, torch.Generator):
            torch.rand(1, generator=generator, device=generator.device)
        else:
            generator.random()


@contextmanager
def isolated(block: nn.Module, model: nn.Module) -> Iterator[None]:
    """Restore all generators after each call of the block."""
    restores: list[Callable[[], None]] = []

    def before(module: nn.Module, args: Any) -> None:
        restores.append(remembered(model))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        restores.pop()()

    hooks = [block.register_forward_pre_hook(before), block.register_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _held(model: nn.Module) -> list[Any]:
    """The generators among the attributes of modules, each once."""
    kinds = (torch.Generator, np.random.Generator, random.Random)
    found = {
        id(value): value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, kinds)
    }
    return list(found.values())
