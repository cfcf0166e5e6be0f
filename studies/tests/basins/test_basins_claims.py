"""Claims of the study of basins on records whose verdict is known, and the numbers behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from theodolite_studies.basins.claims import rank_correlation
from theodolite_studies.basins.study import STUDY
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report

from .made_up import lines, shifts, spectra

GOOD = [*lines(), *spectra(), *shifts()]
STATEMENTS = [claim.statement for claim in STUDY.claims]  # type: ignore[union-attr]


def verdicts(records: list[dict[str, Any]]) -> dict[str, str]:
    return {claim.statement: claim.verdict for claim in STUDY.decide(records)}


def test_claims_hold_where_the_records_say_so() -> None:
    assert verdicts(GOOD) == dict.fromkeys(STATEMENTS, "holds")


@pytest.mark.parametrize(
    ("records", "failed"),
    [
        (lines(continued=0.1), [0]),
        (lines(same_start=0.9, same_high=0.2), [1]),
        (lines(same_high=0.9), [2]),
        (lines(different_starts=5.0), [3]),
        (lines(same_start=0.4, same_high=20.0), [2, 4]),
        (lines(stored=0.01), [5]),
        (spectra(off=2), [6]),
        (spectra(scale=2), [6, 7]),
        (spectra(with_width=2), [8]),
        (spectra(grown=3.0), [9]),
        (spectra(new=0.8), [10]),
        (spectra(parted=1.5), [11]),
        (spectra(share=0.1), [12]),
        (spectra(probe=1), [13]),
        (spectra(error=0.2), [14, 15, 16]),
        (shifts(sign=1.0), [17, 18, 19]),
    ],
)
def test_and_fail_where_they_do_not(records: list[dict[str, Any]], failed: list[int]) -> None:
    found = verdicts(records)
    assert [statement for statement, verdict in found.items() if verdict == "fails"] == [
        STATEMENTS[place] for place in failed
    ]


def test_accuracy_on_clean_data_can_be_the_better_predictor() -> None:
    rows = shifts()
    for row in rows:  # it falls as that on shifted data does, and the criterion says little
        row["clean"][0] = row["noise 1"][0]
        row["train"][1:4] = row["train"][-1:] * 3
    assert verdicts(rows)[STATEMENTS[20]] == "fails"


def test_one_seed_decides_nothing() -> None:
    assert set(verdicts([*lines(seeds=1), *spectra(seeds=1), *shifts(seeds=1)]).values()) == {"unclear"}


def test_networks_that_diverged_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = shifts()
    rows += [{"part": "shifts", "seed": seed, "size": 10, "lr": 9.0, "loss": None} for seed in range(3)]
    assert verdicts(rows) == verdicts(shifts())
    Records(tmp_path / "basins.jsonl", STUDY.about(STUDY.full)).append([*GOOD, *rows[-3:]])
    said = report(STUDY, tmp_path / "basins.jsonl")
    assert "21 of 21 claims hold" in said
    assert "72 networks, 8 seeds, 3 diverged" in said
    for name in ("lines", "spectra", "shifts"):
        assert (tmp_path / f"basins-{name}.svg").read_text().startswith("<svg")


def test_the_rank_correlation_is_that_of_spearman() -> None:
    one, other = np.random.default_rng(0).standard_normal((2, 20)).round(1)  # with ties
    assert rank_correlation(one, other) == pytest.approx(stats.spearmanr(one, other)[0])
    assert np.isnan(rank_correlation([1.0, 1.0], [0.0, 1.0]))
