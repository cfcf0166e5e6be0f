"""Plans for another batch and number of tokens: factors, options of the groups, notes and files."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from tests.planning.exporting.made import run

from theodolite import Plan, Size, UseError
from theodolite.optimizers import OPTIMIZERS
from theodolite.optimizers.horizon import Horizon

from .zoo import BASE, INPUTS, TARGET, Zoo, zoo_plan

pytestmark = pytest.mark.usefixtures("one_dissection")

TRAINED = BASE.at(batch=32, tokens=10**6)
"""What the hyperparameters are right for."""
RULES = ("none", "sde", "timescale", "sde+timescale", "power(0.3, 0.5)+timescale")


def rows_of(plan):
    return {
        name: (row.lr, row.weight_decay, row.eps, row.extent, row.init) for name, row in plan.rows.items()
    }


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "sso"])
def test_at_the_batch_and_tokens_of_the_base_a_plan_is_the_one_without(optimizer, rule):
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    plain = zoo_plan(optimizer=optimizer, options=options)
    size = TARGET.at(batch=32, tokens=10**6)
    for target in (size, TARGET, TARGET.at(batch=32)):  # what it leaves out is that of the base
        made = zoo_plan(target, TRAINED, optimizer=optimizer, options=options, horizon=rule)
        assert made.rows == plain.rows
        assert made.notes == plain.notes
        assert (made.options, made.vector_options) == (plain.options, plain.vector_options)
        assert made.multipliers == plain.multipliers
        assert made.horizon == rule


# At 4 times the batch and 9 times the tokens, there are 9/4 times the steps.
NORMALISED = math.sqrt(
    ((1 - 0.95**8) ** 2 + 0.95**16 * (1 - 0.95**4) / (1 + 0.95**4))
    / ((1 - 0.95**2) ** 2 + 0.95**4 * 0.05 / 1.95)
)
"""√ of Σh² of Nesterov's momentum at 0.95⁴ over that at 0.95."""
FACTORS = {
    ("adamw", "sde"): (math.sqrt(4 / 9), 1, math.sqrt(9 / 4)),
    ("adamw", "sde+timescale"): (math.sqrt(4 / 9), math.sqrt(4 / 9), math.sqrt(9 / 4)),
    ("adamw", "timescale"): (1, 4 / 9, 1),
    ("adamw", "power(0.5, 1)"): (4 / 3, 1, 1),
    ("adamw", "power(0.5, 1)+timescale"): (4 / 3, 1 / 3, 1),
    ("sgd", "sde"): (4 / 3, 1, None),
    ("sgd", "sde+timescale"): (4 / 3, 1 / 3, None),
    ("sgd with momentum", "sde"): (4 / 3 * (1 - 0.9**4) / (1 - 0.9), 1, None),
    # The sum holds the decay as well as the gradients: the decay goes as 1/(steps · 4/3).
    ("sgd with momentum", "sde+timescale"): (4 / 3 * (1 - 0.9**4) / (1 - 0.9), 1 / 3, None),
    ("muon", "sde"): (2 / 3 * NORMALISED, 1, math.sqrt(9 / 4)),
    ("muon", "sde+timescale"): (2 / 3 * NORMALISED, 2 / 3 / NORMALISED, math.sqrt(9 / 4)),
    ("shampoo", "sde"): (1, 1, 9 / 4**2),
    ("shampoo", "timescale"): (1, 4 / 9, 1),
    ("sso", "power(0, 1)"): (4, None, 1),
}


