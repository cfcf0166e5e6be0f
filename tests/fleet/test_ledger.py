"""What goes into a ledger comes out of it, and nothing that is not a ledger is taken for one."""

from __future__ import annotations

import json
import math
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import theodolite
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.fleet import tables
from theodolite.fleet.ledger import Ledger, LedgerError
from theodolite.fleet.run import Outcome, Run

SPEC = {"steps": 10, "axes": {"lr": [0.1, 0.2]}, "sizes": [[64, 2]]}
PLANNED = Run(
    "mlp-mixture",
    Size(64, 2),
    lr=0.1,
    base=Size(32, 2),
    steps=10,
    options={"betas": (0.9, 0.95)},
    probes=("gradient",),
)
STANDARD = Run("mlp-mixture", Size(128, 4), lr=1 / 3, parameterization="standard", seed=2, steps=10)
FINISHED = Outcome(
    PLANNED,
    "finished",
    step=10,
    held_out=0.1 + 0.2,
    metrics={"loss": ((0, 2.5), (9, 1 / 3)), "gradient": ((0, math.inf), (9, math.nan))},
    readings={"parameters": 12_345, "tokens": 640, "sizes": {"stream": 1.5, "logits": math.nan}},
    seconds=1.25,
    device="cpu",
    engine="processes",
)
DIVERGED = Outcome(STANDARD, "diverged", 3, None, {"loss": ((0, 2.5), (1, 7.5), (2, 1e30))})
FAILED = Outcome(STANDARD, "failed", 0, None, error="Traceback\n  ValueError: 'no'")


def opened(path: Path, **changes: Any) -> Ledger:
    return Ledger.open(path, **{"name": "first", "spec": SPEC, **changes})


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with opened(tmp_path) as ledger:
        yield ledger


def test_a_row_has_every_field_of_the_run_and_of_what_came_of_it(ledger: Ledger) -> None:
    ledger.append(FINISHED)
    (row,) = ledger.rows()
    ended = row.pop("ended")
    assert ended.endswith("+00:00")
    assert row == {
        "identity": PLANNED.identity,
        "workload": "mlp-mixture",
        "width": 64,
        "depth": 2,
        "optimizer": "adamw",
        "parameterization": "plan",
        "lr": 0.1,
        "seed": 0,
        "status": "finished",
        "step": 10,
        "held_out": 0.1 + 0.2,
        "seconds": 1.25,
        "base_width": 32,
        "base_depth": 2,
        "steps": 10,
        "weight_decay": 0.0,
        "decay": "paper",
        "eps": None,
        "vector_lr": None,
        "options.betas": (0.9, 0.95),
        "init_scale": 1.0,
        "temperature": 1.0,
        "schedule": "linear",
        "warmup": 0,
        "final": 0.0,
        "precision": "float32",
        "held_out_batches": 16,
        "every": 1,
        "probes": ("gradient",),
        "evaluate_every": 0,
        "horizon": "none",
        "parameters": 12_345,
        "tokens": 640,
        "sizes.stream": 1.5,
        "sizes.logits": None,
        "device": "cpu",
        "engine": "processes",
        "error": None,
        "attempts": 1,
    }


def test_metrics_come_back_to_the_last_bit_also_where_they_are_not_finite(ledger: Ledger) -> None:
    ledger.append(FINISHED)
    metrics = ledger.metrics(PLANNED.identity)
    assert metrics["loss"] == [(0, 2.5), (9, 1 / 3)]
    (first, last) = metrics["gradient"]
    assert first == (0, math.inf)
    assert last[0] == 9
    assert math.isnan(last[1])


def test_runs_come_back_as_values(ledger: Ledger) -> None:
    ledger.append(FINISHED)
    ledger.append(FAILED)
    assert [run.identity for run in ledger.runs()] == [PLANNED.identity, STANDARD.identity]


