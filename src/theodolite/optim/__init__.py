"""Optimizers that no well-kept library has right, and the one object that holds several."""

from theodolite.optim.muon import Muon
from theodolite.optim.planned import BrokenRatiosWarning, Planned
from theodolite.optim.sphere import SpectralSphere

__all__ = ["Muon", "SpectralSphere", "Planned", "BrokenRatiosWarning"]
