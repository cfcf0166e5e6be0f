"""The figures and tables of the Goldilocks study, from records that were made up."""

import itertools
import random
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from theodolite.present.svg import GAP, LEFT, WIDE, SvgAxis, SvgFigure, SvgRow
from theodolite_studies.framework.study import read
from theodolite_studies.goldilocks import study
from theodolite_studies.goldilocks.curves import Measured
from theodolite_studies.goldilocks.figures import figures, labelled
from theodolite_studies.goldilocks.setting import FULL
from theodolite_studies.goldilocks.tables import notes

SVG = "{http://www.w3.org/2000/svg}"


def drawn(svg):
    return ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    "at",
    [FULL.trained_alphas(), (-9.0, -6.0, *range(-4, 5), 6.0, 9.0), (-3.0, -0.5, 3.0), (0.0,)],
    ids=["alphas", "temperatures", "few", "one"],
)
def test_texts_under_a_map_have_room_and_name_both_ends(at):
    found = labelled(np.array(at))
    assert (found[0], found[-1]) == (0, len(at) - 1)
    assert all(other - one >= 2 for one, other in itertools.pairwise(found))


def test_ticks_at_the_edges_stay_within_their_panel():
    axis = SvgAxis(0.0, 1.0, {0.0: "0", 0.5: "half", 1.0: "1000"})
    figure = SvgFigure("", [], ["one", "two"], [SvgRow("", axis, SvgAxis(0.0, 1.0, {}), [[], []])])
    texts = [each for each in drawn(figure.svg()).iter(f"{SVG}text") if each.get("font-size") == "9"]
    anchors = {(each.text, float(each.get("x"))): each.get("text-anchor") for each in texts}
    end, start = LEFT + WIDE, LEFT + WIDE + GAP  # of the first panel, and of the second
    assert anchors["1000", end] == "end"
    assert anchors["0", start] == "start"
    assert anchors["half", LEFT + WIDE / 2] == "middle"


def test_what_has_no_logarithm_is_no_point():
    record = {"part": "logits", "network": "lenet300-fashion", "column": "D", "seed": 0}
    record |= {"at": [-1.0, 0.0, 1.0], "kl": [1e-8, 0.0, 1e-8], "error": [1e-4, 0.0, 1e-4]}
    ((_, svg),) = figures(Measured([record], FULL))
    lines = [each.get("points").split() for each in drawn(svg).iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 2]
    heights = {point.split(",")[1] for points in lines for point in points}
    assert len(heights) == 2  # level in either panel


def test_the_order_of_records_is_no_part_of_a_figure():
    _, records = read(study.STUDY, Path(study.__file__).parent)
    data, mixed = (Measured(some, FULL) for some in (records, random.Random(0).sample(records, len(records))))
    assert dict(figures(mixed)) == dict(figures(data))
    assert notes(mixed) == notes(data)


def test_an_excess_that_50_directions_can_show_is_not_cut_off():
    record = {"part": "zone", "network": "lenet300-fashion", "column": "D", "row": "alpha", "seed": 0}
    names = ("t", "excess of G", "excess of S", "frobenius of G", "frobenius of S")
    record |= {"at": [-3.0, 3.0], "excess": [-7.07, 7.07]} | {name: [1.0, 1.0] for name in names}
    svg = dict(figures(Measured([record], FULL)))["zone"]
    (path,) = (each.get("points") for each in drawn(svg).iter(f"{SVG}polyline"))
    heights = [float(point.split(",")[1]) for point in path.split()]
    borders = [(float(each.get("y")), float(each.get("height"))) for each in drawn(svg).iter(f"{SVG}rect")]
    top, height = borders[0]
    assert top + 1 < min(heights) < max(heights) < top + height - 1