@pytest.mark.parametrize("name, rule", FACTORS)
def test_factors_of_size_and_of_batch_and_tokens_multiply(name, rule):
    """Also for another width and depth; initial values and what is in units of a weight stay."""
    optimizer, _, momentum = name.partition(" with ")
    options = {"momentum": 0.9} if momentum else {}
    lr, decay, eps = FACTORS[name, rule]
    for size in (BASE, TARGET):
        plain = zoo_plan(size, optimizer=optimizer, options=options)
        made = zoo_plan(
            size.at(batch=128, tokens=9 * 10**6), TRAINED, optimizer=optimizer, options=options, horizon=rule
        )
        seen = 0
        for before, after in zip(plain.trained, made.trained, strict=True):
            if before.rule != optimizer:
                continue
            seen += 1
            assert after.lr == pytest.approx(before.lr * lr), before.name
            if decay is not None:
                assert after.weight_decay == pytest.approx(before.weight_decay * decay)
            if eps is not None:
                assert after.eps == pytest.approx(before.eps * eps)
            assert (after.init, after.extent, after.multiplier) == (
                before.init,
                before.extent,
                before.multiplier,
            )
        assert seen > 3


def test_vectors_beside_a_matrix_optimizer_follow_the_rule_of_adamw():
    plain = zoo_plan(optimizer="muon", vector_lr=2**-9)
    made = zoo_plan(
        TARGET.at(batch=128, tokens=10**6), TRAINED, optimizer="muon", vector_lr=2**-9, horizon="sde"
    )
    beside = [row.name for row in plain.trained if row.rule == "adamw"]
    assert len(beside) > 3
    assert {name: made[name].lr for name in beside} == pytest.approx(
        {name: 2 * plain[name].lr for name in beside}
    )


def test_groups_have_the_decay_rates_of_their_averages():
    """β⁴ at four times the batch, in the optimizer that torch makes, and for what is left to AdamW too."""
    size = TARGET.at(batch=128)

    def groups(**given):
        plan = zoo_plan(size, TRAINED, horizon="sde", **given)
        return plan, plan.optimizer(Zoo(size.width, size.depth)).param_groups

    _, adamw = groups()
    assert [group["betas"] for group in adamw] == [pytest.approx((0.9**4, 0.999**4))] * len(adamw)
    _, chosen = groups(options={"betas": (0.5, 0.25)})
    assert {group["betas"] for group in chosen} == {(0.5**4, 0.25**4)}
    _, sgd = groups(optimizer="sgd", options={"momentum": 0.5, "nesterov": True})
    assert {(group["momentum"], group["nesterov"]) for group in sgd} == {(0.5**4, True)}
    plan, both = groups(optimizer="muon", options={"nesterov": False}, vector_options={"betas": (0.5, 0.25)})
    rates = [group["momentum"] for group in both if "momentum" in group]
    assert rates == [pytest.approx(0.95**4)] * len(rates) != []
    assert {group["betas"] for group in both if "betas" in group} == {(0.5**4, 0.25**4)}
    assert plan.options == {"nesterov": False, "momentum": pytest.approx(0.95**4)}


@pytest.mark.parametrize("rule", ["none", "timescale", "power(0.3, 0.5)"])
def test_averages_stay_under_rules_that_say_nothing_of_them(rule):
    options = {"betas": (0.5, 0.25)}
    made = zoo_plan(TARGET.at(batch=128, tokens=10**7), TRAINED, options=options, horizon=rule)
    assert made.options == options
    assert zoo_plan(TARGET.at(tokens=10**7), TRAINED, options=options, horizon="sde").options == options


def test_a_rule_may_be_an_object_and_comes_back_from_the_plan():
    rule = Horizon("power", tokens=0.25, batch=0.5)
    made = zoo_plan(TARGET.at(batch=128, tokens=16 * 10**6), TRAINED, horizon=rule)
    assert Horizon.of(made.horizon) == rule
    assert made["last.weight"].lr == pytest.approx(zoo_plan()["last.weight"].lr * 2 / 2)


