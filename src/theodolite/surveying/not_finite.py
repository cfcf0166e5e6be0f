"""TH108: loss, weights or gradients that are not finite where training starts.

Nothing that is measured on such a network means anything, so sections that measure on data are not examined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from theodolite.anatomy.names import canonical_modules, canonical_parameters
from theodolite.anatomy.specimen import shapes_of
from theodolite.core.building import untouched_randomness
from theodolite.core.finite import not_finite
from theodolite.core.size import Size
from theodolite.surveying.finding import Evidence, Finding, Value
from theodolite.surveying.wording import counted, listed

if TYPE_CHECKING:
    from theodolite.surveying.site import Site

MOST_PARAMETERS = 50_000_000
"""Above this the base of the trials is looked at instead."""
WHY = (
    "One number that is nan or infinite spoils every gradient behind it, and the first step of an optimizer "
    "spreads it over all weights. A larger network does not mend it. Whatever is measured on such a network "
    "means nothing."
)


@dataclass(frozen=True)
class Start:
    """Which numbers of a new network are not finite, on the first batch."""

    size: Size
    loss: float
    tensors: int
    weights: tuple[str, ...]
    """Names of the tensors whose own entries are not finite, …"""
    gradients: tuple[str, ...]
    """… and of those whose gradients are not, in the order of the forward pass."""
    first: str
    """Where a value is first not finite in the forward pass, in words; empty if it is not known."""

    @property
    def finite(self) -> bool:
        """Is everything finite?"""
        return math.isfinite(self.loss) and not self.weights and not self.gradients


def look_at_start(site: Site) -> Start:
    """One forward and one backward pass of a new network, on the first batch."""
    size = site.size
    if sum(math.prod(shape) for shape in shapes_of(site.build_hollow(size)).values()) > MOST_PARAMETERS:
        size = site.trials.base
    model = site.build(size)
    tensors = dict(canonical_parameters(model))
    watch = _Watch(model)
    trained = {name: one for name, one in tensors.items() if one.requires_grad}
    gradients: dict[str, Tensor | None] = {}
    with untouched_randomness(site.seed), torch.enable_grad(), watch:
        loss = site.workload.evaluate(model, site.batch)
    if loss.requires_grad and trained:
        found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        gradients = dict(zip(trained, found, strict=True))
    bad = not_finite(gradients)
    value = float(loss.detach())
    return Start(
        size=size,
        loss=value,
        tensors=len(tensors),
        weights=tuple(not_finite(tensors)),
        gradients=tuple(sorted(bad, key=watch.place)),
        first="" if math.isfinite(value) else watch.first,
    )


def finding(site: Site, start: Start) -> Finding:
    """TH108, of a start that is not finite."""
    where = f"At {start.size}" if start.size == site.size else f"At {start.size}, the base of the trials,"
    said = [f"{where} the loss of a new network on the first batch is {start.loss:.4g}."]
    if start.weights:
        said.append(f"Weights are not finite in {_among(start.weights, start.tensors)}.")
    if start.first:
        said.append(f"In the forward pass {start.first}.")
    if start.gradients:
        said.append(f"Gradients are not finite in {_among(start.gradients, start.tensors)}.")
    remedy = "Mend the initialisation." if start.weights else "Check the batch, the loss and what overflows."
    if math.isfinite(start.loss) and not start.weights:
        last = start.gradients[-1]
        said.append(f"The last of them in the forward pass is {last}.")
        remedy = (
            f"Look behind {last} for an operation whose derivative is not finite: a square root, a logarithm "
            "or a norm of zeros, or a value that overflows and is cut off."
        )
    numbers: dict[str, Value] = {
        "size": str(start.size),
        "loss": start.loss,
        "tensors": start.tensors,
        "weights that are not finite": len(start.weights),
        "gradients that are not finite": len(start.gradients),
    }
    rows = tuple(
        {"tensor": name, "weight": _word(name, start.weights), "gradient": _word(name, start.gradients)}
        for name in dict.fromkeys((*start.weights, *start.gradients))
    )
    return Finding(
        "TH108",
        "fail",
        "Numbers that are not finite at the start",
        " ".join(said),
        why=WHY,
        remedy=f"{remedy} Until then the findings that are measured on data are missing here.",
        evidence=Evidence(numbers, rows),
    )


class _Watch:
    """Follows a forward pass by hooks: in which order modules run, and where a value is first not finite."""

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
        """When a tensor is first used: by its module, or by the one around it."""
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
