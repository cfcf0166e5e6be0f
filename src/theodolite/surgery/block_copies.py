"""A copy of a residual block that adds nothing yet."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import all_parameter_names, canonical_modules, unwrap
from theodolite.anatomy.recording.undisturbed import named_tensors
from theodolite.core.exclusive import exclusive
from theodolite.surgery.passing import watched
from theodolite.surgery.places import SurgeryError


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that ends a branch of a block, and the value at which the branch adds nothing."""

    name: str
    """Within the block."""
    closed: float
    """0, or −1 for a gain that its norm adds 1 to."""
    branch: int
    """Of the branches of the block, the one that it ends."""


@dataclass(frozen=True)
class Point:
    """A place between two blocks of a network."""

    name: str
    """What a block there would be called."""
    holder: str
    """The list it would be in."""
    index: int
    like: str
    """The block it would be a copy of."""
    follows: bool
    """Does the point come right behind that block? Else it comes right before it."""
    outputs: tuple[OutputTensor, ...]
    removed: tuple[str, ...] = ()
    """Modules of the block that a copy goes without: norms of the sum of stream and branch."""

    def __str__(self) -> str:
        return f"{self.name} {'after' if self.follows else 'before'} {self.like}"


@exclusive()
def make_block(model: nn.Module, point: Point, fresh: nn.Module | None = None) -> nn.Module:
    """A closed copy of a point's block: it returns the stream it is given.

    Args:
        model: the network that the point is of.
        point: from `find_points`.
        fresh: a network like it with the weights the copy is to have, such as one just built.
    """
    inner = unwrap(model)
    block = copied(inner, dict(canonical_modules(inner))[point.like])
    if fresh is not None:
        _refresh(block, unwrap(fresh), point.like)
    close(block, point.outputs, point.removed)
    known = shared(inner, dict(canonical_modules(inner))[point.like])
    for tensor in block.parameters():  # it is to learn, also in a network that is frozen
        if id(tensor) not in known and tensor.is_floating_point():
            tensor.requires_grad_(True)
    return block


@torch.no_grad()
def _refresh(block: nn.Module, fresh: nn.Module, name: str) -> None:
    """Give a block the numbers of its namesake in another network."""
    source = dict(canonical_modules(fresh)).get(name)
    if source is None:
        raise SurgeryError(f"fresh has no module {name!r}: give a network that is built alike")
    theirs = dict(named_tensors(source))
    for each, tensor in named_tensors(block):
        if each not in theirs or theirs[each].shape != tensor.shape:
            raise SurgeryError(
                f"{name} of fresh has no {each} of shape {tuple(tensor.shape)}: build it alike"
            )
        tensor.copy_(theirs[each])


@torch.no_grad()
def close(block: nn.Module, closers: Sequence[OutputTensor], removed: Sequence[str] = ()) -> None:
    """Let the branches of a block add nothing."""
    tensors = dict(all_parameter_names(block))
    for closer in closers:
        if closer.name not in tensors:
            raise SurgeryError(f"the block has no tensor {closer.name!r}: its branches cannot be closed")
        tensors[closer.name].fill_(closer.closed)
    for name in removed:
        prefix, _, attribute = name.rpartition(".")
        setattr(dict(canonical_modules(block))[prefix], attribute, nn.Identity())


def copied(model: nn.Module, block: nn.Module) -> nn.Module:
    """A copy of a block, without hooks of ours; what it shares with the rest it goes on sharing.

    A configuration that all modules hold must stay one object: attention asks it for its implementation.
    """
    watching = [(module._forward_hooks, module._forward_pre_hooks) for module in block.modules()]
    made = copy.deepcopy(block, shared(model, block))
    for module, (behind, before) in zip(made.modules(), watching, strict=True):
        for hooks, original in ((module._forward_hooks, behind), (module._forward_pre_hooks, before)):
            for key, hook in list(original.items()):
                if getattr(hook, "__module__", "") == watched.__module__:
                    hooks.pop(key, None)
    for parameter in made.parameters():
        parameter.grad = None
    return made


def shared(model: nn.Module, block: nn.Module) -> dict[int, Any]:
    """What a block holds that is held outside of it too: by id, as `deepcopy` wants to know it."""
    inside = {id(module): module for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    modules = {
        id(child): child
        for module in outside
        for child in module._modules.values()
        if child is not None and child is not block and id(child) in inside
    }
    objects = {
        id(value): value
        for module in outside
        for value in vars(module).values()
        if hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type))
    }
    holders = [*outside, *(each for module in modules.values() for each in module.modules())]
    tensors = {id(one): one for module in holders for one in module._parameters.values() if one is not None}
    # What points back to the network, in whatever way, is not to be copied with all of it.
    return objects | {id(module): module for module in outside} | modules | tensors
