import json
import xml.etree.ElementTree as ElementTree

import pytest

from theodolite.core.size import Size
from theodolite.sweeping import Sweep
from theodolite.sweeping.colours import colours, luminance
from theodolite.sweeping.drawing import draw
from theodolite.sweeping.pictures import figures

from .synthetic import rows_of
from .test_transfer import ALL, BASE, WIDTHS, moving

SPEC = {"study": "sweep", "workload": "mine", "base": [64, 4], "fixed": {}, "search": None}
SPEC |= {"axes": ["lr", "optimizer", "parameterization", "seed", "size"]}
ROWS = rows_of(moving(0.0, 0.0), sizes=ALL) + rows_of(
    moving(-1.0, -0.25), sizes=ALL, parameterization="standard"
)
SVG = "{http://www.w3.org/2000/svg}"


def test_a_panel_for_each_family_and_direction_with_a_curve_for_each_size():
    drawn = ElementTree.fromstring(draw(ROWS, base=BASE, optimizer="adamw"))
    groups = drawn.findall(f"{SVG}g")
    assert [len(group.findall(f"{SVG}polyline")) for group in groups] == [4, 4, 3, 3]
    # Under the plan the dots of a panel stand above each other, under the standard one octave apart.
    plan, standard = ([float(dot.get("cx")) for dot in group.findall(f"{SVG}circle")] for group in groups[:2])
    assert max(plan) - min(plan) < 0.2
    ticks = {
        text.text: float(text.get("x")) for text in drawn.findall(f"{SVG}text") if "2^" in (text.text or "")
    }
    octave = ticks["2^-6"] - ticks["2^-7"]
    assert standard == pytest.approx([standard[0] - k * octave for k in range(4)], abs=0.3)
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    assert {"adamw, plan", "adamw, standard", "-1.00", "-0.25", "0.00"} <= set(texts)


def test_dots_stand_on_their_curves():
    drawn = ElementTree.fromstring(draw(ROWS, base=BASE, optimizer="adamw"))
    for group in drawn.findall(f"{SVG}g"):
        for line, dot in zip(group.findall(f"{SVG}polyline"), group.findall(f"{SVG}circle"), strict=True):
            points = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
            lowest = max(y for _, y in points)
            assert float(dot.get("cy")) <= lowest + 0.1


def test_every_colour_can_be_read_on_white_and_on_black():
    for number in (1, 2, 6, 12):
        paint = colours([Size(2**k, 4) for k in range(number)])
        assert len(set(paint.values())) == number
        for colour in paint.values():
            shine = luminance(colour)
            assert min(1.05 / (shine + 0.05), (shine + 0.05) / 0.05) > 3  # WCAG's contrast for graphics


def test_plotly_accepts_the_figures_and_means_stand_at_their_places():
    plotly = pytest.importorskip("plotly.graph_objects")
    made = Sweep.of(ROWS, SPEC)
    width, depth = figures(made.families)
    assert [len(figure.panels) for figure in (width, depth)] == [2, 2]
    for figure in (width, depth):
        for panel in figure.panels:
            text = json.dumps([list(panel.data), dict(panel.layout)])
            data, layout = json.loads(
                text.replace("var(--ink)", "#111")
                .replace("var(--quiet)", "#111")
                .replace("var(--rule)", "#111")
                .replace("var(--paper)", "#111")
            )
            plotly.Figure(data=data, layout=layout)  # raises on an unknown property
    curves = [trace for trace in width.panels[0].data if trace["mode"] == "lines+markers"]
    assert [trace["name"] for trace in curves] == [str(size) for size in WIDTHS]
    assert curves[0]["x"] == [float(e) for e in range(-12, -4)]
    assert curves[0]["y"][5] == pytest.approx(2.0)
    assert "512 × 4 best at 2^-10" in width.alt


def test_one_size_is_drawn_too():
    made = Sweep.of(rows_of(moving(0, 0), sizes=[BASE]), SPEC)
    (figure,) = figures(made.families)
    assert len(figure.panels) == 1


def test_the_page_carries_its_figures_and_takes_no_other_file_s_place(tmp_path):
    made = Sweep.of(ROWS, SPEC)
    page = made.save(tmp_path / "sweep.html")
    text = page.read_text()
    assert 'data-figure="1" data-panel="1"' in text
    assert "The best lr of mine moves by 0.00 (adamw, plan), 3.00 (adamw, standard) octaves" in text
    assert made.save(tmp_path / "sweep.html") == page  # an older sweep is replaced
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="which is no sweep"):
        made.save(tmp_path / "config.html")
