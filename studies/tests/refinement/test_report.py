"""Claims about refined schedules on made-up records."""

from __future__ import annotations

import re
from typing import Any

import pytest

from theodolite_studies.refinement.problems import quadratic
from theodolite_studies.refinement.report import COLOURS, figures, tuned
from theodolite_studies.refinement.study import FIXED, STUDY


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
    good = STUDY.decide(_records(0.9, 1.1, late))
    assert [claim.verdict for claim in good] == ["holds"] * 5
    bad = STUDY.decide(_records(1.1, 0.5, [1 - place / 50 for place in range(50)], off=0.1))
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
