"""The study of refinement: problems against closed forms, claims on made-up records, a tiny run."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from theodolite.optimizers import refine
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report
from theodolite_studies.refinement.problems import logistic, mlp, quadratic, train
from theodolite_studies.refinement.study import COLOURS, FIXED, STUDY, claims, compared, figures, tuned


def test_a_quadratic_is_trained_as_its_closed_form_says() -> None:
    problem = quadratic(0, steps=5)
    factors = torch.tensor([[1.0, 0.5, 1.0, 0.25, 1.0], [1.0] * 5]).double()
    ends, norms = train(problem, factors, torch.tensor([0.3, 0.1]).double(), seed=7)
    draw = torch.Generator().manual_seed(7)
    noise = [torch.randn(32, generator=draw, dtype=torch.float64).numpy() for _ in range(5)]
    curved = np.logspace(-2, 0, 32)
    for row, lr in enumerate((0.3, 0.1)):
        at = np.full(32, 10.0)
        for step in range(5):
            slope = curved * at + noise[step]
            assert norms[row, step] == pytest.approx(np.linalg.norm(slope))
            at = at - lr * float(factors[row, step]) * slope
        assert ends[row] == pytest.approx(0.5 * (curved * at**2).sum())


def test_adam_is_that_of_torch() -> None:
    problem = mlp(0, steps=6, adam=True)
    ends, norms = train(problem, torch.ones(1, 6).double(), torch.tensor([0.01]).double(), seed=3)
    weights = [torch.nn.Parameter(weight) for weight in problem.start(1)]
    optimizer = torch.optim.Adam(weights, lr=0.01, betas=(0.9, 0.99))
    draw = torch.Generator().manual_seed(3)
    for step in range(6):
        optimizer.zero_grad()
        problem.loss(weights, draw).sum().backward()
        total = sum(float(w.grad.abs().sum()) for w in weights if w.grad is not None)
        assert norms[0, step] == pytest.approx(total, rel=1e-5)
        optimizer.step()
    with torch.no_grad():
        assert ends[0] == pytest.approx(float(problem.judge(weights)), rel=1e-4)


def test_the_minimum_of_a_logistic_regression_is_one() -> None:
    problem = logistic(1, steps=2)
    (start,) = problem.start(1)
    at = start.requires_grad_()
    solver = torch.optim.LBFGS([at], max_iter=500, tolerance_grad=1e-10, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        solver.zero_grad()
        loss = problem.judge([at]).sum()
        loss.backward()
        return loss

    solver.step(closure)
    assert problem.judge([at]).item() == pytest.approx(0, abs=1e-8)


def test_a_run_that_diverges_is_infinitely_bad() -> None:
    ends, _ = train(quadratic(0, steps=900), torch.ones(1, 900).double(), torch.tensor([9.0]).double(), 0)
    assert ends[0] == math.inf


def _records(refined: float, cosine: float, factors: list[float], off: float = 0.0) -> list[dict[str, Any]]:
    """Three seeds of one problem; ends at two peaks, of which the second is the better."""
    ends = {"constant": 2.0, "cosine": cosine, "linear": 1.0, "wsd": 1.2, "refined": refined}
    found = []
    for seed in range(3):
        for kind in (*FIXED, "refined"):
            end = ends[kind] * (1 + 0.001 * seed)
            record: dict[str, Any] = {
                "problem": "quadratic",
                "seed": seed,
                "schedule": kind,
                "ends": [9.0, end],
            }
            if kind == "refined":
                record |= {"factors": factors, "norms": [1.0], "off linear": off}
            found.append(record)
    return found


def test_claims_say_what_records_say() -> None:
    late = [0.1, *[1.0] * 29, *[0.5] * 20]
    good = claims(_records(0.9, 1.1, late))
    assert [claim.verdict for claim in good] == ["holds"] * 5
    bad = claims(_records(1.1, 0.5, [1 - place / 50 for place in range(50)], off=0.1))
    assert [claim.verdict for claim in bad] == ["fails"] * 5
    assert tuned(_records(0.9, 1.1, late), "quadratic", "refined") == pytest.approx([0.9, 0.9009, 0.9018])


def test_the_lowest_point_of_linear_decay_is_drawn_at_one() -> None:
    """Though its seeds end far apart: what is drawn and what it is divided by are one kind of mean."""
    records = _records(0.9, 1.1, [1.0] * 50)
    rates = len(quadratic(0).rates)
    for record in records:
        best = (0.5, 1.0, 8.0)[record["seed"]]
        record["ends"] = [best * (1 + 0.1 * abs(place - 7)) for place in range(rates)]
    drawing = dict(figures(records))["ends"]
    (one,) = re.findall(r'd="M\S+ (\S+)h\d+" stroke="\S+" stroke-width="2"', drawing)  # the thick line
    (points,) = re.findall(rf'<polyline points="([^"]+)" fill="none" stroke="{COLOURS["linear"]}"', drawing)
    heights = [float(point.partition(",")[2]) for point in points.split()]  # downwards
    assert heights.index(max(heights)) == 7
    assert max(heights) == float(one)


def test_a_tiny_study_from_end_to_end(tmp_path: Path) -> None:
    path = tmp_path / "refinement.jsonl"
    records = Records(path, {"study": "refinement"})
    for seed in range(2):
        found = list(compared(quadratic(seed, steps=40), seed))
        assert [record["schedule"] for record in found] == [*FIXED, "refined"]
        records.append({"problem": "quadratic", "seed": seed, **record} for record in found)
    assert "constant norms give linear decay" in report(STUDY, path)
    assert (tmp_path / "refinement-courses.svg").is_file()
    # A schedule that is refined anew, of the norms of a first run, gives the ends that were kept.
    steps = torch.arange(40)
    linear = (1 - steps / 40).double()[None]
    rates = torch.tensor(quadratic(1).rates).double()
    ends, _ = train(quadratic(1, steps=40), linear.expand(len(rates), -1), rates, 1)
    best = int(ends.argmin())
    _, norms = train(quadratic(1, steps=40), linear, rates[best : best + 1], 101)
    again = torch.tensor([refine(norms[0].tolist()).factors]).double()
    ends, _ = train(quadratic(1, steps=40), again.expand(len(rates), -1), rates, 1)
    assert records.all[-1]["ends"] == pytest.approx(ends.tolist(), rel=1e-3)
