"""TH108: a loss, weights or gradients that are not finite at the start of training.

Nothing measured on such a network has a meaning, so sections that measure are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.anatomy.names import canonical_modules, canonical_parameters
from theodolite.core.building import untouched_randomness
from theodolite.core.finite import not_finite
from theodolite.core.size import Size
from theodolite.present.text import counted, listed
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value
from theodolite.surveying.trials import trials_of

MOST_PARAMETERS = 50_000_000
"""Above this the base of the trials is checked instead."""
FINITE = Check(
    "TH108",
    "Numbers that are not finite at the start",
    "One value that is nan or infinite spoils every gradient that depends on it, and the first optimizer "
    "step spreads it over all weights. A larger network has the same problem. Measurements on such a "
    "network have no meaning.",
)


@dataclass(frozen=True)
class NonFinite:
    """What is not finite in a new network, on the first batch."""

    size: Size
    loss: float
    tensors: int
    """The number of parameter tensors."""
    weights: tuple[str, ...]
    """Tensors with entries that are not finite."""
    gradients: tuple[str, ...]
    """Tensors with gradients that are not finite, in the order of the forward pass."""
    first: str
    """Where a value is first not finite in the forward pass, in words; empty if unknown."""

    def __bool__(self) -> bool:
        return not math.isfinite(self.loss) or bool(self.weights or self.gradients)


def find_non_finite(context: SurveyContext) -> NonFinite:
    """One forward and one backward pass of a new network, on the first batch."""
    size = context.size
    if context.num_parameters(size) > MOST_PARAMETERS:
        size = trials_of(context).base
    model = context.build(size)
    tensors = dict(canonical_parameters(model))
    watch = _Watch(model)
    trained = {name: one for name, one in tensors.items() if one.requires_grad}
    gradients: dict[str, Tensor | None] = {}
    with context.calling(), untouched_randomness(context.seed), torch.enable_grad():
        with watch:
            loss = context.workload.evaluate(model, context.batch)
        if loss.requires_grad and trained:
            found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            gradients = dict(zip(trained, found, strict=True))
    value = float(loss.detach())
    return NonFinite(
        size=size,
        loss=value,
        tensors=len(tensors),
        weights=tuple(not_finite(tensors)),
        gradients=tuple(sorted(not_finite(gradients), key=watch.place)),
        first="" if math.isfinite(value) else watch.first,
    )


def not_finite_finding(context: SurveyContext, bad: NonFinite) -> Finding:
    """TH108, of a start that is not finite."""
    where = f"At {bad.size}" if bad.size == context.size else f"At {bad.size}, the base of the trials,"
    said = [f"{where} the loss of a new network on the first batch is {bad.loss:.4g}."]
    if bad.weights:
        said.append(f"Weights are not finite in {_among(bad.weights, bad.tensors)}.")
    if bad.first:
        said.append(f"In the forward pass {bad.first}.")
    if bad.gradients:
        said.append(f"Gradients are not finite in {_among(bad.gradients, bad.tensors)}.")
    remedy = "Fix the initialisation." if bad.weights else "Check the batch, the loss, and what overflows."
    if math.isfinite(bad.loss) and not bad.weights:
        last = bad.gradients[-1]
        said.append(f"The last of them in the forward pass is {last}.")
        remedy = (
            f"Look after {last} for an operation whose derivative is not finite: a square root, a logarithm "
            "or a norm of zeros, or a value that overflows and is clipped."
        )
    numbers: dict[str, Value] = {
        "size": str(bad.size),
        "loss": bad.loss,
        "tensors": bad.tensors,
        "weights that are not finite": len(bad.weights),
        "gradients that are not finite": len(bad.gradients),
    }
    rows = [
        {"tensor": name, "weight": _word(name, bad.weights), "gradient": _word(name, bad.gradients)}
        for name in dict.fromkeys((*bad.weights, *bad.gradients))
    ]
    return FINITE.finding(
        "fail",
        " ".join(said),
        remedy=f"{remedy} Until then, findings that are measured on data are missing.",
        numbers=numbers,
        rows=rows,
    )


class _Watch:
    """Hooks on a forward pass: the order of modules, and where a value is first not finite."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(canonical_modules(model))
        self._handles: list[Any] = []
        self._order: dict[str, int] = {}
        self.first = ""

    def __enter__(self) -> None:
        for name, module in self._modules.items():
            self._handles += [
                module.register_forward_pre_hook(self._before(name), with_kwargs=True),
                module.register_forward_hook(self._after(name)),
            ]

    def __exit__(self, *raised: object) -> None:
        for handle in self._handles:
            handle.remove()

    def place(self, name: str) -> tuple[int, int]:
        """When a tensor is first used."""
        owner = name.rpartition(".")[0]
        # A module's own tensors may be used after those of the modules inside of it.
        return self._order.get(owner, len(self._order)), len(self._order)

    def _before(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.first and _spoilt((args, kwargs)):
                self.first = f"the input of {name or 'the network'} is the first that is not finite"

        return look

    def _after(self, name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            self._order.setdefault(name, len(self._order))
            if not self.first and _spoilt(output):
                self.first = f"the output of {name or 'the network'} is the first that is not finite"

        return look


def _spoilt(values: Any) -> bool:
    """Is there a tensor that is not finite? Minus infinity beside finite numbers is a mask."""
    leaves = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point())
    return any(
        not bool(((finite := leaf.isfinite()) | ((leaf == -math.inf) & finite.any())).all())
        for leaf in leaves
    )


def _among(names: tuple[str, ...], total: int) -> str:
    return f"{len(names)} of {counted(total, 'tensor')}: {listed(list(names))}"


def _word(name: str, bad: tuple[str, ...]) -> str:
    return "not finite" if name in bad else "finite"
