"""What every result can do: print, show itself, become a dict, be saved and read back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from theodolite import UseError
from theodolite.present.figure import Figure, Panel, frame
from theodolite.present.result import Block, Heading, Result
from theodolite.present.text import Table


@dataclass(frozen=True)
class Inner:
    name: str
    value: float


@dataclass(frozen=True)
class Measured(Result):
    kind = "measurement"
    loads = True

    inner: tuple[Inner, ...]
    best: float | None = None

    def blocks(self) -> Iterator[Block]:
        yield "Two <values> were measured."
        yield Heading("All of them")
        yield Table(("name", "value"), [(one.name, one.value) for one in self.inner])
        yield Figure("A caption", "what it shows", (Panel("panel", (), frame(height=100)),))

    def table(self) -> Table:
        return Table(("name", "value"), [(one.name, one.value) for one in self.inner])


@dataclass(frozen=True)
class Bare(Result):
    kind = "bare thing"

    value: float


FOUND = Measured((Inner("a", 0.25), Inner("b", math.nan)))


def test_text_has_paragraphs_headings_and_tables_but_no_figures() -> None:
    text = str(FOUND)
    assert text.startswith("Two <values> were measured.\n\nAll of them\n\nname  value")
    assert "caption" not in text


def test_a_notebook_gets_tables_and_nothing_unescaped() -> None:
    html = FOUND._repr_html_()
    assert "<table" in html
    assert "&lt;values&gt;" in html
    assert Bare(1.0)._repr_html_().startswith("<pre>")


def test_json_is_read_back_as_it_was_and_what_is_no_number_stays_none(tmp_path: Path) -> None:
    path = FOUND.save(tmp_path / "found.json")
    content = json.loads(path.read_text())
    assert content["kind"] == "theodolite measurement"
    assert content["inner"][1]["value"] is None
    back = Measured.load(path)
    assert back.inner[0] == FOUND.inner[0]
    assert math.isnan(back.inner[1].value)
    assert back.best is None


def test_a_page_carries_text_table_and_figure(tmp_path: Path) -> None:
    page = FOUND.save(tmp_path / "found.html").read_text()
    assert "<h1>Measurement</h1>" in page
    assert "A caption" in page
    assert "Plotly" in page
    assert "http-equiv" in page


def test_a_page_says_its_title_once() -> None:
    class Titled(Measured):
        title = "Measured at 64 × 2"

        def blocks(self) -> Iterator[Block]:
            yield "Measured at 64 × 2\nwith two values"
            yield "Measured at 64 × 2 again"

    body = Titled(FOUND.inner).page().partition("<body>")[2]
    assert body.count("Measured at 64 × 2") == 2
    assert "<p>with two values</p>" in body


def test_a_sentence_that_begins_with_the_title_stays_whole() -> None:
    class Titled(Measured):
        title = "Measured"

        def blocks(self) -> Iterator[Block]:
            yield "Measured at 64 × 2"

    assert "<p>Measured at 64 × 2</p>" in Titled(FOUND.inner).page()


def test_csv_only_where_it_is_a_table(tmp_path: Path) -> None:
    assert FOUND.save(tmp_path / "found.csv").read_text() == "name,value\na,0.25\nb,nan\n"
    with pytest.raises(UseError, match=r"must end in \.json or \.html"):
        Bare(1.0).save(tmp_path / "bare.csv")


def test_json_takes_the_place_of_its_own_kind_only(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    FOUND.save(path)
    FOUND.save(path)
    with pytest.raises(UseError, match="holds no bare thing"):
        Bare(1.0).save(path)
    with pytest.raises(UseError, match="there is no folder"):
        FOUND.save(tmp_path / "none" / "found.json")


@pytest.mark.parametrize(
    "content, complaint",
    [
        ('{"kind": "theodolite plan"}', "holds no measurement"),
        ('{"kind": "theodolite measurement"}', "has no inner and no best"),
        ('{"kind": "theodolite measurement", "inner": [{"name": 3, "value": 1}], "best": 1}', "name is 3"),
        ('{"kind": "theodolite measurement", "inner": [], "best": true}', "best is True"),
        ("[", "not JSON"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path: Path, content: str, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(UseError, match=complaint):
        Measured.load(path)
    with pytest.raises(UseError, match="cannot be loaded"):
        Bare.load(path)
