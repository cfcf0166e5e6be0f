"""A model near neural collapse: trainable features that are tied to given ones, and a linear classifier.

A layer cannot choose its features freely: it starts from those of the layer before. So in this model the
features H are variables, tied with strength β to given features H₀; the targets Y are one-hot, and the loss
is the squared error. With N samples as rows, D features and K classes,

    L(W, H) = 1/(2N)·‖HWᵀ − Y‖² + λ_W/2·‖W‖² + λ_H/(2N)·‖H‖² + β/(2N)·‖H − H₀‖²

For given H the best W is known in closed form,

    W*(H) = (YᵀH/N)(HᵀH/N + λ_W·I)⁻¹

so `L*(H) = L(W*(H), H)` is a function of H alone, with the gradient of L at W*. Its gradient flow from H₀,
dH/dt = −N·∇L*(H), is the central path. With the factor N the rate at which a sample moves does not depend on
how many there are.

λ_W is the weight decay of an optimizer, in λ_W/2·‖W‖². The paper writes λ_W/(2K)·‖W‖²: its λ_W is K times
the one here.

References:
    Tirer, Huang and Niles-Weed, Perturbation analysis of neural collapse, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from theodolite.core import arguments
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.present.figure import Figure, Panel, frame, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Table, number
from theodolite.probes.features.class_spread import ClassGeometry, ClassMeans, ClassSpread

Array = NDArray[np.float64]
RTOL, ATOL = 1e-7, 1e-10
"""Tolerances of the flow's integration."""
GRADIENT = 1e-7
"""Largest entry of N·∇L* at a minimum."""
MOST_STEPS = 50_000
"""Of L-BFGS."""


@dataclass(frozen=True)
class NearCollapseState:
    """Features at one time of the flow, or at the minimum."""

    time: float
    """Of the flow; infinite at the minimum."""
    loss: float
    """L*."""
    geometry: ClassGeometry
    features: Tensor | None = field(default=None, repr=False, compare=False)
    """H (N, D); not in files."""


@dataclass(frozen=True)
class CentralPath(Result):
    """Class geometry along the central path. Made by `NearCollapse.flow`."""

    kind: ClassVar[str] = "central path"
    loads: ClassVar[bool] = True

    states: tuple[NearCollapseState, ...]

    @property
    def quotients(self) -> tuple[float, ...]:
        """NC1 as `Tr S_W/Tr S_B`, at each time."""
        return tuple(state.geometry.quotient for state in self.states)

    @property
    def falls(self) -> bool:
        """Does NC1 fall from each time to the next, up to the tolerance of the integration?"""
        return all(after < before * (1 + 10 * RTOL) for before, after in pairwise(self.quotients))

    def blocks(self) -> Iterator[Block]:
        """The table and a figure."""
        yield self.table()
        yield self.figure()

    def table(self) -> Table:
        """A row for each time."""
        rows = [
            (*(one.time, one.loss, one.geometry.quotient, one.geometry.pinv), *(one.geometry.nc2,))
            for one in self.states
        ]
        return Table(("time", "loss", "NC1", "NC1 pinv", "NC2"), rows)

    def figure(self) -> Figure:
        """NC1 and the loss over time."""
        later = [one for one in self.states if one.time > 0]
        times = [one.time for one in later]
        panels = []
        for title, values in (
            ("NC1", [one.geometry.quotient for one in later]),
            ("Loss", [one.loss for one in later]),
        ):
            layout = frame(height=220, x="time")
            for axis in ("xaxis", "yaxis"):
                layout[axis] |= {"type": "log", "exponentformat": "power", "nticks": 5}
            panels.append(Panel(title, (line(times, values, hover="%{x:.3g}: %{y:.3g}"),), layout))
        return Figure(
            caption="NC1 and the loss along the central path.",
            alt=f"NC1 goes from {number(self.quotients[0])} to {number(self.quotients[-1])}.",
            panels=tuple(panels),
        )


