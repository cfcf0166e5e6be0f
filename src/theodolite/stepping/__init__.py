"""Steps that look before they move."""

from theodolite.stepping.drift_adjusted import DriftAdjusted
from theodolite.stepping.finder import find_lr
from theodolite.stepping.lr_range import LrRange
from theodolite.stepping.safe_step import SafeStep
from theodolite.stepping.smoothness import NormalizedSmoothness

__all__ = ["LrRange", "find_lr", "DriftAdjusted", "SafeStep", "NormalizedSmoothness"]
