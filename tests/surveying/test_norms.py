import pytest

from theodolite.anatomy import Anatomy, Branch
from theodolite.size import Size
from theodolite.surveying import Site
from theodolite.surveying.sections.norms import gains, placement


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


def by_gain(finding):
    return {row["gain"]: (row["role"], row["decay"]) for row in finding.evidence.rows}


def test_gains_of_a_pre_norm_gpt_may_decay(gpt):
    finding = gains(Site(gpt(), Size(64, 2)).anatomy)
    assert finding.level == "note"
    assert finding.sentence == "All 5 gains belong to Input-Norms and may decay."
    assert set(by_gain(finding).values()) == {("Input-Norm", "yes")}


def test_a_tied_head_makes_the_final_norm_an_output_norm(gpt):
    table = by_gain(gains(Site(gpt(tied=True), Size(64, 2)).anatomy))
    assert table["norm.weight"] == ("Output-Norm", "no")
    assert table["blocks.*.attention.norm_in.weight"] == ("Input-Norm", "yes")


def test_the_remedy_names_who_decays_and_who_does_not(gpt):
    remedy = gains(Site(gpt(norm_placement="peri"), Size(64, 2)).anatomy).remedy
    decaying, _, spared = remedy.partition("none to")
    assert "blocks.*.attention.norm_in.weight" in decaying
    assert "blocks.*.attention.norm_out.weight" in spared
    assert "norm_out" not in decaying


def test_without_gains_there_is_nothing_to_decay(gpt):
    assert gains(Site(gpt(norm_placement="none"), Size(64, 2)).anatomy).level == "ok"


def test_gains_of_several_kinds_are_counted(gpt):
    sentence = gains(Site(gpt(norm_placement="peri"), Size(64, 1)).anatomy).sentence
    assert sentence == (
        "Of 5 gains, 3 belong to Input-Norms and may decay; 2 belong to Output-Norms and must not decay."
    )
