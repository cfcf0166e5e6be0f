"""Two ways to choose hyperparameters at a size: by the plan, or the same at every size (standard)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from theodolite.core.calling import Build
from theodolite.core.size import Size
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.plan import Plan
from theodolite.planning.planner import plan

Parameterization = Literal["plan", "standard"]
PARAMETERIZATIONS: tuple[Parameterization, ...] = ("plan", "standard")


def plan_for(
    build: Build,
    inputs: Any,
    size: Size,
    *,
    parameterization: Parameterization,
    base: Size,
    **planning: Any,
) -> Plan:
    """The plan for a size; of the standard parameterization the plan at ratio 1, which changes nothing."""
    start = base if parameterization == "plan" else size
    return plan(build, inputs, size=size, base=start, **planning)


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
