"""A network laid open: built without memory where that can be, traced, its residual branches found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from theodolite.anatomy.flow import Flow
from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.anatomy.part import AnatomyError
from theodolite.anatomy.residual import Residual, find_residuals
from theodolite.anatomy.trace import trace
from theodolite.anatomy.uses import find_uses
from theodolite.core.building import build_hollow, build_model, in_one_line
from theodolite.core.calling import Build, see_inside
from theodolite.core.size import Size

# Above this, a network that cannot be traced without computing is not built for real either.
_MOST_REAL_PARAMETERS = 500_000_000


@dataclass(frozen=True)
class Specimen:
    """One network and the dataflow of one forward pass through it."""

    model: nn.Module
    shapes: dict[str, tuple[int, ...]]
    """By canonical name, tied tensors once."""
    flow: Flow
    residuals: list[Residual]


def examine(model: nn.Module, inputs: Any) -> Specimen:
    """Trace a ready module."""
    model = unwrap(model)
    _check_inputs(inputs)
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise AnatomyError(
            f"{type(model).__name__} is scripted or traced by torch.jit: dissect the module it was made from"
        )
    if not any(True for _ in model.parameters()):
        raise AnatomyError(f"{type(model).__name__} has no parameters: there is nothing to dissect")
    try:
        graph = trace(model, _beside(model, inputs))
    except Exception as error:
        raise AnatomyError(
            f"the forward pass of {type(model).__name__} failed: {in_one_line(error)}\n"
            f"It was called with {_shown(inputs)}. Check that the model runs on these inputs"
        ) from error
    flow = Flow(find_uses(graph))
    return Specimen(model, shapes_of(model), flow, find_residuals(flow))


def examine_built(build: Build, size: Size, inputs: Any) -> Specimen:
    """Build a network at a size and trace it; for real only if it cannot be done without computing."""
    model = build_hollow(build, size)
    try:
        return examine(model, inputs)
    except AnatomyError as error:
        count = sum(tensor.numel() for tensor in model.parameters())
        if not any(tensor.is_meta for tensor in model.parameters()):
            raise
        if count > _MOST_REAL_PARAMETERS:
            raise AnatomyError(
                f"{error}\nA network whose control flow depends on values has to be built for real, and "
                f"{count:,} parameters are more than {_MOST_REAL_PARAMETERS:,}: dissect it at a smaller size"
            ) from error
    return examine(build_model(build, size), inputs)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes by canonical name, tied tensors once."""
    return {name: tuple(tensor.shape) for name, tensor in canonical_parameters(model)}


def _beside(model: nn.Module, inputs: Any) -> Any:
    """The inputs on the model's device, where DataParallel and the like would put them."""
    device = next(iter(model.parameters())).device
    if device.type == "meta":
        return inputs
    return tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf, inputs
    )


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
