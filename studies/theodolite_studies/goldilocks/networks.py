"""The networks of the Goldilocks study, in their five variants, and their data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import nn

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.size import Size
from theodolite.fleet.run import Run
from theodolite.fleet.training import planned
from theodolite.models import LeNet5, LeNet300, ResNet4
from theodolite.models.inhomogeneous import Variant
from theodolite.workloads import Workload

Column = Literal["A", "B", "C", "D", "E"]
VARIANTS: Mapping[Column, Variant] = {
    "A": "homogeneous",
    "B": "bias",
    "C": "residual",
    "D": "layernorm",
    "E": "all",
}
"""The columns of the paper's figures."""
NORMED: tuple[Column, ...] = ("D", "E")
RESIDUAL: tuple[Column, ...] = ("C", "E")


@dataclass(frozen=True)
class Network:
    """A network on its data.

    Args:
        name: what records call it.
        build: `build(width, depth, variant=…)`.
        size: the paper's, where it says one.
        layers: L, how many there are.
        branched: ℒ, how many of them lie in residual branches, where the variant has them.
        columns: the variants that it can have.
        load: its images, by split.
    """

    name: str
    build: Callable[..., nn.Module]
    size: Size
    layers: int
    branched: int
    columns: tuple[Column, ...]
    load: Callable[..., data.Examples]

    def workload(self, column: Column, *, images: int = 128, tested: int = 128) -> Workload:
        """Its training on one full batch, the first images of the training set, at every step.

        The tensors are the same for every seed and step, so that many models share them. It is judged by the
        first images of the test set.
        """
        return _workload(self, column, images, tested)

    def start(self, column: Column, seed: int) -> nn.Module:
        """The network before training, with the values that a run with this seed starts from."""
        workload = self.workload(column)
        run = Run(workload.name, self.size, lr=1.0, optimizer="sgd", parameterization="standard")
        return planned(run, workload).build(seed)

    def batch(self, seed: int, num: int) -> Batch:
        """`num` images to measure on, others for each seed."""
        return data.draw_examples(self.load("train"), num=num, seed=seed, step=0)


@functools.lru_cache(maxsize=64)
def _workload(network: Network, column: Column, images: int, tested: int) -> Workload:
    # One object for one question: what is found out about a workload is kept with it.
    return Workload(
        workload_name(network.name, column),
        partial(network.build, variant=VARIANTS[column]),
        partial(_full_batch, network.load, "train", images),
        nn.functional.cross_entropy,
        network.size,
        held_out=partial(_full_batch, network.load, "test", tested),
    )


def workload_name(network: str, column: Column) -> str:
    """What the ledger calls a variant of a network.

    >>> workload_name("lenet300-fashion", "A")
    'lenet300-fashion-A'
    """
    return f"{network}-{column}"


def _full_batch(
    load: Callable[..., data.Examples], split: data.Split, num: int, seed: int, step: int
) -> Batch:
    return _first_images(load, split, num)


@functools.lru_cache(maxsize=4)
def _first_images(load: Callable[..., data.Examples], split: data.Split, num: int) -> Batch:
    examples = load(split)
    first = slice(0, num)
    part = data.Examples(
        examples.name,
        examples.values[first],
        examples.labels[first],
        examples.classes,
        examples.mean,
        examples.std,
    )
    return part.inputs(), part.labels


LENET = Network("lenet300-fashion", LeNet300, Size(300, 2), 3, 0, ("A", "B", "D"), data.fashion_mnist)
RESNET = Network(
    "resnet4-fashion", ResNet4, Size(300, 1), 4, 2, ("A", "B", "C", "D", "E"), data.fashion_mnist
)
NETWORKS: Mapping[str, Network] = {
    network.name: network
    for network in (
        LENET,
        RESNET,
        Network("lenet5-cifar", LeNet5, Size(6, 2), 5, 0, ("A", "B", "D"), data.cifar10),
        Network(
            "resnet4-cifar",
            partial(ResNet4, inputs=3 * 32 * 32),
            Size(300, 1),
            4,
            2,
            ("A", "B", "C", "D", "E"),
            data.cifar10,
        ),
    )
}
"""By name. The LeNets have no place for an identity path: their layers all change shape."""
TRAINED: Mapping[Column, Network] = {"A": LENET, "B": LENET, "C": RESNET, "D": LENET, "E": RESNET}
"""By column of the figures that show accuracy."""
