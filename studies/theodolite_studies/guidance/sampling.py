"""Guidance at equal evaluations: distances over scales and projections, gaps, residuals of the projection."""

# H halves, C classes, N points of each, D dimensions

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from theodolite.data import generator
from theodolite.flows import CountedField, guided, projection, sample, sliced_wasserstein
from theodolite.flows.guidance import FixedPointMethod, fixed_point
from theodolite.flows.sampling import BeforeStep
from theodolite_studies.framework.records import Record, short
from theodolite_studies.guidance.fields import CLASSES, LAYOUTS, Fields, class_data

UNTIL = 0.6
RIDGE = 1e-4
BARE = RIDGE * 2 / 4096
"""The ridge is absolute. This one has the same weight per entry for 2 entries as `RIDGE` for 4096, those of a
latent image of 4 × 32 × 32."""
DIRECTIONS = 16
HALVES = 2
ROUNDING = 1e-6
"""Of times."""


@dataclass(frozen=True)
class Way:
    """How samples are projected before a step, or guided late; `plain` is without."""

    iterations: int = 0
    method: FixedPointMethod = "picard"
    ridge: float = RIDGE
    late: float | None = None
    """The scale from `UNTIL` on, if it is another."""

    @property
    def name(self) -> str:
        """Such as `anderson 2`."""
        if not self.iterations:
            return "plain" if self.late is None else f"then {self.late:g}"
        return f"{'bare ' if self.ridge == BARE else ''}{self.method} {self.iterations}"


PLAIN = Way()
PROJECTED = (Way(1), Way(2), Way(3), Way(2, "anderson"), Way(3, "anderson"))
SCALES = {
    "plain": (*(round(0.5 + 0.1 * place, 1) for place in range(16)), *(2.25 + 0.25 * k for k in range(8))),
    "projected": (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0),
}
EARLY = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.5, 4.0, 5.0, 6.0)
LATER = (0.5, 0.75, 1.0, 1.5)
"""Scales before and after `UNTIL`."""


def grid(
    layout: str,
    given: Fields,
    seed: int,
    num_points: int,
    budgets: Sequence[int],
    scales: Mapping[str, Sequence[float]],
) -> Iterator[Record]:
    """The distance of each scale and way at each number of evaluations, on two halves of the noise."""
    noise = _noise(layout, num_points, seed)
    data, more = (_data(layout, num_points, word, seed) for word in ("reference", "more"))
    yield {"kind": "floor", "distances": _distances(more, data)}
    for budget in budgets:
        for way in (PLAIN, *PROJECTED):
            some = scales["projected" if way.iterations else "plain"]
            yield {"kind": "grid", **_judged(given, noise, data, budget, way, some)}


def early(
    layout: str,
    given: Fields,
    seed: int,
    num_points: int,
    budgets: Sequence[int],
    scales: Sequence[float],
    later: Sequence[float],
) -> Iterator[Record]:
    """The same for a scale before `UNTIL` and another one after it, without projection."""
    noise, data = _noise(layout, num_points, seed), _data(layout, num_points, "reference", seed)
    for budget in budgets:
        for late in later:
            yield {"kind": "early", **_judged(given, noise, data, budget, Way(late=late), scales)}


def _judged(
    given: Fields, noise: Tensor, data: Tensor, budget: int, way: Way, scales: Sequence[float]
) -> Record:
    found = []
    for scale in scales:
        steps = steps_within(budget, scale, way)
        samples, evaluations = _sampled(given, noise, steps, scale, way)
        found.append((scale, steps, evaluations, _distances(samples, data)))
    names = ("scales", "steps", "evaluations", "distances")
    columns = (list(column) for column in zip(*found, strict=True))
    return {"budget": budget, "way": way.name, **dict(zip(names, columns, strict=True))}


def moments(
    layout: str,
    given: Fields,
    seed: int,
    num_points: int,
    steps: int = 10,
    scales: Sequence[float] = (1, 2, 4),
) -> Iterator[Record]:
    """At a fixed number of steps: the gap |c − u| in the projected steps, and what becomes of the classes."""
    noise = _noise(layout, num_points, seed)
    centres, std = LAYOUTS[layout].centres[:CLASSES].float(), LAYOUTS[layout].std
    for scale in scales:
        for way in (PLAIN, *PROJECTED, Way(2, "anderson", BARE)):
            gaps: list[float] = []
            samples, _ = _sampled(given, noise, steps, scale, way, gaps)
            points_CND = _by_class(samples)
            yield {
                "kind": "moments",
                "scale": scale,
                "way": way.name,
                "gap": short(sum(gaps) / len(gaps)),
                "off": short((points_CND.mean(1) - centres).norm(dim=1).mean().item()),
                "spread": short(points_CND.std(1).mean().item() / std),
            }


