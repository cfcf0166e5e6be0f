"""`audit` from the outside: sizes, findings, training, the file, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.core.size import Size
from theodolite.surveying import Audit, audit
from theodolite.workloads import Workload, workload

from .hand_made import batch, building, loss, make_groups, make_optimizer, recipe

BASE = Size(32, 2)


def mine(*faults, **options):
    made = recipe(*faults, **options)
    return Workload("mine", building(made), batch, loss, BASE, optimizer=make_optimizer)


def plain(model):
    return AdamW(model.parameters(), lr=0.01)


def wrong(found):
    return [finding.code for finding in (*found.at("fail"), *found.at("warn"))]


@pytest.fixture(scope="module")
def trained() -> Audit:
    return audit(mine("readout not multiplied"))


def test_standard_training_code_has_wrong_hidden_and_readout_weights():
    found = audit("mlp-mixture", optimizer=plain, base=Size(32, 2), train=False)
    step, start, multiplier = found.at("fail")
    assert (step.code, start.code, multiplier.code) == ("TH206", "TH207", "TH209")
    assert {row["tensor"] for row in step.evidence.rows} == {
        "blocks.*.layers.0.weight",
        "blocks.*.layers.1.weight",
        "readout.weight",
    }
    assert step.evidence.numbers == {"times too large at ten times the width": 10.0}
    assert "by width/32" in step.remedy
    assert start.evidence.numbers == {"times too large at ten times the width": 3.16}
    assert "the branches that `blocks.*.layers.1.weight` end by 2/depth" in multiplier.remedy


@pytest.mark.usefixtures("one_dissection")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon", "muon-kimi", "lion"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_plan_s_network_and_optimizer_are_right(gpt, optimizer, tied):
    given = gpt(tied=tied, bias=True, qk_norm=True)
    inputs = given.draw(0, 0)[0]
    sizes = [Size(32 * wide, 2 * deep) for wide in (1, 2, 4, 8) for deep in (1, 2, 4, 8)]
    plans = {
        size: th.plan(given.build, inputs, base=Size(32, 2), size=size, optimizer=optimizer, lr=0.01,
                      weight_decay=0.1)
        for size in sizes
        if size.width <= 64 or size.depth <= 4
    }  # fmt: skip

    def build(width, depth):
        made = plans[Size(width, depth)].build()
        object.__setattr__(made, "plan", plans[Size(width, depth)])
        return made

    found = audit(
        replace(given, build=build), optimizer=lambda model: model.plan.optimizer(model), base=Size(32, 2),
        train=False,
    )  # fmt: skip
    assert [finding.level for finding in found.findings] == ["ok"] * 4, found
    assert found.right


def test_training_shows_what_reading_found(trained):
    assert wrong(trained) == ["TH209"]
    assert trained.coordinates is not None
    assert trained.coordinates.parameterization == "own"
    assert [one.size for one in trained.spectral] == [Size(128, 2), Size(32, 8)]
    assert "logits" in trained.trained[0]
    assert "head.weight" in trained.trained[1]
    assert not any("disagree" in said for said in trained.trained)


def test_training_of_a_right_recipe_agrees_with_its_reading_and_with_no_other(trained):
    found = audit(mine())
    assert found.right
    assert not any("disagree" in said for said in found.trained)
    assert all(" keep their size" in said for said in found.trained)
    mistaken = replace(found, findings=trained.findings)
    assert "What is wrong by its exponents does not show in these few steps" in mistaken.trained[-1]
    decay = replace(trained.at("fail")[0], code="TH208")  # which a few steps do not show
    assert not any("disagree" in said for said in replace(found, findings=(decay,)).trained)


def test_training_that_disagrees_is_said():
    """A buffer of the width's size is a multiplier that the trace does not take for one."""

    class Hidden(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.inner = building(recipe())(width, depth)
            self.made, self.m_width, self.m_depth = self.inner.made, width / 32, depth / 2
            self.register_buffer("numbers", torch.full((32,), width / 32))

        def forward(self, tokens):
            return self.inner(tokens) * self.numbers

    def make(model):
        return make_optimizer(model.inner)

    found = audit(replace(mine(), build=Hidden, optimizer=make), depths=[2])
    assert found.right
    assert "change of logits goes as width^0." in found.trained[0]
    assert "Reading and training disagree: every number that was read is right" in found.trained[-1]


def test_the_file_holds_all_of_it(trained, tmp_path):
    read = Audit.load(trained.save(tmp_path / "audit.json"))
    assert str(read) == str(trained)
    assert read.width == trained.width
    page = trained.save(tmp_path / "audit.html").read_text()
    assert "head.weight: learning rate" in page
    rows = trained.save(tmp_path / "audit.csv").read_text().splitlines()
    assert len(rows) == 1 + len(trained.width) + len(trained.depth)
    assert "head.weight" in trained._repr_html_()


def test_only_axes_that_were_read_are_shown():
    found = audit(mine(), depths=[2], train=False)
    assert (found.widths, found.depths) == ((32, 64, 128), ())
    assert "Along the depth" not in str(found)
    assert "One depth was read: nothing is said about depth." in found.notes
    deep = audit(mine(), widths=[32], depths=[2, 6], train=False)
    assert (deep.widths, deep.depths) == ((), (2, 6))
    assert "Along the width" not in str(deep)


def test_depth_is_left_out_where_it_adds_no_block(rows):
    class Flat(nn.Module):
        def __init__(self, width, depth):
            super().__init__()
            self.first, self.last = nn.Linear(8, width), nn.Linear(width, 2)

        def forward(self, x):
            return self.last(self.first(x).relu())

    found = audit(rows(Flat), optimizer=plain, train=False)
    assert found.depths == ()
    assert found.width


def test_the_base_comes_first_also_between_the_widths():
    found = audit(mine(), base=Size(64, 2), widths=[128, 32], depths=[2], train=False)
    assert found.widths == (64, 32, 128)
    assert found.right


def test_attention_by_the_root_of_growing_heads_is_named():
    found = audit(mine("attention by the root", growing_heads=True), depths=[2], train=False)
    assert wrong(found) == ["TH209"]
    (said,) = found.at("fail")
    assert "head_dim^−0.5 instead of head_dim^−1" in said.sentence
    assert "2.83/head_dim" in said.remedy  # √8, so that it is 1/√8 where heads have 8 entries
    assert said.evidence.numbers["times too large at ten times the head dimension"] == 3.16


def test_tensors_left_out_are_named_and_frozen_ones_told_apart():
    found = audit(mine("head left out", "positions frozen"), depths=[2], train=False)
    (said,) = found.at("fail")
    assert "so no optimizer trains it: head.weight." in said.sentence
    assert "Frozen tensors need none (wpe.weight)." in said.sentence
    assert any("1 tensor is frozen (wpe.weight)" in note for note in found.notes)


def test_tensors_that_the_factory_freezes_are_frozen_and_not_forgotten():
    def make(model):
        model.wpe.requires_grad_(False)
        groups = make_groups(model)
        for group in groups:
            group["params"] = [tensor for tensor in group["params"] if tensor is not model.wpe.weight]
        return AdamW(groups, lr=1e-2)

    found = audit(mine(), optimizer=make, depths=[2], train=False)
    assert not wrong(found)
    assert any("1 tensor is frozen (wpe.weight)" in note for note in found.notes)


class Chain(nn.Sequential):
    def __init__(self, width, depth):
        super().__init__(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.append(nn.Linear(width, 10))


def eps_remedy(audited, eps):
    def make(model):
        return AdamW(model.parameters(), lr=0.01, eps=eps)

    found = audit(audited, optimizer=make, base=Size(32, 2), train=False)
    return next((one.remedy for one in found.at("warn") if "eps limits" in one.sentence), None)


def test_an_eps_is_divided_by_the_depth_only_where_there_are_blocks():
    """`mlp-mixture` has residual blocks; a plain chain of layers has none."""
    blocks = workload("mlp-mixture")
    for one, eps, expected in ((blocks, 1e-3, True), (replace(blocks, build=Chain), 3e-4, False)):
        remedy = eps_remedy(one, eps)
        assert remedy.startswith("Divide eps by width/32")
        assert ("inside the blocks, by depth/2" in remedy) == expected


def test_an_eps_that_is_too_large_at_the_base_has_to_be_smaller_everywhere():
    """A division that is by one at the base would not mend it there."""
    blocks = workload("mlp-mixture")
    remedy = eps_remedy(blocks, 1.0)
    said = re.fullmatch(r"Take a smaller eps at every size, such as (.*)\.", remedy)
    assert said is not None
    assert eps_remedy(blocks, float(said[1])) is None


def test_an_optimizer_without_a_rule_is_not_judged_by_guess():
    class Mine(AdamW):
        pass

    class Odd(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

    def make(model):
        return Odd(make_groups(model))

    found = audit(mine(), optimizer=make, train=False)
    assert not found.right
    assert "nothing could be judged" in found.verdict
    assert 'rules={"Odd": "adamw"}' in found.at("note")[0].remedy
    told = audit(mine(), optimizer=make, rules={"Odd": "adamw"}, train=False)
    assert told.right
    assert {one.rule for one in told.width} == {"adamw"}
    # A subclass steps as its base does.
    assert audit(mine(), optimizer=lambda model: Mine(make_groups(model)), train=False).right


def test_coupled_decay_of_adam_is_said_to_be_none():
    found = audit(mine(), optimizer=lambda model: Adam(make_groups(model)), train=False)
    (note,) = found.at("note")
    assert (note.code, note.title) == ("TH208", "A weight decay that is none")
    assert "Take AdamW" in note.remedy
    assert found.right


def test_an_eps_near_the_gradients_is_a_warning_and_a_small_one_is_not():
    small = audit(mine("eps left alone"), depths=[2], train=False)
    assert small.right
    assert "still" in next(one for one in small.findings if one.code == "TH208").sentence
    large = audit(mine("eps left alone", eps=1e-4), depths=[2], train=False)
    assert wrong(large) == ["TH208"]
    assert "eps limits the steps" in large.at("warn")[0].sentence
    # An eps that falls as the gradients do is as far below them at every width.
    assert audit(mine(eps=1e-4), depths=[2], train=False).right


def test_a_tensor_that_changes_its_optimizer_with_size_is_named():
    def make(model):
        if model.wte.embedding_dim > 32:
            return torch.optim.SGD(make_groups(model), lr=0.1)
        return AdamW(make_groups(model))

    found = audit(mine(), optimizer=make, depths=[2], train=False)
    assert any(one.title == "Another optimizer at another size" for one in found.at("fail"))


def test_a_network_that_is_too_large_to_train_is_read(monkeypatch):
    monkeypatch.setattr("theodolite.surveying.auditing.audit.MOST_TRAINED", 150_000)
    found = audit(mine(), depths=[2])
    assert found.coordinates is not None
    assert {track.size for track in found.coordinates.tracks} == {Size(32, 2), Size(64, 2)}
    assert any("Not trained: 128 × 2" in note for note in found.notes)
    monkeypatch.setattr("theodolite.surveying.auditing.audit.MOST_TRAINED", 0)
    assert audit(mine(), depths=[2]).coordinates is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimizer": None}, "says nothing of its optimizer"),
        ({"widths": [32], "depths": [2]}, "at least two of one of them"),
        ({"widths": 64}, "widths is 64: give a list"),
        ({"widths": [0, 64]}, "widths is 0"),
        ({"steps": 0}, "steps is 0"),
        ({"rules": {"AdamW": "adam"}}, "rules\\['AdamW'\\] is 'adam'"),
        ({"rules": "adamw"}, "rules is 'adamw'"),
        ({"rules": {"AdmW": "adamw"}}, "rules\\['AdmW'\\]: no optimizer is of this class; there is AdamW"),
        ({"roles": {"embed.*": "input"}}, "roles\\['embed.\\*'\\] matches no parameter"),
        ({"base": (32, 2)}, "base is \\(32, 2\\): give a Size"),
    ],
)
def test_bad_arguments_are_refused(arguments, said):
    given = {"optimizer": make_optimizer, "train": False} | arguments
    with pytest.raises(UseError, match=said):
        audit(replace(mine(), optimizer=None), **given)


def test_an_optimizer_that_wants_more_than_gradients_can_be_read_alone():
    def make(model):
        return torch.optim.LBFGS(model.parameters())

    with pytest.raises(UseError, match=r"the factory's LBFGS failed: TypeError.*train=False"):
        audit(mine(), optimizer=make, depths=[2])
    assert "no rule is known" in audit(mine(), optimizer=make, depths=[2], train=False).verdict


def test_learning_rates_of_zero_are_not_taken_for_an_unknown_optimizer():
    def make(model):
        return AdamW([{**group, "lr": 0.0} for group in make_groups(model)])

    found = audit(mine(), optimizer=make, depths=[2], train=False)
    assert found.verdict == "mine: nothing could be judged, as it has no learning rate."


def test_a_tensor_twice_in_one_group_is_named():
    def make(model):
        first, *others = make_groups(model)
        with pytest.warns(UserWarning, match="duplicate"):
            return AdamW([{**first, "params": first["params"] * 2}, *others])

    (said,) = audit(mine(), optimizer=make, depths=[2], train=False).at("fail")
    assert "in parameter groups several times, so each step moves it several times: wte" in said.sentence


def test_factories_with_faults_are_refused():
    with pytest.raises(UseError, match="needs config beside the model"):
        audit(mine(), optimizer=lambda model, config: None, train=False)
    with pytest.raises(UseError, match="takes a Workload or the name of one"):
        audit(7)  # type: ignore[arg-type]


def test_a_built_in_workload_is_found_by_its_name():
    assert workload("mlp-mixture").optimizer is None
    assert math.isfinite(audit("mlp-mixture", optimizer=plain, train=False).width[0].lr.own[0])


def test_gradients_that_are_off_outside_are_on_within():
    with torch.no_grad():
        found = audit(mine(), widths=[32, 64], depths=[2], steps=1, seeds=1)
    assert found.verdict == audit(mine(), widths=[32, 64], depths=[2], train=False).verdict
    assert found.coordinates is not None


def test_a_network_whose_depth_adds_no_block_is_read_at_one_depth():
    def two_blocks(width, depth):
        return building(recipe())(width, 2)

    found = audit(replace(mine(), build=two_blocks), train=False)
    assert (found.widths, found.depths) == ((32, 64, 128), ())