def test_a_failed_run_is_not_settled_and_can_be_tried_until_it_is(ledger: Ledger) -> None:
    ledger.append(FAILED)
    ledger.append(replace(FAILED, error="another"))
    assert ledger.settled() == set()
    assert ledger.rows()[0]["error"] == "another"
    ledger.append(DIVERGED)
    assert ledger.settled() == {STANDARD.identity}
    (row,) = ledger.rows()
    assert (row["status"], row["step"], row["error"], row["attempts"]) == ("diverged", 3, None, 3)
    assert ledger.metrics(STANDARD.identity)["loss"][-1] == (2, 1e30)


def test_what_settled_a_run_counts_also_if_an_attempt_fails_later(ledger: Ledger) -> None:
    ledger.append(DIVERGED)
    ledger.append(FAILED)
    (row,) = ledger.rows()
    assert (row["status"], row["attempts"]) == ("diverged", 2)
    assert ledger.settled() == {STANDARD.identity}
    assert len(ledger.metrics(STANDARD.identity)["loss"]) == 3


def test_a_run_settles_once(ledger: Ledger) -> None:
    ledger.append(DIVERGED)
    before = ledger.rows()
    with pytest.raises(UseError, match=rf"run {STANDARD.identity} \(.*\) cannot be added .*settled\(\)"):
        ledger.append(replace(DIVERGED, status="finished", metrics={"loss": ((5, 1.0),)}))
    assert ledger.rows() == before
    ledger.append(FINISHED)
    assert len(ledger.rows()) == 2


@pytest.mark.parametrize(
    "table", ["study", "runs", "environments", "attempts", "metrics", "readings", "digests"]
)
@pytest.mark.parametrize("change", ["UPDATE {} SET rowid = 7", "DELETE FROM {}"])
def test_nothing_that_is_written_can_be_changed_or_taken_out(ledger: Ledger, table: str, change: str) -> None:
    ledger.append(FINISHED)
    column = {"metrics": "step", "readings": "name"}.get(table, "rowid")
    refused = pytest.raises(sqlite3.IntegrityError, match="a ledger is only ever added to")
    with closing(sqlite3.connect(ledger.path)) as shell, refused:
        shell.execute(change.format(table).replace("rowid", column))


def test_tables_and_the_view_say_what_rows_say_to_any_tool(ledger: Ledger) -> None:
    ledger.append(FINISHED)
    ledger.append(FAILED)
    ledger.append(DIVERGED)
    with closing(sqlite3.connect(ledger.path)) as shell:
        found = shell.execute(
            "SELECT identity, width, lr, status, held_out, attempts FROM results ORDER BY lr"
        )
        assert found.fetchall() == [
            (PLANNED.identity, 64, 0.1, "finished", 0.1 + 0.2, 1),
            (STANDARD.identity, 128, 1 / 3, "diverged", None, 2),
        ]
        (spec,) = shell.execute("SELECT spec FROM runs WHERE width = 64").fetchone()
        assert Run.from_dict(json.loads(spec)).identity == PLANNED.identity
        count = "SELECT COUNT(*), SUM(value IS NULL) FROM metrics WHERE name = 'gradient'"
        assert shell.execute(count).fetchone() == (2, 1)
        query = "SELECT value FROM readings WHERE name = 'sizes'"
        assert json.loads(shell.execute(query).fetchone()[0]) == {"stream": 1.5, "logits": None}
        assert shell.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_commit_waits_for_the_disk(ledger: Ledger) -> None:
    full = 2  # https://www.sqlite.org/pragma.html#pragma_synchronous
    assert ledger._connection.execute("PRAGMA synchronous").fetchone() == (full,)


def test_attempts_made_with_the_same_versions_share_one_environment(ledger: Ledger, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("workload = 1")
    own = replace(STANDARD, workload=f"{file}:workload")
    for outcome in (FINISHED, DIVERGED, replace(DIVERGED, run=own)):
        ledger.append(outcome)
    made_with = [attempt.environment for attempt in ledger.attempts()]
    assert made_with[0] == made_with[1]
    import torch

    assert made_with[0]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert made_with[0]["python"] == sys.version.split()[0]
    assert made_with[0]["workload_source"] is None
    # sha256 of the file's bytes, from the tool that comes with every system
    said = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True).stdout
    assert made_with[2] == made_with[0] | {"workload_source": said[:16]}
    with closing(sqlite3.connect(ledger.path)) as shell:
        assert shell.execute("SELECT COUNT(*) FROM environments").fetchone() == (2,)


