"""From a rule and an anatomy to initial values, parameter groups, an optimizer and a schedule."""

from theodolite.planning.exporting import Exported
from theodolite.planning.grouping import groups
from theodolite.planning.groups import Groups
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.plan import Explanation, Plan
from theodolite.planning.planner import plan
from theodolite.planning.rows import PlanDiff, PlanRow

__all__ = [
    "Explanation",
    "Exported",
    "Groups",
    "InitDistribution",
    "Plan",
    "PlanDiff",
    "PlanRow",
    "groups",
    "plan",
]
