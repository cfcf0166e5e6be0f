"""Which base hyperparameters are best, and do they transfer to other sizes?"""

from theodolite.sweeping.curves import Criterion, Optimum, SeedInterval
from theodolite.sweeping.families import Family, analyse
from theodolite.sweeping.ranges import Range
from theodolite.sweeping.result import Best, Sweep
from theodolite.sweeping.sweep import sweep
from theodolite.sweeping.transfer import Change, OptimumDrift, Transfer, TransferReach

__all__ = [
    # the function and what it returns
    "sweep",
    "Sweep",
    "Range",
    # what it finds
    "Family",
    "Optimum",
    "SeedInterval",
    "OptimumDrift",
    "Transfer",
    "Change",
    "Criterion",
    "TransferReach",
    "Best",
    "analyse",
]
