"""diffGrad: `A = ξ·m̂/(√v̂ + eps)` with `ξ = sigmoid(|∇W_before − ∇W|)`, which is between 1/2 and 1.

Entries of gradients decrease as the width grows, so ξ goes to 1/2 and A to AdamW's at half the learning rate:
see `theodolite study diffgrad`. That is the case its rule is for. Where entries are about one, ξ is up to
twice as large: a base size with such gradients does not transfer, and multipliers are not absorbed exactly.

References:
    Dubey et al., diffGrad: an optimization method for convolutional neural networks, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from theodolite.optimizers.borrowed import DECOUPLED, NEGATED, Borrowed, ByAge, NoHiddenEps, corrected_eps
from theodolite.optimizers.horizon import Memory
from theodolite.optimizers.scaling import GRADIENT_ENTRY, SIGN
from theodolite.optimizers.spec import Eps, OptimizerSpec


class DiffGradFixes(NoHiddenEps, ByAge):
    """Adds eps after the bias correction: before it, eps counts 32 times at the first step."""

    def _of_age(self, group: Mapping[str, Any], age: int) -> dict[str, Any]:
        return {"step": age, "eps": corrected_eps(group, age + 1)}


SPECS = (
    OptimizerSpec(
        "diffgrad",
        Borrowed("DiffGrad", (DiffGradFixes,)),
        update=SIGN,
        eps=Eps(GRADIENT_ENTRY),
        memory=Memory({"betas": (0.9, 0.999)}),
        keeps_squares=True,
        fixed=DECOUPLED,
        refused=NEGATED,
    ),
)
