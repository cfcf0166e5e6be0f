"""Claims about Lion on records whose verdict is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report
from theodolite_studies.lion.study import STUDY


def _records(**changes: Any) -> list[dict[str, Any]]:
    found = []
    for seed in range(3):
        kept = {"steps": [0, 9], "largest then": [10.0, 1.0], "height then": [1.0, 0.1]}
        for pull in ("in", "out"):
            own = {
                "part": "fall",
                "pull": pull,
                "size": 0.01,
                "seed": seed,
                "slowest": 1.0,
                "farthest": 1e-12,
            }
            found.append({**own, "beyond": -0.1, "entered": 7, **kept})
        for size in (0.1, 0.01):
            own = {"part": "box", "pull": "", "size": size, "seed": seed, "beyond": 0.0, "allowed": -0.5}
            found.append({**own, "rising": 0.001, "rise": 0.001, "distance": size + seed * 1e-4, **kept})
        own = {"part": "network", "pull": "", "size": 4.0, "seed": seed, "largest": 1.0, "rise": 0.01}
        found.append({**own, **kept})
    return [{**one, **{key: value for key, value in changes.items() if key in one}} for one in found]


def test_claims_hold_where_the_records_say_so() -> None:
    assert [claim.verdict for claim in STUDY.decide(_records())] == ["holds"] * 10


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"slowest": 1.1}, 0),
        ({"farthest": 0.1}, 1),
        ({"beyond": 1e-3}, 2),
        ({"allowed": 0.1}, 3),
        ({"rising": 0.2}, 4),
        ({"distance": 0.1}, 6),
        ({"largest": 1.01}, 8),
    ],
)
def test_and_fail_where_they_do_not(changes: dict[str, float], place: int) -> None:
    assert STUDY.decide(_records(**changes))[place].verdict == "fails"


def test_the_report_draws_what_there_is(tmp_path: Path) -> None:
    Records(tmp_path / "lion.jsonl", {"study": "lion"}).append(_records())
    said = report(STUDY, tmp_path / "lion.jsonl")
    assert "10 of 10 claims hold" in said
    for name in ("fall", "height", "network"):
        assert (tmp_path / f"lion-{name}.svg").read_text().startswith("<svg")
