"""Exports as results, unknown formats and rules, and the command."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
from tests.planning.exporting.made import gpt_plan, parts_plan

import theodolite as th
from theodolite.cli import main
from theodolite.core.errors import UseError
from theodolite.planning.exporting import Exported, find_formats

pytestmark = pytest.mark.usefixtures("one_dissection")

PYTHON = {"torch", "huggingface", "torchtitan", "deepspeed", "dion", "megatron"}
TABLES = {"csv", "markdown", "yaml"}


def test_there_are_these_formats() -> None:
    assert set(find_formats()) == PYTHON | TABLES


@pytest.mark.parametrize("format", sorted(PYTHON))
def test_python_files_are_python_and_need_nothing_of_this_library(format: str) -> None:
    tree = ast.parse(gpt_plan().export(format).text)
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        )
    }
    assert "theodolite" not in imported


@pytest.mark.parametrize("format", sorted(PYTHON | TABLES))
def test_how_tensors_were_fused_is_said_once(format: str) -> None:
    plan = parts_plan(("wide", "tall"), "adamw")
    rows = {name: dataclasses.replace(plan["wide"], name=name) for name in ("q", "k")}
    notes = dataclasses.replace(plan, rows=rows).export(format, names={"q": "qk", "k": "qk"}).notes
    assert sum("qk: taken to hold q, k one after the other" in note for note in notes) == 1


@pytest.mark.parametrize("format", sorted(PYTHON | TABLES))
def test_notes_are_in_the_text_where_it_has_comments(format: str) -> None:
    made = gpt_plan("muon", tied=True).export(format) if format != "torchtitan" else gpt_plan().export(format)
    text = " ".join(made.text.replace("#", " ").split())
    if format != "csv":
        for note in made.notes:
            assert " ".join(note.replace("#", " ").split()) in text


@pytest.mark.parametrize("format", sorted(PYTHON | TABLES))
def test_an_export_prints_its_text_and_saves_it(format: str, tmp_path: Path) -> None:
    made = gpt_plan().export(format)
    path = made.save(tmp_path / f"plan{made.suffixes[0]}")
    assert path.read_text(encoding="utf-8") == made.text == f"{made}\n"
    assert "<pre>" in made._repr_html_()


def test_an_export_is_saved_under_its_own_suffixes_only(tmp_path: Path) -> None:
    with pytest.raises(UseError, match=r"its name must end in \.py"):
        gpt_plan().export("torch").save(tmp_path / "plan.json")


def test_an_export_goes_through_json() -> None:
    made = gpt_plan().export("csv")
    assert Exported.from_dict(made.to_dict()) == made


def test_an_unknown_format_is_refused_with_the_nearest() -> None:
    with pytest.raises(UseError, match=r"format is 'deepsped'\. Did you mean 'deepspeed'\?"):
        gpt_plan().export("deepsped")


@pytest.mark.parametrize("format", sorted(PYTHON))
def test_a_rule_without_an_optimizer_there_is_refused_with_the_way_out(format: str) -> None:
    with pytest.raises(UseError, match=r"no optimizer for the rule sophia: .*csv, markdown and yaml"):
        gpt_plan("sophia").export(format)


@pytest.mark.parametrize("format", sorted(PYTHON - {"torch", "huggingface"}))
def test_an_option_without_a_counterpart_is_refused_by_name(format: str) -> None:
    plan = gpt_plan()
    plan = th.Plan(**{**vars(plan), "options": {"amsgrad": True}})
    with pytest.raises(UseError, match=r"the option amsgrad=True of adamw has no counterpart in"):
        plan.export(format)


def test_the_title_says_what_is_exported() -> None:
    assert "muon, 16 × 2 → 32 × 4" in parts_plan().export("torch").text.splitlines()[0]


def _run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        main(["plan", "gpt-sotu", "--width", "64", "--base-width", "32", "--depth", "1", *words])
        status = 0
    except SystemExit as error:
        status = int(error.code or 0)
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_prints_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = _run("--lr", "0.004", "--format", "torch", capsys=capsys)
    assert status == 0
    ast.parse(out)
    assert "def make_optimizers(model):" in out


def test_the_command_saves_the_text_and_names_tensors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.csv"
    names = ("--name", "blocks.*=model.layers.*", "--name", "*=*")
    status, out, err = _run("--lr", "0.004", "--format", "csv", "--out", str(path), *names, capsys=capsys)
    assert (status, out) == (0, "")
    assert str(path) in err
    assert "\nmodel.layers.0." in path.read_text(encoding="utf-8")


def test_the_command_still_saves_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    status, _, _ = _run("--lr", "0.004", "--out", str(path), capsys=capsys)
    assert status == 0
    assert th.Plan.load(path).lr == 0.004


@pytest.mark.parametrize(
    "words, said",
    [
        (("--format", "torh"), "--format is 'torh'. Did you mean 'torch'?"),
        (("--format", "torch", "--json"), "--format and --json print different things"),
        (("--name", "a=b"), "--name gives names for another trainer"),
        (("--format", "torch", "--name", "a"), "--name a: write PATTERN=NAME"),
        (("--format", "torch", "--out", "plan.json"), "must end in .py"),
        (("--format", "csv", "--name", "layer.*=x.*"), "no rule matches"),
    ],
)
def test_the_command_refuses_in_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = _run("--lr", "0.004", *words, capsys=capsys)
    assert (status, out) == (2, "")
    assert said in " ".join(err.split())
