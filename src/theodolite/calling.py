"""How a network is built and called, and what it returns: the little that everything agrees on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from theodolite.errors import UseError
from theodolite.higher_order import trainable_operators

Build = Callable[[int, int], nn.Module]
"""`build(width, depth) -> nn.Module`."""


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)`, `model(*inputs)` for a tuple, `model(**inputs)` for a mapping."""
    with trainable_operators(inputs):
        if isinstance(inputs, Mapping):
            return model(**inputs)
        if isinstance(inputs, tuple):
            return model(*inputs)
        return model(inputs)


def logits(output: Any) -> Tensor:
    """What a loss is taken of: the output itself, its `.logits`, its `["logits"]`, a tuple's only tensor.

    >>> import torch
    >>> logits({"logits": torch.ones(2), "cache": None})
    tensor([1., 1.])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(found := getattr(output, "logits", None), Tensor):
        return found
    if isinstance(output, Mapping) and isinstance(found := output.get("logits"), Tensor):
        return found
    if isinstance(output, (tuple, list)):
        tensors = [value for value in output if isinstance(value, Tensor)]
        if len(tensors) == 1:
            return tensors[0]
    raise UseError(
        f"the model returned {described(output)}, in which the logits cannot be told. Return a tensor, "
        "an object with .logits, or a dict with the key 'logits'"
    )


def described(value: Any) -> str:
    """A value in a few words, for an error message.

    >>> import torch
    >>> described((torch.ones(2), None))
    'a tuple of 2 (Tensor, NoneType)'
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return (
            f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value)})"
        )
    return f"a {type(value).__name__}"
