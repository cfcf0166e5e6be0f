"""Optimizers: how hyperparameters follow from size, what makes the steps, learning rates over time."""

from theodolite.optimizers.finite import NonFiniteError
from theodolite.optimizers.muon import Muon
from theodolite.optimizers.planned import BrokenRatiosWarning, Planned
from theodolite.optimizers.refining import Refined, refine
from theodolite.optimizers.rules import MATRIX_RULES, POLICIES, RULES, Base, Hyper, Policy, Ratios, Rule, meet
from theodolite.optimizers.schedule import schedule
from theodolite.optimizers.sphere import SpectralSphere

__all__ = [
    # rules
    "Base",
    "Hyper",
    "MATRIX_RULES",
    "POLICIES",
    "Policy",
    "RULES",
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
