"""The loss on the straight line between two networks, and how far it rises above its ends.

    barrier over the higher end   max_t L(t) − max(L(0), L(1))
    barrier over the chord        max_t L(t) − [(1 − t)·L(0) + t·L(1)]

If there is no barrier over the higher end, the line does not leave the region below that loss, and both
networks lie in one basin. If there is one, another path may still connect them: the neurons of a layer can be
permuted without changing the function, so two trainings from different starts hardly ever meet on a line.

The maximum of noisy values is too high on average. So the examples are divided into two halves. Each half
chooses a point, and the other half measures the rise there. The barrier is the mean of both, and its lower
end follows from their errors: the rise at a chosen point is at most the barrier. A half that chose an end saw
no barrier, which does not show that there is none. So the upper end is the highest of the upper ends at all
points, each from all examples. Points are compared example by example, so that what all points share cancels.

References:
    Sagun et al., Empirical analysis of the Hessian of over-parametrized neural networks, 2017.
    Frankle et al., Linear mode connectivity and the lottery ticket hypothesis, 2020.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import torch
from scipy.special import stdtrit
from torch import Tensor, nn

from theodolite.core.arguments import positive, whole
from theodolite.core.batches import Batches
from theodolite.core.calling import Loss
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.progress import Progress, share
from theodolite.present.figure import FAINT, Figure, Panel, frame, guide, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted
from theodolite.probes.curvature.interpolation import Interpolation, Losses, Statistics, Unit
from theodolite.probes.curvature.sampling import NORMAL_95
from theodolite.probes.eval_mode import at_rest

Verdict = Literal["same basin", "barrier", "unclear"]

NUM_POINTS = 21
ROUNDS = 2
"""How often the steps beside a maximum are halved."""
LEVEL = 0.975
"""Of each end of an interval."""
LEAST = 4
"""Examples or batches from which on there are two halves with an interval each."""
TAKEN = {
    "reestimated": "re-estimated on the batches, at every point",
    "batch": "of each batch, at every point",
    "frozen": "stored, interpolated",
}


@dataclass(frozen=True)
class Barrier:
    """How far the loss rises, with its 95 % interval.

    >>> print(Barrier(0.5, 0.25, 0.75, at=0.4))
    0.5 (0.25 to 0.75)
    """

    value: float
    """Infinite if the loss is not finite somewhere on the line."""
    low: float
    high: float
    """nan if there are too few examples or batches for an interval."""
    at: float
    """Where the loss is highest, by all examples: 0 is the first network, 1 the second."""

    def __str__(self) -> str:
        if not math.isfinite(self.value):  # JSON has no infinity
            return "infinite"
        interval = f"{self.low:.3g} to {self.high:.3g}" if math.isfinite(self.low) else "no interval"
        return f"{self.value:.3g} ({interval})"


@dataclass(frozen=True)
class LossPath(Result):
    """The loss on the line between two networks. Made by `path`."""

    kind: ClassVar[str] = "path"
    loads: ClassVar[bool] = True

    places: Tensor
    """From 0, the first network, to 1, the second; float64, denser where the loss is highest."""
    losses: Tensor
    """The loss at each place. May hold nan and inf between the ends."""
    errors: Tensor
    """The standard error of each loss."""
    above: Tensor
    """The loss less the chord at each place."""
    above_errors: Tensor
    """The standard errors of these differences, which are smaller, as noise of both ends cancels."""
    higher: Barrier
    """Over the higher end."""
    chord: Barrier
    """Over the straight line between the losses of both ends."""
    tolerance: float
    """A barrier below this share of the loss at the higher end is none."""
    distance: float
    """Euclidean, between the parameters."""
    norms: tuple[float, float]
    """Of the parameters of both networks."""
    num_units: int
    unit: Unit
    """What the interval is over, `num_units` of them."""
    batch_norm: Statistics | None
    """Which statistics batch norms used; None if there are none."""
    notes: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        """The largest barrier that is none: `tolerance` times the loss at the higher end."""
        return self.tolerance * abs(float(self.losses[[0, -1]].max()))

    @property
    def verdict(self) -> Verdict:
        """By the barrier over the higher end: is the whole interval below the limit, or above it?"""
        if not math.isfinite(self.higher.value):
            return "barrier"
        known = math.isfinite(self.higher.low)
        low, high = (self.higher.low, self.higher.high) if known else (self.higher.value,) * 2
        if high <= self.limit:
            return "same basin"
        return "barrier" if low > self.limit else "unclear"

    @property
    def title(self) -> str:
        """The verdict in one sentence."""
        limit = f"{100 * self.tolerance:g} % of the higher end's loss, {self.limit:.3g}"
        if self.verdict == "same basin":
            return f"Same basin: barrier {self.higher} is below {limit}."
        if self.verdict == "barrier":
            return f"A barrier lies between them: {self.higher} is above {limit}."
        return f"Unclear: barrier {self.higher} may be below or above {limit}."

    def blocks(self) -> Iterator[Block]:
        """The verdict, the barriers, the figure, and how it was measured."""
        yield self.title
        columns = [
            Column("barrier over"),
            *(Column(name, "{:.4g}".format) for name in ("value", "low", "high", "at")),
        ]
        named = (("the higher end", self.higher), ("the chord", self.chord))
        yield Table(columns, [(name, one.value, one.low, one.high, one.at) for name, one in named])
        yield self._figure()
        yield "\n".join(self._lines())

    def table(self) -> Table:
        """A row for each place."""
        columns = (self.places, self.losses, self.errors, self.above, self.above_errors)
        names = ("place", "loss", "error", "above the chord", "error of that")
        return Table(names, list(zip(*(column.tolist() for column in columns), strict=True)))

    def _lines(self) -> Iterator[str]:
        first, last = self.losses[[0, -1]].tolist()
        yield f"loss {first:.4g} at model_a and {last:.4g} at model_b; {len(self.places)} points"
        one, other = self.norms
        yield f"distance {self.distance:.4g}; the norms of the weights are {one:.4g} and {other:.4g}"
        over = counted(self.num_units, self.unit)
        if math.isnan(self.higher.low):
            yield f"no interval from {over}: give at least {LEAST}; the barrier is too high on average"
        else:
            yield f"intervals of 95 % over {over}; each half judges the point that the other half chose"
        if self.batch_norm is not None:
            yield f"batch norm: statistics {TAKEN[self.batch_norm]}"
        yield from self.notes

    def _figure(self) -> Figure:
        return Figure(
            caption="The loss on the line from the first network, at 0, to the second, at 1; and how far it "
            "is above the chord, compared example by example. Bands: 95 %.",
            alt=f"The loss from {self.losses[0]:.4g} to {self.losses[-1]:.4g}, highest at "
            f"{self.higher.at:.3g}. {self.title}",
            panels=(
                self._panel("Loss", self.losses, self.errors, self._ends),
                self._panel("Above the chord", self.above, self.above_errors, lambda: [guide(y=0)]),
            ),
        )

    def _ends(self) -> list[dict[str, Any]]:
        return [guide(y=float(self.losses[[0, -1]].max()))]

    def _panel(self, title: str, values: Tensor, errors: Tensor, guides: Any) -> Panel:
        places, shown = self.places.tolist(), values.tolist()
        data: list[Mapping[str, Any]] = []
        if bool(errors.isfinite().any()):
            edges = [(values + sign * NORMAL_95 * errors.nan_to_num(0.0)).tolist() for sign in (-1, 1)]
            around = [*edges[0], *reversed(edges[1])]
            filled = {"fill": "toself", "fillcolor": FAINT, "line": {"width": 0}}
            data.append(line([*places, *reversed(places)], around) | filled)
        data.append(line(places, shown, hover="%{x:.3g}: %{y:.4g}", markers=4))
        layout = frame(height=260, x="from model_a to model_b")
        layout["yaxis"] |= {"nticks": 6}
        layout["shapes"] = guides()
        return Panel(title, tuple(data), layout)


@exclusive()
def path(
    model_a: nn.Module,
    model_b: nn.Module | Mapping[str, Tensor],
    loss: Loss,
    batches: Batches,
    *,
    num: int = NUM_POINTS,
    batch_norm: Statistics = "reestimated",
    tolerance: float = 0.05,
    progress: Progress | None = None,
) -> LossPath:
    """The loss on the straight line between two networks: do they lie in the same basin?

    Args:
        model_a: any module; its forward pass is used, in eval mode, at all points.
        model_b: the same network with other weights, or its state dict; on any device, wrapped or not.
        loss: `loss(logits, targets) -> scalar`.
        batches: a pair (inputs, targets), or several. The interval is over their examples; over batches where
            an example has no loss of its own.
        num: points on the line, with both ends. Some more are taken where the loss is highest.
        batch_norm: `reestimated`: every network gets the statistics of all batches; `batch`: those of the
            batch at hand; `frozen`: the stored ones, interpolated, with which the barrier is higher or
            lower than that of the networks.
        tolerance: a barrier up to this share of the loss at the higher end does not count.
        progress: called with the fraction of the work that is done.

    Neither network is changed. Under DistributedDataParallel each process measures its own batches.

    >>> left, right = (nn.Linear(1, 1, bias=False).double() for _ in range(2))
    >>> _ = nn.init.constant_(left.weight, -1.0), nn.init.constant_(right.weight, 1.0)
    >>> def wells(logits, targets):  # (w² − 1)², with minima at −1 and 1
    ...     return (logits.square() - targets).square().mean()
    >>> found = path(left, right, wells, (torch.ones(8, 1).double(), torch.ones(8, 1).double()))
    >>> print(found.title)
    A barrier lies between them: 1 (1 to 1) is above 5 % of the higher end's loss, 0.
    """
    whole("num", num, least=3)
    positive("tolerance", tolerance)
    between = Interpolation(model_a, model_b)
    places = torch.linspace(0, 1, num, dtype=torch.float64)
    with at_rest(between.model):
        losses = Losses(between, loss, batches, batch_norm)
        values = losses.at(places.tolist(), share(progress, "path", 0.0, 0.6))
        halves = _halves(losses.weights)
        _require_finite_ends(values)
        may_choose = torch.ones(len(halves), num, dtype=torch.bool)
        """Which half may choose which place: a half refines the grid for itself."""
        for done in range(ROUNDS):
            wanted = _midpoints(places, values, halves, may_choose)
            report = share(progress, "path", 0.6 + 0.4 * done / ROUNDS, 0.6 + 0.4 * (done + 1) / ROUNDS)
            more = losses.at(list(wanted), report)
            chosen = torch.tensor([[half in own for own in wanted.values()] for half in range(len(halves))])
            places = torch.cat([places, torch.tensor(list(wanted), dtype=torch.float64)])
            order = places.argsort()
            places, values = places[order], torch.cat([values, more])[order]
            may_choose = torch.cat([may_choose, chosen], dim=1)[:, order]
    weights = losses.weights
    above = _above(values, places, weights, chord=True)
    (means, errors), (rises, rise_errors) = _means(values, weights), _means(above, weights)
    notes = [losses.note] if losses.note else []
    if between.kept:
        notes.append(f"not interpolated, as they hold integers: {', '.join(between.kept)}")
    higher, chord = (
        _barrier(values, places, weights, halves, may_choose, chord=one) for one in (False, True)
    )
    return LossPath(
        places=places,
        losses=means,
        errors=errors,
        above=rises,
        above_errors=rise_errors,
        higher=higher,
        chord=chord,
        tolerance=float(tolerance),
        distance=between.distance,
        norms=(between.norms[0], between.norms[1]),
        num_units=len(weights),
        unit=losses.unit,
        batch_norm=losses.statistics,
        notes=tuple(notes),
    )


def _halves(weights: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Weights that choose and weights that judge, 0 for the units that do not; the whole for both if few."""
    if len(weights) < LEAST:
        return [(weights, weights)]
    odd = torch.arange(len(weights)) % 2 == 1
    return [(weights * odd, weights * ~odd), (weights * ~odd, weights * odd)]


