"""The numbers that a Hugging Face model keeps of its layers, after one was inserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from theodolite.anatomy.names import canonical_modules
from theodolite.surgery.block_copies import Point
from theodolite.surgery.editing import Edits

COUNTS = "num_hidden_layers"
"""What a config calls the number of layers; its `attribute_map` knows other names of it."""
LISTS = ("layer_types", "no_rope_layers", "layers_block_type")
"""What a config says of each layer, in a list."""
NUMBERS = ("layer_idx", "layer_id")
"""What a layer and its attention call their place, by which they find their keys and values."""


def renumber(model: nn.Module, point: Point, holder: nn.ModuleList | nn.Sequential, edits: Edits) -> None:
    """Let config and layers know of a block that was just put into the list."""
    for index in range(point.index, len(holder)):
        # The new one has the number of the block it is a copy of.
        behind = index > point.index or point.follows
        for module in holder[index].modules():
            for name in NUMBERS:
                if behind and isinstance(number := getattr(module, name, None), int):
                    _set(module, name, number + 1, edits)
    length = len(holder) - 1
    for config in _configs(model, holder, length):
        _set(config, COUNTS, length + 1, edits)
        for name in LISTS:
            values = getattr(config, name, None)
            if isinstance(values, Sequence) and not isinstance(values, str) and len(values) == length:
                like = int(point.like.rpartition(".")[2])
                _set(config, name, [*values[: point.index], values[like], *values[point.index :]], edits)


@contextmanager
def kept_on_failure(model: nn.Module) -> Iterator[None]:
    """Lists of blocks, their numbers and configs are as before if something is raised."""
    modules = list(model.modules())
    lists = [
        (each, dict(each._modules)) for each in modules if isinstance(each, (nn.ModuleList, nn.Sequential))
    ]
    numbers = [
        (each, name, number)
        for each in modules
        for name in NUMBERS
        if isinstance(number := getattr(each, name, None), int)
    ]
    configs = {id(one): one for each in modules if (one := getattr(each, "config", None)) is not None}
    known = [
        (one, name, getattr(one, name))
        for one in configs.values()
        for name in (COUNTS, *LISTS)
        if hasattr(one, name)
    ]
    try:
        yield
    except BaseException:
        for holder, children in lists:
            holder._modules.clear()
            holder._modules.update(children)
        for module, name, number in numbers:
            setattr(module, name, number)
        for config, name, value in known:
            setattr(config, name, value)
        raise


def _configs(model: nn.Module, holder: nn.Module, length: int) -> list[Any]:
    """The configs that count the blocks of a list: those of the modules around it with its length."""
    around = [
        module for _, module in canonical_modules(model) if any(each is holder for each in module.modules())
    ]
    found = {
        id(config): config for module in around if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in found.values() if getattr(config, COUNTS, None) == length]


def _set(owner: Any, name: str, value: Any, edits: Edits) -> None:
    before = getattr(owner, name)

    def undo(set_back: Callable[[Any, str, Any], None] = setattr) -> None:
        set_back(owner, name, before)

    setattr(owner, name, value)
    edits.undos.append(undo)
