"""Measurements on a network that leave it as it was."""

from theodolite.probes.assumptions import Assumptions, assumptions
from theodolite.probes.coordinates import Coordinates, coordinates
from theodolite.probes.power import SpectralNorm, spectral_norm
from theodolite.probes.slopes import Slope
from theodolite.probes.spectral import Spectral, spectral
from theodolite.probes.track import Track

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
