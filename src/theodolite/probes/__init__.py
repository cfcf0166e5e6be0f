"""Measurements on a network that leave it as it was."""

from theodolite.probes.assumptions import Assumptions, assumptions
from theodolite.probes.coordinates import Coordinates, coordinates
from theodolite.probes.following import Track
from theodolite.probes.power import SpectralNorm, spectral_norm
from theodolite.probes.slopes import Slope
from theodolite.probes.spectral import Spectral, spectral

__all__ = [
    "Assumptions",
    "Coordinates",
    "Slope",
    "Spectral",
    "SpectralNorm",
    "Track",
    "assumptions",
    "coordinates",
    "spectral",
    "spectral_norm",
]
