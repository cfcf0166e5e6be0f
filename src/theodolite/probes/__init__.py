"""Measurements on a network that leave it as it was."""

from theodolite.probes.amplification import Amplification, amplification
from theodolite.probes.assumptions import Assumptions, assumptions
from theodolite.probes.coordinates import Coordinates, coordinates
from theodolite.probes.decay import Decay, decay
from theodolite.probes.following import Track
from theodolite.probes.power import SpectralNorm, spectral_norm
from theodolite.probes.preconditioning import Preconditioning, preconditioning
from theodolite.probes.second_order.curvature import Curvature, curvature
from theodolite.probes.second_order.density import Density, density
from theodolite.probes.second_order.eigenvalues import Eigenvalues, eigenvalues
from theodolite.probes.second_order.estimate import Estimate
from theodolite.probes.second_order.landscape import Landscape, landscape
from theodolite.probes.second_order.operator import Hessian, Operator, hessian
from theodolite.probes.second_order.outliers import Outliers, outliers
from theodolite.probes.second_order.rescaling import scaled, tempered
from theodolite.probes.second_order.sharpness import Sharpness, sharpness
from theodolite.probes.second_order.trace import Trace, trace
from theodolite.probes.second_order.tracking import Tracking, track
from theodolite.probes.second_order.trajectory import Trajectory, trajectory
from theodolite.probes.second_order.zone import along_scale, along_temperature
from theodolite.probes.signal import PointSignal, Signal, signal
from theodolite.probes.slopes import Slope
from theodolite.probes.spectral import Spectral, spectral
from theodolite.probes.steps.drift import Drift, drift
from theodolite.probes.steps.profile import Profile, profile
from theodolite.probes.steps.radius import Radius, radius
from theodolite.probes.steps.update import optimizer_step
from theodolite.probes.stream import Stream, stream
from theodolite.probes.stream_course import StreamCourse, stream_course

__all__ = [
    # the first steps of training
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
    # second derivatives
    "Hessian",
    "Operator",
    "hessian",
    "Curvature",
    "Estimate",
    "curvature",
    "along_scale",
    "along_temperature",
    "scaled",
    "tempered",
    # the spectrum
    "Density",
    "Eigenvalues",
    "Outliers",
    "Sharpness",
    "Trace",
    "density",
    "eigenvalues",
    "outliers",
    "sharpness",
    "trace",
    # the landscape
    "Landscape",
    "Tracking",
    "Trajectory",
    "landscape",
    "track",
    "trajectory",
    # scale vectors
    "Amplification",
    "Preconditioning",
    "amplification",
    "preconditioning",
    # the optimizer's groups
    "Decay",
    "decay",
    # the residual stream
    "Stream",
    "StreamCourse",
    "stream",
    "stream_course",
    # one more block
    "PointSignal",
    "Signal",
    "signal",
    # along a step
    "Drift",
    "drift",
    "Profile",
    "Radius",
    "optimizer_step",
    "profile",
    "radius",
]