def residuals(
    layout: str, given: Fields, seed: int, num_points: int, iterations: int = 5, half_step: float = 0.05
) -> Iterator[Record]:
    """The residual |G(x) − x| of the projection after 0, 1, … iterations, from noisy data."""
    data, noise = class_data(layout, num_points, "residuals", seed), _normal(layout, num_points, seed, 0)
    methods = {"picard": (0, 0.0), "anderson": (1, RIDGE), "bare anderson": (1, BARE)}
    for name, (window, ridge) in methods.items():
        found = torch.zeros(iterations + 1, dtype=torch.float64)
        for time in (0.1, 0.3, 0.5):
            x = (1 - time) * noise + time * data
            at = torch.full((len(x),), time)

            def towards(x: Tensor, at: Tensor = at) -> Tensor:
                back = x - half_step * given.unconditional(x, at)
                return back + half_step * given.conditional(back, at)

            for count in range(iterations + 1):
                here = fixed_point(towards, x, iterations=count, window=window, ridge=ridge) if count else x
                found[count] += (towards(here) - here).norm(dim=1).double().mean() / 3
        yield {"kind": "residuals", "method": name, "residuals": [short(one) for one in found.tolist()]}


@cache
def steps_within(budget: int, scale: float, way: Way) -> int:
    """The largest number of steps that takes at most so many evaluations."""
    steps = 1
    while _cost(steps + 1, scale, way) <= budget:
        steps += 1
    return steps


@cache
def _cost(steps: int, scale: float, way: Way) -> int:
    """Evaluations, counted on a sample of one number."""
    still = Fields(lambda x, t: 0 * x, lambda x, t: 0 * x)
    return _sampled(still, torch.zeros(1, 1), steps, scale, way)[1]


def _sampled(
    given: Fields, noise: Tensor, steps: int, scale: float, way: Way, gaps: list[float] | None = None
) -> tuple[Tensor, int]:
    """Samples, and how many evaluations they took."""
    u, c = CountedField(given.unconditional), CountedField(given.conditional)
    project: BeforeStep | None = None
    if way.iterations:
        project = projection(u, c, iterations=way.iterations, until=UNTIL, method=way.method, ridge=way.ridge)

    def before(x: Tensor, t: float, dt: float) -> Tensor:
        x = project(x, t, dt) if project else x
        if gaps is not None and t < UNTIL:
            at = torch.full((len(x),), t)
            gaps.append((given.conditional(x, at) - given.unconditional(x, at)).norm(dim=1).mean().item())
        return x

    strong = guided(u, c, float(scale))
    weak = strong if way.late is None else guided(u, c, way.late)

    def field(x: Tensor, t: Tensor) -> Tensor:
        return (strong if UNTIL - t[0].item() > ROUNDING else weak)(x, t)

    found = sample(field, noise, steps=steps, before_step=before)
    return found, u.evaluations + c.evaluations


def _distances(samples: Tensor, data: Tensor) -> list[float | None]:
    """The sliced Wasserstein distance from the data of the class, a mean over the classes, by half."""
    found = []
    for ours, theirs in zip(_by_half(samples), _by_half(data), strict=True):
        if not bool(ours.isfinite().all()):
            found.append(math.nan)
            continue
        pairs = zip(ours, theirs, strict=True)
        values = [sliced_wasserstein(one, other, num_projections=DIRECTIONS) for one, other in pairs]
        found.append(sum(values) / len(values))
    return [short(one) for one in found]


def _by_class(points: Tensor) -> Tensor:
    return points.view(CLASSES, -1, points.shape[1])


def _by_half(points: Tensor) -> Tensor:
    """(H, C, N, D), from points that are ordered by class and then by half."""
    return _by_class(points).unflatten(1, (HALVES, -1)).transpose(0, 1)


def _data(layout: str, num_points: int, word: str, seed: int) -> Tensor:
    halves = [
        class_data(layout, num_points, word, seed, half).view(CLASSES, num_points, -1)
        for half in range(HALVES)
    ]
    return torch.cat(halves, 1).flatten(0, 1)


def _noise(layout: str, num_points: int, seed: int) -> Tensor:
    halves = [_normal(layout, num_points, seed, half).view(CLASSES, num_points, -1) for half in range(HALVES)]
    return torch.cat(halves, 1).flatten(0, 1)


def _normal(layout: str, num_points: int, seed: int, half: int) -> Tensor:
    shape = (CLASSES * num_points, LAYOUTS[layout].centres.shape[1])
    return torch.from_numpy(generator("guidance", "noise", seed, half).standard_normal(shape)).float()
