"""`theodolite study`: one command for all studies, found by entry points."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from theodolite.cli import main
from theodolite.commands import study as commands

STUDIES = Path(__file__).parents[2] / "theodolite_studies"
NAMES = sorted(page.parent.name.replace("_", "-") for page in STUDIES.glob("*/page.md"))


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["study", *words])
    out, err = capsys.readouterr()
    return int(left.value.code or 0), out, err


def test_every_study_is_an_entry_point_with_records_and_a_page() -> None:
    assert list(commands.installed()) == NAMES
    for name in NAMES:
        folder = STUDIES / name.replace("-", "_")
        assert {"__init__.py", "study.py", "page.md", "records.jsonl"} <= {
            file.name for file in folder.iterdir()
        }
        assert callable(commands.installed()[name].load())


def test_without_studies_it_says_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "entry_points", lambda group: [])
    code, _, err = run("lion", "--draw", capsys=capsys)
    assert code == 2
    assert "pip install -e studies" in err
    code, out, _ = run("--help", capsys=capsys)
    assert "pip install -e studies" in out


def test_a_study_that_cannot_be_imported_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = EntryPoint("broken", "no_such_package:command", commands.GROUP)
    lion = commands.installed()["lion"]
    monkeypatch.setattr(commands, "entry_points", lambda group: [broken, lion])
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run("--help", capsys=capsys)
    assert code == 0
    assert "Does Lion keep every weight" in out
    assert "Not available: no_such_package:command cannot be imported" in out
    code, _, err = run("broken", capsys=capsys)
    assert code == 2
    assert "study broken: no_such_package:command cannot be imported" in err
    assert "Traceback" not in err


def test_a_study_has_the_options_that_it_has_a_use_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    _, lion, _ = run("lion", "--help", capsys=capsys)
    _, goldilocks, _ = run("goldilocks", "--help", capsys=capsys)
    for option in ("--draw", "--out", "--jobs", "--small", "--part"):
        assert option in lion
        assert option in goldilocks
    for option in ("--device", "--engine", "--set", "--summary"):
        assert option not in lion
        assert option in goldilocks


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys\nfrom theodolite.cli import main\n"
        "for words in (['study', '--help'], ['study', 'lion', '--help']):\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], env=os.environ, check=True, capture_output=True)


def test_the_records_of_a_study_are_drawn_into_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("lion", "--draw", capsys=capsys)
    assert code == 0
    assert "Figures: lion/fall.svg" in out
    for file in (tmp_path / "lion").iterdir():
        assert file.read_bytes() == (STUDIES / "lion" / file.name).read_bytes()
    _, small, _ = run("norm-placement", "--small", "--draw", "--out", "figures", capsys=capsys)
    assert "9 of 22 claims hold" in small
    assert (tmp_path / "figures" / "rates.svg").exists()


def test_records_are_for_drawing_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("lion", "lion.jsonl", capsys=capsys)
    assert code == 2
    assert "records are only given with --draw" in err
