"""What the paper claims of gradient-normalized smoothness, and the figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, GREEN, INK, ORANGE, SvgAxis, SvgFigure, SvgLine, SvgRow, ticks
from theodolite_studies.framework.claims import Claim, Observation, Observe, at_least, at_most, per
from theodolite_studies.framework.figures import line, log10
from theodolite_studies.framework.records import Record, distinct, select

CONVEX = ("logistic", "softmax")
CURVATURES = ("hessian", "gauss_newton", "fisher")
TITLES = {"hessian": "Hessian", "gauss_newton": "Gauss–Newton", "fisher": "Fisher", "descent": "descent"}
FLOOR = 1e-9
"""Of relative gaps: what is below is too near to rounding for a rate."""
WINDOW = 10


def slowest(gaps: Sequence[float]) -> float:
    """The largest ratio of two gaps that are ten steps apart, as long as there is a gap to tell.

    >>> slowest([0.5**step for step in range(15)]) == 0.5**10
    True
    """
    told = [gap for gap in gaps if gap > FLOOR]
    # A way that is shorter than that has fallen to the floor, or ended before.
    short = FLOOR if len(told) < len(gaps) else math.inf
    return max((later / earlier for earlier, later in zip(told, told[WINDOW:], strict=False)), default=short)


def _runs(value: Callable[[Record], float], **only: object) -> Observe:
    """By problem and curvature, of the runs from the usual first γ."""

    def titled(problem: str, method: str) -> str:
        return f"{problem}, {TITLES[method]}"

    return per(("problem", "method"), value, titled, gamma=1.0, **{"method": _is_newton, **only})


def _is_newton(method: str) -> bool:
    return method != "descent"


def _is_convex(problem: str) -> bool:
    return problem in CONVEX


def _beside_descent(value: Callable[[Record, Record], float], *, convex: bool) -> Observe:
    """The same of runs beside that of gradient descent with the same problem and seed."""

    def observe(records: Sequence[Record]) -> Sequence[Observation]:
        descents = {
            (one["problem"], one["seed"]): one for one in select(records, gamma=1.0, method="descent")
        }
        known = [one for one in records if (one["problem"], one["seed"]) in descents]
        measure = _runs(
            lambda one: value(one, descents[one["problem"], one["seed"]]),
            problem=lambda problem: _is_convex(problem) == convex,
        )
        return measure(known)

    return observe


def _last_ratio(one: Record) -> float:
    gaps = [gap for gap in one["gaps"] if gap > FLOOR]
    below = [gap for gap in one["gaps"] if gap <= FLOOR]
    return max(below[0], 0.0) / gaps[-1] if below else gaps[-1] / gaps[-2]


def _to(key: str) -> Callable[[Record, Record], float]:
    return lambda one, other: _ratio(one[key], other[key])


def _to_its_end(axis: str) -> Callable[[Record, Record], float]:
    """When the loss was below the other's last, over when the other was there."""

    def value(one: Record, other: Record) -> float:
        places = zip(one[axis], one["losses"], strict=True)
        own = next((place for place, loss in places if loss <= other["losses"][-1]), None)
        return _ratio(own, other[axis][-1])

    return value


def _ratio(own: float | None, other: float | None) -> float:
    """Of two ways; where neither has got there nothing can be told."""
    if own is None:
        return math.nan if other is None else math.inf
    return own / other if other is not None else 0.0


def _other_starts(records: Sequence[Record]) -> list[Observation]:
    """Steps to a gap of 10⁻⁶ from another first γ, less those from the usual one."""
    own = select(records, problem="logistic", method="gauss_newton")
    steps = {(one["gamma"], one["seed"]): one["to 1e-06"] for one in own}
    known = {key: math.inf if count is None else count for key, count in steps.items()}
    return [
        Observation(
            f"γ₀ = {gamma:g}",
            np.array(
                [known[gamma, one["seed"]] - known[1.0, one["seed"]] for one in select(own, gamma=gamma)]
            ),
        )
        for gamma in sorted({*distinct(own, "gamma")} - {1.0})
    ]


