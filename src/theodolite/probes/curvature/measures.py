"""What `track` can measure by name, and what it makes of what a function of the user's own returns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from theodolite.core.batches import Batches
from theodolite.core.building import untouched_randomness
from theodolite.core.calling import Loss, described
from theodolite.core.errors import UseError
from theodolite.probes.curvature.curvature import Curvature, curvature
from theodolite.probes.curvature.edge import edge
from theodolite.probes.curvature.operator import Hessian, hessian
from theodolite.probes.curvature.rescaling import is_compiled
from theodolite.probes.curvature.sharpness import sharpness

Measure = Callable[[nn.Module, Loss, Batches], Any]
"""`measure(model, loss, batch)`: a number, or something with `.value` and perhaps `.error`."""


class Moment:
    """One moment of training. What several measures need is made once."""

    def __init__(self, model: nn.Module, loss: Loss, batch: Batches, optimizer: Optimizer) -> None:
        self.model, self.loss, self.batch, self.optimizer = model, loss, batch, optimizer

    @cached_property
    def hessian(self) -> Hessian:
        """As an operator."""
        return hessian(self.model, self.loss, self.batch)

    @cached_property
    def curvature(self) -> Curvature:
        """In 50 directions, if there are as many."""
        return curvature(self.model, self.loss, self.batch, directions=min(50, self.hessian.size))


NAMED: dict[str, Callable[[Moment], Any]] = {
    "loss": lambda now: now.hessian.loss,
    "gradient_norm": lambda now: now.hessian.gradient.norm(),
    "sharpness": lambda now: sharpness(now.hessian),
    "edge": lambda now: edge(now.hessian, now.model, now.optimizer),
    "trace": lambda now: now.curvature.trace,
    "excess": lambda now: now.curvature.excess,
    "t": lambda now: now.curvature.t,
}


def find_measures(
    measure: str | Sequence[str] | Mapping[str, str | Measure],
) -> dict[str, Callable[[Moment], Any]]:
    """By name, what is measured at a moment."""
    if isinstance(measure, str):
        measure = [measure]
    pairs = measure.items() if isinstance(measure, Mapping) else [(name, name) for name in measure]
    found: dict[str, Callable[[Moment], Any]] = {}
    for name, one in pairs:
        if callable(one):
            found[name] = _own(one)
        elif one in NAMED:
            found[name] = NAMED[one]
        else:
            raise UseError(
                f"measure {name!r} is {one!r}: give one of {', '.join(NAMED)}, or a function "
                "(model, loss, batch) -> number"
            )
    if not found:
        raise UseError(f"measure is empty: give some of {', '.join(NAMED)}")
    return found


def number(name: str, found: Any) -> tuple[float, float]:
    """A value and its error, nan if it has none said, out of what a measure returned.

    >>> number("loss", torch.tensor(2.0))
    (2.0, nan)
    """
    value = getattr(found, "value", found)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return float(value), float(getattr(found, "error", math.nan))
    except (TypeError, ValueError):
        raise UseError(
            f"measure {name!r} returned {described(found)}: return a number, or something with .value"
        ) from None


def _own(measure: Measure) -> Callable[[Moment], Any]:
    def measured(now: Moment) -> Any:
        with _undisturbed(now.model):
            return measure(now.model, now.loss, now.batch)

    return measured


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Modes, gradients, buffers and random numbers are afterwards what they were before; no compiled code."""
    modes = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with ExitStack() as stack:
        stack.enter_context(untouched_randomness())
        if is_compiled(model):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # A replica under DDP that were called with gradients would wait for the others' backward pass.
        stack.enter_context(torch.no_grad())
        try:
            for parameter, _ in grads:
                parameter.grad = None
            yield
        finally:
            for module, training in modes:
                module.training = training
            for parameter, grad in grads:
                parameter.grad = grad
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
