"""Blocks of a network: how one is called, copied, closed so that it adds nothing, and put into its list."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import all_parameter_names, canonical_modules, unwrap
from theodolite.anatomy.recording.undisturbed import named_tensors
from theodolite.core.exclusive import exclusive
from theodolite.surgery.edits import Edits
from theodolite.surgery.gains import SurgeryError


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that ends a branch of a block, and the value at which the branch adds nothing."""

    name: str
    """Within the block."""
    closed: float
    """0, or −1 for a gain that its norm adds 1 to."""
    branch: int
    """The number of the branch within the block."""


@dataclass(frozen=True)
class InsertionPoint:
    """A place between two blocks of a network."""

    name: str
    """The name of a block there."""
    holder: str
    """The list it would be in."""
    index: int
    like: str
    """The block it would be a copy of."""
    follows: bool
    """Is the point right behind that block? Otherwise it is right before it."""
    outputs: tuple[OutputTensor, ...]
    removed: tuple[str, ...] = ()
    """Modules that a copy of the block leaves out: norms of the sum of stream and branch."""

    def __str__(self) -> str:
        return f"{self.name} {'after' if self.follows else 'before'} {self.like}"

    def renamed(self, name: str) -> str:
        """The name of a tensor or module after a block was inserted here.

        >>> point = InsertionPoint("blocks.1", "blocks", 1, "blocks.0", True, ())
        >>> [point.renamed(name) for name in ("blocks.0.weight", "blocks.1.weight", "head.weight")]
        ['blocks.0.weight', 'blocks.2.weight', 'head.weight']
        """
        prefix = f"{self.holder}." if self.holder else ""
        number, *rest = name.removeprefix(prefix).split(".", 1)
        if not name.startswith(prefix) or not number.isdigit() or int(number) < self.index:
            return name
        return prefix + ".".join([str(int(number) + 1), *rest])


# How a block is called


@dataclass(frozen=True)
class BlockCall:
    """One call of a block.

    >>> call = BlockCall((torch.ones(2, 4), None), {"mask": torch.zeros(2)}, (torch.ones(2, 4), "weights"))
    >>> call.stream_in.shape, call.stream_out.shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    >>> call.run(lambda stream, rest, mask: stream + 1, call.stream_out)
    tensor([[2., 2., 2., 2.],
            [2., 2., 2., 2.]])
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    """What it returned; None before it is called."""

    @property
    def stream_out(self) -> Tensor | None:
        """The stream after the block: what it returns, or the first of several things."""
        return _stream_of(self.output)

    @property
    def stream_in(self) -> Tensor | None:
        """The stream that the block reads: its first floating-point tensor of two dimensions or more."""
        return next((one for one in (*self.args, *self.kwargs.values()) if _is_stream(one)), None)

    def with_stream(self, stream: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another stream."""
        mine = self.stream_in
        args = tuple(stream if arg is mine else arg for arg in self.args)
        return args, {key: stream if arg is mine else arg for key, arg in self.kwargs.items()}

    def run(self, block: Callable[..., Any], stream: Tensor) -> Any:
        """Call another block in the same way on another stream; return the stream that it returns."""
        args, kwargs = self.with_stream(stream)
        return _stream_of(block(*args, **kwargs))


def _stream_of(returned: Any) -> Tensor | None:
    if isinstance(returned, (tuple, list)) and returned:
        returned = returned[0]
    return returned if _is_stream(returned) else None


