"""Figures and tables of depth expansion."""

from xml.etree import ElementTree

from theodolite_studies.depth_expansion.grid import Regimes
from theodolite_studies.depth_expansion.report import figures, notes

from .made_up import made_up


def test_figures_and_tables_are_drawn():
    regimes = Regimes.of(made_up())
    for _, svg in figures(regimes):
        ElementTree.fromstring(svg)
    assert [name for name, _ in figures(regimes)] == [
        "signal",
        "matched",
        "losses",
        "correlations",
        "alignment",
    ]
    assert "width 16 n 8" in notes(regimes)
