"""A network laid open: built without memory where that can be, traced, its residual branches found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
from theodolite.calling import Build
from theodolite.size import Size

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
    if not any(True for _ in model.parameters()):
        raise AnatomyError(f"{type(model).__name__} has no parameters: there is nothing to dissect")
    try:
        graph = trace(model, _beside(model, inputs))
    except Exception as error:
        raise AnatomyError(
            f"the forward pass of {type(model).__name__} failed: {_summary(error)}\n"
            f"It was called with {_shown(inputs)}. Check that the model runs on these inputs"
        ) from error
    flow = Flow(find_uses(graph))
    return Specimen(model, shapes_of(model), flow, find_residuals(flow))


def examine_built(build: Build, size: Size, inputs: Any) -> Specimen:
    """Build a network at a size and trace it; for real only if it cannot be done without computing."""
    model = build_on_meta(build, size)
    try:
        return examine(model, inputs)
    except AnatomyError:
        count = sum(tensor.numel() for tensor in model.parameters())
        if not _on_meta(model) or count > _MOST_REAL_PARAMETERS:
            raise
    return examine(_build(build, size, "cpu"), inputs)


def build_on_meta(build: Build, size: Size) -> nn.Module:
    """The network without memory for its weights, or a real one where it cannot be built so."""
    try:
        return unwrap(_build(build, size, "meta"))
    except AnatomyError:
        return unwrap(_build(build, size, "cpu"))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes by canonical name, tied tensors once."""
    return {name: tuple(tensor.shape) for name, tensor in canonical_parameters(model)}


def _build(build: Build, size: Size, device: str) -> nn.Module:
    try:
        with _same_rng(), torch.device(device):
            model = build(size.width, size.depth)
    except Exception as error:
        raise AnatomyError(
            f"build(width={size.width}, depth={size.depth}) failed: {_summary(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise AnatomyError(
            f"build(width={size.width}, depth={size.depth}) returned a {type(model).__name__}, "
            "not an nn.Module"
        )
    return model


@contextmanager
def _same_rng() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


def _beside(model: nn.Module, inputs: Any) -> Any:
    """The inputs on the model's device, where DataParallel and the like would put them."""
    device = next(iter(model.parameters())).device
    if device.type == "meta":
        return inputs
    return tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) and not leaf.is_meta else leaf, inputs
    )


def _on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in model.parameters())


def _check_inputs(inputs: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
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


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
