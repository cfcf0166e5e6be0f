"""Edits of a network that keep the function it computes, each with its proof."""

from theodolite.surgery.baking import bake
from theodolite.surgery.block_copies import OutputTensor, Point, make_block
from theodolite.surgery.converting import convert, scale_vectors
from theodolite.surgery.folding import fold
from theodolite.surgery.inserting import insert_block
from theodolite.surgery.places import Place, Places, Reader, SurgeryError, find_places
from theodolite.surgery.points import Points, find_points
from theodolite.surgery.proof import Proof
from theodolite.surgery.rebuilding import rebuild
from theodolite.surgery.removing import remove_gains

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
    "Place",
    "Places",
    "Reader",
    "find_places",
    "OutputTensor",
    "Point",
    "Points",
    "find_points",
    "make_block",
]
