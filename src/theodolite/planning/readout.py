"""The one multiplier that cannot be absorbed: on the readout of a tied embedding."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from theodolite.anatomy import Anatomy
from theodolite.anatomy.part import Part
from theodolite.planning.plan import Plan


def readouts(target: Anatomy, partners: Mapping[str, Part]) -> tuple[dict[str, float], dict[str, float]]:
    """Multipliers on the inputs of modules by their names, and the same by the name of the tied tensor."""
    return {}, {}


def attach(plan: Plan, model: nn.Module) -> nn.Module:
    """Put the plan's multipliers on a network."""
    return model
