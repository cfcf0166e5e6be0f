"""Data sets, and batches of them that depend on a seed and a step alone."""

from theodolite.data.bpe import Bpe, train_bpe
from theodolite.data.drawing import draw_examples, draw_text, generator
from theodolite.data.fetching import fetch
from theodolite.data.images import cifar10, fashion_mnist, mnist
from theodolite.data.reading import path, present
from theodolite.data.sets import Examples, Split, Text
from theodolite.data.sources import Source, catalogue, folder
from theodolite.data.synthetic import mixture, mixture_accuracy, modular_addition
from theodolite.data.texts import enwik8, state_of_the_union

__all__ = [
    "Bpe",
    "Examples",
    "Source",
    "Split",
    "Text",
    "catalogue",
    "cifar10",
    "draw_examples",
    "draw_text",
    "enwik8",
    "fashion_mnist",
    "fetch",
    "folder",
    "generator",
    "mixture",
    "mixture_accuracy",
    "mnist",
    "modular_addition",
    "path",
    "present",
    "state_of_the_union",
    "train_bpe",
]
