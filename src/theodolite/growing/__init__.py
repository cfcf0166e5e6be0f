"""Growing a network by a block, and how sure one can be that it helps."""

from theodolite.growing.certificate import Certificate, certificate, clip_from
from theodolite.growing.checkpoints import load_file, save_file
from theodolite.growing.concentration import least_units
from theodolite.growing.fallback import Kept, fallback
from theodolite.growing.grow import grow
from theodolite.growing.grown import Contender, Grown, Stage
from theodolite.growing.line_search import Jump, jump, longest_step
from theodolite.growing.splits import Splits, check_disjoint, split
from theodolite.growing.theory import Theory, theory

__all__ = [
    # one verb
    "grow",
    "Grown",
    "Stage",
    "Contender",
    # a step of a new block
    "Jump",
    "jump",
    "longest_step",
    # what was written is read again
    "load_file",
    "save_file",
    # three samples
    "Splits",
    "check_disjoint",
    "split",
    # how sure
    "Certificate",
    "certificate",
    "clip_from",
    "least_units",
    # what the theory says
    "Theory",
    "theory",
    # which model to keep
    "Kept",
    "fallback",
]
