"""What shows that an edit kept the function: outputs and gradients before it and after."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from theodolite.anatomy.names import canonical_parameters, unwrap
from theodolite.building import evaluated, untouched_randomness
from theodolite.calling import call, logits
from theodolite.surgery.editing import scaled_gains, scaled_weights

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.2}
"""By the coarsest dtype that a network computes in: how far outputs and gradients may differ, in parts of
themselves. Some ten times what rounding does to a network of a dozen blocks."""


@dataclass(frozen=True)
class Proof:
    """What an edit of a network did to its outputs and gradients.

    `left` holds the gains that were not moved, with the reason for each.
    """

    operation: str
    outputs: float | None
    """Largest difference between the outputs before and after, in parts of the largest output; None for a
    network on the meta device, which has none."""
    gradients: float | None
    """The same for the gradient by each tensor, from that after the edit by the chain rule, in parts of the
    tensor's gradient; the worst of all tensors."""
    dtype: str
    """The coarsest that the network computes in."""
    inputs: str
    """What the network was called with."""
    tolerance: float
    moved: tuple[str, ...]
    """The gains that are part of the weights now."""
    left: Mapping[str, str] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Are both within the tolerance? True where nothing could be computed."""
        if self.outputs is None or self.gradients is None:
            return True
        return self.outputs <= self.tolerance and self.gradients <= self.tolerance

    def __str__(self) -> str:
        lines = [f"{self.operation}: {len(self.moved)} gains moved, {len(self.left)} left"]
        if self.outputs is None:
            lines.append("not compared: on the meta device nothing is computed")
        else:
            lines.append(
                f"outputs differ by {self.outputs:.1e}, gradients by {self.gradients:.1e} "
                f"(at most {self.tolerance:.0e}), {self.dtype}, on {self.inputs}"
            )
        return "\n".join([*lines, *(f"  left {name}: {reason}" for name, reason in self.left.items())])


@dataclass(frozen=True)
class Evidence:
    """Outputs of a network, and gradients of a fixed random combination of them."""

    outputs: Tensor
    dtype: torch.dtype
    """The coarsest that was computed in."""
    gradients: Mapping[str, Tensor]
    """By canonical name of a parameter that is trained and used."""
    effective: Mapping[str, Tensor]
    """The same by the tensors that the network computes with: a weight with scale vectors in it is the
    product, under its plain name."""


def gathered(model: nn.Module, inputs: Any) -> Evidence | None:
    """Evidence of the network as it is, in eval mode; it is left as it was. None on the meta device."""
    model = unwrap(model)
    if any(tensor.is_meta for tensor in model.parameters()):
        return None
    tensors = {name: one for name, one in canonical_parameters(model) if one.requires_grad}
    coarsest = _Coarsest()
    with (
        evaluated(model),
        untouched_randomness(0),
        torch.enable_grad(),
        torch.compiler.set_stance("force_eager"),
        _watched(model) as seen,
    ):
        with coarsest:
            found = logits(call(model, inputs))
        wide = found.to(torch.promote_types(found.dtype, torch.float32))
        loss = (wide * torch.randn_like(wide)).sum() / wide.numel() ** 0.5
        wanted = [*tensors.values(), *(one for each in seen.values() for one in each)]
        if not loss.requires_grad:
            return Evidence(found.detach(), coarsest.dtype, {}, {})
        every = list(torch.autograd.grad(loss, wanted, allow_unused=True))
    gradients = {
        name: one for name, one in zip(tensors, every[: len(tensors)], strict=True) if one is not None
    }
    computed: dict[str, Tensor] = {}
    rest = iter(every[len(tensors) :])
    for name, each in seen.items():  # a weight may be computed several times in one pass
        several = [one for one in [next(rest) for _ in each] if one is not None]
        if several:
            computed[name] = torch.stack(several).sum(0)
    return Evidence(found.detach(), coarsest.dtype, gradients, {**gradients, **computed})


def compared(before: Evidence, outputs: Tensor, gradients: Mapping[str, Tensor]) -> tuple[float, float]:
    """Differences of the outputs and of the gradients; gradients are under the names of before the edit."""
    apart = _largest(outputs.double() - before.outputs.double()) / max(_largest(before.outputs), 1e-300)
    norms = {name: one.double().norm().item() for name, one in before.gradients.items()}
    # What is zero but for rounding, as the gradient by a key's bias, is measured by the largest of all.
    least = 1e-3 * max(norms.values(), default=0.0)
    worst = 0.0
    for name, one in before.gradients.items():
        if name in gradients:
            difference = (gradients[name].double() - one.double()).norm().item()
            worst = _larger(worst, difference / max(norms[name], least, 1e-300))
    return apart, worst


def said(inputs: Any) -> str:
    """The inputs in a few words.

    >>> said({"tokens": torch.zeros(2, 8, dtype=torch.long)})
    'int64 (2, 8)'
    """
    leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}" for leaf in leaves)


class _Coarsest(TorchDispatchMode):
    """Notes the coarsest dtype that comes out of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float64

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype in TOLERANCE:
                self.dtype = max(self.dtype, leaf.dtype, key=list(TOLERANCE).index)
        return result


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """What the scale vectors make of weights and gains in a forward pass, by plain name."""
    seen: dict[str, list[Tensor]] = {}

    def keeping(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def keep(how: nn.Module, args: Any, made: Tensor) -> None:
            if made.requires_grad:
                seen.setdefault(name, []).append(made)

        return keep

    parametrized = {**scaled_weights(model), **scaled_gains(model)}
    hooks = [how.register_forward_hook(keeping(name)) for name, (_, how) in parametrized.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def _larger(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)
