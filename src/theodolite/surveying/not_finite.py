"""TH108: a loss, weights, gradients or batches that are not finite at the start of training.

Nothing measured on such a network has a meaning, so sections that measure are skipped.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from theodolite.anatomy.names import canonical_modules, canonical_parameters
from theodolite.core.building import untouched_randomness
from theodolite.core.errors import UseError
from theodolite.core.finite import among, not_finite, spoilt, spoilt_part
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding
from theodolite.surveying.trials import trials_of

MOST_PARAMETERS = 50_000_000
"""Above this the base of the trials is checked instead."""
BATCHES = 16
"""How many batches are looked at, as many as short trainings take."""
FINITE = Check(
    "TH108",
    "Numbers that are not finite at the start",
    "One value that is nan or infinite spoils every gradient that depends on it, and the first optimizer "
    "step spreads it over all weights. A larger network has the same problem. Measurements on such a "
    "network have no meaning.",
)


def find_not_finite(context: SurveyContext) -> Finding | None:
    """TH108, after one forward and one backward pass of a new network; None if all is finite.

    The batches after the first are looked at too.
    """
    size = context.size
    if context.num_parameters(size) > MOST_PARAMETERS:
        size = trials_of(context).base
    model = context.build(size)
    tensors = dict(canonical_parameters(model))
    trained = {name: one for name, one in tensors.items() if one.requires_grad}
    slopes: dict[str, Tensor | None] = {}
    with context.calling(), untouched_randomness(context.seed), torch.enable_grad():
        with _watching(model) as seen:
            result = context.workload.evaluate(model, context.batch)
        if result.requires_grad and trained:
            found = torch.autograd.grad(result, list(trained.values()), allow_unused=True)
            slopes = dict(zip(trained, found, strict=True))
    loss, weights = float(result.detach()), not_finite(tensors)
    gradients = sorted(not_finite(slopes), key=seen.place)
    if math.isfinite(loss) and not weights and not gradients:
        return _spoilt_batch(context, model)
    said = [f"{context.where(size)} the loss of a new network on the first batch is {loss:.4g}."]
    remedy = "Check the batch, the loss, and what overflows."
    if weights:
        said.append(f"Weights are not finite in {among(weights, len(tensors))}.")
        remedy = "Fix the initialisation."
    if seen.first and not math.isfinite(loss):
        said.append(f"In the forward pass the {seen.first} is the first that is not finite.")
    if gradients:
        said.append(f"Gradients are not finite in {among(gradients, len(tensors))}.")
    if math.isfinite(loss) and not weights:
        said.append(f"The last of them in the forward pass is {gradients[-1]}.")
        remedy = (
            f"Look after {gradients[-1]} for an operation whose derivative is not finite: a square root, a "
            "logarithm or a norm of zeros, or a value that overflows and is clipped."
        )
    return FINITE.finding(
        "fail",
        " ".join(said),
        remedy=f"{remedy} Until then, findings that are measured on data are missing.",
        numbers={
            "size": str(size),
            "loss": loss,
            "tensors": len(tensors),
            "weights that are not finite": len(weights),
            "gradients that are not finite": len(gradients),
        },
        rows=[
            {
                "tensor": name,
                "weight": "not finite" if name in weights else "finite",
                "gradient": "not finite" if name in gradients else "finite",
            }
            for name in dict.fromkeys((*weights, *gradients))
        ],
    )


def _spoilt_batch(context: SurveyContext, model: nn.Module) -> Finding | None:
    """TH108 if a later batch is not finite, and the loss of a new network on it is not finite either."""
    for step in range(1, BATCHES):
        try:
            batch = context.draw(step)
            part = spoilt_part(batch)
            if part is None:
                continue
            with context.calling(step), untouched_randomness(context.seed):
                loss = float(context.workload.evaluate(model, batch).detach())
        except UseError:  # the data may end: sections that need this batch say so
            return None
        if not math.isfinite(loss):
            return FINITE.finding(
                "fail",
                f"batch({context.seed}, {step}) has {part} that are not finite, and the loss of a new "
                f"network on it is {loss:.4g}.",
                title="Batches that are not finite",
                remedy="Repair the data, or leave out such examples. Until then, findings that are measured "
                "on data are missing.",
                numbers={"step": step, "loss": loss},
            )
    return None


@dataclass
class _Seen:
    """The order of modules in a forward pass, and where a value is first not finite."""

    order: dict[str, int] = field(default_factory=dict)
    first: str = ""

    def place(self, name: str) -> int:
        """When the module of a tensor ends: its own tensors may be used after those of modules inside it."""
        return self.order.get(name.rpartition(".")[0], len(self.order))

    def look(self, name: str, side: str, module: nn.Module, *values: Any) -> None:
        if side == "output":
            self.order.setdefault(name, len(self.order))
        if not self.first and spoilt(values):
            self.first = f"{side} of {name or 'the network'}"


@contextlib.contextmanager
def _watching(model: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()
    with contextlib.ExitStack() as stack:
        for name, module in canonical_modules(model):
            before, after = partial(seen.look, name, "input"), partial(seen.look, name, "output")
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield seen
