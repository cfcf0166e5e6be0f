"""A plan on disk is the plan: every digit comes back, and what is no plan is refused by name."""

import json
import math
from dataclasses import replace

import pytest

from theodolite import Plan, UseError
from theodolite.planning.init_distribution import InitDistribution

from .zoo import Zoo, zoo_plan


@pytest.fixture
def saved(tmp_path):
    return zoo_plan().save(tmp_path / "plan.json")


@pytest.mark.parametrize("optimizer", ["adamw", "sso"])
def test_what_is_read_is_what_was_written(tmp_path, optimizer):
    options = {"betas": (0.9, 0.95), "nested": {"on": True, "name": None}} if optimizer == "adamw" else {}
    plan = zoo_plan(optimizer=optimizer, lr=0.1 + 0.2, options=options)
    plan = replace(plan, notes=("größer",), multipliers={"head": 1 / 3})
    bounded = replace(plan["last.weight"], init=InitDistribution("truncated", std=1 / 7, bound=2 / 7))
    plan = replace(plan, rows={**plan.rows, "last.weight": bounded})
    again = Plan.load(plan.save(tmp_path / "plan.json"))
    assert again == plan
    assert list(again.rows) == list(plan.rows)
    assert again.options == options
    assert again["last.weight"].init.bound == 2 / 7  # to the last bit
    assert again.explain("blocks.*.up.weight") == plan.explain("blocks.*.up.weight")
    assert str(again) == str(plan)


def test_the_build_function_is_handed_over_anew(saved):
    assert Plan.load(saved).build_function is None
    assert Plan.load(saved, Zoo).build_function is Zoo


def test_a_file_is_plain_json_with_a_version(saved):
    content = json.loads(saved.read_text(encoding="utf-8"))
    assert (content["kind"], content["version"]) == ("theodolite plan", 2)
    assert content["rows"]["last.weight"]["lr"] == zoo_plan()["last.weight"].lr


def test_an_older_plan_may_be_replaced_but_nothing_else(tmp_path, saved):
    zoo_plan(lr=0.5).save(saved)
    assert Plan.load(saved).lr == 0.5
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(UseError, match=r"config.json: there is a file that holds no plan. Give another name"):
        zoo_plan().save(config)
    assert config.read_text() == '{"model_type": "llama"}'
    with pytest.raises(UseError, match="there is no folder"):
        zoo_plan().save(tmp_path / "absent" / "plan.json")
    with pytest.raises(UseError, match=r"its name must end in .json or .html or .csv"):
        zoo_plan().save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "plan.json"]  # no rests


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_infinities_are_refused_and_the_old_file_stays(saved, number):
    plan = zoo_plan()
    row = replace(plan["last.bias"], weight_decay=number)
    with pytest.raises(UseError, match=r"rows: last.bias: weight_decay is (-?inf|nan): give a finite"):
        replace(plan, rows={**plan.rows, "last.bias": row}).save(saved)
    assert Plan.load(saved) == plan


def test_options_that_are_no_data_are_refused(tmp_path):
    with pytest.raises(UseError, match="options: foreach is a function"):
        zoo_plan(options={"foreach": zoo_plan}).save(tmp_path / "plan.json")


def spoilt(content, *keys, value=None):
    """The content with one value changed, or one key away."""
    *path, last = keys
    inside = content
    for key in path:
        inside = inside[key]
    if value is None:
        del inside[last]
    else:
        inside[last] = value
    return content


ROW = ("rows", "last.weight")


