"""Random numbers that a network draws in its forward pass: the same ones before an edit and after.

Some networks draw in eval mode too: noise that is injected, stochastic depth, dropout without
`self.training`. Passes are compared that begin with the same state of all generators, and what a new block
draws is taken back, so that the blocks behind it draw what they drew before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from theodolite.core.building import seed_generators


def remembered(model: nn.Module) -> Callable[[], None]:
    """A function that puts all generators back to where they are now, also those that modules hold."""
    restores: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
    ]
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            restores.append(partial(torch.cuda.set_rng_state, torch.cuda.get_rng_state(device), device))
    for generator in _held(model):
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
    """All generators, also those that modules hold, are as before at the end."""
    restore = remembered(model)
    try:
        yield
    finally:
        restore()


def draw_others(model: nn.Module) -> None:
    """Put all generators somewhere else."""
    seed_generators(1)
    for generator in _held(model):
        if isinstance(generator, torch.Generator):
            torch.rand(1, generator=generator, device=generator.device)
        else:
            generator.random()


@contextmanager
def isolated(block: nn.Module, model: nn.Module) -> Iterator[None]:
    """What the block draws is not taken from those that are called after it."""
    restores: list[Callable[[], None]] = []

    def before(module: nn.Module, args: Any) -> None:
        restores.append(remembered(model))

    def behind(module: nn.Module, args: Any, output: Any) -> None:
        restores.pop()()

    hooks = [
        block.register_forward_pre_hook(before),
        block.register_forward_hook(behind, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def noise(
    passes: Callable[[bool], Sequence[Tensor]],
    apart: Callable[[Sequence[Tensor], Sequence[Tensor]], float],
    least: float,
    edit: str,
) -> str:
    """Why outputs of a network differ that should not, where its randomness is the cause; else nothing.

    Args:
        passes: makes a pass through the network as it is, on the same random numbers, or on others.
        apart: how far outputs differ.
        least: what counts as a difference.
        edit: what was done to the network, as in "with one block more".
    """
    first = passes(False)
    if (between := apart(first, passes(False))) > least:
        return (
            f"two passes of the network as it is differ by {between:.1e} of themselves, on the same random "
            "numbers: it keeps something from one pass to the next, or draws from a source of its own. "
            "Let eval mode switch that off"
        )
    if (between := apart(first, passes(True))) > least:
        return (
            f"the network draws random numbers in its forward pass, and others {edit} (passes on other "
            f"numbers differ by {between:.1e}), so nothing can be compared. Let it draw none in eval mode"
        )
    return ""


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
