"""Measurements on a network that leave it as it was."""

from theodolite.probes.curvature.axes import Trajectory, trajectory
from theodolite.probes.curvature.curvature import Curvature, curvature
from theodolite.probes.curvature.density import Density, Outliers, density, outliers
from theodolite.probes.curvature.eigenvalues import Eigenvalues, eigenvalues
from theodolite.probes.curvature.landscape import Landscape, landscape
from theodolite.probes.curvature.operator import Hessian, Operator, hessian
from theodolite.probes.curvature.path import Barrier, LossPath, path
from theodolite.probes.curvature.rescaling import along_scale, along_temperature, scaled, tempered
from theodolite.probes.curvature.sampling import Estimate
from theodolite.probes.curvature.sharpness import Sharpness, sharpness
from theodolite.probes.curvature.trace import Trace, trace
from theodolite.probes.curvature.tracking import Tracking, track
from theodolite.probes.features.class_spread import ClassGeometry
from theodolite.probes.features.collapse import Collapse, collapse
from theodolite.probes.features.fourier import Fourier, fourier
from theodolite.probes.features.fourier_winners import FourierWinners, fourier_winners
from theodolite.probes.features.near_collapse import CentralPath, NearCollapse
from theodolite.probes.gains.decay import Decay, decay
from theodolite.probes.gains.preconditioning import Preconditioning, preconditioning
from theodolite.probes.gains.scale_vectors import Amplification, amplification
from theodolite.probes.noise.meter import NoiseMeter
from theodolite.probes.noise.noise import noise
from theodolite.probes.noise.result import Noise, TensorNoise
from theodolite.probes.scaling.assumptions import Assumptions, assumptions
from theodolite.probes.scaling.coordinates import Coordinates, Slope, coordinates
from theodolite.probes.scaling.first_steps import Track
from theodolite.probes.scaling.spectral import Spectral, spectral
from theodolite.probes.scaling.spectral_norm import SpectralNorm, spectral_norm
from theodolite.probes.signal.result import PointSignal, Signal
from theodolite.probes.signal.signal import signal
from theodolite.probes.steps.drift import Drift, drift
from theodolite.probes.steps.game import GameDrift, game_drift
from theodolite.probes.steps.profile import Profile, profile
from theodolite.probes.steps.radius import Radius, radius
from theodolite.probes.steps.update import optimizer_step
from theodolite.probes.stream.along import StreamAlong
from theodolite.probes.stream.history import StreamHistory, stream_history
from theodolite.probes.stream.result import Stream
from theodolite.probes.stream.stream import stream

# the first steps of training
__all__ = ["Assumptions", "Coordinates", "Slope", "Spectral", "SpectralNorm", "Track"]
__all__ += ["assumptions", "coordinates", "spectral", "spectral_norm"]
# second derivatives
__all__ += ["Hessian", "Operator", "hessian", "Curvature", "Estimate", "curvature"]
__all__ += ["along_scale", "along_temperature", "scaled", "tempered"]
# the spectrum
__all__ += ["Density", "Eigenvalues", "Outliers", "Sharpness", "Trace"]
__all__ += ["density", "eigenvalues", "outliers", "sharpness", "trace"]
# the landscape
__all__ += ["Landscape", "Tracking", "Trajectory", "landscape", "track", "trajectory"]
__all__ += ["Barrier", "LossPath", "path"]
# scale vectors, and the optimizer's groups
__all__ += ["Amplification", "Preconditioning", "amplification", "preconditioning", "Decay", "decay"]
# the residual stream
__all__ += ["Stream", "StreamAlong", "StreamHistory", "stream", "stream_history"]
# the noise of gradients
__all__ += ["Noise", "NoiseMeter", "TensorNoise", "noise"]
# what was learned
__all__ += ["Fourier", "FourierWinners", "fourier", "fourier_winners"]
__all__ += ["CentralPath", "ClassGeometry", "Collapse", "NearCollapse", "collapse"]
# one more block
__all__ += ["PointSignal", "Signal", "signal"]
# along a step
__all__ += ["Drift", "GameDrift", "Profile", "Radius"]
__all__ += ["drift", "game_drift", "optimizer_step", "profile", "radius"]
