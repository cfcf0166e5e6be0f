"""Data sets, and batches of them that depend only on a seed and a step."""

from theodolite.data.batches import Examples, Split, Text, draw_examples, draw_text, generator
from theodolite.data.fetching import fetch
from theodolite.data.files import path, present
from theodolite.data.images import cifar10, fashion_mnist, mnist
from theodolite.data.poisson import laplacian, poisson_residuals, poisson_right_sides
from theodolite.data.sources import Source, catalogue, folder
from theodolite.data.synthetic import mixture, mixture_accuracy, modular_addition
from theodolite.data.texts import Bpe, enwik8, state_of_the_union, train_bpe
from theodolite.data.two_cylinders import CylinderFlows, TwoCylinders, cylinder_flows

__all__ = [
    "Bpe",
    "CylinderFlows",
    "Examples",
    "Source",
    "Split",
    "Text",
    "TwoCylinders",
    "catalogue",
    "cifar10",
    "cylinder_flows",
    "draw_examples",
    "draw_text",
    "enwik8",
    "fashion_mnist",
    "fetch",
    "folder",
    "generator",
    "laplacian",
    "mixture",
    "mixture_accuracy",
    "mnist",
    "modular_addition",
    "path",
    "poisson_residuals",
    "poisson_right_sides",
    "present",
    "state_of_the_union",
    "train_bpe",
]
