"""Which base hyperparameters are best, and do they transfer to other sizes?"""

from theodolite.sweeping.drift import Drift
from theodolite.sweeping.families import Best, Family, analyse
from theodolite.sweeping.optimum import Interval, Optimum
from theodolite.sweeping.ranges import Range
from theodolite.sweeping.result import Sweep
from theodolite.sweeping.sweep import sweep
from theodolite.sweeping.transfer import Change, Reach, Transfer

__all__ = [
    # the function and what it returns
    "sweep",
    "Sweep",
    "Range",
    # what it finds
    "Family",
    "Optimum",
    "Interval",
    "Drift",
    "Transfer",
    "Change",
    "Reach",
    "Best",
    "analyse",
]
