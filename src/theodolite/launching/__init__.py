"""From a workload and a target size to a launch sheet: small runs, a plan, a forecast."""

from theodolite.launching.preparation import Preparation, Stage, prepare
from theodolite.launching.scale import scale
from theodolite.launching.sheet import LaunchSheet

__all__ = ["Preparation", "LaunchSheet", "Stage", "prepare", "scale"]
