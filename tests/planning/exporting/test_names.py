"""The name map: wildcards, fused names, and what is refused with its culprit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.planning.exporting.made import gpt_plan, parts_plan

from theodolite.core.errors import UseError
from theodolite.planning.exporting.names import renamed
from theodolite.planning.init_distribution import InitDistribution
from theodolite.planning.rows import PlanRow

pytestmark = pytest.mark.usefixtures("one_dissection")


def _row(name: str, shape: tuple[int, ...] = (4, 3), **given: object) -> PlanRow:
    vector = len(shape) == 1
    return PlanRow(
        name,
        shape,
        "bias" if vector else "hidden",
        0,
        1 if vector else shape[1],
        shape[0],
        () if vector else (1,),
        (0,),
        (),
        scale_free=False,
        init=InitDistribution("normal", std=1.0),
        rule="muon",
        **{"lr": 0.1, **given},  # type: ignore[arg-type]
    )


def _rows(*rows: PlanRow) -> dict[str, PlanRow]:
    return {row.name: row for row in rows}


def test_a_star_stands_for_the_same_text_on_both_sides() -> None:
    rows = _rows(_row("layers.0.up.weight"), _row("layers.11.up.weight"), _row("embed.weight"))
    new = renamed(rows, {}, {"layers.*": "model.layers.*", "embed.*": "model.embed_tokens.*"})
    assert list(new.rows) == [
        "model.layers.0.up.weight",
        "model.layers.11.up.weight",
        "model.embed_tokens.weight",
    ]
    assert all(row.name == name for name, row in new.rows.items())


def test_without_a_map_names_stay() -> None:
    rows = _rows(_row("a"))
    assert renamed(rows, {}, None).rows is rows


def test_the_first_rule_that_matches_applies() -> None:
    new = renamed(_rows(_row("a.w"), _row("b.w")), {}, {"a.*": "first.*", "*": "*"})
    assert list(new.rows) == ["first.w", "b.w"]


def test_a_tensor_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(UseError, match=r"no rule matches head\.weight.*from '\*' to '\*'"):
        renamed(_rows(_row("layers.0.w"), _row("head.weight")), {}, {"layers.*": "model.layers.*"})


def test_a_rule_without_a_tensor_is_refused_by_its_pattern() -> None:
    with pytest.raises(UseError, match=r"'layer\.\*' matches no tensor"):
        renamed(_rows(_row("layers.0.w")), {}, {"layers.*": "model.*", "layer.*": "model.*"})


def test_several_rules_join_their_tensors_along_the_outputs() -> None:
    rows = _rows(_row("h.0.q", (4, 3)), _row("h.0.k", (2, 3)), _row("h.0.v", (2, 3)))
    new = renamed(rows, {}, {"h.*.q": "h.*.qkv", "h.*.k": "h.*.qkv", "h.*.v": "h.*.qkv"})
    (row,) = new.rows.values()
    assert (row.name, row.shape) == ("h.0.qkv", (8, 3))
    assert row.rows == (((0, 4),), ((4, 6),), ((6, 8),))
    assert "h.*.q, h.*.k, h.*.v one after the other" in new.notes[0]


def test_layers_that_are_fused_alike_have_one_note() -> None:
    rows = _rows(*(_row(f"h.{layer}.{name}", (4, 3)) for layer in range(3) for name in "qk"))
    assert len(renamed(rows, {}, {"h.*.q": "h.*.qk", "h.*.k": "h.*.qk"}).notes) == 1


def test_parts_that_differ_in_a_number_alone_are_said_by_their_names() -> None:
    rows = _rows(*(_row(f"h.{layer}.up") for layer in range(3)))
    (note,) = renamed(rows, {}, {"h.1.up": "h.2.up", "*": "*"}).notes
    assert note.startswith("h.2.up: taken to hold h.1.up, h.2.up one after the other")


@pytest.mark.parametrize("format", ["torch", "csv", "yaml"])
def test_what_was_assumed_of_a_fused_tensor_is_said_once(format: str) -> None:
    notes = parts_plan(("tall", "equal")).export(format, names={"*": "both"}).notes
    assert sum("both: taken to" in note for note in notes) == 1


def test_the_order_of_the_rules_is_the_order_in_the_fused_tensor() -> None:
    rows = _rows(_row("q", (4, 3)), _row("k", (2, 3)))
    (row,) = renamed(rows, {}, {"k": "qk", "q": "qk"}).rows.values()
    assert row.rows == (((0, 2),), ((2, 6),))


def test_biases_are_joined_too() -> None:
    rows = _rows(_row("q", (4,)), _row("k", (2,)))
    (row,) = renamed(rows, {}, {"q": "qk", "k": "qk"}).rows.values()
    assert (row.shape, row.rows) == ((6,), ())


def test_a_rule_that_drops_a_star_stacks() -> None:
    names = [f"h.0.experts.{number}.up" for number in (0, 1, 2)]
    new = renamed(_rows(*map(_row, names)), {}, {"h.*.experts.*.up": "h.*.up"})
    (row,) = new.rows.values()
    assert (row.name, row.shape, row.in_axes, row.out_axes) == ("h.0.up", (3, 4, 3), (2,), (1,))
    assert "a stack of 3" in new.notes[0]


def test_experts_are_stacked_before_their_halves_are_joined() -> None:
    names = [f"experts.{number}.{half}" for number in (0, 1) for half in ("gate", "up")]
    new = renamed(_rows(*map(_row, names)), {}, {"experts.*.gate": "gate_up", "experts.*.up": "gate_up"})
    (row,) = new.rows.values()
    assert row.shape == (2, 8, 3)
    assert row.rows == (((0, 4),), ((4, 8),))


def test_fused_tensors_that_are_trained_differently_are_refused_with_both() -> None:
    rows = _rows(_row("q"), _row("k", lr=0.2))
    with pytest.raises(UseError, match=r"q and k would both be qk, .* lr 0\.1 and 0\.2"):
        renamed(rows, {}, {"q": "qk", "k": "qk"})


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("rule", "rule"),
        ("lr", "lr"),
        ("weight_decay", "weight decay"),
        ("eps", "eps"),
        ("extent", "extent"),
        ("multiplier", "multiplier"),
    ],
)
def test_every_number_of_training_is_compared(field: str, said: str) -> None:
    rows = _rows(_row("q"), _row("k"))
    other = "adamw" if field == "rule" else 0.75
    rows["k"] = replace(rows["k"], **{field: other})  # type: ignore[arg-type]
    with pytest.raises(UseError, match=rf"q and k would both be qk, .* {said} .* and {other}"):
        renamed(rows, {}, {"q": "qk", "k": "qk"})


def test_blocks_of_a_tensor_stay_apart_where_another_is_joined_to_it() -> None:
    rows = _rows(replace(_row("qk"), rows=(((0, 2),), ((2, 4),))), _row("v", (2, 3)))
    (row,) = renamed(rows, {}, {"qk": "qkv", "v": "qkv"}).rows.values()
    assert row.rows == (((0, 2),), ((2, 4),), ((4, 6),))


def test_learning_rates_that_differ_by_rounding_agree() -> None:
    rows = _rows(_row("q", lr=0.3), _row("k", lr=0.1 + 0.2))
    assert list(renamed(rows, {}, {"q": "qk", "k": "qk"}).rows) == ["qk"]


def test_shapes_that_do_not_fit_are_refused_with_both() -> None:
    with pytest.raises(UseError, match=r"q and k would both be qk, .* \(4, 3\) and \(4, 5\)"):
        renamed(_rows(_row("q"), _row("k", (4, 5))), {}, {"q": "qk", "k": "qk"})


def test_parts_that_start_differently_are_left_to_the_network() -> None:
    rows = _rows(_row("q"), _row("k"))
    rows["k"] = replace(rows["k"], init=InitDistribution("constant"))
    new = renamed(rows, {}, {"q": "qk", "k": "qk"})
    assert new.rows["qk"].init.kind == "own"
    assert "start differently" in " ".join(new.notes)


def test_more_stars_than_the_pattern_has_are_refused() -> None:
    with pytest.raises(UseError, match=r"'a\.\*\.\*' has more stars than 'a\.\*'"):
        renamed(_rows(_row("a.w")), {}, {"a.*": "a.*.*"})


@pytest.mark.parametrize("names", [{}, ["a"], {"a": 1}, {"": "b"}])
def test_what_is_no_map_is_refused(names: object) -> None:
    with pytest.raises(UseError, match=r"^names"):
        renamed(_rows(_row("a")), {}, names)  # type: ignore[arg-type]


def test_multipliers_follow_the_names_of_their_modules() -> None:
    plan = gpt_plan(tied=True)
    new = renamed(plan.rows, plan.multipliers, {"readout.*": "lm_head.*", "*": "model.*"})
    assert new.multipliers == {"lm_head": plan.multipliers["readout"]}


def test_a_multiplier_whose_module_has_no_rule_is_refused() -> None:
    plan = gpt_plan(tied=True)
    names = {"embed.*": "embed.*", "blocks.*": "h.*", "norm.*": "norm.*", "positions*": "positions*"}
    names = {one: new for one, new in names.items() if any(name.startswith(one[:-1]) for name in plan.rows)}
    with pytest.raises(UseError, match=r"the module readout, and no rule matches readout\.weight"):
        renamed(plan.rows, plan.multipliers, names)


def test_a_plan_by_hand_is_renamed_too() -> None:
    text = parts_plan(("wide",)).export("csv", names={"wide": "w"}).text
    assert text.splitlines()[1].startswith("w,12x20,hidden,muon,0.02,")


def test_a_star_stands_for_as_little_as_it_can() -> None:
    (row,) = renamed(_rows(_row("h.0.w")), {}, {"*.*": "*/*"}).rows.values()
    assert row.name == "h/0.w"
