"""The documentation says what is so: its code runs, prints what stands below it, and names what exists.

The convention, for README.md, CONTRIBUTING.md and every page in docs/, top to bottom, one Python namespace
for each page:

- a ```python block is run; a ```text block right below it is what it prints;
- a ```console block holds lines `$ command`, each followed by what it prints. A command without output below
  it is not run, but it must exist;
- `<!-- no-run -->` on the line above a block: not run, because it takes long or depends on the machine.

What is printed may differ from what stands there as tests/printed.py says: words and counts not at all,
trained numbers by 2 %. `<!-- numbers: 10 %, because they are drawn -->` above a block allows more there. In
output `...` stands for anything. `python -m tests.test_docs PAGE...` puts in what is printed now, where it
differs.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from theodolite.cli import main
from theodolite.core.building import untouched_randomness

from .printed import COLUMNS, TOLERANCE, difference

pytestmark = pytest.mark.usefixtures("one_dissection")

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
STUDIES = sorted((ROOT / "studies" / "theodolite_studies").glob("*/page.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "studies" / "README.md", *DOCS, *STUDIES]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUN_ON = {
    "python examples/curvature.py": ROOT / "docs" / "tour.md",
    "python examples/safe_step.py": ROOT / "docs" / "tour.md",
    "python examples/fit_scaling_law.py": ROOT / "docs" / "fits.md",
}
"""Programs that several pages show: where they are run. The others need nothing that they write."""

_FENCE = re.compile(
    r"^(?P<skip><!-- no-run -->\n)?(?:<!-- numbers: (?P<percent>\d+) %, because [^>]+ -->\n)?"
    r"```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.M | re.S,
)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    start: int
    """Where its text begins on the page."""
    run: bool
    below: bool
    """Does it stand right below the block before it?"""
    tolerance: float


@dataclass(frozen=True)
class Output:
    start: int
    """Where it begins on the page."""
    text: str
    tolerance: float

    def differs(self, printed: str) -> str | None:
        return difference(self.text, printed, self.tolerance)


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    found, end = [], 0
    for match in _FENCE.finditer(source):
        below = bool(found) and not source[end : match.start()].strip()
        tolerance = int(match["percent"]) / 100 if match["percent"] else TOLERANCE
        run, start = match["skip"] is None, match.start("text")
        found.append(Block(match["language"], match["text"], start, run, below, tolerance))
        end = match.end()
    return found


def commands(block: Block) -> Iterator[tuple[str, Output]]:
    """The commands of a console block, each with what is said to be printed."""
    for match in re.finditer(r"^\$ (?P<command>.*)\n(?P<said>(?:(?!\$ ).*\n)*)", block.text, re.M):
        yield (
            match["command"].partition("  #")[0].strip(),
            Output(block.start + match.start("said"), match["said"], block.tolerance),
        )


def all_commands() -> Iterator[tuple[Path, str, str]]:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console":
                yield from ((page, command, output.text) for command, output in commands(block))


def run_page(page: Path) -> Iterator[tuple[Output, str]]:
    """Run all that can be run on a page: what is said to be printed, and what is."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed: str | None = None
    for block in blocks(page):
        if block.language == "text" and block.below and printed is not None:
            yield Output(block.start, block.text, block.tolerance), printed
        printed = None
        if not block.run:
            continue
        if block.language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block.text, str(page), "exec"), namespace)
            printed = tidy(out.getvalue())
        elif block.language == "console":
            for command, said in commands(block):
                if said.text.strip() and not shown_elsewhere(page, command, said.text):
                    yield said, tidy(run_command(command))


def shown_elsewhere(page: Path, command: str, said: str) -> bool:
    """Does another page, which runs it, show the same program and what it prints?"""
    return RUN_ON.get(command, page) != page and any(
        (RUN_ON[command], command, said) == shown for shown in all_commands()
    )


def tidy(text: str) -> str:
    return "\n".join(map(str.rstrip, text.strip("\n").splitlines())) + "\n"


def run_command(command: str) -> str:
    """What a command prints, in this process, which has torch."""
    program, *arguments = shlex.split(command)
    printed = io.StringIO()
    if program == "python":
        before = torch.get_default_dtype()
        with contextlib.redirect_stdout(printed), untouched_randomness():
            runpy.run_path(*arguments, run_name="__main__")
        torch.set_default_dtype(before)
        return printed.getvalue()
    assert program == "theodolite", f"no test knows how to run {command}"
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as left:
        main(arguments)
    assert not left.value.code, command
    return printed.getvalue()


