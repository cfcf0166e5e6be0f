"""The networks of the Goldilocks study in their five variants, their data, and how the study is run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import nn

from theodolite import data
from theodolite.core.batches import Batch
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet.plans import planned
from theodolite.fleet.run import PRECISIONS, Precision, Run
from theodolite.models import LeNet5, LeNet300, ResNet4
from theodolite.models.inhomogeneous import Variant
from theodolite.workloads import Workload
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import Setting

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
PARTS: Mapping[str, str] = {
    "zone": "figure 1: the excess at the start, against α, T and both together",
    "logits": "figure 3: are the logits of αθ those of θ times α, with LayerNorm?",
    "temperature": "figures 2 and 5: accuracies after gradient descent, over T and η₀",
    "scale": "figure 4: the same over α",
    "adam": "beyond the paper: Adam instead of gradient descent, over T",
    "course": "beyond the paper: the excess, and its parts G and S, during training",
    "neighbours": "beyond the paper: A, B and D of the network that C and E have, over T",
}
"""By name, in the order of their worth."""
COURSE_TEMPERATURES = (-4.0, -2.0, 0.0, 2.0, 4.0)
"""log10 of T at which training is followed: in the middle of the zone, at its edges and outside."""
DECADES = 3
"""α goes from 10⁻³ to 10³, and T from 10^-3L to 10^3L."""


@dataclass(frozen=True)
class GoldilocksSetting(Setting):
    """All that decides the numbers, but for the machine. Powers of ten are given by their exponents.

    Args:
        networks: that are measured before training.
        points: of each curve of figure 1.
        batch: images that curvature and logits are measured on.
        directions: columns of R.
        epochs: steps of full-batch training.
        images: that are trained on.
        tested: images of the test set that it is judged by.
        inner: temperatures that are trained at, besides those at the ends of the range.
        rates: η₀ of gradient descent.
        adam_rates: learning rates of Adam.
        looks: how many times during training the curvature is measured, besides at the start.
        seeds: each redraws the weights, R, and the batch that is measured on.
        precision: of training; curvature is measured in float64.
    """

    networks: tuple[str, ...] = tuple(NETWORKS)
    points: int = 25
    batch: int = 128
    directions: int = 50
    epochs: int = 1000
    images: int = 10_000
    tested: int = 10_000
    inner: tuple[int, ...] = (-4, -3, -2, -1, 0, 1, 2, 3, 4)
    rates: tuple[float, ...] = (-3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0)
    adam_rates: tuple[float, ...] = (-5.0, -4.5, -4.0, -3.5, -3.0, -2.5, -2.0)
    looks: int = 12
    seeds: tuple[int, ...] = (0, 1, 2)
    precision: Precision = "tf32"

    def __post_init__(self) -> None:
        for name in ("points", "batch", "directions", "epochs", "images", "tested", "looks"):
            if getattr(self, name) < 1:
                raise UseError(f"{name} is {getattr(self, name)}: it has to be at least 1")
        if not self.seeds:
            raise UseError("seeds is 0: give at least one; with three, claims have a spread")
        if self.precision not in PRECISIONS:
            raise UseError(f"precision is {self.precision!r}: it is one of {', '.join(PRECISIONS)}")

    def alphas(self) -> tuple[float, ...]:
        """The α of figure 1.

        >>> GoldilocksSetting(points=5).alphas()
        (-3.0, -1.5, 0.0, 1.5, 3.0)
        """
        return tuple(_spaced(-DECADES, DECADES, self.points))

    def temperatures(self, network: Network) -> tuple[float, ...]:
        """The T of figure 1."""
        reach = DECADES * network.layers
        return tuple(_spaced(-reach, reach, self.points))

    def trained_temperatures(self, network: Network) -> tuple[float, ...]:
        """The T that are trained at: every decade around 1, and two more towards either end of the range.

        >>> GoldilocksSetting().trained_temperatures(LENET)
        (-9.0, -6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0)
        """
        ends = (-3, -2, 2, 3) if len(self.inner) > 5 else (-3, 3)
        outer = [end * network.layers for end in ends]
        return tuple(map(float, sorted({*outer, *self.inner})))

    def trained_alphas(self) -> tuple[float, ...]:
        """The α that are trained at: those at which three layers do what the temperatures do.

        >>> [round(alpha, 2) for alpha in GoldilocksSetting().trained_alphas()]
        [-3.0, -2.0, -1.33, -1.0, -0.67, -0.33, 0.0, 0.33, 0.67, 1.0, 1.33, 2.0, 3.0]
        """
        ends = (-3.0, -2.0, 2.0, 3.0) if len(self.inner) > 5 else (-3.0, 3.0)
        return tuple(sorted({*ends, *(round(each / 3, 6) for each in self.inner)}))

    def about(self) -> dict[str, Any]:
        """What a file of records has to agree with to be gone on with. Seeds may be added."""
        return {
            name: value for name, value in dataclasses.asdict(self).items() if name not in ("seeds", "small")
        }

    @staticmethod
    def from_about(about: Record) -> GoldilocksSetting:
        """The inverse of `about`, with the usual seeds.

        >>> GoldilocksSetting.from_about(GoldilocksSetting(epochs=7).about()) == GoldilocksSetting(epochs=7)
        True
        """
        values: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in about.items()
        }
        values.pop("study", None)
        if values.keys() != FULL.about().keys():
            raise UseError("these are no records of the goldilocks study: they are about something else")
        return GoldilocksSetting(**values)


FULL = GoldilocksSetting()
SMALL = GoldilocksSetting(
    small=True,
    networks=(LENET.name, RESNET.name),
    points=13,
    epochs=100,
    images=500,
    tested=1000,
    inner=(-2, -1, 0, 1, 2),
    rates=(-2.5, -2.0, -1.5, -1.0),
    adam_rates=(-4.0, -3.5, -3.0, -2.5),
    looks=4,
    seeds=(0, 1),
    precision="float32",
)
"""For a CPU."""


def _spaced(low: float, high: float, num: int) -> list[float]:
    if num == 1:
        return [0.0]
    return [round(low + (high - low) * place / (num - 1), 6) for place in range(num)]
