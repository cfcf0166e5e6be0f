"""Learning rates that can be used: `find_lr` and its result, `LrRange`."""

from theodolite.lr_finder.finder import find_lr
from theodolite.lr_finder.lr_range import LrRange

__all__ = ["LrRange", "find_lr"]
