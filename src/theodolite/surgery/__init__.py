"""Edits of a network that keep the function it computes, each with its proof."""

from theodolite.surgery.baking import bake
from theodolite.surgery.blocks import InsertionPoint, OutputTensor, make_block
from theodolite.surgery.converting import convert, scale_vectors
from theodolite.surgery.folding import fold, remove_gains
from theodolite.surgery.gains import GainReader, NormGain, NormGains, SurgeryError, find_gains
from theodolite.surgery.inserting import insert_block, rebuild
from theodolite.surgery.insertion_points import InsertionPoints, find_points
from theodolite.surgery.proof import Proof

__all__ = [
    # the operations
    "bake",
    "fold",
    "remove_gains",
    "scale_vectors",
    "convert",
    "insert_block",
    "rebuild",
    # what they return and raise
    "Proof",
    "SurgeryError",
    # where they are made
    "GainReader",
    "NormGain",
    "NormGains",
    "find_gains",
    "OutputTensor",
    "InsertionPoint",
    "InsertionPoints",
    "find_points",
    "make_block",
]
