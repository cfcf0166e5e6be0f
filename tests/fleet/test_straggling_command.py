"""`theodolite stragglers`: what it prints and writes, and how it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from theodolite.cli import main


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In each round another of four workers takes 4 seconds, and the others 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    rows = [",".join("4" if turn % 4 == worker else "1" for worker in range(4)) for turn in range(40)]
    path = tmp_path / "times.csv"
    path.write_text("a,b,c,d\n" + "\n".join(rows) + "\n")
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    with pytest.raises(SystemExit) as left:
        main(["stragglers", *map(str, arguments)])
    assert (left.value.code or 0) == status
    printed = capsys.readouterr()
    return printed.out if not status else printed.err


def test_it_prints_what_each_scheme_would_have_taken(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, file, "--overhead", "0.5", "--models", "1")
    assert "Waiting for the slowest worker takes 4.00 times as long as the median worker." in shown
    assert "GC (s = 1) would have saved 62% (62% to 62%) of the time" in shown  # (0.5 + 0.5·2)/4
    assert "M-SGC" not in shown


def test_a_second_measurement_gives_the_overhead(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heavier = file.with_name("twice.csv")
    heavier.write_text("a,b,c,d\n" + "1.25,1.25,1.25,1.25\n" * 4)
    shown = said(capsys, file, "--heavier", heavier, "--load", "2", "--json", "--mu", "0,0.5")
    assert json.loads(shown)["overhead"] == pytest.approx(0.75)
    alone = said(capsys, file, "--load", "2", status=2)
    assert "--load is 2, and there are no times with more examples: give them as --heavier" in alone
    both = said(capsys, file, "--heavier", heavier, "--overhead", "0.5", status=2)
    assert (
        both.strip()
        == "theodolite: --overhead and --heavier both say how much of a step is fixed: give one of the two"
    )


def test_the_page_is_written_and_a_wrong_name_is_refused_before_the_work(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, file, "--out", "stragglers.html")
    page = file.with_name("stragglers.html").read_text(encoding="utf-8")
    assert "GC (s = 1)" in page or "M-SGC" in page
    assert "times.txt" in said(capsys, file.with_name("nowhere.csv"), "--out", "times.txt", status=2)


def test_a_table_has_a_number_in_every_cell(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, file, "--models", "1", "--overhead", "0.5", "--out", "report.csv")
    with file.with_name("report.csv").open(encoding="utf-8") as table:
        rows = {row["scheme"]: row for row in csv.DictReader(table)}
    assert list(rows) == ["wait for all", "leave out", "backup workers", "GC"]
    assert [float(rows["GC"][name]) for name in ("of waiting", "low", "high")] == [0.375] * 3


def test_a_hole_is_named_and_can_be_filled(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(file.read_text().replace("4,1,1,1", ",1,1,1", 1))
    told = said(capsys, file, status=2)
    assert "round 1, worker a: the time is empty" in told
    assert "--missing 60" in told
    assert "4 workers, 40 rounds" in said(capsys, file, "--missing", "4")
