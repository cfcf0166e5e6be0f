"""Growing a network by a block, and how sure one can be that it helps."""

from theodolite.growing.certificate import Certificate, certificate, clip_from, least_examples
from theodolite.growing.checkpoints import load_file, save_file
from theodolite.growing.grow import grow
from theodolite.growing.grown import Contender, Grown, GrowthStep
from theodolite.growing.line_search import Jump, jump, longest_step
from theodolite.growing.splits import Splits, check_disjoint, split
from theodolite.growing.theory import BetterModel, Theory, keep_better, theory

__all__ = [
    "BetterModel",
    "Certificate",
    "Contender",
    "Grown",
    "GrowthStep",
    "Jump",
    "Splits",
    "Theory",
    "certificate",
    "check_disjoint",
    "clip_from",
    "grow",
    "jump",
    "keep_better",
    "least_examples",
    "load_file",
    "longest_step",
    "save_file",
    "split",
    "theory",
]
