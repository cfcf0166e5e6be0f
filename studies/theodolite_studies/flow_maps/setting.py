"""What the study of flow maps trains: its arms, sizes and lengths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from theodolite.core.files import plain
from theodolite.core.size import Size
from theodolite.flows.maps import MapLoss
from theodolite_studies.framework.study import Setting

JUMPS = (1, 2, 4, 8, 16)
"""Jumps of a map, or evaluations of a sampler, on the mixture."""
IMAGE_JUMPS = (1, 2, 4, 8)
"""The same on images."""


@dataclass(frozen=True)
class Arm:
    """A way to train a flow map."""

    loss: MapLoss
    stop_gradients: bool = True
    times: int = 1
    """As many times the steps."""


ARMS: Mapping[str, Arm] = {
    "matching": Arm("matching"),
    "lagrangian": Arm("lagrangian"),
    "eulerian": Arm("eulerian"),
    "progressive-midpoint": Arm("progressive-midpoint"),
    "progressive-uniform": Arm("progressive-uniform"),
    "lagrangian-unstopped": Arm("lagrangian", stop_gradients=False),
    "eulerian-unstopped": Arm("eulerian", stop_gradients=False),
    "progressive-midpoint-long": Arm("progressive-midpoint", times=3),
}
"""Those of the mixture. A step of `lagrangian` takes as long there as three of `progressive-midpoint`."""

SIZE, IMAGE_SIZE = Size(64, 3), Size(128, 4)
MAPS = ("lagrangian", "eulerian", "progressive-midpoint", "progressive-uniform")
"""The self-distillation losses of the paper."""


@dataclass(frozen=True)
class FlowMapSetting(Setting):
    """Sizes and lengths of all parts."""

    seeds: int = 4
    steps: int = 2000
    size: Size = SIZE
    points: int = 4000
    """Samples of the mixture that a map is judged by."""
    cost_sizes: tuple[tuple[int, int], ...] = ((64, 256), (512, 1024))
    """Widths, and examples in a batch."""
    image_seeds: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {
            "matching": 3,
            "lagrangian": 3,
            "progressive-midpoint": 3,
            "eulerian": 3,
        }
    )
    """Seeds of each arm that is trained on images."""
    image_size: Size = IMAGE_SIZE
    image_steps: int = 3000
    image_batch: int = 256
    images: int = 10_000
    """Samples that a map of images is judged by."""
    widths: tuple[int, ...] = (64, 128, 256)
    """Of the plain networks whose samples are drawn as they train."""
    moments: tuple[int, ...] = (30, 100, 300, 1000, 3000)
    """The steps after which they are drawn."""

    def about(self) -> dict[str, Any]:
        """All of it, as sizes that JSON knows; seeds may be added."""
        found = plain(self)
        for name in ("small", "seeds", "image_seeds"):
            del found[name]
        return found


FULL = FlowMapSetting()
SMALL = FlowMapSetting(
    small=True,
    seeds=2,
    steps=200,
    points=1000,
    cost_sizes=((64, 256),),
    image_seeds={},
    widths=(),
)