@pytest.mark.parametrize(
    "keys, value, words",
    [
        (("kind",), "survey", 'holds no plan: its "kind" is not'),
        (("version",), 1, "has version 1 of the format, and this is version 2"),
        (("lr",), None, "the plan has no lr"),
        (("colour",), 1, "the plan has a 'colour', which means nothing"),
        (("lr",), "much", "the plan: lr is 'much' where a finite number belongs"),
        (("lr",), True, "the plan: lr is True where a finite number belongs"),
        (("policy",), 3, "the plan: policy is 3 where a text belongs"),
        (("rows",), [], "the plan: rows is [] where an object belongs"),
        (("size", "width"), 1.5, "the plan: size: width is 1.5 where a whole number belongs"),
        ((*ROW, "eps"), None, "the plan: rows: last.weight has no eps"),
        ((*ROW, "shape"), 7, "last.weight: shape is 7 where a list belongs"),
        ((*ROW, "lr"), math.inf, "last.weight: lr is inf where a finite number belongs"),
        ((*ROW, "init", "kind"), "cauchy", "last.weight: init: kind is 'cauchy' where 'constant' or "),
        ((*ROW, "block"), "2", "last.weight: block is '2' where a whole number belongs"),
        (("size", "width"), -1, "width is -1: a size is two positive whole numbers"),
        ((*ROW, "lr"), -1, "rows: last.weight: lr is -1: give a finite number from 0 to"),
        ((*ROW, "lr"), 10**400, "last.weight: lr is a number of many digits where a finite number belongs"),
        ((*ROW, "weight_decay"), -0.1, "last.weight: weight_decay is -0.1: give a finite number from 0 to"),
        ((*ROW, "init", "std"), -0.1, "last.weight: init: std is -0.1: give a finite number from 0 to"),
        (
            (*ROW, "init", "std"),
            1e38,
            "last.weight: init: std is 1e+38: give a finite number from 0 to 3.40282e+36",
        ),
        (
            (*ROW, "init", "mean"),
            1e300,
            "last.weight: init: mean is 1e+300: give a finite number from -3.40282e+36 to",
        ),
        (
            (*ROW, "init", "kind"),
            "truncated",
            "last.weight: init: bound is None: give a finite number from 0.0312",
        ),
        ((*ROW, "multiplier"), 0, "last.weight: multiplier is 0: give a number other than 0"),
        ((*ROW, "role"), "weight", "last.weight: role is 'weight'. It is one of input, hidden"),
        ((*ROW, "rule"), "adam", "last.weight: rule is 'adam'. Did you mean 'adamw'? It is one of adamw"),
        ((*ROW, "shape"), [3, -128], "last.weight: shape is -128: give an integer, at least 0"),
        (
            (*ROW, "in_axes"),
            [2],
            "last.weight: in_axes and out_axes are (2,) and (0,): give different dimensions of",
        ),
        (
            (*ROW, "rows"),
            [[[0, 4]]],
            "last.weight: rows holds (0, 4): give a range within 3 outputs",
        ),
        ((*ROW, "rows"), [[[0, 1, 2]]], "last.weight: rows is [0, 1, 2] where a list of 2 belongs"),
        (
            (*ROW, "name"),
            "first.weight",
            "last.weight: name is 'first.weight': give 'last.weight'",
        ),
        (("policy",), "papers", "the plan: policy is 'papers'. Did you mean 'paper'? It is one of paper"),
        (("options",), {"betas": [0.9, math.nan]}, "options: betas is nan: give a finite number"),
    ],
)
def test_a_spoilt_file_is_refused_with_its_name_and_what_is_wrong(saved, keys, value, words):
    content = spoilt(json.loads(saved.read_text(encoding="utf-8")), *keys, value=value)
    saved.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UseError) as caught:
        Plan.load(saved)
    assert words in str(caught.value)
    assert "plan.json" in str(caught.value)


def test_what_is_no_json_or_not_there_is_refused(tmp_path, saved):
    saved.write_text(saved.read_text(encoding="utf-8")[:1000], encoding="utf-8")
    with pytest.raises(UseError, match=r"plan.json is not JSON"):
        Plan.load(saved)
    saved.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UseError, match=r"plan.json cannot be read: it is not a text in UTF-8"):
        Plan.load(saved)
    saved.write_text("[1, 2]")
    with pytest.raises(UseError, match="holds no plan"):
        Plan.load(saved)
    with pytest.raises(UseError, match=r"absent.json cannot be read: No such file"):
        Plan.load(tmp_path / "absent.json")
