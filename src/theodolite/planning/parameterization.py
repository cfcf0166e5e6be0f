"""Three ways to choose hyperparameters at a size.

plan      by the rules of the optimizer, from values at a base size
standard  the network as it initialises itself, and the same values at every size
own       the network as it builds itself, and the optimizer that its author makes of it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from theodolite.anatomy import Anatomy
from theodolite.core import arguments
from theodolite.core.calling import Build
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.optimizers import Rule
from theodolite.planning.factory import MakeOptimizer
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.own import own
from theodolite.planning.plan import Plan
from theodolite.planning.planner import plan

Parameterization = Literal["plan", "standard", "own"]
PARAMETERIZATIONS: tuple[Parameterization, ...] = ("plan", "standard", "own")
WITHOUT_FACTORY: tuple[Parameterization, ...] = ("plan", "standard")
"""Those that any network can be trained in, whatever its author says of the optimizer."""


def plan_for(
    build: Build,
    inputs: Any,
    size: Size,
    *,
    parameterization: Parameterization,
    base: Size | None,
    make_optimizer: MakeOptimizer | None = None,
    lr: float | None = None,
    anatomies: Mapping[Size, Anatomy] | None = None,
    **planning: Any,
) -> Plan:
    """The plan for a size.

    Of the standard parameterization it is the plan at ratio 1, which changes nothing; of the own one what
    the network and `make_optimizer` have (`theodolite.planning.own`), with the learning rate of the factory
    by default.
    """
    if parameterization == "own":
        anatomy = (anatomies or {}).get(size)
        return own(build, inputs, make_optimizer, size=size, lr=lr, anatomy=anatomy, **planning)
    start = base if parameterization == "plan" else size
    return plan(build, inputs, size=size, base=start, lr=lr, anatomies=anatomies, **planning)  # type: ignore[arg-type]


def chosen(
    parameterization: str,
    *,
    factory: MakeOptimizer | None,
    base: Size | None,
    lr: float | None,
    optimizer: str | Rule | MakeOptimizer | None,
    weight_decay: float,
    planning: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of `plan_for` for a size, from those of a function that compares parameterizations.

    `factory` is the workload's. Under `own`, `optimizer` is another one in its place, and everything that
    the factory says itself is refused.

    >>> chosen("own", factory=None, base=None, lr=None, optimizer=None, weight_decay=0.1, planning={})
    Traceback (most recent call last):
    theodolite.UseError: weight_decay is given, and the own parameterization has that of its optimizer. ...
    """
    arguments.one_of("parameterization", parameterization, PARAMETERIZATIONS)
    if parameterization != "own":
        if lr is None:
            raise UseError(f"lr is missing: the {parameterization} parameterization needs a learning rate")
        if parameterization == "plan" and base is None:
            raise UseError("base is missing: a plan starts from a base size, as in base=Size(128, 4)")
        given = {"optimizer": optimizer or "adamw", "weight_decay": weight_decay, **planning}
        return {"parameterization": parameterization, "base": base, "lr": lr, **given}
    if isinstance(optimizer, str):
        raise UseError(
            f"optimizer is {optimizer!r}: the own parameterization has an optimizer that a function makes, "
            "(model) -> Optimizer. Give that, or leave it out for the one of the workload"
        )
    strange = [name for name in planning if name != "roles"] + ["weight_decay"] * bool(weight_decay)
    if strange:
        raise UseError(
            f"{strange[0]} is given, and the own parameterization has that of its optimizer. Leave it out"
        )
    make = factory if optimizer is None else optimizer
    return {"parameterization": "own", "base": None, "lr": lr, "make_optimizer": make, **planning}


def with_zero_readout(plan: Plan) -> Plan:
    """The plan with a readout that starts at zero, so that the logits hold nothing but what was learnt.

    Two kinds start as they do: a readout that is the embedding too, which is an input, and one that is
    divided by its own norm, which would be 0/0.
    """
    rows = {
        name: dataclasses.replace(row, init=InitDistribution("constant"))
        if row.role == "output" and row.block is None and not row.scale_free
        else row
        for name, row in plan.rows.items()
    }
    return dataclasses.replace(plan, rows=rows)
