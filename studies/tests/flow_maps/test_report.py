"""Claims of the study of flow maps on records whose verdict is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from theodolite_studies.flow_maps.setting import ARMS, FULL, JUMPS, MAPS
from theodolite_studies.flow_maps.study import STUDY, cells
from theodolite_studies.framework.records import Records
from theodolite_studies.framework.study import report

ERRORS = {
    "lagrangian": [0.15, 0.14, 0.1, 0.07, 0.05],
    "eulerian": [0.2, 0.18, 0.1, 0.07, 0.06],
    "progressive-midpoint": [0.3, 0.2, 0.1, 0.07, 0.06],
    "progressive-uniform": [0.4, 0.2, 0.1, 0.07, 0.06],
    "lagrangian-unstopped": [0.2, 0.18, 0.1, 0.07, 0.06],
    "eulerian-unstopped": [0.25, 0.2, 0.1, 0.07, 0.06],
    "progressive-midpoint-long": [0.22, 0.2, 0.1, 0.07, 0.06],
}
EULER = [1.2, 0.5, 0.25, 0.1, 0.07]


def _records(changes: dict[tuple[str, str], Any]) -> list[dict[str, Any]]:
    """Five seeds of all parts; `changes` are by kind (or part) and field."""
    found: list[dict[str, Any]] = []
    for seed in range(5):
        near = 1 + 0.002 * seed
        bounds = [[0.1, 0.2, 3.0]] * len(JUMPS)
        for kind in ARMS:
            row = {"part": "mixture", "kind": kind, "seed": seed, "diverged": False, "bounds": bounds}
            row |= {"gradient": 5.0 * near, "gradients": [5.0, 1.0], "gap": 0.01, "data distance": 0.05}
            errors = {"euler": EULER, "heun": EULER[1:]}
            if kind in ERRORS:
                errors["map"] = ERRORS[kind]
            for name, values in errors.items():
                row |= {name: values, f"{name} distance": values}
            row |= {field: value for (name, field), value in changes.items() if name == kind}
            for name in ("map", "euler"):
                if name in row:
                    row[name] = [near**2 * value if name == "map" else value for value in row[name]]
            found.append(row)
        found.append(
            {"part": "exact", "seed": seed, "euler": EULER, "bounds": [[None] * 3, *bounds[1:]]}
            | {"map bounds": bounds[0]}
        )
        for width in (64, 512):
            own = {"part": "cost", "width": width, "num": 256, "seed": seed, "milliseconds": 2.0}
            paid = changes.get(("cost", "costs"), {})
            found.append({**own, "costs": {kind: paid.get(kind, 1.5) * near for kind in MAPS}})
    return found


def test_claims_hold_where_the_records_say_so() -> None:
    assert [claim.verdict for claim in STUDY.decide(_records({}))] == ["holds"] * 11


@pytest.mark.parametrize(
    ("place", "changes"),
    [
        (0, {("lagrangian", "map"): [0.3, 0.14, 0.1, 0.07, 0.05]}),
        (1, {("progressive-uniform", "map"): [0.2, 0.2, 0.1, 0.07, 0.06]}),
        (2, {("eulerian", "map"): [0.45, 0.2, 0.1, 0.07, 0.06]}),
        (3, {("matching", "euler"): [*EULER[:-1], 0.2]}),
        (4, {("matching", "euler"): [0.5, *EULER[1:]]}),
        (5, {("matching", "euler"): [1.2, 0.5, 0.1, 0.1, 0.07]}),
        (6, {("progressive-midpoint-long", "map"): [0.1, 0.1, 0.1, 0.07, 0.06]}),
        (7, {("eulerian-unstopped", "map"): [0.1, 0.1, 0.1, 0.07, 0.06]}),
        (8, {("eulerian", "gradient"): 30.0}),
        (9, {("cost", "costs"): {"progressive-midpoint": 2.5}}),
        (10, {("cost", "costs"): {"eulerian": 4.0}}),
    ],
)
def test_and_fail_where_they_do_not(place: int, changes: dict[tuple[str, str], Any]) -> None:
    found = STUDY.decide(_records(changes))
    assert found[place].verdict == "fails", found[place]
    untouched = {1, 3, 4, 5, 8, 9, 10} - {place}
    if place in untouched | {place} and place not in (0, 2):
        assert all(found[each].verdict == "holds" for each in untouched)


def test_a_run_that_diverged_counts_as_infinitely_far() -> None:
    found = STUDY.decide(_records({("lagrangian", "diverged"): True}))
    assert [found[place].verdict for place in (0, 1, 2, 4, 5, 6)] == ["fails"] * 6


def _images(first: float, gradient: float) -> list[dict[str, Any]]:
    found = []
    for seed in range(3):
        near = 1 + 0.002 * seed
        for kind in ("matching", "lagrangian", "progressive-midpoint", "eulerian"):
            row = {"part": "dit-fashion", "kind": kind, "seed": seed, "diverged": False}
            row |= {"gradient": (gradient if kind == "eulerian" else 1.0) * near}
            row["euler"] = [90.0, 40.0, 20.0, 10.0]
            if kind != "matching":
                one = first if kind == "lagrangian" else 15.0
                row["map"] = [one * near, 9.0, 6.0, 5.0]
            found.append(row)
    return found


def test_claims_about_images() -> None:
    assert [claim.verdict for claim in STUDY.decide(_images(10.0, 50.0))] == ["holds"] * 4
    assert [claim.verdict for claim in STUDY.decide(_images(60.0, 2.0))] == ["fails"] * 4


def test_distances_by_another_classifier_are_left_out_and_gradients_are_not() -> None:
    rows = [{**row, "classifier": "one", "floor": 0.1} for row in _images(10.0, 50.0)]
    odd = next(row for row in rows if row["kind"] == "lagrangian" and row["seed"] == 1)
    odd |= {"classifier": "other", "map": [1000.0] * 4, "gradient": 40.0}
    *distances, unstable = STUDY.decide(rows)
    assert [claim.verdict for claim in distances] == ["holds"] * 3
    assert unstable.verdict != "holds"  # the gradient of that seed is 50/40 of it
    said = next(line for line in STUDY.notes(rows).splitlines() if line.startswith("lagrangian, jumps"))
    assert said.split()[2:] == ["3", "of", "3", "40", "2", "10.02", "9.00", "6.00", "5.00"]


def test_losses_of_widths_are_printed_by_width_and_step() -> None:
    losses = {(64, 30): 1.5, (64, 300): 0.5, (256, 30): 1.25, (256, 300): 0.375}
    rows = [
        {"part": "dit-widths", "width": width, "seed": 0, "step": step, "loss": loss}
        for (width, step), loss in reversed(losses.items())
    ]
    lines = [line.split() for line in STUDY.notes(rows).splitlines()]
    assert lines[-2:] == [["64", "1.500", "0.500"], ["256", "1.250", "0.375"]]


def test_cells_are_distinct_and_complete() -> None:
    found = cells(FULL)
    assert len({str(sorted(cell.items())) for cell in found}) == len(found)
    parts = [cell["part"] for cell in found]
    assert {part: parts.count(part) for part in parts} == {
        "mixture": 8 * 4,
        "exact": 4,
        "cost": 2 * 4,
        "dit-fashion": 4 * 3,
        "dit-widths": 3,
    }


def test_the_report_draws_what_there_is(tmp_path: Path) -> None:
    Records(tmp_path / "maps.jsonl", STUDY.about(FULL)).append(_records({}))
    said = report(STUDY, tmp_path / "maps.jsonl")
    assert "11 of 11 claims hold" in said
    assert "constant" in said
    for name in ("jumps", "gradients"):
        assert (tmp_path / f"maps-{name}.svg").read_text().startswith("<svg")
    assert not (tmp_path / "maps-widths.svg").exists()
