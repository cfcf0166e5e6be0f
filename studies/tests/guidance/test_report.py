"""Claims of the study of guidance on records whose verdict is known, and the numbers behind them."""

from __future__ import annotations

import numpy as np
import pytest

from theodolite_studies.guidance.figures import figures
from theodolite_studies.guidance.report import judged, notes, ratios
from theodolite_studies.guidance.study import STUDY

from .made_up import inversions, records


def test_claims_say_what_records_say() -> None:
    short, longer = (records(kind=kind, projected=0.5) for kind in ("150 steps", "1500 steps"))
    noisy = records(kind="noisy labels", projected=0.5)
    rows = [*records(kind="exact", projected=1.2), *short, *longer, *noisy, *inversions(good=True)]
    verdicts = [claim.verdict for claim in STUDY.decide(rows)]
    assert verdicts == ["holds", "fails", *["holds"] * 4, "fails", *["holds"] * 5]  # exact gap and residual
    short, longer = (records(kind=kind, projected=1.5) for kind in ("150 steps", "1500 steps"))
    noisy = records(kind="noisy labels", projected=1.5)
    rows = [*records(kind="exact", projected=0.5), *short, *longer, *noisy, *inversions(good=False)]
    assert [claim.verdict for claim in STUDY.decide(rows)] == ["fails"] * 12


def test_steps_of_their_own_are_judged_where_the_bound_is_too_small() -> None:
    rows = inversions(good=True)
    for row in rows:
        if row["kind"] == "auto" and row["layout"] != "three":
            row["early"] = 0.5
    assert STUDY.decide(rows)[-1].verdict == "holds"


def test_two_seeds_that_disagree_decide_nothing() -> None:
    rows = [*records(kind="150 steps", projected=0.9, seeds=1)]
    other = [{**row, "seed": 1} for row in records(kind="150 steps", projected=1.3, seeds=1)]
    (found,) = [claim for claim in STUDY.decide(rows + other) if "150 steps: a projection" in claim.statement]
    assert found.verdict == "unclear"


def test_the_best_of_many_equal_candidates_has_no_advantage() -> None:
    rng = np.random.default_rng(0)
    many = [judged(1 + 0.1 * rng.standard_normal((60, 2))) for _ in range(400)]
    assert np.mean(many) == pytest.approx(1.0, abs=0.02)
    assert np.mean([(1 + 0.1 * rng.standard_normal((60, 2))).min() for _ in range(400)]) < 0.8


def test_samples_that_are_not_finite_are_never_chosen() -> None:
    rows = records(kind="exact", projected=0.5)
    for row in rows:
        if row["kind"] == "grid" and row["way"] != "plain":
            row["distances"] = [[None, None], [0.2, 0.2]]
    (found,) = ratios(rows)
    np.testing.assert_allclose(found.values, 2.0)


def test_notes_and_figures_of_every_part() -> None:
    rows = [*records(kind="exact", projected=1.2), *inversions(good=True)]
    said = notes(rows)
    assert "three, 40 evaluations" in said
    assert "0.1220" in said  # the best projection: 1.2 times 0.1, and 0.002 for the mean seed
    assert [name for name, _ in figures(rows)] == ["scales", "inversion"]
    early = {"kind": "early", "part": "early", "layout": "three", "field": "noisy labels", "budget": 40}
    early |= {"way": "then 1", "scales": [3.0], "distances": [[0.05, 0.05]]}
    noisy = records(kind="noisy labels", projected=1.2)
    said = notes([*noisy, *({**early, "seed": seed} for seed in range(5))])
    (row,) = [line for line in said.splitlines() if "then 1" in line]
    assert row.split()[-4::2] == ["2.00", "2.44"]  # 0.1/0.05 and 0.122/0.05
    assert [name for name, _ in figures(inversions(good=True))] == ["inversion"]