def _is_stream(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1


Change = Callable[[BlockCall, Tensor], Tensor | None]
"""From a call and the stream at a point to the stream that the network goes on with; None for the same."""


@contextmanager
def watched(block: nn.Module, change: Change, *, follows: bool) -> Iterator[None]:
    """Look at the stream behind a block, or before it, whenever it is called; and change it."""

    def behind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        call = BlockCall(args, kwargs, output)
        changed = None if call.stream_out is None else change(call, call.stream_out)
        if changed is None or not isinstance(output, (tuple, list)):
            return changed
        return type(output)([changed, *output[1:]])

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = BlockCall(args, kwargs, None)
        changed = None if call.stream_in is None else change(call, call.stream_in)
        return None if changed is None else call.with_stream(changed)

    handle = (
        block.register_forward_hook(behind, with_kwargs=True)
        if follows
        else block.register_forward_pre_hook(before, with_kwargs=True)
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def uncached(model: nn.Module) -> Iterator[None]:
    """Run a Hugging Face model without its cache of keys and values.

    A copy of a block has the number of its original, and would write into the original's cache.
    """
    edits = Edits()
    try:
        for config in _configs(model.modules()):
            if getattr(config, "use_cache", None):
                edits.set(config, "use_cache", False)
        yield
    finally:
        edits.undo()


# How a block is copied and closed


@exclusive()
def make_block(model: nn.Module, point: InsertionPoint, fresh: nn.Module | None = None) -> nn.Module:
    """A closed copy of a point's block: it returns the stream it is given.

    Args:
        model: the network of the point.
        point: from `find_points`.
        fresh: a network like it with the weights that the copy should have, such as one just built.
    """
    inner = unwrap(model)
    original = dict(canonical_modules(inner))[point.like]
    block = copied(inner, original)
    if fresh is not None:
        _refresh(block, unwrap(fresh), point.like)
    close(block, point.outputs, point.removed)
    known = shared(inner, original)
    for tensor in block.parameters():  # it is to learn, also in a network that is frozen
        if id(tensor) not in known and tensor.is_floating_point():
            tensor.requires_grad_(True)
    return block


@torch.no_grad()
def _refresh(block: nn.Module, fresh: nn.Module, name: str) -> None:
    """Give a block the values of the block of the same name in another network."""
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


def close(
    block: nn.Module, outputs: Sequence[OutputTensor], removed: Sequence[str] = (), edits: Edits | None = None
) -> None:
    """Set what ends the branches of a block so that they add nothing."""
    edits = edits or Edits()
    tensors, modules = dict(all_parameter_names(block)), dict(canonical_modules(block))
    for output in outputs:
        if output.name not in tensors:
            raise SurgeryError(f"the block has no tensor {output.name!r}: its branches cannot be closed")
        edits.write(tensors[output.name], torch.full_like(tensors[output.name], output.closed))
    for name in removed:
        prefix, _, attribute = name.rpartition(".")
        edits.set(modules[prefix], attribute, nn.Identity())


def copied(model: nn.Module, block: nn.Module) -> nn.Module:
    """A copy of a block without our hooks; what it shares with the rest of the network stays shared.

    A configuration that all modules hold must stay one object: attention asks it for its implementation.
    """
    hooks_of = [(module._forward_hooks, module._forward_pre_hooks) for module in block.modules()]
    made = copy.deepcopy(block, shared(model, block))
    for module, (behind, before) in zip(made.modules(), hooks_of, strict=True):
        for hooks, original in ((module._forward_hooks, behind), (module._forward_pre_hooks, before)):
            for key, hook in list(original.items()):
                if getattr(hook, "__module__", "") == watched.__module__:
                    hooks.pop(key, None)
    for parameter in made.parameters():
        parameter.grad = None
    return made


def shared(model: nn.Module, block: nn.Module) -> dict[int, Any]:
    """What a block shares with the rest of the network, by id, as `deepcopy` takes it."""
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
    # What points back to the network, in whatever way, must not be copied with all of it.
    return objects | {id(module): module for module in outside} | modules | tensors


# How a block is put into its list, and the numbers that Hugging Face models keep of their layers

COUNTS = "num_hidden_layers"
"""The number of layers in a config; its `attribute_map` knows other names of it."""
LISTS = ("layer_types", "no_rope_layers", "layers_block_type")
"""Lists in a config with an entry for each layer."""
NUMBERS = ("layer_idx", "layer_id")
"""The number of a layer, by which it and its attention find their keys and values."""


def put_block(
    network: nn.Module, point: InsertionPoint, block: nn.Module, edits: Edits | None = None
) -> list[str]:
    """Insert a block, and renumber the blocks behind it. Returns the names of its output tensors."""
    edits = edits or Edits()
    holder = dict(canonical_modules(network))[point.holder]
    assert isinstance(holder, (nn.ModuleList, nn.Sequential))
    length = len(holder)

    holder.insert(point.index, block)
    edits.undos.append(partial(holder.pop, point.index))
    # The new block has the number of the block it is a copy of.
    for each in list(holder)[point.index + (not point.follows) :]:
        for module in each.modules():
            for name in NUMBERS:
                if isinstance(number := getattr(module, name, None), int):
                    edits.set(module, name, number + 1)
    around = (one for _, one in canonical_modules(network) if any(each is holder for each in one.modules()))
    for config in _configs(around):
        if getattr(config, COUNTS, None) == length:
            edits.set(config, COUNTS, length + 1)
            for name in LISTS:
                values = getattr(config, name, None)
                if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == length:
                    like = values[int(point.like.rpartition(".")[2])]
                    edits.set(config, name, [*values[: point.index], like, *values[point.index :]])
    return [f"{point.name}.{output.name}" for output in point.outputs]


@contextmanager
def inserted(model: nn.Module, point: InsertionPoint, fresh: nn.Module | None = None) -> Iterator[nn.Module]:
    """A closed block at a point while the context lasts."""
    inner, edits = unwrap(model), Edits()
    block = make_block(inner, point, fresh)
    try:
        put_block(inner, point, block, edits)
        yield block
    finally:
        edits.undo()


@contextmanager
def blocks_kept_on_failure(model: nn.Module) -> Iterator[None]:
    """Restore lists of blocks, their numbers and configs if something is raised."""
    modules = list(model.modules())
    lists = [(one, dict(one._modules)) for one in modules if isinstance(one, (nn.ModuleList, nn.Sequential))]
    owners = [*((one, NUMBERS) for one in modules), *((one, (COUNTS, *LISTS)) for one in _configs(modules))]
    values = [
        (owner, name, getattr(owner, name))
        for owner, names in owners
        for name in names
        if hasattr(owner, name)
    ]
    try:
        yield
    except BaseException:
        for holder, children in lists:
            holder._modules.clear()
            holder._modules.update(children)
        for owner, name, value in values:
            setattr(owner, name, value)
        raise


def _configs(modules: Iterable[nn.Module]) -> list[Any]:
    """The configs of modules, each once."""
    found = {id(one): one for module in modules if (one := getattr(module, "config", None)) is not None}
    return list(found.values())