def test_without_a_rule_a_change_is_warned_of_and_with_one_the_critical_batch_is_named():
    def notes(size, rule):
        return [
            note
            for note in zoo_plan(size, TRAINED, horizon=rule).notes
            if "batch" in note or "tokens" in note
        ]

    both = TARGET.at(batch=64, tokens=3 * 10**6)
    (warning,) = notes(both, "none")
    assert warning.startswith(
        "Warning: TH210: batch × 2 and tokens × 3, and the learning rate is that of the base"
    )
    assert "horizon='sde+timescale'" in warning
    assert warning in " ".join(str(zoo_plan(both, TRAINED, horizon="none")).split())
    (decaying,) = notes(TARGET.at(tokens=3 * 10**6), "timescale")
    assert "Warning: TH210: tokens × 3, and" in decaying
    assert "Only weight decay follows." in decaying
    (larger,) = notes(both, "sde")
    assert larger.startswith("batch × 2: the rule holds up to the critical batch")
    assert notes(TARGET.at(batch=16), "sde") == []
    assert notes(TARGET.at(tokens=10**7), "sde") == []
    assert notes(TARGET.at(batch=32, tokens=10**6), "none") == []


def test_the_title_and_the_first_line_say_what_changed_and_by_which_rule():
    said = str(zoo_plan(TARGET.at(batch=64, tokens=3 * 10**6), TRAINED, horizon="sde+timescale"))
    title, _, first = " ".join(said.split()).partition(" at base size ")
    assert title.endswith("(width × 8, depth × 3, batch × 2, tokens × 3)")
    assert "16 × 2, batch 32, 1M tokens → 128 × 6, batch 64, 3M tokens" in title
    assert first.startswith(
        "lr 0.0156, weight decay 0.1 (paper); batch and tokens by the rule sde+timescale; "
    )
    assert "rule" not in str(zoo_plan(TARGET, TRAINED, horizon="sde")).splitlines()[1]


def test_what_the_base_does_not_say_has_no_ratio():
    for size, name in ((TARGET.at(batch=64), "batch"), (TARGET.at(tokens=64), "tokens")):
        with pytest.raises(UseError, match=f"size has {name}=64 and base has none, so that the ratio is not"):
            zoo_plan(size, BASE)
    with pytest.raises(UseError, match=r"horizon is 'sdee'. Did you mean 'sde'\?"):
        zoo_plan(horizon="sdee")


def test_a_plan_for_another_batch_comes_back_from_its_file(tmp_path):
    made = zoo_plan(
        TARGET.at(batch=128, tokens=9 * 10**6),
        TRAINED,
        horizon="sde+timescale",
        options={"betas": (0.9, 0.95)},
    )
    path = made.save(tmp_path / "plan.json")
    again = Plan.load(path)
    assert again == made
    assert str(again) == str(made)
    assert again.explain("last.weight") == made.explain("last.weight")
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["size"] == {"width": 128, "depth": 6, "batch": 128, "tokens": 9_000_000}
    assert content["horizon"] == "sde+timescale"
    path.write_text(json.dumps({**content, "horizon": "fast"}), encoding="utf-8")
    with pytest.raises(UseError, match=r"horizon is 'fast'"):
        Plan.load(path)
    path.write_text(json.dumps({**content, "base": {"width": 16, "depth": 2}}), encoding="utf-8")
    with pytest.raises(UseError, match="base has none"):
        Plan.load(path)


def test_two_plans_differ_in_size_rule_and_averages(tmp_path):
    before = zoo_plan(TARGET, TRAINED, options={"betas": (0.5, 0.25)})
    after = zoo_plan(TARGET.at(batch=64), TRAINED, options={"betas": (0.5, 0.25)}, horizon="sde")
    lines = str(before.diff(after)).splitlines()
    assert "size: 128 × 6 → 128 × 6, batch 64" in lines
    assert "rule for batch and tokens: none → sde" in lines
    assert "options: {'betas': (0.5, 0.25)} → {'betas': (0.25, 0.0625)}" in lines
    changes = [line for line in lines if line.startswith("lr ")]
    assert changes
    assert all("(× 1.41)" in line.partition(",")[0] for line in changes)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon-kimi"])
