"""What the paper claims of gradient-normalized smoothness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, settled

CONVEX = ("logistic", "softmax")
CURVATURES = ("hessian", "gauss_newton", "fisher")
TITLES = {"hessian": "Hessian", "gauss_newton": "Gauss–Newton", "fisher": "Fisher", "descent": "descent"}
FLOOR = 1e-9
"""Of relative gaps: what is below is too near to rounding for a rate."""
WINDOW = 10


def claims(records: Sequence[Record]) -> list[Claim]:
    """All that there are records for."""
    plain = [one for one in records if one["gamma"] == 1.0]
    steps = [one for one in plain if one["method"] != "descent"]
    convex = [one for one in steps if one["problem"] in CONVEX]
    found: list[Claim] = []
    if convex:
        found += _of_the_radius(convex) + _of_the_rate(convex)
    if any(one["method"] == "descent" for one in plain):
        found += _against_descent(plain)
    if any(one["gamma"] != 1.0 for one in records):
        found.append(_of_the_start(records))
    return found


def slowest(gaps: Sequence[float]) -> float:
    """The largest ratio of two gaps that are ten steps apart, as long as there is a gap to tell.

    >>> slowest([0.5**step for step in range(15)]) == 0.5**10
    True
    """
    told = [gap for gap in gaps if gap > FLOOR]
    # A way that is shorter than that has fallen to the floor, or ended before.
    short = FLOOR if len(told) < len(gaps) else math.inf
    return max((later / earlier for earlier, later in zip(told, told[WINDOW:], strict=False)), default=short)


def _of_the_radius(convex: Sequence[Record]) -> list[Claim]:
    exact = [one for one in convex if one["method"] == "hessian"]
    rough = [one for one in convex if one["method"] == "fisher"]
    found = []
    if exact:
        found += _with_the_hessian(exact)
    if rough:
        found.append(
            settled(
                "with the Fisher matrix γ is bounded below too",
                "not said",
                "last/first γ ≥ 0.1",
                _cases(rough, lambda one: one["end"] / one["gammas"][0]),
                limit=0.1,
                below=False,
            )
        )
    return found


def _with_the_hessian(exact: Sequence[Record]) -> list[Claim]:
    return [
        settled(
            "with the Hessian γ is bounded below by the data's reach",
            "γ ≥ c/M",
            "min γ·max‖x‖ ≥ 0.25",
            _cases(exact, lambda one: one["least"] * one["reach"]),
            limit=0.25,
            below=False,
        ),
        settled(
            "with the Hessian γ grows near the minimum",
            "Newton's steps",
            "last/least γ ≥ 10",
            _cases(exact, lambda one: one["end"] / one["least"]),
            limit=10.0,
            below=False,
        ),
        settled(
            "with the Hessian the end is faster than linear",
            "superlinear",
            "last gap ratio ≤ 0.05",
            _cases(exact, _last_ratio),
            limit=0.05,
            below=True,
        ),
    ]


def _of_the_rate(convex: Sequence[Record]) -> list[Claim]:
    return [
        settled(
            f"the gap halves in any {WINDOW} steps",
            "global linear rate",
            "largest ratio ≤ 0.5",
            _cases(convex, lambda one: one["slowest"]),
            limit=0.5,
            below=True,
        ),
        settled(
            "half of all tries are accepted",
            "2 tries a step",
            "share ≥ 0.45",
            _cases(convex, lambda one: one["accepted"] / one["tries"]),
            limit=0.45,
            below=False,
        ),
    ]


def _against_descent(plain: Sequence[Record]) -> list[Claim]:
    pairs = [
        (one, other)
        for one in plain
        for other in plain
        if one["method"] != "descent"
        and other["method"] == "descent"
        and all(one[key] == other[key] for key in ("problem", "seed"))
    ]
    found = []
    convex = [(one, other) for one, other in pairs if one["problem"] in CONVEX]
    network = [(one, other) for one, other in pairs if one["problem"] not in CONVEX]
    if convex:
        found += [
            settled(
                "to a gap of 10⁻⁶, fewer steps than gradient descent",
                "fewer",
                "steps/steps ≤ 0.5",
                _paired(convex, lambda one, other: _ratio(one["to 1e-06"], other["to 1e-06"])),
                limit=0.5,
                below=True,
            ),
            settled(
                "and less work, a product counted as two gradients",
                "not said",
                "work/work ≤ 1",
                _paired(convex, lambda one, other: _ratio(one["work to 1e-06"], other["work to 1e-06"])),
                limit=1.0,
                below=True,
            ),
        ]
    if network:
        found += [
            settled(
                "on the network, to where 2000 steps of descent end",
                "fewer",
                "steps/steps ≤ 0.5",
                _paired(network, lambda one, other: _to_its_end(one, other, "steps")),
                limit=0.5,
                below=True,
            ),
            settled(
                "and less work there",
                "not said",
                "work/work ≤ 1",
                _paired(network, lambda one, other: _to_its_end(one, other, "works")),
                limit=1.0,
                below=True,
            ),
            settled(
                "on the network the gradient falls",
                "stationary point",
                "last/first ‖g‖ ≤ 10⁻³",
                _cases([one for one, _ in network], lambda one: one["norms"][-1] / one["norms"][0]),
                limit=1e-3,
                below=True,
            ),
        ]
    return found


def _of_the_start(records: Sequence[Record]) -> Claim:
    own = [one for one in records if one["problem"] == "logistic" and one["method"] == "gauss_newton"]
    usual = {one["seed"]: one["to 1e-06"] for one in own if one["gamma"] == 1.0}
    cases = [
        Case(
            f"γ₀ = {gamma:g}",
            np.array(
                [
                    _number(one["to 1e-06"]) - _number(usual[one["seed"]])
                    for one in own
                    if one["gamma"] == gamma
                ]
            ),
        )
        for gamma in sorted({one["gamma"] for one in own} - {1.0})
    ]
    return settled(
        "the first γ does not matter",
        "found on the way",
        "≤ 12 more steps",
        cases,
        limit=12.0,
        below=True,
    )


def _cases(records: Sequence[Record], measure: Callable[[Record], float]) -> list[Case]:
    return _paired([(one, one) for one in records], lambda one, _: measure(one))


def _paired(pairs: Sequence[tuple[Record, Record]], measure: Callable[[Record, Record], float]) -> list[Case]:
    """A case for each problem and method, a value for each seed."""
    kinds = dict.fromkeys((one["problem"], one["method"]) for one, _ in pairs)
    return [
        Case(
            f"{problem}, {TITLES[method]}",
            np.array(
                [
                    measure(one, other)
                    for one, other in pairs
                    if (one["problem"], one["method"]) == (problem, method)
                ],
                dtype=float,
            ),
        )
        for problem, method in kinds
    ]


def _last_ratio(one: Record) -> float:
    gaps = [gap for gap in one["gaps"] if gap > FLOOR]
    below = [gap for gap in one["gaps"] if gap <= FLOOR]
    return max(below[0], 0.0) / gaps[-1] if below else gaps[-1] / gaps[-2]


def _to_its_end(one: Record, other: Record, axis: str) -> float:
    """When the loss was below the other's last, over when the other was there."""
    own = next(
        (place for place, loss in zip(one[axis], one["losses"], strict=True) if loss <= other["losses"][-1]),
        None,
    )
    return _ratio(own, other[axis][-1])


def _ratio(own: float | None, other: float | None) -> float:
    """Of two ways; where neither has got there nothing can be told."""
    if own is None:
        return math.nan if other is None else math.inf
    return own / other if other is not None else 0.0


def _number(value: float | None) -> float:
    return math.inf if value is None else value
