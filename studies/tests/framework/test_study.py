"""A study runs what is missing, tells what failed, and is reported from its records alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from theodolite import UseError
from theodolite_studies.framework.claims import Claim, at_most, per
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.study import RECORDS, Cell, Setting, Study, conduct, read, report


def cells(setting: Setting) -> list[Cell]:
    networks = ("mlp",) if setting.small else ("mlp", "gpt")
    return [{"network": network, "seed": seed} for network in networks for seed in range(2)]


def run(cell: Cell, *_: object) -> list[Record]:
    """Two records of a cell, but for one cell that fails."""
    if (cell["network"], cell["seed"]) == ("gpt", 1):
        raise ValueError("no GPT today")
    return [{"step": step, "loss": 1.0 / (step + 1)} for step in range(2)]


def figures(records: list[Record]) -> list[tuple[str, str]]:
    return [("losses", f"<svg>{len(records)}</svg>")]


CLAIMS = (Claim("the loss falls", "falls", "≤ 0.9", at_most(0.9, per("network", "loss", step=1))),)
STUDY = Study("toy", cells, run, CLAIMS, figures, notes=lambda records: f"{len(records)} records.")


def made(out: Path, **options: Any) -> tuple[int, list[str]]:
    told: list[str] = []
    return conduct(STUDY, out, tell=told.append, **options), told


def test_cells_that_fail_are_told_and_tried_again(tmp_path: Path) -> None:
    status, told = made(tmp_path)
    assert status == 1
    assert told[0] == f"0 of 4 cells are in {tmp_path / RECORDS}"
    assert "4/4  gpt 1: failed: ValueError: no GPT today" in told
    assert told[-1] == "1 of 4 cells failed; the same command tries them again"
    status, told = made(tmp_path)
    assert (status, told[0]) == (1, f"3 of 4 cells are in {tmp_path / RECORDS}")
    assert made(tmp_path, setting=STUDY.small) == (0, [f"2 of 2 cells are in {tmp_path / RECORDS}"])


def test_a_cell_that_was_being_written_is_run_again(tmp_path: Path) -> None:
    made(tmp_path, setting=STUDY.small)
    whole = (tmp_path / RECORDS).read_text()
    (tmp_path / RECORDS).write_text(whole[:-3])  # the second of the two records of the last cell
    assert made(tmp_path, setting=STUDY.small)[1][0] == f"1 of 2 cells are in {tmp_path / RECORDS}"
    assert (tmp_path / RECORDS).read_text() == whole


def test_the_report_is_made_from_a_folder_or_from_a_file(tmp_path: Path) -> None:
    made(tmp_path, parts=["mlp"])
    said = report(STUDY, tmp_path)
    assert "0.50 ± 0.00 (mlp)" in said
    assert said.endswith(f"4 records.\n\nFigures: {tmp_path / 'losses.svg'}")
    assert (tmp_path / "losses.svg").read_text() == "<svg>4</svg>"
    other = tmp_path / "other.jsonl"
    (tmp_path / RECORDS).rename(other)
    report(STUDY, other)
    report(STUDY, other, tmp_path / "figures")
    assert (tmp_path / "other-losses.svg").exists()
    assert (tmp_path / "figures" / "other-losses.svg").exists()


def test_records_of_something_else_and_no_records_are_refused(tmp_path: Path) -> None:
    made(tmp_path, parts=["mlp"])
    with pytest.raises(UseError, match="is about 'toy': it is no file of the study 'other'"):
        read(dataclasses.replace(STUDY, name="other"), tmp_path)
    (tmp_path / RECORDS).write_text('{"study": "toy"}\n')
    with pytest.raises(UseError, match="holds no records yet: run the study first"):
        report(STUDY, tmp_path)
    (tmp_path / RECORDS).write_text('{"study": "toy", "steps": 3}\n')
    with pytest.raises(UseError, match="they are about something else"):
        read(STUDY, tmp_path)


def test_a_study_may_give_its_records_another_form(tmp_path: Path) -> None:
    made(tmp_path, parts=["mlp"])
    as_array = dataclasses.replace(
        STUDY,
        data=lambda records, setting: np.array([one["loss"] for one in records]),
        claims=lambda losses: [],
        figures=lambda losses: [],
        notes=lambda losses: f"mean {losses.mean():g}",
    )
    assert report(as_array, tmp_path) == "mean 0.75"
