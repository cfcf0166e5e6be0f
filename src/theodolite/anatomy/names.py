"""Canonical parameter names: the same whatever the model is wrapped in."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import Tensor, nn

# The child through which a wrapper holds the module it wraps, by the wrapper's class. Classes, not
# strings: a user's own attribute may well be called `module`.
_WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside the outermost wrappers: what DDP or `torch.compile` was given."""
    while (inner := _wrapped(model)) is not None:
        model = inner
    return model


def canonical_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module under its canonical name, wrappers left out; a shared module under each of its names."""
    model = unwrap(model)
    yield prefix, model
    for name, child in model.named_children():
        yield from canonical_modules(child, f"{prefix}.{name}" if prefix else name)


def canonical_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its canonical name; a tied one once, under its first."""
    seen: set[int] = set()
    for name, tensor in all_parameter_names(model):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def all_parameter_names(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under every canonical name it has."""
    for prefix, module in canonical_modules(model):
        for name, tensor in module._parameters.items():
            if tensor is not None:
                yield (f"{prefix}.{name}" if prefix else name), tensor


def _wrapped(module: nn.Module) -> nn.Module | None:
    if not type(module).__module__.startswith("torch."):
        return None
    child = _WRAPPERS.get(type(module).__name__)
    return getattr(module, child) if child else None


def starred(name: str) -> str:
    """A name without its numbers: those of one kind in different blocks have the same.

    >>> starred("blocks.3.norm1.weight")
    'blocks.*.norm*.weight'
    """
    return re.sub(r"\d+", "*", name)
