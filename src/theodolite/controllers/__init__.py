"""Controllers of the step: wrappers around an optimizer, or in its place, that measure before they move."""

from theodolite.controllers.drift_adjusted import DriftAdjusted
from theodolite.controllers.interaction import cancel_interaction
from theodolite.controllers.safe_step import SafeStep
from theodolite.controllers.smoothness import NormalizedSmoothness

__all__ = ["DriftAdjusted", "NormalizedSmoothness", "SafeStep", "cancel_interaction"]