def test_an_exported_file_makes_the_optimizer_of_the_batch(optimizer):
    options = {"momentum": 0.5} if optimizer == "sgd" else {}
    made = zoo_plan(
        TARGET.at(batch=128, tokens=9 * 10**6), TRAINED, optimizer=optimizer, options=options, horizon="sde"
    )
    model = Zoo(TARGET.width, TARGET.depth)
    names = {id(weight): name for name, weight in model.named_parameters()}
    found = {}
    for one in run(made.export("torch").text).make_optimizers(model):
        for group in one.param_groups:
            if "betas" in group:
                assert group["betas"] == pytest.approx((0.9**4, 0.999**4))
            elif optimizer == "sgd":
                assert group["momentum"] == 0.5**4
            else:
                assert group["momentum"] == pytest.approx(0.95**4)
            found |= {names[id(weight)]: group["lr"] for weight in group["params"]}
    assert found.keys() == {row.name for row in made.trained}
    if optimizer != "muon-kimi":  # torch's Muon has factors of its own
        assert found == pytest.approx({row.name: row.lr for row in made.trained}, rel=1e-9)


def test_a_table_has_the_numbers_of_the_batch(tmp_path):
    made = zoo_plan(TARGET.at(batch=128), TRAINED, horizon="sde")
    with made.save(tmp_path / "plan.csv").open(encoding="utf-8") as file:
        rows = {row["tensor"]: row for row in csv.DictReader(file)}
    assert float(rows["last.weight"]["lr"]) == pytest.approx(2 * zoo_plan()["last.weight"].lr, rel=1e-3)


def test_networks_of_a_plan_are_built_without_their_batch():
    made = zoo_plan(TARGET.at(batch=128, tokens=10**7), TRAINED, horizon="sde")
    plain = zoo_plan()
    for one, other in zip(made.build(seed=3).parameters(), plain.build(seed=3).parameters(), strict=True):
        assert torch.equal(one, other)
    assert made.build(seed=0)(INPUTS).shape == (2, 3)


def test_a_rule_of_ones_own_follows_batch_and_tokens_by_its_degree():
    def gradient_step(part, ratios, base):
        return OPTIMIZERS["sgd"].rule(part, ratios, base)

    def sign_step(part, ratios, base):
        return OPTIMIZERS["adamw"].rule(part, ratios, base)

    size = BASE.at(batch=128)
    for rule, factor in ((gradient_step, 4), (sign_step, 2)):
        made = zoo_plan(size, TRAINED, optimizer=rule, horizon="sde")
        assert made["last.weight"].lr == pytest.approx(2**-6 * factor)


def test_a_size_of_the_base_may_be_given_as_the_one_that_is_planned():
    assert rows_of(zoo_plan(Size(16, 2), TRAINED)) == rows_of(zoo_plan(TRAINED, TRAINED, horizon="sde"))


def test_a_printed_plan_names_the_averages_that_go_with_its_learning_rates():
    """0.9^4 and 0.999^4; 0.95^4 for Muon. Rates without them would be used with the averages of the base."""
    target = TARGET.at(batch=128)
    assert "; betas of adamw 0.6561, 0.996 at the target" in plain_text(
        zoo_plan(target, TRAINED, horizon="sde")
    )
    muon = plain_text(zoo_plan(target, TRAINED, horizon="sde", optimizer="muon"))
    assert "momentum of muon 0.8145 at the target" in muon
    assert "betas of adamw 0.6561, 0.996 at the target" in muon
    for same in (zoo_plan(target, TRAINED), zoo_plan(TARGET.at(tokens=10**7), TRAINED, horizon="sde")):
        assert "at the target" not in plain_text(same)


def plain_text(made: Plan) -> str:
    """What is printed, without the breaks of lines."""
    return " ".join(str(made).split())
