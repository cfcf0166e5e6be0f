"""What decides each claim about gradient-normalized smoothness."""

import numpy as np
import pytest

from theodolite_studies.smoothness.report import figures, slowest
from theodolite_studies.smoothness.study import STUDY


def test_the_slowest_ten_steps_are_found_wherever_they_are():
    gaps = [1.0, *(0.5**step for step in range(1, 6))]
    gaps += [gaps[-1] * 0.99**step for step in range(1, 13)]
    gaps += [gaps[-1] * 0.1**step for step in range(1, 12)]
    assert slowest(gaps) == pytest.approx(0.99**10)
    assert slowest([1.0, 1e-5, 1e-12]) == 1e-9
    assert slowest([1.0, 0.5, 0.25]) == np.inf  # it gave up


def made_up(problem, method, seed=0, *, rate=0.1, gammas=(1.0, 2.0, 64.0), gamma=1.0, accepted=9, steps=12):
    """A run whose gap falls by one factor in each step."""
    gaps = [rate**step for step in range(steps + 1)]
    to = next((step for step, gap in enumerate(gaps) if gap <= 1.0001e-6), None)
    return {
        **{"problem": problem, "method": method, "gamma": gamma, "seed": seed, "reach": 2.0},
        **{"accepted": accepted, "tries": 10, "gammas": list(gammas), "gaps": gaps, "losses": gaps},
        **{"steps": list(range(steps + 1)), "works": [10 * step for step in range(steps + 1)]},
        **{"slowest": slowest(gaps), "least": min(gammas), "end": gammas[-1]},
        **{"norms": gaps, "to 1e-06": to, "work to 1e-06": None if to is None else 10 * to},
    }


def verdicts(records):
    return {claim.statement: claim.verdict for claim in STUDY.decide(records)}


def test_claims_hold_of_runs_that_are_as_the_paper_says():
    records = [
        made_up(problem, method, seed, rate=0.01 if method == "hessian" else 0.1, gammas=(1.0, 2.0, 64.0))
        for problem in ("logistic", "softmax", "network")
        for method in ("hessian", "gauss_newton", "fisher")
        for seed in (0, 1)
    ]
    records += [
        made_up(problem, "descent", seed, rate=0.9, steps=200)
        for problem in ("logistic", "softmax", "network")
        for seed in (0, 1)
    ]
    records += [made_up("logistic", "gauss_newton", seed, gamma=1e3, rate=0.2) for seed in (0, 1)]
    found = verdicts(records)
    assert len(found) == 12
    assert set(found.values()) == {"holds"}
    ((name, svg),) = figures(records)
    assert name == "way"
    assert svg.count("<rect") == 9  # three problems: the gap, γ, λ


@pytest.mark.parametrize(
    "changes, claim",
    [
        ({"gammas": (1.0, 0.05, 64.0)}, "with the Hessian γ is bounded below by the data's reach"),
        ({"gammas": (1.0, 2.0, 4.0)}, "with the Hessian γ grows near the minimum"),
        ({"rate": 0.3}, "with the Hessian the end is faster than linear"),
        ({"rate": 0.95, "steps": 100}, "the gap halves in any 10 steps"),
        ({"accepted": 3}, "half of all tries are accepted"),
    ],
)
def test_and_fail_of_runs_that_are_not(changes, claim):
    good = {"rate": 0.01}
    assert verdicts([made_up("logistic", "hessian", seed, **good) for seed in (0, 1)])[claim] == "holds"
    found = verdicts([made_up("logistic", "hessian", seed, **{**good, **changes}) for seed in (0, 1)])
    assert found[claim] == "fails"


def test_what_is_compared_with_descent_can_fail():
    for problem in ("logistic", "network"):
        slow = [made_up(problem, "fisher", seed, rate=0.8, steps=80) for seed in (0, 1)]
        quick = [made_up(problem, "descent", seed, rate=0.7, steps=60) for seed in (0, 1)]
        found = {name: verdict for name, verdict in verdicts([*slow, *quick]).items() if "descent" in name}
        assert list(found.values()) == ["fails"]
    never = [made_up("logistic", "fisher", seed, rate=0.9, steps=20) for seed in (0, 1)]
    found = verdicts([*never, *(made_up("logistic", "descent", seed) for seed in (0, 1))])
    assert found["to a gap of 10⁻⁶, fewer steps than gradient descent"] == "fails"


def test_a_first_radius_that_costs_many_steps_fails():
    records = [made_up("logistic", "gauss_newton", seed, rate=0.1) for seed in (0, 1)]
    records += [made_up("logistic", "gauss_newton", seed, gamma=1e3, rate=0.5, steps=40) for seed in (0, 1)]
    assert verdicts(records)["the first γ does not matter"] == "fails"