@dataclass(frozen=True, eq=False)
class NearCollapse:
    """Features as variables that are tied to given ones, with a linear classifier of least squares.

    Args:
        features: H₀ (N, D), a row for each sample.
        labels: the class of each (N,), from 0 to K − 1, every class with two samples or more.
        head_decay: λ_W.
        feature_decay: λ_H.
        tie: β.

    Everything is in float64 on the CPU.

    Two classes of two points each. The flow draws the points of a class together:

    >>> points = torch.tensor([[1.2, 0.0], [0.8, 0.0], [0.0, 1.2], [0.0, 0.8]])
    >>> model = NearCollapse(points, torch.tensor([0, 0, 1, 1]), head_decay=0.01)
    >>> path = model.flow([0, 1, 10])
    >>> path.falls, round(path.quotients[0], 6)  # 0.2² over 0.5
    (True, 0.08)

    A weaker tie lets the minimum collapse further:

    >>> for tie in (1.0, 0.01):
    ...     model = NearCollapse(points, torch.tensor([0, 0, 1, 1]), head_decay=0.01, tie=tie)
    ...     print(model.minimum().geometry.quotient < 0.001)
    False
    True
    """

    features: Tensor
    labels: Tensor
    head_decay: float
    feature_decay: float = 0.0
    tie: float = 0.0

    def __post_init__(self) -> None:
        arguments.positive("head_decay", self.head_decay)
        arguments.number("feature_decay", self.feature_decay, least=0)
        arguments.number("tie", self.tie, least=0)
        features, labels = self.features, self.labels
        if not isinstance(features, Tensor) or features.ndim != 2 or not features.is_floating_point():
            raise UseError(
                f"features is {described(features)}: give a tensor (N, D) of floating-point numbers"
            )
        if not isinstance(labels, Tensor) or labels.shape != features.shape[:1] or labels.is_floating_point():
            raise UseError(
                f"labels is {described(labels)}: give an integer for each of the {len(features)} rows of "
                "features"
            )
        if not bool(features.isfinite().all()):
            raise UseError("features has entries that are not finite")
        counts = torch.bincount(labels.clamp(min=0))
        if len(counts) < 2 or int(labels.min()) < 0 or int(counts.min()) < 2:
            raise UseError(
                f"the samples by class are {counts.tolist()}: give two classes or more, numbered from 0, "
                "with two samples or more each"
            )
        object.__setattr__(self, "features", features.detach().cpu().double())
        object.__setattr__(self, "labels", labels.detach().cpu().long())

    @property
    def targets(self) -> Tensor:
        """Y (N, K), one-hot."""
        return torch.nn.functional.one_hot(self.labels).double()

    def head(self, features: Tensor) -> Tensor:
        """W*(H), (K, D)."""
        num, width = features.shape
        gram = features.T @ features / num
        ridge = gram + self.head_decay * torch.eye(width, dtype=gram.dtype)
        return torch.linalg.solve(ridge, features.T @ self.targets / num).T

    def loss(self, features: Tensor) -> float:
        """L*(H)."""
        return self._loss_and_pull(features)[0]

    def gradient(self, features: Tensor) -> Tensor:
        """∇L*(H), (N, D): that of L at W*(H), since W* is a minimum."""
        return self._loss_and_pull(features)[1] / len(features)

    def flow(self, times: Iterable[float]) -> CentralPath:
        """The central path from H₀, seen at these times.

        Args:
            times: not negative, increasing.
        """
        from scipy.integrate import solve_ivp  # slow to import

        if not isinstance(times, Iterable):
            raise UseError(f"times is {described(times)}: give a list of times, such as [0, 1, 10]")
        times = list(times)
        wanted = [arguments.number("times", time, least=0) for time in times]
        if not wanted or any(after <= before for before, after in pairwise(wanted)):
            raise UseError(f"times is {times}: give one time or more, in increasing order")
        if wanted[-1] == 0:
            return CentralPath((self._state(0.0, self.features),))

        def fall(_: float, flat: Array) -> Array:
            pull: Array = -self._loss_and_pull(self._shaped(flat))[1].numpy().ravel()
            return pull

        start = self.features.numpy().ravel()
        found = solve_ivp(fall, (0.0, wanted[-1]), start, "DOP853", t_eval=wanted, rtol=RTOL, atol=ATOL)
        if not found.success:
            raise UseError(f"the flow could not be followed to time {wanted[-1]:g}: {found.message}")
        columns = zip(wanted, found.y.T, strict=True)
        return CentralPath(tuple(self._state(time, self._shaped(flat)) for time, flat in columns))

    def minimum(self) -> NearCollapseState:
        """The minimum of L* that L-BFGS reaches from H₀."""
        from scipy.optimize import minimize  # slow to import

        def both(flat: Array) -> tuple[float, Array]:
            loss, pull = self._loss_and_pull(self._shaped(flat))
            return len(self.labels) * loss, pull.numpy().ravel()

        found = minimize(
            both,
            self.features.numpy().ravel(),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": MOST_STEPS, "maxfun": 2 * MOST_STEPS, "ftol": 0.0, "gtol": GRADIENT},
        )
        left = float(np.abs(found.jac).max())
        if left > 100 * GRADIENT:
            raise UseError(
                f"no minimum after {found.nit} steps of L-BFGS: the gradient is {left:.1g}. A tie or a decay "
                "of features that is not so near to zero makes the minimum easier to find"
            )
        return self._state(math.inf, self._shaped(found.x))

    def _loss_and_pull(self, features: Tensor) -> tuple[float, Tensor]:
        """L*(H) and N·∇L*(H)."""
        head = self.head(features)
        miss, away = features @ head.T - self.targets, features - self.features
        squares = miss.square().sum() + self.feature_decay * features.square().sum()
        squares = squares + self.tie * away.square().sum()
        loss = squares / (2 * len(features)) + self.head_decay / 2 * head.square().sum()
        return float(loss), miss @ head + self.feature_decay * features + self.tie * away

    def _shaped(self, flat: Array) -> Tensor:
        return torch.from_numpy(np.array(flat)).reshape(self.features.shape)

    def _state(self, time: float, features: Tensor) -> NearCollapseState:
        counts = torch.bincount(self.labels)
        means = ClassMeans(counts, features)
        means.add(features, self.labels)
        spread = ClassSpread(means.means, counts)
        spread.add(features, self.labels)
        return NearCollapseState(time, self.loss(features), spread.geometry(), features)
