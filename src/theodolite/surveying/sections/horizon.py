"""Is there a rule for the batch and the number of tokens that the network will be trained with?"""

from __future__ import annotations

from collections.abc import Iterator

from theodolite.core.size import Size, rounded
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.horizon import Horizon, HorizonCase
from theodolite.optimizers.scaling import fraction
from theodolite.present.text import listed
from theodolite.surveying.context import SurveyContext
from theodolite.surveying.finding import Check, Finding, Value
from theodolite.surveying.section import Section
from theodolite.surveying.trials import OPTIMIZER

HORIZON = Check(
    "TH210",
    "Batch and tokens",
    "The best learning rate also depends on the batch and on how long a network is trained. A plan for width "
    "and depth alone keeps the rate that was right for a short run in small batches. A run that is 100 times "
    "as long may diverge with it, or learn less than it could.",
)


def examine(context: SurveyContext) -> Iterator[Finding]:
    """TH210, if the survey is told what batch or how many tokens the network will be trained with."""
    if context.to is None:
        return
    workload, base = context.workload, context.size.at(tokens=context.workload.size.tokens)
    if context.to.batch is not None:
        base = base.at(batch=workload.size.batch or workload.usual_batch)
    if context.to.tokens is not None and base.tokens is None:
        yield HORIZON.finding(
            "warn",
            f"Training will see {rounded(context.to.tokens)} tokens, and the workload does not say with how "
            "many its hyperparameters were tuned.",
            title="A number of tokens that is compared with nothing",
            remedy=f"Give the workload's size its tokens: Size({base.width}, {base.depth}, tokens=…).",
        )
        return
    yield from followed(base, context.to, Horizon.of(context.horizon))


def followed(base: Size, size: Size, horizon: Horizon) -> Iterator[Finding]:
    """TH210: does the learning rate follow what changes?"""
    case = HorizonCase(horizon, base, size, OPTIMIZERS[OPTIMIZER], {})
    stretch = case.stretch
    if not stretch.changes:
        return
    factors = case.factors(0, 1, independent=False)
    said = listed([f"{name} × {fraction(getattr(stretch, name))}" for name in stretch.changes])
    numbers: dict[str, Value] = {f"{name}, ratio": getattr(stretch, name) for name in stretch.changes}
    numbers |= {
        "steps, ratio": stretch.steps,
        f"learning rate of {OPTIMIZER}, factor": factors.lr,
        "weight decay, factor": factors.weight_decay,
    }
    if horizon.rates != "none":
        yield HORIZON.finding(
            "ok",
            f"With {said} the rule {horizon} multiplies the learning rate of {OPTIMIZER} by "
            f"{fraction(factors.lr)}.",
            numbers=numbers,
        )
        return
    yield HORIZON.finding(
        "warn",
        f"With {said} the learning rate would stay that of the base: no rule is named.",
        title="A batch or a number of tokens without a rule",
        remedy="Plan with horizon='sde+timescale'; or measure how the best rate moves, by theodolite sweep "
        "with --batches and --tokens, and plan with horizon=sweep.horizon.",
        numbers=numbers,
    )


section = Section("Batch and tokens", 52, examine)
