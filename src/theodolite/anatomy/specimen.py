"""A network with its dataflow: built without memory where possible, traced, its branches and blocks found."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.anatomy.names import canonical_modules, canonical_parameters, unwrap
from theodolite.anatomy.part import AnatomyError
from theodolite.anatomy.recording.trace import most_quick_parameters, trace
from theodolite.anatomy.structure.branches import names_in
from theodolite.anatomy.structure.flow import Flow
from theodolite.anatomy.structure.residual import TracedBranch, find_residuals
from theodolite.core.building import TooLargeError, build_hollow, build_model, in_one_line
from theodolite.core.calling import Build, see_inside
from theodolite.core.size import Size

# A larger network takes longer to initialise than to trace without values.
_MOST_QUICK_PARAMETERS = 8_000_000
# A network that cannot be traced without values is built for real up to this size.
_MOST_REAL_PARAMETERS = 500_000_000
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Specimen:
    """One network and the dataflow of one forward pass through it."""

    model: nn.Module
    shapes: dict[str, tuple[int, ...]]
    """By canonical name, tied tensors once."""
    flow: Flow
    residuals: list[TracedBranch]

    def viewed(self, *, small_streams: bool | None) -> Specimen:
        """The same with the branches that `find_residuals` finds so."""
        return dataclasses.replace(self, residuals=find_residuals(self.flow, small_streams=small_streams))

    @property
    def single_block(self) -> str:
        """What names in the only block begin with, if it is an element of a list; otherwise nothing."""
        if len({block for block, _ in self.places}) != 1:
            return ""
        elements = _elements(self.model)
        names = [name for residual in self.residuals for name in names_in(self.flow, residual)]
        home = _common([elements.get(name.rpartition(".")[0], ()) for name in names])
        return f"{home[-1]}." if home else ""

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """By residual branch: its block, and which branch of the block it is, both counted from 0.

        Branches of one element of a list of modules are one block, unless they are the same modules called
        again. Where lists do not show blocks, a block ends at a branch of a kind that the block already has,
        or at another position of its outermost list.
        """
        elements = _elements(self.model)
        weights: dict[str, list[str]] = {}
        for use in self.flow.uses.all:
            if use.kind == "weight":
                weights.setdefault(use.name, []).append(use.op)
        found: list[tuple[int, int]] = []
        kinds: set[object] = set()
        used: set[str] = set()
        last: tuple[str, ...] = ()
        block, branch = -1, 0
        for residual in self.residuals:
            names = names_in(self.flow, residual)
            home = _common([elements.get(name.rpartition(".")[0], ()) for name in names])
            kind = residual.attends, _kind(names, weights)
            same_element = home == last and home != ()
            same_position = _position(home) == _position(last)
            again = not used.isdisjoint(names) and kind in kinds
            if block < 0 or again or not (same_element or (same_position and kind not in kinds)):
                block, branch, kinds, used = block + 1, 0, set(), set()
            else:
                branch += 1
            kinds.add(kind)
            used.update(names)
            last = home
            found.append((block, branch))
        return found


def examine(model: nn.Module, inputs: Any) -> Specimen:
    """Trace a ready module."""
    outer, model = model, unwrap(model)
    _check_inputs(inputs)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise AnatomyError(
            f"{type(model).__name__} is scripted or traced by torch.jit: dissect the module it was made from"
        )
    if wrapped := _flattened(outer):
        raise AnatomyError(
            f"{wrapped} is wrapped by FullyShardedDataParallel, which flattens its parameters: dissect it "
            "before it is wrapped, or shard it by torch.distributed.fsdp.fully_shard"
        )
    if not any(True for _ in model.parameters()):
        raise AnatomyError(f"{type(model).__name__} has no parameters: there is nothing to dissect")
    try:
        graph = trace(model, _beside(model, inputs))
    except Exception as error:
        raise AnatomyError(
            f"the forward pass of {type(model).__name__} failed: {in_one_line(error).rstrip('.')}.\n"
            f"It was called with {_shown(inputs)}. Check that the model runs on these inputs"
        ) from error
    flow = Flow(graph)
    return Specimen(model, shapes_of(model), flow, find_residuals(flow))


def _flattened(model: nn.Module) -> str:
    """The class of a module that the first generation of FSDP wraps; empty if there is none."""
    modules = (
        module
        for module in model.modules()
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(module).__mro__)
    )
    first = next(modules, None)
    return "" if first is None else type(unwrap(first)).__name__


def examine_built(build: Build, size: Size, inputs: Any) -> Specimen:
    """Build a network at a size and trace it; with values if that is quicker, or impossible without."""
    try:
        quick = min(_MOST_QUICK_PARAMETERS, most_quick_parameters(inputs))
        return examine(build_model(build, size, most=quick), inputs)
    except TooLargeError:
        model = build_hollow(build, size)
    try:
        return examine(model, inputs)
    except AnatomyError as error:
        count = sum(tensor.numel() for tensor in model.parameters())
        if not any(tensor.is_meta for tensor in model.parameters()):
            raise
        if count > _MOST_REAL_PARAMETERS:
            raise AnatomyError(
                f"{error}.\nA network whose control flow depends on values has to be built for real, and "
                f"{count:,} parameters are more than {_MOST_REAL_PARAMETERS:,}: dissect it at a smaller size"
            ) from error
    return examine(build_model(build, size), inputs)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes by canonical name, tied tensors once."""
    return {name: tuple(tensor.shape) for name, tensor in canonical_parameters(model)}


def _beside(model: nn.Module, inputs: Any) -> Any:
    """The inputs on the model's device, as wrappers such as DataParallel do it."""
    device = next(iter(model.parameters())).device

    def place(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

    return inputs if device.type == "meta" else tree_map(place, inputs)


def _check_inputs(inputs: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(see_inside(inputs)) if isinstance(leaf, Tensor)]
    if not tensors:
        raise AnatomyError(
            f"inputs hold no tensor: they are a {type(inputs).__name__}. Pass what the model is called with"
        )
    for tensor in tensors:
        if tensor.numel() == 0:
            raise AnatomyError(
                f"inputs hold a tensor of shape {tuple(tensor.shape)}: pass at least one example"
            )


def _shown(inputs: Any) -> str:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return ", ".join(f"{tensor.dtype} of shape {tuple(tensor.shape)}" for tensor in tensors)


def _kind(names: list[str], weights: Mapping[str, list[str]]) -> object:
    """What distinguishes the branches of a block at any size: how many weights each operation uses.

    Cross-attention has fewer than self-attention, as its keys and values are made outside of the branch.
    """
    counted = Counter(op for name in set(names) for op in weights.get(name, ()))
    return tuple(sorted(counted.items()))


def _elements(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """By module name: the elements of lists of modules it lies in, outermost first."""
    modules = dict(canonical_modules(model))
    found: dict[str, tuple[str, ...]] = {}
    for name in modules:
        steps = name.split(".") if name else []
        paths = [".".join(steps[:length]) for length in range(len(steps) + 1)]
        found[name] = tuple(
            path for parent, path in itertools.pairwise(paths) if isinstance(modules[parent], _CONTAINERS)
        )
    return found


def _common(homes: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The elements that most of a branch's parameters lie in; a norm may lie elsewhere."""
    counted = Counter(home[:length] for home in homes for length in range(1, len(home) + 1))
    inside = [home for home, count in counted.items() if 2 * count > len(homes)]
    return max(inside, key=len, default=())


def _position(home: tuple[str, ...]) -> str | None:
    return home[0].rpartition(".")[2] if home else None
