"""Optimizers and schedules that no well-kept library has right, and the one object that holds several."""

import importlib
from typing import TYPE_CHECKING, Any

from theodolite.optim.finite import NonFiniteError
from theodolite.optim.muon import Muon
from theodolite.optim.planned import BrokenRatiosWarning, Planned
from theodolite.optim.refining import Refined, refine
from theodolite.optim.schedule import schedule
from theodolite.optim.sphere import SpectralSphere

if TYPE_CHECKING:
    from theodolite.stepping import DriftAdjusted, NormalizedSmoothness, SafeStep

__all__ = [
    # steps
    "Muon",
    "SpectralSphere",
    "Planned",
    "BrokenRatiosWarning",
    "NonFiniteError",
    # schedules
    "Refined",
    "refine",
    "schedule",
    # steps that look before they move
    "DriftAdjusted",
    "NormalizedSmoothness",
    "SafeStep",
]

_LOOKING = ("DriftAdjusted", "NormalizedSmoothness", "SafeStep")


def __getattr__(name: str) -> Any:
    # They measure, and what measures stands above this folder: loaded at first use.
    if name not in _LOOKING:
        raise AttributeError(f"module 'theodolite.optim' has no attribute {name!r}")
    return getattr(importlib.import_module("theodolite.stepping"), name)
