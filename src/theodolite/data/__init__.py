"""Data sets, and batches of them that depend only on a seed and a step."""

from theodolite.data.batches import Examples, Split, Text, draw_examples, draw_text, generator
from theodolite.data.fetching import fetch
from theodolite.data.files import path, present
from theodolite.data.images import cifar10, fashion_mnist, mnist
from theodolite.data.sources import Source, catalogue, folder
from theodolite.data.synthetic import mixture, mixture_accuracy, modular_addition
from theodolite.data.texts import Bpe, enwik8, state_of_the_union, train_bpe

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
