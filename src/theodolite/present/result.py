"""`Result`: what the library returns prints, shows itself in a notebook, becomes a dict, and is saved."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, ClassVar, Self

from theodolite.core.errors import UseError
from theodolite.core.files import plain, read_dataclass, read_json, write_whole
from theodolite.present.figure import Figure
from theodolite.present.page import figure_html, sheet
from theodolite.present.text import Table, as_html, wrapped


@dataclass(frozen=True)
class Heading:
    """The title of what follows."""

    text: str


@dataclass(frozen=True)
class Html:
    """A piece of HTML for the page, such as a drawing; the text has nothing in its place."""

    html: str


@dataclass(frozen=True)
class Code:
    """Lines to copy."""

    text: str


Block = str | Heading | Table | Figure | Html | Code
"""What a result shows: paragraphs, titles, tables, figures, lines to copy."""


class Result:
    """The base of all results.

    A subclass names its `kind` and gives `blocks`, or `table` if it is one, which can be saved as CSV;
    everything else follows from these. One that can be read back sets `loads`; its fields are read by their
    type hints, or by a `from_dict` of its own.
    """

    kind: ClassVar[str] = "result"
    """What it is called in files and on pages: `learning-rate range`."""
    loads: ClassVar[bool] = False
    """Can it be read back from JSON?"""

    def blocks(self) -> Iterator[Block]:
        """What it says, from the top: by default its table. Figures are for pages only."""
        rows = self.table()
        yield repr(self) if rows is None else rows

    def table(self) -> Table | None:
        """Its numbers as one table, if it is one."""
        return None

    @property
    def title(self) -> str:
        """The heading of its page."""
        return self.kind.capitalize()

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON knows; a number that is not finite is None."""
        found: dict[str, Any] = plain(self)
        return found

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """The result from what `to_dict` gave."""
        found: Self = read_dataclass(cls, content, f"the {cls.kind}")
        return found

    def to_json(self) -> str:
        """As JSON, with its kind."""
        content = {"kind": f"theodolite {self.kind}", **self.to_dict()}
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def page(self) -> str:
        """As one HTML page that carries all it needs. A heading among the blocks opens a section."""
        blocks = list(self.blocks())
        if blocks and isinstance(blocks[0], str):
            first, _, rest = blocks[0].partition("\n")
            if first == self.title:  # which the heading says already
                blocks[0] = rest
        figures = [block for block in blocks if isinstance(block, Figure)]
        sections = [""]
        for block in blocks:
            if isinstance(block, Heading):
                sections.append("")
            sections[-1] += (
                figure_html(block, figures.index(block)) if isinstance(block, Figure) else block_html(block)
            )
        return sheet(
            title=f"{self.title} · Theodolite",
            kicker=f"Theodolite · {self.kind}",
            heading=self.title,
            sections=[section for section in sections if section],
            figures=figures,
        )

    def save(self, path: str | Path) -> Path:
        """Write a file; its suffix says which: .json, .html (one page that carries all it needs), .csv."""
        path = writable(path, self.kind, suffixes(self))
        if path.suffix == ".json":
            text = self.to_json()
        elif path.suffix == ".csv":
            rows = self.table()
            assert rows is not None
            text = rows.csv()
        else:
            text = self.page()
        write_whole(path, text)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote to a .json file."""
        if not cls.loads:
            raise UseError(f"a {cls.kind} cannot be loaded: it holds what no file keeps")
        path = Path(path).expanduser()
        content = read_json(path)
        if not isinstance(content, dict) or content.pop("kind", None) != f"theodolite {cls.kind}":
            raise UseError(f"{path} holds no {cls.kind}: its \"kind\" is not 'theodolite {cls.kind}'")
        try:
            return cls.from_dict(content)
        except UseError as error:
            raise UseError(f"{path} cannot be read: {error}") from error

    def __str__(self) -> str:
        texts = []
        for block in self.blocks():
            if isinstance(block, str):
                texts.append("\n".join(wrapped(line, indent="  ") for line in block.splitlines()))
            elif isinstance(block, Heading | Code):
                texts.append(block.text)
            elif isinstance(block, Table):
                texts.append(block.text())
        return "\n\n".join(text for text in texts if text)

    def _repr_html_(self) -> str:
        if type(self).blocks is Result.blocks and self.table() is None:
            return f"<pre>{escape(str(self))}</pre>"
        return "\n".join(block_html(block) for block in self.blocks() if not isinstance(block, Figure))


def block_html(block: Block) -> str:
    """A block as HTML. A figure needs the page's script: here it is what its alt text says."""
    if isinstance(block, str):
        return "".join(f"<p>{as_html(line)}</p>" for line in block.splitlines() if line)
    if isinstance(block, Heading):
        return f"<h2>{escape(block.text)}</h2>"
    if isinstance(block, Code):
        return f"<pre><code>{escape(block.text)}</code></pre>"
    if isinstance(block, Table):
        return block.html()
    return block.html if isinstance(block, Html) else f"<p>{escape(block.alt)}</p>"


def suffixes(result: Result | type[Result]) -> tuple[str, ...]:
    """The suffixes that a result can be saved with."""
    is_table = isinstance(result, Result) and result.table() is not None
    return (".json", ".html", ".csv") if is_table else (".json", ".html")


def writable(path: str | Path, kind: str, allowed: Sequence[str]) -> Path:
    """The path a result may be written to. It replaces an older file of its kind and no other."""
    path = Path(path).expanduser()
    refused = f"the {kind} cannot be written to {path}"
    if path.suffix.lower() not in allowed:
        raise UseError(f"{refused}: its name must end in {' or '.join(allowed)}")
    try:
        if not path.parent.is_dir():
            raise UseError(f"{refused}: there is no folder {path.parent}")
        if path.is_dir():
            raise UseError(f"{refused}: that is a folder")
        if path.suffix == ".json" and path.exists() and not _holds(path, kind):
            raise UseError(f"{refused}: there is a file that holds no {kind}. Give another name")
        with tempfile.TemporaryFile(dir=path.parent):  # may anything be written there?
            pass
    except OSError as error:
        raise UseError(f"{refused}: {error.strerror}") from error
    return path


def _holds(path: Path, kind: str) -> bool:
    try:
        content = read_json(path)
    except UseError:
        return False
    return isinstance(content, dict) and content.get("kind") == f"theodolite {kind}"