def copy_what_commands_read(folder: Path) -> None:
    """Examples, and the results that studies have left."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    for page in STUDIES:
        place = folder / page.parent.relative_to(ROOT)
        place.mkdir(parents=True)
        shutil.copy(page.with_name("records.jsonl"), place)


@pytest.fixture
def in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder like the repository's, where commands may write what they like."""
    copy_what_commands_read(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("in_a_copy")
def test_code_runs_and_prints_what_stands_below_it(page: Path) -> None:
    for said, printed in run_page(page):
        differing = said.differs(printed)
        assert differing is None, f"{differing}; it prints\n{printed}"


@pytest.mark.parametrize(
    "page, command", sorted({(str(page.relative_to(ROOT)), command) for page, command, _ in all_commands()})
)
def test_commands_exist(page: str, command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        assert set(arguments) <= targets
    elif program == "theodolite":
        path: list[str] = []
        for word in arguments:
            if word not in _subcommands(tuple(path)):
                break
            path.append(word)
        shown = _help(tuple(path))
        for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
            assert re.search(rf"{option}\b", shown), f"{' '.join(path)} has no {option}"
        assert path or arguments[0].startswith("--"), f"theodolite has no {arguments[0]}"
    elif program == "python":
        file = arguments[1].replace(".", "/") if arguments[0] == "-m" else arguments[0]
        assert (ROOT / file).exists()
    else:
        assert program in ("pip", "git"), f"{page}: no test knows {program}"


@cache
def _help(path: tuple[str, ...]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(COLUMNS))
        patch.delenv("FORCE_COLOR", raising=False)
        return run_command(shlex.join(["theodolite", *path, "--help"]))


@cache
def _subcommands(path: tuple[str, ...]) -> set[str]:
    _, _, listed = _help(path).partition("─ Commands ")
    return set(re.findall(r"^│ ([\w-]+)", listed, re.M))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_open_with_a_command_whose_output_is_documented(example: Path) -> None:
    described = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8")))
    assert described is not None
    shown = {command for page, command, output in all_commands() if output.strip()}
    opening = {line.strip() for line in described.splitlines() if line.startswith("    ")}
    assert opening & shown, f"no page shows what {example.name} prints"


def codes() -> set[str]:
    sources = (ROOT / "src" / "theodolite" / "surveying").rglob("*.py")
    return {code for file in sources for code in re.findall(r"\bTH\d{3}\b", file.read_text(encoding="utf-8"))}


def test_every_finding_has_a_page_in_the_navigation_and_no_page_is_left_over() -> None:
    written = {page.stem for page in (ROOT / "docs" / "findings").glob("TH*.md")}
    linked = set(re.findall(r"findings/(TH\d{3})\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert written == codes()
    assert linked == codes()


@pytest.mark.parametrize("code", sorted(codes()))
def test_a_finding_page_answers_the_same_questions_as_the_others(code: str) -> None:
    source = (ROOT / "docs" / "findings" / f"{code}.md").read_text(encoding="utf-8")
    assert source.startswith(f"# {code}: ")
    assert re.findall(r"^## (.+)$", source, re.M) == [
        "What it says",
        "Why it matters",
        "How it is measured",
        "What to do",
        "Example",
    ]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS:
        assert page.relative_to(ROOT / "docs").as_posix() in navigation
    for page in STUDIES:
        assert f"studies/{page.parent.name.replace('_', '-')}.md" in navigation


FRONT = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "studies/README.md")),
    *STUDIES,
]


@pytest.mark.parametrize("page", FRONT, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def rewrite(page: Path) -> None:
    """Put what is printed now in the place of what is said to be, where they differ."""
    source = page.read_text(encoding="utf-8")
    for said, printed in reversed(list(run_page(page))):
        if said.differs(printed) is None:
            continue
        source = source[: said.start] + printed + source[said.start + len(said.text) :]
    page.write_text(source, encoding="utf-8")


if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]]
    os.environ["COLUMNS"] = str(COLUMNS)
    for page in chosen:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            copy_what_commands_read(Path(folder))
            rewrite(page)
