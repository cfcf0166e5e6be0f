"""The study of coordinates resumes, holds what the probe gives, and is reported from its file alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import theodolite as th
from theodolite_studies.coordinates import study
from theodolite_studies.coordinates.report import report
from theodolite_studies.framework.networks import network
from theodolite_studies.framework.records import read_records

GRID = study.Grid(
    widths=(32, 64),
    depths=(1, 2),
    centre=th.Size(32, 1),
    base=th.Size(32, 1),
    steps=3,
    seeds=(0, 1),
    num=2,
    length=16,
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study that has ended."""
    path = tmp_path_factory.mktemp("study") / "coordinates.jsonl"
    torch.set_num_threads(1)
    conduct(path)
    return path


def conduct(path: Path) -> list[str]:
    told: list[str] = []
    study.conduct(path, grid=GRID, networks=["gpt-pre"], optimizers=["adamw"], tell=told.append)
    return told


def test_records_hold_what_the_probe_gives(ended: Path) -> None:
    _, records = read_records(ended)
    assert len(records) == 2 * 3 * 2  # parameterizations, sizes, seeds
    made = th.probes.coordinates(
        network("gpt-pre", num=2, length=16), GRID.sizes, base=GRID.base, lr=2**-8, steps=3, seeds=(0, 1)
    )
    kept = study.tracks_of(records, "gpt-pre", "adamw", "plan")
    assert {(track.size, track.seed) for track in kept} == {(track.size, track.seed) for track in made.tracks}
    for one in kept:
        (other,) = (track for track in made.tracks if (track.size, track.seed) == (one.size, one.seed))
        assert one.expected == other.expected
        for name, values in one.values.items():
            assert values == pytest.approx([other.values[name][step] for step in (0, 1, 3)], rel=1e-3)


def test_only_what_is_missing_is_run_again(ended: Path, tmp_path: Path) -> None:
    assert conduct(ended) == [f"6 of 6 cells are in {ended}"]
    lines = ended.read_text().splitlines(keepends=True)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[:-1]))
    told = conduct(cut)
    assert told[0] == f"5 of 6 cells are in {cut}"
    assert len(told) == 2
    assert sorted(cut.read_text().splitlines()) == sorted(ended.read_text().splitlines())


def test_an_unknown_network_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(th.UseError, match="no network 'gpt-5' in the studies: there are gpt-pre"):
        study.conduct(tmp_path / "x.jsonl", grid=GRID, networks=["gpt-5"])
    assert not (tmp_path / "x.jsonl").exists()


def record(parameterization: str, width: int, depth: int, **powers: float) -> dict[str, Any]:
    """Values that follow powers of the width; branches fall with the depth as they should."""
    values = []
    for name in study.QUANTITIES:
        power = powers.get(name.replace(" ", "_").replace(".", "_"), 0.0)
        values.append([1.0, 1.0, width**power / (depth if "branch" in name else 1)])
    where = {"parameterization": parameterization, "width": width, "depth": depth, "seed": 0}
    return {"network": "gpt-pre", "optimizer": "adamw", **where, "status": "finished", "values": values}


def test_a_claim_is_the_slope_that_is_furthest_off() -> None:
    sizes = [(64, 4), (128, 4), (256, 4), (128, 2), (128, 8)]
    records = [record("plan", *size, stream=0.05, branch_1=-0.08, logits=3.0) for size in sizes]
    records += [record("standard", *size, change_of_logits=1.0) for size in sizes]
    width, depth = sorted(study.claims(records), key=lambda claim: claim.axis, reverse=True)
    assert (width.plan.quantity, round(width.plan.excess, 6), width.holds) == ("branch.1", -0.08, True)
    assert (width.standard.quantity, round(width.standard.excess, 6)) == ("change of logits", 1.0)
    assert depth.holds
    assert abs(depth.plan.excess) < 1e-9
    records[0]["values"][study.QUANTITIES.index("stream")][-1] = None
    wide = next(claim for claim in study.claims(records) if claim.axis == "width")
    assert math.isnan(wide.plan.value)
    assert not wide.holds
    assert "stream: diverged | no |" in study.table([wide])


def test_figures_are_drawn_from_the_file_alone(ended: Path) -> None:
    printed = report(ended)
    assert "| gpt-pre | adamw | width |" in printed
    for axis in ("width", "depth"):
        svg = ElementTree.fromstring((ended.with_name(f"coordinates-adamw-{axis}.svg")).read_text())
        lines = svg.findall(".//{http://www.w3.org/2000/svg}polyline")
        assert len(lines) == 7 * 2  # quantities, parameterizations
        assert all(len(line.attrib["points"].split()) == 2 for line in lines)
        assert "nan" not in ElementTree.tostring(svg, "unicode")
