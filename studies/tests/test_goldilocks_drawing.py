"""The figures and tables of the Goldilocks study, from records that were made up."""

import itertools
import random
from xml.etree import ElementTree

import numpy as np
import pytest

from theodolite.present.svg import GAP, LEFT, WIDE, SvgAxis, SvgFigure, SvgRow
from theodolite_studies.framework.verdict import Case, exceptions, settled
from theodolite_studies.goldilocks.figures import figures
from theodolite_studies.goldilocks.maps import labelled, maps
from theodolite_studies.goldilocks.setting import Setting
from theodolite_studies.goldilocks.study import read
from theodolite_studies.goldilocks.tables import courses, trained, zones

SVG = "{http://www.w3.org/2000/svg}"
RECORDS = "docs/studies/goldilocks.jsonl"


def drawn(svg):
    return ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    "at",
    [Setting().trained_alphas(), (-9.0, -6.0, *range(-4, 5), 6.0, 9.0), (-3.0, -0.5, 3.0), (0.0,)],
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
    ((_, svg),) = figures([record], Setting())
    lines = [each.get("points").split() for each in drawn(svg).iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 2]
    heights = {point.split(",")[1] for points in lines for point in points}
    assert len(heights) == 2  # level in either panel


def test_the_order_of_records_is_no_part_of_a_figure(pytestconfig):
    about, records = read(pytestconfig.rootpath / RECORDS)
    setting = Setting.from_about(about)
    mixed = random.Random(0).sample(records, len(records))
    assert dict(figures(mixed, setting)) == dict(figures(records, setting))
    assert dict(maps(mixed)) == dict(maps(records))
    assert [f(mixed) for f in (zones, trained, courses)] == [f(records) for f in (zones, trained, courses)]


def test_an_excess_that_50_directions_can_show_is_not_cut_off():
    record = {"part": "zone", "network": "lenet300-fashion", "column": "D", "row": "alpha", "seed": 0}
    names = ("t", "excess of G", "excess of S", "frobenius of G", "frobenius of S")
    record |= {"at": [-3.0, 3.0], "excess": [-7.07, 7.07]} | {name: [1.0, 1.0] for name in names}
    svg = dict(figures([record], Setting()))["zone"]
    (path,) = (each.get("points") for each in drawn(svg).iter(f"{SVG}polyline"))
    heights = [float(point.split(",")[1]) for point in path.split()]
    borders = [(float(each.get("y")), float(each.get("height"))) for each in drawn(svg).iter(f"{SVG}rect")]
    top, height = borders[0]
    assert top + 1 < min(heights) < max(heights) < top + height - 1


def accuracy_record(column, at, train, seed):
    key = {"part": "temperature", "rule": "temperature", "network": "lenet300-fashion", "column": column}
    return key | {"at": at, "seed": seed, "rates": [-2.0, -1.0], "train": train, "test": train}


def test_the_table_of_accuracies_takes_the_best_rate_of_each_seed():
    records = [
        accuracy_record("A", 0.0, [0.6, 0.8], 0),
        accuracy_record("A", 0.0, [1.0, None], 1),
        accuracy_record("A", 2.0, [0.2, 0.3], 0),
        accuracy_record("A", 2.0, [0.4, 0.1], 1),
    ]
    _, head, train, test = trained(records).splitlines()
    assert head.split() == ["descent,", "T", "=", "10^0", "10^2", "mean", "diverged"]
    # Best of each seed: 0.8 and 1.0; 0.3 and 0.4. One of eight diverged, and counts as 0.1 in the mean.
    assert train.split() == ["A,", "train", "0.900", "0.350", "0.438", "12%"]
    assert test.split() == ["A,", "test", *train.split()[2:]]


def test_the_table_of_courses_goes_from_the_first_look_to_the_last():
    key = {"part": "course", "column": "B", "temperature": 0.0}
    records = [
        key | {"seed": 0, "at": [0, 1, 10], "excess": [1.0, 9.0, 3.0]},
        key | {"seed": 1, "at": [0, 1, 10], "excess": [2.0, 9.0, 5.0]},
    ]
    head, line = courses(records).splitlines()
    assert line.split() == ["B", "1.50", "→", "4.00"]
    assert head.index("10^0") + len("10^0") == len(line)


def test_cases_in_which_a_claim_does_not_hold_are_named():
    good, bad = Case("here", np.array([1.0, 1.1])), Case("there", np.array([3.0, 3.2]))
    found = settled("flat", "p", "t", [good, bad], limit=2.0, below=True)
    assert exceptions([found]).splitlines()[1:] == ["flat: there 3.10 ± 0.10 fails"]
    assert exceptions([settled("flat", "p", "t", [good, good], limit=2.0, below=True)]) == ""
