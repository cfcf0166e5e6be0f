"""How the Goldilocks study is run: grids, seeds, how long and on how many images."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from theodolite.core.errors import UseError
from theodolite.fleet.run import PRECISIONS, Precision
from theodolite_studies.goldilocks.networks import LENET, NETWORKS, RESNET, Network

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
DECADES = 3
"""α goes from 10⁻³ to 10³, and T from 10^-3L to 10^3L."""


@dataclass(frozen=True)
class Setting:
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

        >>> Setting(points=5).alphas()
        (-3.0, -1.5, 0.0, 1.5, 3.0)
        """
        return tuple(_spaced(-DECADES, DECADES, self.points))

    def temperatures(self, network: Network) -> tuple[float, ...]:
        """The T of figure 1."""
        reach = DECADES * network.layers
        return tuple(_spaced(-reach, reach, self.points))

    def trained_temperatures(self, network: Network) -> tuple[float, ...]:
        """The T that are trained at: every decade around 1, and two more towards either end of the range.

        >>> from theodolite_studies.goldilocks.networks import LENET
        >>> Setting().trained_temperatures(LENET)
        (-9.0, -6.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0)
        """
        ends = (-3, -2, 2, 3) if len(self.inner) > 5 else (-3, 3)
        outer = [end * network.layers for end in ends]
        return tuple(map(float, sorted({*outer, *self.inner})))

    def trained_alphas(self) -> tuple[float, ...]:
        """The α that are trained at: those at which three layers do what the temperatures do.

        >>> [round(alpha, 2) for alpha in Setting().trained_alphas()]
        [-3.0, -2.0, -1.33, -1.0, -0.67, -0.33, 0.0, 0.33, 0.67, 1.0, 1.33, 2.0, 3.0]
        """
        ends = (-3.0, -2.0, 2.0, 3.0) if len(self.inner) > 5 else (-3.0, 3.0)
        return tuple(sorted({*ends, *(round(each / 3, 6) for each in self.inner)}))

    def about(self) -> dict[str, Any]:
        """What a file of records has to agree with to be gone on with. Seeds may be added."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if name != "seeds"}
        return {"study": "goldilocks", **values}

    @staticmethod
    def from_about(about: Mapping[str, Any]) -> Setting:
        """The inverse of `about`, with the usual seeds.

        >>> Setting.from_about(Setting(epochs=7).about()) == Setting(epochs=7)
        True
        """
        names = {each.name for each in dataclasses.fields(Setting)} - {"seeds"}
        if about.get("study") != "goldilocks" or names != about.keys() - {"study"}:
            raise UseError("these are no records of the goldilocks study: they are about something else")
        values: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in about.items()
        }
        return Setting(**{name: values[name] for name in names})


FULL = Setting()
SMALL = Setting(
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
