import json

import pytest

from theodolite.present.figure import power_law, stacked_bars
from theodolite.surveying.network import parameters_by_block


def light(value):
    """The figure with a real colour for every name, as the page's script would put in."""
    text = json.dumps(value)
    for name in ("ink", "quiet", "rule", "accent", "paper", "input", "hidden", "output", "gain", "bias"):
        text = text.replace(f"var(--{name})", "#123456")
    assert "var(" not in text
    return json.loads(text)


def all_panels(surveyed):
    figures = [figure for finding in surveyed.findings for figure in finding.evidence.figures]
    return [panel for figure in [*figures, parameters_by_block(surveyed.anatomy)] for panel in figure.panels]


def test_plotly_accepts_every_panel(surveyed):
    from plotly.graph_objects import Figure

    panels = all_panels(surveyed)
    assert len(panels) == 3
    for panel in panels:
        Figure(data=light(panel.data), layout=light(panel.layout))  # raises on an unknown property


def test_bars_add_up_to_the_network(surveyed):
    (panel,) = parameters_by_block(surveyed.anatomy).panels
    assert [bar["name"] for bar in panel.data] == ["input", "hidden", "output", "bias", "gain"]
    assert panel.data[0]["x"] == ["in", "0", "1", "2", "out"]
    heights = [sum(column) for column in zip(*(bar["y"] for bar in panel.data), strict=True)]
    assert sum(heights) == surveyed.anatomy.num_parameters
    assert heights[0] == surveyed.anatomy["embed.weight"].numel
    assert heights[1] == heights[2] == heights[3]


def test_every_point_lies_on_the_axes():
    panel = power_law("w", (2, 4, 8), (0.1, 0.05, 0.025), x_title="blocks", slope=-1.0, y_range=(0.02, 0.2))
    low, high = (10**bound for bound in panel.layout["yaxis"]["range"])
    assert all(low < y < high for y in panel.data[1]["y"])
    assert panel.layout["yaxis"]["tickvals"] == pytest.approx([0.02, 0.05, 0.1, 0.2])
    assert panel.layout["xaxis"]["ticktext"] == ["2", "4", "8"]
    assert panel.layout["annotations"][0]["text"] == "slope −1.00"


@pytest.mark.parametrize("slope, corner", [(2.5, ("left", "top")), (-2.5, ("left", "bottom"))])
def test_the_label_of_a_slope_stands_clear_of_the_line(slope: float, corner: tuple[str, str]) -> None:
    heights = (4.0, 4.0 * 2**slope)
    panel = power_law("w", (2, 4), heights, x_title="depth", slope=slope, y_range=(0.5, 30.0))
    (label,) = panel.layout["annotations"]
    assert (label["xanchor"], label["yanchor"]) == corner
    assert label["x"] < 0.1


def test_a_deep_network_has_few_labels_at_round_distances():
    labels = ["in", *map(str, range(80)), "out"]
    panel = stacked_bars("", labels, {"hidden": [1] * 82}, {"hidden": "var(--hidden)"}, x_title="block")
    assert panel.layout["xaxis"]["tickvals"] == ["in", "20", "40", "60", "out"]


def test_a_part_without_a_colour_is_refused():
    with pytest.raises(KeyError, match="router"):
        stacked_bars("", ["0"], {"router": [1]}, {}, x_title="block")
