"""The study of coordinates resumes, holds what the probe gives, and is reported from its file alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import theodolite as th
from theodolite_studies.coordinates import study
from theodolite_studies.coordinates.report import tracks_of
from theodolite_studies.framework.networks import network
from theodolite_studies.framework.records import read_records
from theodolite_studies.framework.study import RECORDS, conduct, report

GRID = study.CoordinateSetting(
    widths=(32, 64),
    depths=(1, 2),
    centre=th.Size(32, 1),
    base=th.Size(32, 1),
    steps=3,
    seeds=(0, 1),
    num=2,
    length=16,
)
TINY = dataclasses.replace(study.STUDY, full=GRID)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a study that has ended."""
    path = tmp_path_factory.mktemp("study")
    torch.set_num_threads(1)
    made(path)
    return path


def made(path: Path) -> list[str]:
    told: list[str] = []
    assert conduct(TINY, path, parts=["gpt-pre", "adamw"], tell=told.append) == 0
    return told


def test_records_hold_what_the_probe_gives(ended: Path) -> None:
    _, records = read_records(ended / RECORDS)
    assert len(records) == 2 * 3 * 2  # parameterizations, sizes, seeds
    made = th.probes.coordinates(
        network("gpt-pre", num=2, length=16), GRID.sizes, base=GRID.base, lr=2**-8, steps=3, seeds=(0, 1)
    )
    kept = tracks_of(records, "gpt-pre", "adamw", "plan")
    assert {(track.size, track.seed) for track in kept} == {(track.size, track.seed) for track in made.tracks}
    for one in kept:
        (other,) = (track for track in made.tracks if (track.size, track.seed) == (one.size, one.seed))
        assert one.expected == other.expected
        for name, values in one.values.items():
            assert values == pytest.approx([other.values[name][step] for step in (0, 1, 3)], rel=1e-3)


def test_only_what_is_missing_is_run_again(ended: Path, tmp_path: Path) -> None:
    assert made(ended) == [f"12 of 12 cells are in {ended / RECORDS}"]
    lines = (ended / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / RECORDS).write_text("".join(lines[:-1]))
    told = made(tmp_path)
    assert told[0] == f"11 of 12 cells are in {tmp_path / RECORDS}"
    assert len(told) == 2
    assert sorted((tmp_path / RECORDS).read_text().splitlines()) == sorted(map(str.rstrip, lines))


def test_an_unknown_network_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(th.UseError, match="no part 'gpt-5': it has gpt-pre, gpt-post"):
        conduct(TINY, tmp_path / "x", parts=["gpt-5"])
    assert not (tmp_path / "x").exists()


def test_figures_are_drawn_from_the_file_alone(ended: Path) -> None:
    assert "gpt-pre, adamw: sizes do not depend on the width" in report(TINY, ended)
    for axis in ("width", "depth"):
        svg = ElementTree.fromstring((ended / f"adamw-{axis}.svg").read_text())
        lines = svg.findall(".//{http://www.w3.org/2000/svg}polyline")
        assert len(lines) == 7 * 2  # quantities, parameterizations
        assert all(len(line.attrib["points"].split()) == 2 for line in lines)
        assert "nan" not in ElementTree.tostring(svg, "unicode")