def test_the_same_study_goes_on(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.append(FINISHED)
    # JSON has no tuples and no whole numbers as names; a spec is compared as it is stored.
    with opened(tmp_path, spec={**SPEC, "sizes": ((64, 2),)}) as ledger:
        assert ledger.settled() == {PLANNED.identity}
        ledger.append(DIVERGED)
    with Ledger.read(tmp_path) as ledger:
        assert (ledger.name, ledger.spec) == ("first", SPEC)
        assert [row["identity"] for row in ledger.rows()] == [PLANNED.identity, STANDARD.identity]


@pytest.mark.parametrize(
    "spec, difference",
    [
        ({**SPEC, "steps": 20}, "steps is 10 there and 20 here"),
        ({**SPEC, "axes": {"lr": [0.1]}}, r"axes.lr is \(0.1, 0.2\) there and \(0.1,\) here"),
        ({"steps": 10}, r"axes.lr is \(0.1, 0.2\) there and not set here; sizes is"),
        ({**SPEC, "seed": 1}, "seed is not set there and 1 here"),
    ],
)
def test_the_same_name_with_another_spec_is_refused_by_what_differs(
    tmp_path: Path, spec: dict[str, Any], difference: str
) -> None:
    opened(tmp_path).close()
    with pytest.raises(UseError, match=f"holds the study 'first' with other settings: {difference}"):
        opened(tmp_path, spec=spec)
    opened(tmp_path).close()  # it is free, and as it was


def test_another_study_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(UseError, match=r"holds the study 'first', not 'second': .* folder \(--out\)"):
        opened(tmp_path, name="second")


def test_a_text_file_is_no_ledger_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.db"
    file.write_text("buy milk\n" * 1000)
    for use in (opened, Ledger.read):
        with pytest.raises(UseError, match=r"notes.db is not a ledger"):
            use(file)
    assert file.read_text() == "buy milk\n" * 1000
    assert [each.name for each in tmp_path.iterdir()] == ["notes.db"]


def test_a_database_of_another_program_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(file)) as shell:
        shell.execute("CREATE TABLE milk (litres)")
    before = file.read_bytes()
    for use in (opened, Ledger.read):
        with pytest.raises(UseError, match=r"other.sqlite is a SQLite file of another program"):
            use(file)
    assert file.read_bytes() == before


