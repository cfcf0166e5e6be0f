"""Optimizers: how hyperparameters follow from size, steps, and learning rates over time."""

from theodolite.optimizers.condition import Base, Hyper, Ratios, Rule, meet
from theodolite.optimizers.decay_policies import POLICIES, Policy
from theodolite.optimizers.muon import Muon as Muon
from theodolite.optimizers.planned import BrokenRatiosWarning, Planned
from theodolite.optimizers.schedule import Refined, refine, schedule
from theodolite.optimizers.spec import OptimizerSpec, find_optimizers
from theodolite.optimizers.sphere import SpectralSphere as SpectralSphere
from theodolite.optimizers.step_checks import NonFiniteError

OPTIMIZERS = find_optimizers()
"""Every optimizer by name."""

# Under these names the classes are written above as well, where type checkers see them.
_CLASSES = {
    spec.class_name: spec.implementation for spec in OPTIMIZERS.values() if spec.source == "theodolite"
}
globals().update(_CLASSES)

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
    "NonFiniteError",
    "Planned",
    *_CLASSES,
    # schedules
    "Refined",
    "refine",
    "schedule",
]
