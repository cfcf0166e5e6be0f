"""The study of refinement: problems against closed forms, claims on made-up records, a tiny run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from theodolite.optimizers import refine
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report
from theodolite_studies.refinement.problems import quadratic, train
from theodolite_studies.refinement.study import FIXED, STUDY, compared


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