@pytest.mark.parametrize("version", [1, 99])
def test_tables_of_another_version_are_refused(tmp_path: Path, version: int) -> None:
    opened(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as shell:
        shell.execute(f"PRAGMA user_version = {version}")
    for use in (opened, Ledger.read):
        with pytest.raises(UseError, match=rf"has tables of version {version}, .* knows version 2. Read it"):
            use(tmp_path)


def test_a_comment_in_a_definition_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(tables, "TABLES", tables.TABLES.replace("-- UTC", "-- the time in UTC"))
        opened(tmp_path).close()
    Ledger.read(tmp_path).close()


def changed(path: Path, statement: str) -> None:
    """What no driver does: the triggers that refuse it are put back afterwards, as they were."""
    with closing(sqlite3.connect(path / "ledger.sqlite", isolation_level=None)) as shell:
        triggers = shell.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            shell.execute(f"DROP TRIGGER {name}")
        shell.execute(statement)
        for _, sql in triggers:
            shell.execute(sql)


ROWS = ("rows", "settled", "sources", "runs")


@pytest.mark.parametrize(
    "statement, ways, said",
    [
        ("UPDATE attempts SET held_out = 0.25 WHERE id = 2", ROWS, r"attempt 2 of run \w+ .* values do not"),
        (
            "UPDATE attempts SET status = 'failed' WHERE id = 2",
            ROWS,
            r"attempt 2 of run \w+ .* values do not",
        ),
        ("UPDATE readings SET value = '640.5' WHERE name = 'tokens'", ROWS, r"attempt 2 of run"),
        ("UPDATE readings SET value = 'no JSON'", ROWS, r"attempt 2 is not whole"),
        ("UPDATE environments SET torch = '1.0'", ROWS, r"attempt 1 of run"),
        ("UPDATE runs SET spec = replace(spec, '0.3333', '0.4333')", ROWS, r"attempt 1 .* run's identity"),
        ("UPDATE runs SET width = 65 WHERE width = 64", ROWS, r"attempt 2 .* run's columns do not match"),
        ("DELETE FROM attempts WHERE id = 1", ROWS, r"attempt 1 is not whole"),
        ("DELETE FROM attempts WHERE id = 2", ROWS, r"attempt 2 is not whole"),
        ("DELETE FROM digests WHERE attempt = 2", ROWS, r"attempt 2 is not whole"),
        (
            "UPDATE metrics SET value = 2.25 WHERE value = 2.5",
            ("metrics",),
            r"attempt 2 .* its metrics do not",
        ),
        ("DELETE FROM metrics WHERE step = 9", ("metrics",), r"attempt 2 .* its metrics do not"),
        ("UPDATE study SET name = 'second'", (), "the name and the spec of its study are not as"),
        ("DROP INDEX settles_once", (), "settles_once is not defined as it was"),
    ],
)
def test_what_is_not_as_it_was_written_is_named_and_not_read(
    tmp_path: Path, statement: str, ways: tuple[str, ...], said: str
) -> None:
    with opened(tmp_path) as ledger:
        ledger.append(FAILED)
        ledger.append(FINISHED)
    changed(tmp_path, statement)
    refused = rf"ledger.sqlite is damaged \(.*{said}.*\). `theodolite ledger salvage .* NEW`"
    with pytest.raises(LedgerError, match=refused):
        opened(tmp_path)
    if not ways:
        with pytest.raises(LedgerError, match=refused):
            Ledger.read(tmp_path)
        return
    with Ledger.read(tmp_path) as ledger:
        for way in ways:
            with pytest.raises(LedgerError, match=refused):
                ledger.metrics(PLANNED.identity) if way == "metrics" else getattr(ledger, way)()
        with pytest.raises(LedgerError, match=refused):
            ledger.export(tmp_path / "out.csv")


def test_salvage_names_what_it_leaves_out(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        for outcome in (FAILED, FINISHED, DIVERGED):
            ledger.append(outcome)
        before = ledger.rows()
    changed(tmp_path, "UPDATE attempts SET held_out = 0.25 WHERE id = 2")
    said: list[str] = []
    with Ledger.salvage(tmp_path, tmp_path / "new", said=said.append) as ledger:
        assert ledger.rows() == before[1:]
    (line,) = said
    assert line == (
        f"left out: attempt 2 of run {PLANNED.identity} is not as it was written: "
        "its values do not match their digest"
    )


def test_salvage_does_not_take_a_ledger_without_tables_for_an_empty_one(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.append(FINISHED)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)) as shell:
        shell.execute("PRAGMA writable_schema = ON")
        shell.execute("DELETE FROM sqlite_master WHERE tbl_name IN ('attempts', 'digests')")
    with pytest.raises(LedgerError, match=r"cannot be salvaged: .* cannot be read \(no such table"):
        Ledger.salvage(tmp_path, tmp_path / "new")


ODD = "no file 'b\udc80d\0' \ud83d\U0001f4d0\r\n"
ODD_STORED = "no file 'b\\udc80d\\x00' \\ud83d\U0001f4d0\r\n"


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_any_text_of_a_run_is_stored_exported_and_read_back(tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    odd = Outcome(
        replace(STANDARD, workload=ODD, seed=2**70, options={ODD: ODD, "infinite": math.inf}),
        "failed",
        0,
        None,
        metrics={ODD: ((0, 1.0),), "": ((0, -0.0),), "none": ()},
        readings={ODD: {ODD: [ODD]}, "": ""},
        device=ODD,
        engine="",
        error=ODD * 500_000,
    )
    with Ledger.open(tmp_path, name=ODD, spec={ODD: ODD}) as ledger:
        ledger.append(odd)
        ledger.append(replace(FAILED, error="\n"))
        ledger.append(FINISHED)
    Ledger.open(tmp_path, name=ODD, spec={ODD: ODD}).close()  # the same study goes on
    with Ledger.read(tmp_path) as before:
        row = before.rows()[0]
        assert (row["workload"], row["seed"], row[f"options.{ODD}"]) == (ODD, 2**70, ODD)
        assert (row["options.infinite"], row[f"{ODD_STORED}.{ODD}"]) == (math.inf, (ODD,))
        assert (row["device"], row["engine"], before.name) == (ODD_STORED, "", ODD_STORED)
        assert row["error"].startswith(ODD_STORED * 1000)
        assert row["error"].endswith(ODD_STORED * 1000)
        assert "characters are left out here" in row["error"]
        assert before.metrics(odd.run.identity) == {ODD_STORED: [(0, 1.0)], "": [(0, 0.0)]}
        file, _ = before.export(tmp_path / f"out.{ending}")
        with Ledger.import_(file, tmp_path / "again") as after:
            assert after.rows() == before.rows()
            assert repr(list(after.attempts())) == repr(list(before.attempts()))
            assert (after.name, after.spec) == (before.name, before.spec)
            assert after.runs()[0].identity == odd.run.identity


def test_a_ledger_that_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UseError, match=r"there is no ledger at .*nowhere/ledger.sqlite"):
        Ledger.read(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "path, said",
    [
        ("file/study", "cannot be written: Not a directory"),
        ("file", "is a file, and its name does not end in .sqlite"),
        ("/proc/study", "the ledger /proc/study/ledger.sqlite cannot be written"),
        ("/proc/1/study.db", "the ledger /proc/1/study.db cannot be written"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UseError, match=said):
        opened(tmp_path / path)


def test_somebody_who_may_only_read_can_read() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        Path(place).chmod(0o755)
        folder = Path(place) / "of somebody else"
        with opened(folder) as ledger:
            ledger.append(FINISHED)
        (folder / "ledger.sqlite").chmod(0o444)
        folder.chmod(0o555)
        program = Path(place) / "read_as_nobody.py"
        program.write_text((Path(__file__).parent / "programs" / program.name).read_text())
        source = Path(theodolite.__file__).parents[1]
        command = [sys.executable, str(program), str(source), str(folder), json.dumps(SPEC)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        folder.chmod(0o755)
    if "there is nobody else" in done.stderr:  # a namespace with one user
        pytest.skip("this root cannot be another user")
    assert done.returncode == 0, done.stderr
    loss, refused = done.stdout.splitlines()
    assert float(loss) == 0.1 + 0.2
    assert refused.startswith(f"the ledger {folder / 'ledger.sqlite'} cannot be written: Permission denied")


def test_one_that_is_read_cannot_be_written(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with Ledger.read(tmp_path) as ledger, pytest.raises(UseError, match="was opened to be read"):
        ledger.append(FINISHED)


def test_an_identity_that_is_not_there_is_named(ledger: Ledger) -> None:
    with pytest.raises(UseError, match="has no run 'abc'"):
        ledger.metrics("abc")


def test_frames_hold_the_rows_and_the_metrics(ledger: Ledger) -> None:
    pandas = pytest.importorskip("pandas")
    for outcome in (FINISHED, FAILED, DIVERGED):
        ledger.append(outcome)
    frame = ledger.frame()
    assert frame.loc[frame.lr == 0.1, "held_out"].tolist() == [0.1 + 0.2]
    assert frame.base_width.tolist() == [32, pandas.NA]
    assert frame.groupby("options.betas").size().to_dict() == {(0.9, 0.95): 1}
    long = ledger.frame_of_metrics()
    assert list(long.columns) == ["identity", "name", "step", "value"]
    losses = long[(long.identity == STANDARD.identity) & (long.name == "loss")]
    assert losses.value.tolist() == [2.5, 7.5, 1e30]
    assert len(long) == 7


def test_empty_frames_are_frames(ledger: Ledger) -> None:
    pytest.importorskip("pandas")
    assert len(ledger.frame()) == 0
    assert len(ledger.frame_of_metrics()) == 0


def test_the_ledger_does_not_need_torch() -> None:
    code = "import sys, theodolite.fleet.ledger; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
