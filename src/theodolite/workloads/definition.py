"""What is trained: a network, its data and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.errors import UseError
from theodolite.size import Size

Build = Callable[[int, int], nn.Module]
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Workload:
    """A network, its data and its loss, as three functions.

    Args:
        name: what reports call it.
        build: `build(width, depth) -> nn.Module`.
        batch: `batch(seed, step) -> (inputs, targets)`, a pure function: the same seed and step give the
            same batch in every process, which is what lets a run resume. `inputs` is a tensor, a tuple
            (`model(*inputs)`) or a dict (`model(**inputs)`).
        loss: `loss(logits, targets) -> scalar`. What the model returns goes through `logits` first.
        size: the size the network has when nobody says otherwise.

    >>> import torch
    >>> from torch import nn
    >>> def build(width: int, depth: int) -> nn.Module:
    ...     hidden = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    ...     return nn.Sequential(nn.Linear(8, width), *hidden, nn.Linear(width, 2))
    >>> def batch(seed: int, step: int):
    ...     generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    ...     inputs = torch.randn(16, 8, generator=generator)
    ...     return inputs, (inputs.sum(1) > 0).long()
    >>> mine = Workload("mine", build, batch, nn.functional.cross_entropy, size=Size(32, 2))
    >>> model = mine.build(32, 2)
    >>> mine.evaluate(model, mine.batch(0, 0)).shape
    torch.Size([])
    """

    name: str
    build: Build
    batch: Callable[[int, int], Batch]
    loss: Callable[[Tensor, Any], Tensor]
    size: Size = Size(128, 4)

    def __post_init__(self) -> None:
        for field in ("build", "batch", "loss"):
            if not callable(value := getattr(self, field)):
                raise UseError(f"workload {self.name!r}: {field} is {value!r}, which cannot be called")

    def evaluate(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of the model on one batch."""
        inputs, targets = batch
        return self.loss(logits(call(model, inputs)), targets)

    def draw(self, seed: int, step: int) -> Batch:
        """`batch(seed, step)`, refused if it is not a pair or holds nothing."""
        drawn = self.batch(seed, step)
        if not (isinstance(drawn, tuple) and len(drawn) == 2):
            raise UseError(
                f"workload {self.name!r}: batch({seed}, {step}) returned {_describe(drawn)}, "
                "not a pair (inputs, targets)"
            )
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(drawn[0]) if isinstance(leaf, Tensor)]
        if not tensors or any(tensor.numel() == 0 for tensor in tensors):
            raise UseError(
                f"workload {self.name!r}: batch({seed}, {step}) is empty: its inputs are {_describe(drawn[0])}. "
                "Return at least one example"
            )
        return drawn


def call(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)`, `model(*inputs)` for a tuple, `model(**inputs)` for a mapping."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs)
    return model(inputs)


def logits(output: Any) -> Tensor:
    """The tensor a loss is taken of: the output itself, its `.logits`, its `["logits"]`, or a tuple's only tensor.

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
        f"the model returned {_describe(output)}, in which the logits cannot be told. Return a tensor, "
        "an object with .logits, or a dict with the key 'logits'"
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value)})"
    return f"a {type(value).__name__}"
