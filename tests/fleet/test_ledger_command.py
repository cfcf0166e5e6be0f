"""`theodolite ledger` shows what is there, and says what is wrong."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from theodolite.cli import main
from theodolite.core.size import Size
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.run import Outcome, Run

RUN = Run("mlp-mixture", Size(64, 2), lr=0.1, parameterization="standard")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "120")
    with Ledger.open(tmp_path, name="first", spec={}) as ledger:
        for seed in range(45):
            ledger.append(Outcome(replace(RUN, seed=seed), "finished", 100, 1 + seed / 1000))
        ledger.append(Outcome(replace(RUN, seed=45), "diverged", 7, None))
        ledger.append(
            Outcome(replace(RUN, seed=46), "failed", 0, None, error="Traceback\nValueError: no [bold]")
        )
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as left:
        main(["ledger", *map(str, arguments)])
    assert not left.value.code
    return capsys.readouterr().out


def test_show_lists_what_differs_and_says_once_what_does_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head, same, _, columns, _, *lines = said(capsys, "show", folder).splitlines()
    assert head == "first: 47 runs: 45 finished, 1 diverged, 1 failed"
    assert same.startswith("workload mlp-mixture, width 64, depth 2, optimizer adamw")
    assert columns.split() == ["run", "seed", "status", "held_out", "seconds"]
    assert lines[0].split() == [replace(RUN, seed=7).identity, "7", "finished", "1.007", "0.0"]
    assert lines[-3].split()[1:] == ["45", "diverged", "at", "7", "0.0"]
    assert lines[-1] == "These are the last 40; --all shows all"
    assert len(said(capsys, "show", folder, "--all").splitlines()) == 5 + 47


def test_show_has_a_column_for_each_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Ledger.open(tmp_path, name="judged", spec={}) as ledger:
        ledger.append(Outcome(RUN, "finished", 100, 1.5, {}, {"tokens": 640, "residual": 0.25}))
        never = {"tokens": 640, "iterations": math.inf}
        ledger.append(Outcome(replace(RUN, seed=1), "finished", 100, 2.5, {}, never))
    *_, columns, _, first, second = said(capsys, "show", tmp_path).splitlines()
    assert columns.split() == ["run", "seed", "status", "held_out", "residual", "iterations", "seconds"]
    assert first.split()[1:] == ["0", "finished", "1.5", "0.25", "0.0"]
    assert second.split()[1:] == ["1", "finished", "2.5", "inf", "0.0"]


def test_show_tells_runs_of_other_batches_and_tokens_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Ledger.open(tmp_path, name="batches", spec={}) as ledger:
        for batch, tokens in ((16, 1600), (32, 3200)):
            size = Size(64, 2, batch=batch, tokens=tokens)
            ledger.append(Outcome(replace(RUN, size=size), "finished", 100, 1.5))
    _, same, _, columns, _, first, second = said(capsys, "show", tmp_path).splitlines()
    assert "none" not in same  # no rule for them, as everywhere
    assert columns.split()[1:3] == ["batch", "planned_tokens"]
    assert first.split()[1:3] == ["16", "1600"]
    assert second.split()[1:3] == ["32", "3200"]


def test_show_failed_prints_the_traceback_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    identity = replace(RUN, seed=46).identity
    shown = said(capsys, "show", folder, "--failed")
    assert shown.endswith(f"\n{identity}, attempt 1\nTraceback\nValueError: no [bold]\n")


def test_a_damaged_ledger_is_salvaged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "ledger.sqlite"
    file.write_bytes(file.read_bytes()[: -12 * 4096])
    new = folder / "new.db"
    *left_out, last = said(capsys, "salvage", file, new).splitlines()
    assert last.startswith(f"{new}: ")
    assert left_out
    assert all(line.startswith("left out: attempt ") for line in left_out)
    with pytest.raises(SystemExit) as left:
        main(["ledger", "show", str(folder)])
    assert left.value.code == 2
    assert f"`theodolite ledger salvage {file} NEW`" in capsys.readouterr().err
    with Ledger.read(new) as salvaged:
        assert 0 < len(salvaged.rows()) < 47
        assert all(row["held_out"] == 1 + row["seed"] / 1000 for row in salvaged.rows()[:45])


def test_there_is_no_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["ledger", "show", str(tmp_path)])
    assert left.value.code == 2
    assert "theodolite: there is no ledger at" in capsys.readouterr().err


def test_workloads_that_runs_name_are_not_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "canary.py").write_text("open('has-run', 'w').close()")
    with Ledger.open("runs", name="first", spec={}) as ledger:
        for width in (16, 32, 64, 128):
            named = replace(RUN, workload="canary.py:workload", size=Size(width, 2))
            ledger.append(Outcome(named, "finished", 100, 2 / width))
    said(capsys, "show", "runs")
    said(capsys, "export", "runs", "runs.csv")
    said(capsys, "import", "runs.csv", "again")
    said(capsys, "salvage", "runs", "salvaged")
    with pytest.raises(SystemExit):
        main(["fit", "runs", "--form", "power", "--columns", "x=width", "--draws", "20"])
    assert "4 points" in capsys.readouterr().out
    assert not (tmp_path / "has-run").exists()