CLAIMS = (
    Claim(
        "with the Hessian γ is bounded below by the data's reach",
        "γ ≥ c/M",
        "min γ·max‖x‖ ≥ 0.25",
        at_least(0.25, _runs(lambda one: one["least"] * one["reach"], problem=_is_convex, method="hessian")),
    ),
    Claim(
        "with the Hessian γ grows near the minimum",
        "Newton's steps",
        "last/least γ ≥ 10",
        at_least(10.0, _runs(lambda one: one["end"] / one["least"], problem=_is_convex, method="hessian")),
    ),
    Claim(
        "with the Hessian the end is faster than linear",
        "superlinear",
        "last gap ratio ≤ 0.05",
        at_most(0.05, _runs(_last_ratio, problem=_is_convex, method="hessian")),
    ),
    Claim(
        "with the Fisher matrix γ is bounded below too",
        "not said",
        "last/first γ ≥ 0.1",
        at_least(0.1, _runs(lambda one: one["end"] / one["gammas"][0], problem=_is_convex, method="fisher")),
    ),
    Claim(
        f"the gap halves in any {WINDOW} steps",
        "global linear rate",
        "largest ratio ≤ 0.5",
        at_most(0.5, _runs(lambda one: one["slowest"], problem=_is_convex)),
    ),
    Claim(
        "half of all tries are accepted",
        "2 tries a step",
        "share ≥ 0.45",
        at_least(0.45, _runs(lambda one: one["accepted"] / one["tries"], problem=_is_convex)),
    ),
    Claim(
        "to a gap of 10⁻⁶, fewer steps than gradient descent",
        "fewer",
        "steps/steps ≤ 0.5",
        at_most(0.5, _beside_descent(_to("to 1e-06"), convex=True)),
    ),
    Claim(
        "and less work, a product counted as two gradients",
        "not said",
        "work/work ≤ 1",
        at_most(1.0, _beside_descent(_to("work to 1e-06"), convex=True)),
    ),
    Claim(
        "on the network, to where 2000 steps of descent end",
        "fewer",
        "steps/steps ≤ 0.5",
        at_most(0.5, _beside_descent(_to_its_end("steps"), convex=False)),
    ),
    Claim(
        "and less work there",
        "not said",
        "work/work ≤ 1",
        at_most(1.0, _beside_descent(_to_its_end("works"), convex=False)),
    ),
    Claim(
        "on the network the gradient falls",
        "stationary point",
        "last/first ‖g‖ ≤ 10⁻³",
        at_most(1e-3, _beside_descent(lambda one, _: one["norms"][-1] / one["norms"][0], convex=False)),
    ),
    Claim("the first γ does not matter", "found on the way", "≤ 12 more steps", at_most(12.0, _other_starts)),
)
COLOURS = {"hessian": BLUE, "gauss_newton": GREEN, "fisher": ORANGE, "descent": INK}


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Gaps, γ and λ along the way, of the first seed."""
    first = min(one["seed"] for one in records)
    plain = select(records, gamma=1.0, seed=first)
    problems = distinct(plain, "problem")
    by_problem = [select(plain, problem=problem) for problem in problems]
    gaps = [[_line(one, one["gaps"]) for one in own] for own in by_problem]
    stepped = [[one for one in own if "gammas" in one] for own in by_problem]
    radii = [[_line(one, one["gammas"]) for one in own] for own in stepped]
    shifts = [[_line(one, np.divide(*_known(one)).tolist()) for one in own] for own in stepped]
    across = SvgAxis(0, 3.4, ticks([0, 1, 2, 3], power=True))
    down = SvgAxis(-12, 0, ticks([-12, -8, -4, 0], power=True))
    figure = SvgFigure(
        f"Loss above its minimum, γ and λ = ‖g‖/γ, seed {first}",
        [(TITLES[method], colour) for method, colour in COLOURS.items()],
        problems,
        [
            SvgRow("relative gap", across, down, gaps, "step + 1"),
            SvgRow("γ", across, SvgAxis(-5, 5, ticks([-4, -2, 0, 2, 4], power=True)), radii, "step + 1"),
            SvgRow("λ", across, down, shifts, "step + 1"),
        ],
    )
    yield "way", figure.svg()


def _known(one: Record) -> tuple[list[float], list[float]]:
    """‖g‖ and γ; there is no γ after the last step."""
    return one["norms"][: len(one["gammas"])], one["gammas"]


def _line(one: Record, values: Sequence[float]) -> SvgLine:
    """Along the steps of a run, in logarithms; γ and λ have no value after the last."""
    steps = np.array(one["steps"][: len(values)])
    return line(np.log10(steps + 1), log10(values), COLOURS[one["method"]])
