"""The table of docs/architecture.md against the imports, those inside functions included.

The list of modules on that page is made of their first lines: `python -m tests.test_layers` writes it.
"""

from __future__ import annotations

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "theodolite"
PAGE = ROOT / "docs" / "architecture.md"
LONGEST = 450
"""Lines of a file."""


@functools.cache
def allowed() -> dict[str, frozenset[str]]:
    """By folder: the folders it may import; `everything above` is all of the rows before."""
    rows = re.findall(r"^\| `(\w+)(?:/|\.py)` \| .* \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.M)
    found: dict[str, frozenset[str]] = {}
    for name, uses in rows:
        found[name] = frozenset(found if uses == "everything above" else re.findall(r"`(\w+)`", uses))
    return found


@functools.cache
def imports() -> dict[str, dict[str, list[str]]]:
    """By folder: what it imports of the others, and where."""
    found: dict[str, dict[str, list[str]]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        if parts in (("__init__",), ("__main__",)):
            continue  # the face: it loads what it is asked for
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for target in imported(node):
                if target != parts[0]:
                    where = f"{file.relative_to(ROOT)}:{node.lineno}"
                    found.setdefault(parts[0], {}).setdefault(target, []).append(where)
    return found


def imported(node: ast.AST) -> list[str]:
    """The folders of the library that a statement imports."""
    names: list[str] = []
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        module = node.module or ""
        names = [f"{module}.{one.name}" for one in node.names] if module == "theodolite" else [module]
    elif isinstance(node, ast.Import):
        names = [one.name for one in node.names]
    parts = [name.split(".") for name in names]
    return [
        one[1] for one in parts if one[0] == "theodolite" and len(one) > 1 and (PACKAGE / one[1]).is_dir()
    ]


def test_every_folder_has_its_row() -> None:
    folders = {one.name for one in PACKAGE.iterdir() if (one / "__init__.py").exists()}
    assert set(allowed()) == folders | {"cli"}


@pytest.mark.parametrize("folder", sorted(allowed()))
def test_a_folder_imports_what_its_row_allows(folder: str) -> None:
    used = imports().get(folder, {})
    forbidden = {target: places for target, places in used.items() if target not in allowed()[folder]}
    assert not forbidden


@pytest.mark.parametrize("folder", sorted(set(allowed()) - {"commands", "cli"}))
def test_a_row_allows_what_is_used_and_no_more(folder: str) -> None:
    assert allowed()[folder] == imports().get(folder, {}).keys() & allowed().keys()


def test_there_is_no_cycle_and_the_rows_stand_in_their_order() -> None:
    list(TopologicalSorter(allowed()).static_order())  # raises CycleError
    seen: set[str] = set()
    for folder, uses in allowed().items():
        assert uses <= seen, f"{folder} stands above what it imports"
        seen.add(folder)


def test_no_file_is_too_long_to_be_read_at_once() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "studies" / "theodolite_studies").rglob("*.py")]
    lengths = {
        str(file.relative_to(ROOT)): len(file.read_text(encoding="utf-8").splitlines()) for file in files
    }
    assert {file: length for file, length in lengths.items() if length > LONGEST} == {}


OF_WHOLE_FOLDERS = {
    "controllers": ["cuda"],
    "optimizers": ["absorption", "cuda", "every", "slopes", "tables", "vectorised"],
    "surveying": ["bad_input", "browser"],
}
"""Tests of all that a folder holds; every other file of tests is named after the module it tests."""


def test_test_files_are_named_after_what_they_test() -> None:
    strangers = []
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        folder, subject = file.parent.relative_to(ROOT / "tests"), file.stem.removeprefix("test_")
        if (
            not (PACKAGE / folder).is_dir()
            or folder == Path()
            or subject in OF_WHOLE_FOLDERS.get(str(folder), ())
        ):
            continue
        modules = {one.stem for one in (PACKAGE / folder).iterdir()}
        if not any(subject == one or subject.startswith(f"{one}_") for one in modules):
            strangers.append(str(file.relative_to(ROOT)))
    assert strangers == []


MARKS = "<!-- modules: made by python -m tests.test_layers -->\n", "<!-- end of modules -->\n"


def modules() -> str:
    """For each folder its files, with the first line of each."""
    parts = []
    for folder in allowed():
        here = PACKAGE / folder
        files = [
            file for file in sorted(here.rglob("*.py")) if file.name != "__init__.py" or file.parent != here
        ]
        if not files:
            continue
        parts.append(f"\n### `{folder}/`\n\n{first_line(here / '__init__.py')}\n\n| file | |\n|---|---|\n")
        for file in files:
            name = file.relative_to(here)
            shown = f"{name.parent}/" if name.name == "__init__.py" else str(name)
            parts.append(f"| `{shown}` | {first_line(file)} |\n")
    return "".join(parts) + "\n"


def first_line(file: Path) -> str:
    """The first sentence of a module's documentation."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def test_the_page_lists_the_modules_as_they_are() -> None:
    text = PAGE.read_text(encoding="utf-8")
    listed = text.partition(MARKS[0])[2].partition(MARKS[1])[0]
    assert listed == modules(), "python -m tests.test_layers writes it again"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}{modules()}{MARKS[1]}{after}", encoding="utf-8")
