import pytest

from theodolite.anatomy import Anatomy, Branch
from theodolite.surveying.sections.norms import placement


def branches(*kinds):
    return Anatomy({}, tuple(Branch(i, 0, kind, 2, (), ()) for i, kind in enumerate(kinds)))


@pytest.mark.parametrize(
    "kinds, level",
    [
        (["pre", "pre"], "ok"),
        (["peri"], "ok"),
        (["out"], "ok"),
        (["inner", "inner"], "ok"),
        (["post"], "note"),
        (["none", "none"], "note"),
        (["pre", "peri"], "note"),
        (["pre", "none"], "warn"),
    ],
)
def test_placements_are_judged(kinds, level):
    assert placement(branches(*kinds)).level == level


def test_branches_of_one_kind_are_one_row_with_their_blocks():
    (row,) = placement(branches("pre", "pre", "pre")).evidence.rows
    assert (row["blocks"], row["computes"]) == ("0–2", "x + f(N x)")


@pytest.mark.parametrize(
    "count, sentence",
    [
        (1, "The only branch is inner-norm: x + f(N g(x))."),
        (2, "Both branches are inner-norm: x + f(N g(x))."),
        (3, "All 3 branches are inner-norm: x + f(N g(x))."),
    ],
)
def test_branches_of_one_kind_are_counted(count, sentence):
    assert placement(branches(*["inner"] * count)).sentence == sentence


def test_a_mixture_is_counted():
    assert "2 pre-norm, 1 peri-norm" in placement(branches("pre", "peri", "pre")).sentence
