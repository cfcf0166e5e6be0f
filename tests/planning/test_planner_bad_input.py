"""What cannot be planned is refused in one sentence that names the culprit, the value and the fix."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from theodolite import Plan, Size, UnclassifiedError, UseError, plan
from theodolite.optimizers import OPTIMIZERS

from .zoo import BASE, INPUTS, TARGET, Zoo, zoo_plan

pytestmark = pytest.mark.usefixtures("one_dissection")


def refusal(call, *arguments, **options):
    with pytest.raises(UseError) as caught:
        call(*arguments, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"optimizer": "adamv"}, ["optimizer is 'adamv'", "muon-kimi", "Did you mean 'adamw'?"]),
        ({"optimizer": "muon-kimmi"}, ["Did you mean 'muon-kimi'?"]),
        ({"optimizer": "fastest"}, ["optimizer is 'fastest'", "there is a rule for adamw, diffgrad"]),
        (
            {"optimizer": torch.optim.AdamW},
            ["the class AdamW", "name of its rule", "a function (part, ratios"],
        ),
        ({"size": (32, 2)}, ["size is (32, 2)", "give a Size, for example Size(256, 4)"]),
        ({"base": 16}, ["base is 16", "give a Size"]),
        ({"lr": math.nan}, ["lr is nan", "give a positive finite number"]),
        ({"lr": math.inf}, ["lr is inf", "give a positive finite number"]),
        ({"lr": -0.1}, ["lr is -0.1", "positive"]),
        ({"lr": 0}, ["lr is 0", "positive"]),
        ({"lr": "0.1"}, ["lr is '0.1'", "finite number"]),
        ({"lr": None}, ["lr is None", "finite number"]),
        ({"lr": True}, ["lr is True", "finite number"]),
        ({"weight_decay": -0.1}, ["weight_decay is -0.1", "at least 0"]),
        ({"weight_decay": None}, ["weight_decay is None", "finite number"]),
        ({"eps": -1e-8}, ["eps is -1e-08", "at least 0"]),
        ({"vector_lr": math.nan, "optimizer": "muon"}, ["vector_lr is nan", "give a positive finite number"]),
        ({"decay": "papers"}, ["decay is 'papers'", "paper, independent, none"]),
        ({"covers": "most"}, ["covers is 'most'", "one of hidden, all"]),
        (
            {"init": {"blok*": 0.1}},
            ["'blok*'", "there are first.weight, first.bias"],
        ),
        ({"init": {"last.*": -1.0}}, ["std for 'last.*' is -1.0", "at least 0"]),
        ({"init": {"last.*": "0.1"}}, ["std for 'last.*' is '0.1'"]),
        ({"init": 0.02}, ["init is 0.02", "by pattern of names"]),
        ({"roles": {"blok*": "bias"}}, ["roles['blok*'] matches no parameter", "there are first.weight"]),
    ],
)
def test_what_is_asked_for_has_to_make_sense(options, words):
    said = refusal(zoo_plan, **options)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    "width, depth, word", [(0, 2, "width is 0"), (16, -1, "depth is -1"), (1.5, 2, "1.5")]
)
def test_sizes_are_positive_whole_numbers(width, depth, word):
    said = refusal(lambda: zoo_plan(size=Size(width, depth)))
    assert word in said
    assert "positive whole numbers" in said


def test_a_base_larger_than_the_target_is_the_inverse():
    there, back = zoo_plan(size=TARGET, base=BASE), zoo_plan(size=BASE, base=TARGET)
    for name, row in back.rows.items():
        opposite = there[name.replace("blocks.1.", "blocks.5.")]
        assert (row.lr / back.lr) * (opposite.lr / there.lr) == pytest.approx(1, rel=1e-12), name
        assert row.eps * opposite.eps == pytest.approx(1e-16, rel=1e-12), name
        assert row.weight_decay * opposite.weight_decay == pytest.approx(
            0.01 if row.weight_decay else 0, rel=1e-12
        )


class Idle(Zoo):
    def __init__(self, width, depth):
        super().__init__(width, depth)
        self.idle = nn.Parameter(torch.zeros(3, 5))

    def forward(self, *inputs):
        return super().forward(*inputs), self.idle.exp()


def test_a_tensor_that_no_rule_covers_is_named_and_can_be_told():
    with pytest.raises(UnclassifiedError) as caught:
        plan(Idle, INPUTS, size=TARGET, base=BASE, lr=0.1)
    assert "idle has shape (3, 5)" in str(caught.value)
    assert 'Say what it is: roles={"idle": ' in str(caught.value)
    told = plan(Idle, INPUTS, size=TARGET, base=BASE, lr=0.1, roles={"idle": "bias"})
    assert told["idle"].role == "bias"


def test_a_build_that_fails_at_base_size_is_quoted_with_the_size():
    def build(width, depth):
        if width < 32:
            raise KeyError("too narrow")
        return Zoo(width, depth)

    said = refusal(plan, build, INPUTS, size=TARGET, base=BASE, lr=0.1)
    assert said == "build(width=16, depth=2) failed: KeyError: 'too narrow'"


def test_a_base_at_which_a_kind_of_tensor_is_missing():
    class Deep(Zoo):
        def __init__(self, width, depth):
            super().__init__(width, depth)
            if depth >= 4:
                self.last = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3))

    said = refusal(plan, Deep, INPUTS, size=Size(32, 4), base=Size(16, 2), lr=0.1)
    assert "last.0.weight has no counterpart at the base size 16 × 2" in said
    assert "Choose a base at which every kind" in said


@pytest.mark.parametrize("use", [Plan.param_groups, Plan.optimizer, Plan.initialize])
@pytest.mark.parametrize(
    "model, words",
    [
        (lambda: Zoo(64, 6), ["first.weight is (64, 8), planned (128, 8)", "of another shape"]),
        (lambda: Zoo(128, 5), ["not in the network: blocks.5.norm_in.weight"]),
        (lambda: Zoo(128, 7), ["not in the plan: blocks.6.norm_in.weight"]),
        (lambda: Idle(128, 6), ["1 not in the plan: idle."]),
        (lambda: nn.Linear(2, 2), ["does not fit this Linear", "90 not in the network", "2 not in the plan"]),
    ],
)
def test_a_plan_for_another_network_says_which_tensors_differ(use, model, words):
    said = refusal(use, zoo_plan(), model())
    assert "the plan is for width 128, depth 6" in said
    assert "Plan for this network, or build the network at the plan's size" in said
    for word in words:
        assert word in said


def test_a_missing_parameter_is_named():
    model = Zoo(128, 6)
    model.last.bias = None
    assert "1 not in the network: last.bias." in refusal(zoo_plan().optimizer, model)


def test_a_frozen_parameter_is_named_and_can_be_skipped():
    model = Zoo(128, 6)
    model.last.bias.requires_grad_(False)
    said = refusal(zoo_plan().optimizer, model)
    assert "last.bias: frozen" in said
    assert "skip=['last.bias']" in said
    optimizer = zoo_plan().optimizer(model, skip=["last.bias"])
    trained = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    assert len(trained) == 89
    assert id(model.last.bias) not in trained
    assert "no tensor's name matches 'lost.*'" in refusal(zoo_plan().optimizer, model, skip=["lost.*"])


def test_what_a_plan_cannot_do_it_says():
    homeless = replace(zoo_plan(), build_function=None)
    assert "Plan.load(path, build)" in refusal(homeless.build)
    optimizer = zoo_plan().optimizer(Zoo(128, 6))
    said = refusal(zoo_plan().schedule, optimizer, "cosin", steps=10)
    assert "'cosin'" in said
    assert "constant, cosine, linear, wsd" in said
    assert "warmup is 10" in refusal(zoo_plan().schedule, optimizer, steps=10, warmup=10)
    assert "'momentun' is no option of AdamW" in refusal(
        zoo_plan(options={"momentun": 1}).optimizer, Zoo(128, 6)
    )
    with pytest.raises(UseError, match="'lost' is not a tensor of this plan"):
        zoo_plan()["lost"]


def test_options_for_vectors_are_refused_where_one_rule_trains_everything():
    for options in ({"vector_lr": 0.1}, {"vector_options": {"betas": (0.9, 0.95)}}):
        said = refusal(zoo_plan, **options)
        assert "adamw trains every tensor" in said


def test_init_patterns_may_name_tensors_of_the_target_that_the_base_does_not_have():
    made = zoo_plan(size=Size(32, 6), init={"blocks.5.*.weight": 0.0})
    assert {
        row.init.std for name, row in made.rows.items() if name.startswith("blocks.5.") and "weight" in name
    } == {0.0}
    assert any(row.init.std > 0 for name, row in made.rows.items() if name.startswith("blocks.4."))


def test_a_rule_that_trains_nothing_is_refused():
    def frozen(part, ratios, base):
        return replace(OPTIMIZERS["adamw"].rule(part, ratios, base), lr=0.0)

    said = refusal(zoo_plan, optimizer=frozen)
    assert "the rule frozen gives it the learning rate 0.0" in said
    assert "skip" in said


def test_a_built_in_rule_may_be_given_as_the_function_it_is():
    assert zoo_plan(optimizer=OPTIMIZERS["muon-kimi"].rule) == zoo_plan(optimizer="muon-kimi")


def test_options_do_not_override_what_is_planned():
    made = zoo_plan(options={"lr": 7.0, "weight_decay": 3.0})
    model = Zoo(TARGET.width, TARGET.depth)
    assert {group["lr"] for group in made.param_groups(model)} == {row.lr for row in made.rows.values()}
    assert "is set for each tensor" in refusal(made.optimizer, model)
