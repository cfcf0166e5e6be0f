import dataclasses
import re
from html.parser import HTMLParser

import pytest

from theodolite import UseError
from theodolite.core.files import replacing, write_whole
from theodolite.present.figure import Figure, Panel
from theodolite.surveying import Evidence, Finding
from theodolite.surveying.page import page


class Reader(HTMLParser):
    """Headings in order, the text outside of scripts, and every address the page could ask for."""

    def __init__(self):
        super().__init__()
        self.headings, self.words, self.addresses, self.stack, self.scripts = [], [], [], [], 0

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link", "br", "wbr", "img"):
            self.stack.append(tag)
        self.scripts += tag == "script"
        if tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "srcset")]

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.words.append(data)


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.stack == []
    return reader


def words(html):
    return " ".join("".join(read(html).words).split())


def test_the_page_asks_for_nothing(surveyed):
    html = page(surveyed)
    assert read(html).addresses == ["data:,"]
    style = re.search(r"<style>(.*?)</style>", html, re.S)[1]
    assert "url(" not in style
    assert "@import" not in style
    assert html.count("plotly.js v") == 1


def test_the_verdict_is_the_first_heading_and_findings_come_gravest_first(surveyed):
    html = page(surveyed)
    reader = read(html)
    assert reader.headings[0] == "h1"
    assert reader.headings.count("h1") == 1
    said = words(html)
    places = [said.index(finding.sentence) for finding in surveyed.ranked]
    assert said.index(surveyed.verdict) < places[0]
    assert places == sorted(places)
    assert [finding.level for finding in surveyed.ranked] == ["warn", "note", *["ok"] * 6]


def test_every_finding_is_explained_on_the_page(surveyed):
    said = words(page(surveyed))
    for finding in surveyed.findings:
        assert finding.why in said
        assert finding.documentation in said
        assert finding.remedy in said


def test_names_from_outside_cannot_become_markup(surveyed):
    figure = Figure("c", "a", (Panel("p", ({"name": "</script><img src=y>"},), {"height": 9}),))
    evidence = Evidence({"<u>": 1}, figures=(figure,))
    evil = Finding("TH900", "fail", "<b>t</b>", "</script><img src=x>", why="<i>", evidence=evidence)
    html = page(dataclasses.replace(surveyed, findings=(evil, *surveyed.findings)))
    assert "<img" not in html
    assert "</script><img src=x>" in words(html)
    assert "Survey of <small & sharp>" in words(html)


def test_what_stands_between_backticks_is_code_and_a_name_breaks_at_its_dots(surveyed):
    remedy = "Divide `blocks.*.up.weight` by width/32, not `a<b`."
    finding = dataclasses.replace(surveyed.ranked[0], remedy=remedy)
    written = page(dataclasses.replace(surveyed, findings=(finding,)))
    name = "blocks.<wbr>*.<wbr>up.<wbr>weight"
    assert f"Divide <code>{name}</code> by width/32, not <code>a&lt;b</code>." in written
    assert "`blocks" not in written


def test_without_figures_the_page_does_not_carry_the_script(surveyed):
    html = page(dataclasses.replace(surveyed, anatomy=None, findings=()))
    assert "plotly.js v" not in html
    assert len(html) < 50_000


def test_every_tensor_is_on_the_page(surveyed):
    html = page(surveyed).replace("<wbr>", "")
    for name in surveyed.anatomy:
        assert re.sub(r"\.\d+\.", ".*.", name) in html


def test_figures_have_words_for_those_who_cannot_see_them(surveyed):
    html = page(surveyed)
    (figure,) = [f for finding in surveyed.findings for f in finding.evidence.figures]
    assert f'role="img" aria-label="{figure.alt}"' in html


@pytest.mark.parametrize("width", [60, 100])
def test_the_text_keeps_to_the_width_of_the_terminal(surveyed, width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert max(map(len, str(surveyed).splitlines())) <= width


@pytest.mark.parametrize(
    "name, words",
    [
        ("page.txt", r"must end in \.json or \.html or \.csv"),
        ("no/page.html", "no folder"),
        ("sub.html", "a folder"),
        (f"{'x' * 300}.html", "File name too long"),
        ("config.json", "holds no survey"),
        ("list.json", "holds no survey"),
        ("text.json", "holds no survey"),
    ],
)
def test_a_survey_takes_the_place_of_nothing_but_a_survey(surveyed, tmp_path, name, words):
    (tmp_path / "sub.html").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "llama", "findings": 3}')
    (tmp_path / "list.json").write_text('["findings", "verdict"]')
    (tmp_path / "text.json").write_text("findings, verdict")
    with pytest.raises(UseError, match=words):
        surveyed.save(tmp_path / name)


def test_a_file_is_whole_or_not_there(tmp_path):
    target = tmp_path / "a.html"
    target.write_text("old")

    def break_off():
        with replacing(target) as part:
            part.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]
    write_whole(target, "new √")
    assert target.read_text(encoding="utf-8") == "new √"


def test_an_older_survey_may_be_overwritten(surveyed, tmp_path):
    for _ in range(2):
        for name in ("survey.html", "survey.json"):
            assert surveyed.save(tmp_path / name).exists()


def test_a_file_that_cannot_be_written_is_an_error_of_use(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(UseError, match="folder cannot be written: Is a directory"):
        write_whole(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_row_may_have_no_value_in_a_column(surveyed):
    rows = ({"tensor": "a.b", "L = 2": 0.5, "L = 4": None}, {"tensor": "c.d", "L = 2": None, "L = 4": 0.25})
    finding = Finding("TH900", "warn", "t", "s", why="w", evidence=Evidence(rows=rows))
    said = words(page(dataclasses.replace(surveyed, findings=(finding,))))
    assert "tensor L = 2 L = 4 a.b 0.500 – c.d – 0.250" in said
