"""Hyperparameters as functions of size: one pure function `(part, ratios, base) -> Hyper` per optimizer."""

from __future__ import annotations

from collections.abc import Callable

from theodolite.anatomy.part import Part
from theodolite.optimizers.adam_rules import adamw, diffgrad, lion, schedule_free, sophia
from theodolite.optimizers.condition import meet
from theodolite.optimizers.decay_policies import POLICIES, Policy
from theodolite.optimizers.hyper import Base, Hyper, Ratios
from theodolite.optimizers.muon_rules import muon, muon_kimi, muon_original, muon_spectral, shampoo, soap
from theodolite.optimizers.sgd_rules import sgd
from theodolite.optimizers.sphere_rules import sso

Rule = Callable[[Part, Ratios, Base], Hyper]

RULES: dict[str, Rule] = {
    "sgd": sgd,
    "adamw": adamw,
    "diffgrad": diffgrad,
    "schedule-free": schedule_free,
    "lion": lion,
    "sophia": sophia,
    "muon": muon,
    "muon-original": muon_original,
    "muon-kimi": muon_kimi,
    "muon-spectral": muon_spectral,
    "shampoo": shampoo,
    "soap": soap,
    "sso": sso,
}

MATRIX_RULES = frozenset({"muon", "muon-original", "muon-kimi", "muon-spectral", "shampoo", "soap", "sso"})
"""Rules for weights only: vectors need another."""

__all__ = [
    "Base", "Hyper", "Ratios", "Rule", "RULES", "MATRIX_RULES", "Policy", "POLICIES", "meet",
    "sgd", "adamw", "diffgrad", "schedule_free", "lion", "sophia", "muon", "muon_original", "muon_kimi",
    "muon_spectral", "shampoo", "soap", "sso",
]  # fmt: skip
