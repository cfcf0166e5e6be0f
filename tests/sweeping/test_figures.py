import json
import xml.etree.ElementTree as ElementTree

import pytest

from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.sweeping import Sweep, analyse
from theodolite.sweeping.figures import colours, draw, figures

from .synthetic import rows_of
from .test_transfer import ALL, BASE, WIDTHS, moving

SPEC = {"study": "sweep", "workload": "mine", "base": [64, 4], "fixed": {}, "search": None}
SPEC |= {"axes": ["lr", "optimizer", "parameterization", "seed", "size"]}
ROWS = rows_of(moving(0.0, 0.0), sizes=ALL) + rows_of(
    moving(-1.0, -0.25), sizes=ALL, parameterization="standard"
)
SVG = "{http://www.w3.org/2000/svg}"


def panels_of(text):
    """By panel, row by row: the lines as lists of points, and the dots."""
    drawn = ElementTree.fromstring(text)
    found = []
    for each in drawn:
        if each.tag == f"{SVG}rect":
            found.append(([], []))
        elif each.tag == f"{SVG}polyline":
            found[-1][0].append([tuple(map(float, pair.split(","))) for pair in each.get("points").split()])
        elif each.tag == f"{SVG}path" and each.get("stroke-linecap"):
            found[-1][1].append(tuple(map(float, each.get("d").strip("Mh0").split())))
    return drawn, found


def test_a_panel_for_each_family_and_direction_with_a_curve_for_each_size():
    drawn, panels = panels_of(draw(analyse(ROWS, base=BASE)))
    assert [len(lines) for lines, _ in panels] == [4, 3, 4, 3]
    # Under the plan the dots of a panel stand above each other, under the standard one octave apart.
    plan, standard = ([x for x, _ in panels[place][1]] for place in (0, 2))
    assert max(plan) - min(plan) < 0.2
    ticks = [
        (float(text.text.removeprefix("2^")), float(text.get("x")))
        for text in drawn.iter(f"{SVG}text")
        if (text.text or "").startswith("2^")
    ]
    octave = (ticks[1][1] - ticks[0][1]) / (ticks[1][0] - ticks[0][0])
    assert standard == pytest.approx([standard[0] - k * octave for k in range(4)], abs=0.3)
    texts = {text.text for text in drawn.iter(f"{SVG}text")}
    assert {"adamw, plan", "adamw, standard", "width", "depth"} <= texts
    assert "dots: the optimum; its drift per doubling: −1.00 with width, −0.25 with depth" in texts


def test_dots_stand_on_their_curves():
    _, panels = panels_of(draw(analyse(ROWS, base=BASE)))
    for lines, dots in panels:
        for points, (_, y) in zip(lines, dots, strict=True):
            assert y <= max(y for _, y in points) + 0.1


def luminance(colour):
    """Relative luminance of `#rrggbb`, from 0 for black to 1 for white, as WCAG defines it."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


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


def test_the_page_carries_its_figures():
    text = Sweep.of(ROWS, SPEC).page()
    assert 'data-figure="1" data-panel="1"' in text
    assert "The best lr of mine moves by 0.00 (adamw, plan), 3.00 (adamw, standard) octaves" in text


def test_a_saved_sweep_says_the_same_and_takes_no_other_file_s_place(tmp_path):
    made = Sweep.of(ROWS, SPEC)
    path = made.save(tmp_path / "sweep.json")
    assert made.save(path) == path  # an older sweep is replaced
    again = Sweep.load(path)
    assert str(again) == str(made)
    assert again.rows == made.rows
    assert again.to_dict() == made.to_dict()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UseError, match="there is a file that holds no sweep"):
        made.save(tmp_path / "config.json")


def test_a_sweep_that_was_edited_is_refused(tmp_path):
    path = Sweep.of(ROWS, SPEC).save(tmp_path / "sweep.json")
    text = path.read_text()
    for old, new in (
        ('"over": "lr"', '"over": "lt"'),
        ('"width"', '"wide"'),
        ('"status": "f', '"state": "f'),
    ):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(UseError, match="cannot be read"):
            Sweep.load(path)


def test_a_table_has_the_mean_of_every_point(tmp_path):
    lines = Sweep.of(ROWS, SPEC).save(tmp_path / "sweep.csv").read_text().splitlines()
    assert lines[0] == "optimizer,parameterization,width,depth,lr,held_out,seeds"
    assert lines[6] == "adamw,plan,64,4,0.0078125,2.0,3"
    assert len(lines) == 1 + 2 * len(ALL) * 8


def test_a_table_tells_batches_and_tokens_apart(tmp_path):
    at = [{"batch": batch, "planned_tokens": 10**6} for batch in (16, 32)]
    rows = [row for one in at for row in rows_of(moving(0.0, 0.0), sizes=[BASE], exponents=[-8, -7], **one)]
    spec = {**SPEC, "base": [64, 4, 16, 10**6]}
    head, *lines = Sweep.of(rows, spec).save(tmp_path / "sweep.csv").read_text().splitlines()
    assert head == "optimizer,parameterization,width,depth,batch,tokens,lr,held_out,seeds"
    assert [line.split(",")[2:6] for line in lines] == [
        ["64", "4", str(batch), "1000000"] for batch in (16, 16, 32, 32)
    ]
