"""Optimizers: how hyperparameters follow from size, steps, and learning rates over time."""

from theodolite.optimizers.condition import Base, Hyper, Ratios, Rule, meet
from theodolite.optimizers.decay_policies import POLICIES, Policy
from theodolite.optimizers.muon import Muon
from theodolite.optimizers.planned import BrokenRatiosWarning, Planned
from theodolite.optimizers.schedule import Refined, refine, schedule
from theodolite.optimizers.spec import OptimizerSpec, find_optimizers
from theodolite.optimizers.sphere import SpectralSphere
from theodolite.optimizers.step_checks import NonFiniteError

OPTIMIZERS = find_optimizers()
"""Every optimizer by name."""

__all__ = [
    # what is known about each optimizer
    "OPTIMIZERS",
    "OptimizerSpec",
    # rules
    "Base",
    "Hyper",
    "POLICIES",
    "Policy",
    "Ratios",
    "Rule",
    "meet",
    # steps
    "BrokenRatiosWarning",
    "Muon",
    "NonFiniteError",
    "Planned",
    "SpectralSphere",
    # schedules
    "Refined",
    "refine",
    "schedule",
]
