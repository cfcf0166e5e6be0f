"""From a rule and an anatomy to initial values, parameter groups, an optimizer and a schedule."""

from theodolite.planning.plan import Plan, Row
from theodolite.planning.planner import plan

__all__ = ["Plan", "Row", "plan"]
