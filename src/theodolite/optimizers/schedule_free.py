"""Schedule-free AdamW: steps of z, whose average x is evaluated; gradients are taken at y, in between.

    z ← z − lr·(∇f(y)/(√v̂ + eps) + weight_decay·y),   x ← (1 − c)·x + c·z,   y = (1 − β₁)·z + β₁·x

The parameters are y in training and x after `eval()`; `train()` goes back. It replaces a schedule: the
learning rate stays, after a warmup. Averages of z are as large as z, so the rule is AdamW's.

References:
    Defazio et al., The road less scheduled, 2024.
"""

from __future__ import annotations

from theodolite.core.errors import UseError
from theodolite.optimizers.borrowed import NEGATED, Borrowed, ByAge, NoHiddenEps
from theodolite.optimizers.horizon import Memory
from theodolite.optimizers.scaling import GRADIENT_ENTRY, SIGN
from theodolite.optimizers.spec import Eps, OptimizerSpec
from theodolite.optimizers.step_checks import Group


class ScheduleFreeFixes(NoHiddenEps, ByAge):
    """Leaves gradients as they are, and refuses a step after `eval()`, which would move x as if it were y."""

    changes_gradients = True

    def _check(self, cohorts: list[tuple[Group, Group]]) -> None:
        if not all(group["train_mode"] for _, group in cohorts):
            raise UseError(
                "the parameters are the averages, after eval(): call optimizer.train() before computing the "
                "gradients of the next step"
            )


SPECS = (
    OptimizerSpec(
        "schedule-free",
        Borrowed("ScheduleFreeAdamW", (ScheduleFreeFixes,)),
        update=SIGN,
        eps=Eps(GRADIENT_ENTRY),
        # The first beta places y between x and z; it is no decay rate.
        memory=Memory(
            {"betas": (0.9, 0.999)},
            lambda options, batch: {"betas": (options["betas"][0], options["betas"][1] ** batch)},
        ),
        keeps_squares=True,
        averages=True,
        refused=NEGATED,
    ),
)
