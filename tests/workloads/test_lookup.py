"""What the user types finds the workload, or an answer that says what to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from theodolite import UseError, workload
from theodolite.workloads.lookup import function_in_file

GOOD = """
from helper_beside import loss
from theodolite import Size, Workload

def build(width, depth): ...
def batch(seed, step): ...

mine = Workload("mine", build, batch, loss, Size(8, 2))
number = 7

def make(): return Workload("made", build, batch, loss)
def make_nothing(): return None
def make_trouble(): return 1 / 0
def make_for(width): return mine
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    (tmp_path / "helper_beside.py").write_text("def loss(logits, targets): ...\n")
    path = tmp_path / "mymodel.py"
    path.write_text(GOOD)
    return path


def test_a_workload_of_mine_is_found_by_file_and_name(file: Path) -> None:
    found = workload(f"{file}:mine")
    assert (found.name, found.size.width) == ("mine", 8)


def test_a_function_that_returns_one_will_do(file: Path) -> None:
    assert workload(f"{file}:make").name == "made"


def test_the_path_may_have_no_utf8(file: Path) -> None:
    odd = file.rename(file.with_name("odd\udc80.py"))
    assert workload(f"{odd}:mine").name == "mine"


def test_the_path_may_be_relative(file: Path, monkeypatch) -> None:
    monkeypatch.chdir(file.parent)
    assert workload("mymodel.py:mine").name == "mine"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nine", r"mymodel\.py has no 'nine'\. Its workloads are mine$"),
        ("number", r"mymodel\.py: number is an int, neither a Workload nor a function that returns one"),
        ("make_nothing", r"make_nothing\(\) returned a NoneType, not a Workload"),
        ("make_trouble", r"make_trouble\(\) failed: ZeroDivisionError: division by zero \(line 13\)"),
        ("make_for", r"make_for\(\) failed: TypeError: make_for\(\) missing 1 required positional argument"),
    ],
)
def test_a_wrong_name_is_answered_with_what_is_there(file: Path, name: str, message: str) -> None:
    with pytest.raises(UseError, match=message):
        workload(f"{file}:{name}")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "import torch\nimport no_such_package\n",
            r"ModuleNotFoundError: No module named 'no_such_package' \(line 2\)",
        ),
        ("x = 1\ny = (\n", r"SyntaxError: '\(' was never closed \(mymodel\.py, line 2\)"),
        ("import sys\n\nsys.exit(3)\n", r"SystemExit: 3 \(line 3\)"),
        ("def f():\n    raise KeyError('gone')\n\nf()\n", r"KeyError: 'gone' \(line 2\)"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why_and_where(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    with pytest.raises(UseError, match=rf"mymodel\.py could not be imported: {message}"):
        workload(f"{file}:mine")


def test_a_file_without_any_workload_says_so(file: Path) -> None:
    file.write_text("x = 1\n")
    with pytest.raises(UseError, match=r"has no 'mine'\. It has no Workload at all"):
        workload(f"{file}:mine")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gpt-soto", r"no workload 'gpt-soto'\. Did you mean 'gpt-sotu'\? Built in are gpt-sotu, gpt-enwik8"),
        ("zzz", r"there is no workload 'zzz'\. Built in are"),
        ("", r"there is no workload ''\. Built in are"),
        ("nowhere.py:mine", r"nowhere\.py is not there \(looked for /"),
        ("mymodel.py", r"mymodel\.py names a file but no workload in it: write mymodel\.py:name"),
        ("hf:nowhere.json", r"nowhere\.json is not there: give hf: the path of a config\.json on disk"),
        ("diffuser:config.json", r"no workload 'diffuser:config\.json'.* diffusers:path/to/config\.json"),
    ],
)
def test_what_cannot_be_meant_is_answered_with_what_can(spec: str, message: str) -> None:
    with pytest.raises(UseError, match=message):
        workload(spec)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(UseError, match="looked up by a string such as 'gpt-sotu', not by an int"):
        workload(3)


PLAIN = """
import {helper}
from theodolite import Workload

def build(width, depth): return {helper}.word
def late(width, depth):
    import lazy_beside
    return lazy_beside.word

mine = Workload("mine", build, build, build)
lazy = Workload("lazy", late, late, late)
"""


def _write(folder: Path, helper: str, word: str) -> str:
    folder.mkdir()
    (folder / f"{helper}.py").write_text(f"word = {word!r}\n")
    (folder / "lazy_beside.py").write_text(f"word = {word!r}\n")
    (folder / "model.py").write_text(PLAIN.format(helper=helper))
    return str(folder / "model.py")


def test_two_files_each_have_the_helper_beside_them(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    first, second = (_write(tmp_path / word, "common_helper", word) for word in ("first", "second"))
    built = [workload(f"{file}:mine").build for file in (first, second, first)]
    assert [build(1, 1) for build in built] == ["first", "second", "first"]


def test_a_module_beside_the_file_comes_before_an_installed_one(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "popular_name.py").write_text("word = 'installed'\n")
    monkeypatch.setattr("sys.path", [str(tmp_path / "installed"), *__import__("sys").path])
    file = _write(tmp_path / "mine", "popular_name", "mine")
    assert workload(f"{file}:mine").build(1, 1) == "mine"


def test_a_module_beside_the_file_can_be_imported_by_build(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    file = _write(tmp_path / "mine", "other_helper", "mine")
    assert workload(f"{file}:lazy").build(1, 1) == "mine"


def test_a_function_of_a_file_is_found_and_what_is_none_is_named(file: Path) -> None:
    assert function_in_file(f"{file}:make_trouble", "--optimizer").__name__ == "make_trouble"
    with pytest.raises(UseError, match=r"number in .*mymodel\.py is an int, which cannot be called"):
        function_in_file(f"{file}:number", "--optimizer")
    with pytest.raises(UseError, match=r"--optimizer: .*mymodel\.py has no 'make_troubles'. Did you mean"):
        function_in_file(f"{file}:make_troubles", "--optimizer")
