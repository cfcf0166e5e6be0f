"""A ledger goes out as Parquet or CSV and comes back the same."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Outcome, Run

RUN = Run("mlp-mixture", Size(64, 2), lr=1 / 3, parameterization="standard", options={"betas": (0.9, 0.95)})
NASTY = 'Traceback:\r\n  "quoted", and\n\tµP \U0001f4d0 ' + "long " * 40_000
OUTCOMES = (
    Outcome(RUN, "failed", 0, None, error=NASTY),
    Outcome(
        RUN,
        "finished",
        100,
        2**-1074,
        {
            "loss": tuple((step, 1 / (step + 3)) for step in range(100)),
            "gradient": ((0, math.inf), (1, -0.0)),
        },
        {
            "parameters": 2**53 + 1,
            "sizes": {"stream": [1.5, None]},
            "residual": 1 / 3,
            "iterations": math.inf,
        },
        seconds=1e-9,
    ),
    Outcome(
        replace(RUN, seed=1), "diverged", 1, None, {"loss": ((0, 5e-324),), "gradient": ((0, math.nan),)}
    ),
    Outcome(replace(RUN, seed=2), "failed", 0, None, error="once"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Ledger.open(
        tmp_path, name="µ-transfer", spec={"axes": {"lr": [0.1]}, "title": "Größe, Rate"}
    ) as ledger:
        for outcome in OUTCOMES:
            ledger.append(outcome)
    return tmp_path


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_what_comes_back_is_equal(folder: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    with Ledger.read(folder) as before:
        written = before.export(folder / f"out.{ending}")
        assert [file.name for file in written] == [f"out.{ending}", f"out.metrics.{ending}"]
        with Ledger.import_(written[0], folder / "again") as after:
            assert (after.name, after.spec) == (before.name, before.spec)
            assert after.rows() == before.rows()
            assert after.settled() == before.settled() == {RUN.identity, replace(RUN, seed=1).identity}
            # repr tells -0.0 from 0.0, and nan is like nan
            assert repr(list(after.attempts())) == repr(list(before.attempts()))
            assert after.runs() == before.runs()
            assert after.rows()[0]["iterations"] == math.inf
            assert after.rows()[0]["attempts"] == 2
    # A driver goes on with it.
    spec = {"axes": {"lr": [0.1]}, "title": "Größe, Rate"}
    with Ledger.open(folder / "again", name="µ-transfer", spec=spec) as ledger:
        with pytest.raises(UseError, match="cannot be added"):
            ledger.append(OUTCOMES[1])
        ledger.append(replace(OUTCOMES[3], status="finished", error=None))


def test_other_tools_read_the_csv(folder: Path) -> None:
    with Ledger.read(folder) as ledger:
        lines, values = ledger.export(folder / "out.csv")
    with values.open(newline="") as file:
        losses = [row for row in csv.DictReader(file) if row["name"] == "loss" and row["attempt"] == "2"]
    assert [float(row["value"]) for row in losses] == [1 / (step + 3) for step in range(100)]
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(lines)
    assert frame.status.tolist() == ["failed", "finished", "diverged", "failed"]
    assert frame.lr.tolist() == pytest.approx([1 / 3] * 4, rel=1e-15)
    assert frame.error[0] == NASTY
    # JSON has no infinity: it is a number that is too large for a float.
    assert json.loads(frame.readings[1], parse_constant=pytest.fail)["iterations"] == math.inf


def test_other_tools_read_the_parquet(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    with Ledger.read(folder) as ledger:
        lines, values = ledger.export(folder / "out.parquet")
    joined = pandas.read_parquet(values).merge(pandas.read_parquet(lines), on=["attempt", "identity"])
    assert joined[(joined.name == "loss") & (joined.seed == 1)].value.tolist() == [5e-324]


def test_a_number_that_was_changed_by_hand_is_found(folder: Path) -> None:
    with Ledger.read(folder) as ledger:
        lines, _ = ledger.export(folder / "out.csv")
    text = lines.read_bytes()
    lines.write_bytes(text.replace(f",adamw,standard,{1 / 3},".encode(), b",adamw,standard,0.25,", 1))
    with pytest.raises(UseError, match=rf"attempt 1 .*: lr is 0.25, but by the rest .* is {1 / 3}"):
        Ledger.import_(lines, folder / "again")
    assert not (folder / "again" / "ledger.sqlite").exists()


@pytest.mark.parametrize(
    "old, new, said",
    [
        (
            ",failed,",
            ",diverged,",
            r"attempt 1 of run \w{16} is not as it was exported: its values do not match",
        ),
        ("5e-324", "1e-323", r"attempt 2 of run \w{16} is not as it was exported: its values do not match"),
        ("9007199254740993", "9007199254740992", r"attempt 2 of run"),
        ('""seed"": 2', '""seed"": 3', r"attempt 4 .* its run's value does not match its run's identity"),
        ('""seed"": 2', '""seed"": ', r"attempt 4 of run \w{16} is not as it was exported: Expecting value"),
        ("µ-transfer", "transfer", r"the study is not as it was exported"),
        (",4,", ",5,", r"has 4 attempts, and 5 were exported"),
    ],
)
def test_what_was_changed_by_hand_is_refused(folder: Path, old: str, new: str, said: str) -> None:
    with Ledger.read(folder) as ledger:
        lines, _ = ledger.export(folder / "out.csv")
    text = lines.read_bytes()
    assert old.encode() in text
    lines.write_bytes(text.replace(old.encode(), new.encode(), 1))
    with pytest.raises(UseError, match=rf"out.csv.*{said}"):
        Ledger.import_(lines, folder / "again")
    assert not (folder / "again" / "ledger.sqlite").exists()


def test_lines_that_are_missing_are_missed(folder: Path) -> None:
    with Ledger.read(folder) as ledger:
        lines, _ = ledger.export(folder / "out.csv")
    limit = csv.field_size_limit(2**31 - 1)
    with lines.open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    csv.field_size_limit(limit)
    for left in (rows[:-1], rows[1:], [*rows, rows[-1]], rows[::-1]):
        with lines.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([head, *left])
        with pytest.raises(UseError, match=r"attempts, and 4 were exported, numbered from 1"):
            Ledger.import_(lines, folder / "again")


def test_a_run_that_settles_twice_is_no_ledger(folder: Path) -> None:
    with Ledger.read(folder) as ledger:
        name, spec, every = ledger.name, ledger.spec, list(ledger.attempts())
    with pytest.raises(UseError, match=r"is no ledger: UNIQUE constraint failed: attempts.run"):
        Ledger.written(folder / "again", name, spec, iter([*every, every[1]]))
    assert list((folder / "again").iterdir()) == []


def test_values_that_are_missing_are_missed(folder: Path) -> None:
    with Ledger.read(folder) as ledger:
        lines, values = ledger.export(folder / "out.csv")
    text = values.read_text(encoding="utf-8").splitlines(keepends=True)
    values.write_text("".join(text[:-5]), encoding="utf-8")
    with pytest.raises(UseError, match=r"attempt 2 of run \w{16} .* its metrics do not match their digest"):
        Ledger.import_(lines, folder / "again")
    values.unlink()
    with pytest.raises(UseError, match=r"out.metrics.csv is not there: an export is two files"):
        Ledger.import_(lines, folder / "again")


def test_what_is_not_an_export_is_refused(folder: Path) -> None:
    for name in ("other.csv", "other.metrics.csv"):
        (folder / name).write_text("a,b\n1,2\n")
    with pytest.raises(UseError, match=r"other.csv is not an export of a ledger: it has no column attempt"):
        Ledger.import_(folder / "other.csv", folder / "again")
    with (
        Ledger.read(folder) as ledger,
        pytest.raises(UseError, match=r"ends in .json: an export is a .parquet"),
    ):
        ledger.export(folder / "out.json")
    pytest.importorskip("pyarrow")
    for name in ("other.parquet", "other.metrics.parquet"):
        (folder / name).write_text("a,b\n1,2\n")
    with pytest.raises(UseError, match=r"other.parquet is not Parquet"):
        Ledger.import_(folder / "other.parquet", folder / "again")


def test_a_ledger_is_not_imported_over_another(folder: Path) -> None:
    with Ledger.read(folder) as ledger:
        lines, _ = ledger.export(folder / "out.csv")
        before = ledger.rows()
        with pytest.raises(UseError, match=r"ledger.sqlite is there already"):
            Ledger.import_(lines, folder)
        assert ledger.rows() == before


def test_an_empty_ledger_has_nothing_to_export(tmp_path: Path) -> None:
    refused = pytest.raises(UseError, match="has no runs yet")
    with Ledger.open(tmp_path, name="empty", spec={}) as ledger, refused:
        ledger.export(tmp_path / "out.csv")
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_a_folder_that_is_not_there_is_named(folder: Path) -> None:
    with Ledger.read(folder) as ledger, pytest.raises(UseError, match=r"nowhere/out.csv cannot be written"):
        ledger.export(folder / "nowhere" / "out.csv")