def _require_finite_ends(values: Tensor) -> None:
    for name, own in (("model_a", values[0]), ("model_b", values[-1])):
        if not bool(own.isfinite().all()):
            raise UseError(
                f"the loss of {name} is {float(own.mean())} on these batches, and a barrier is measured from "
                "the ends. Check its weights and the batches"
            )


def _above(values: Tensor, places: Tensor, weights: Tensor, *, chord: bool) -> Tensor:
    """How far each loss is above the chord, or above the end that is higher by these weights."""
    first, last = values[0], values[-1]
    if chord:
        return values - torch.lerp(first, last, places[:, None])
    return values - (first if float(weights @ first) >= float(weights @ last) else last)


def _means(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means of rows and their standard errors; nan for one unit. Weights of 0 do not count."""
    own = weights > 0
    values, weights = values[:, own], weights[own] / weights.sum()
    means = (values * weights).sum(1)
    if len(weights) < 2:
        return means, torch.full_like(means, torch.nan)
    squares = ((values - means[:, None]) * weights).square().sum(1)
    return means, (squares * len(weights) / (len(weights) - 1)).sqrt()


def _highest(above: Tensor, weights: Tensor, among: Tensor) -> int:
    """The place of the highest mean; one that is not a number is infinite."""
    means = _means(above, weights)[0].nan_to_num(nan=math.inf, posinf=math.inf)
    return int(means.masked_fill(~among, -math.inf).argmax())


def _midpoints(
    places: Tensor, values: Tensor, halves: list[tuple[Tensor, Tensor]], may_choose: Tensor
) -> dict[float, set[int]]:
    """The middles of the steps beside each maximum, with the halves whose maximum it is."""
    found: dict[float, set[int]] = {}
    for half, ((choosing, _), among) in enumerate(zip(halves, may_choose, strict=True)):
        for chord in (False, True):
            above = _above(values, places, choosing, chord=chord)
            at = _highest(above, choosing, among)
            for one, other in pairwise(places[max(at - 1, 0) : at + 2].tolist()):
                found.setdefault((one + other) / 2, set()).add(half)
    return found


def _barrier(
    values: Tensor,
    places: Tensor,
    weights: Tensor,
    halves: list[tuple[Tensor, Tensor]],
    may_choose: Tensor,
    *,
    chord: bool,
) -> Barrier:
    """What each half says at the point that the other one has chosen, and the highest that there may be."""
    whole_line = _above(values, places, weights, chord=chord)
    at = float(places[_highest(whole_line, weights, torch.ones_like(places, dtype=torch.bool))])
    means, errors = _means(whole_line, weights)
    if not bool(means.isfinite().all()):
        return Barrier(math.inf, math.inf, math.inf, at)
    # Which end is higher may be noise too. The rise over the higher end is the smaller one of both.
    over = (
        [_above(values, places, weights, chord=True)] if chord else [values - values[0], values - values[-1]]
    )
    parts: list[list[tuple[float, float]]] = [[] for _ in over]
    for (choosing, judging), among in zip(halves, may_choose, strict=True):
        chosen = _highest(_above(values, places, choosing, chord=chord), choosing, among)
        for own, rise in zip(parts, over, strict=True):
            mean, error = _means(rise[chosen, None], judging)
            own.append((float(mean), float(error)) if 0 < chosen < len(places) - 1 else (0.0, 0.0))
    count = len(halves)
    value = min(math.fsum(mean for mean, _ in own) / count for own in parts)
    if count < 2:
        return Barrier(value, math.nan, math.nan, at)
    half, every = (float(stdtrit(num - 1, LEVEL)) for num in (len(weights) // 2, len(weights)))
    low = min(
        math.fsum(mean for mean, _ in own) / count - half * math.hypot(*(error for _, error in own)) / count
        for own in parts
    )
    return Barrier(value, low, max(value, float((means + every * errors).max())), at)
