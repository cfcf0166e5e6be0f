"""The words of a finding suit its tensors and numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon

from theodolite.core.size import Size
from theodolite.surveying import Audit, audit
from theodolite.surveying.auditing.exponents import Axis, TensorScaling
from theodolite.surveying.auditing.faults import Fault, find_faults
from theodolite.surveying.auditing.phrases import REMEDIES, SENTENCES, is_depth_mup
from theodolite.workloads import Workload

from .hand_made import batch, building, loss, make_optimizer, recipe
from .test_faults import as_power, weight
from .test_report import Rows
from .test_report import batch as rows_batch


def audited(*faults: str, optimizer: Any = make_optimizer, **sizes: Any) -> Audit:
    workload = Workload("mine", building(recipe(*faults)), batch, loss, Size(32, 2))
    return audit(workload, optimizer=optimizer, train=False, **sizes)


def said_of(axis: Axis, one: TensorScaling) -> tuple[str, str]:
    """The sentence and the remedy of the one fault of a tensor."""
    (fault,) = find_faults([one], axis)
    return SENTENCES[fault.cause](fault), REMEDIES[fault.cause](fault, Size(64, 2))


def test_a_factor_that_should_not_be_there_is_taken_out() -> None:
    _, remedy = said_of("width", weight(lr=as_power(1)))
    assert remedy.startswith("Do not multiply the learning rate of `w` by width/64")
    _, remedy = said_of("width", weight(lr=as_power(-1)))
    assert remedy.startswith("Do not divide the learning rate of `w` by width/64")
    _, remedy = said_of("width", weight(lr=as_power(0, -1)))
    assert remedy.startswith("Divide the learning rate of `w` by width/64")


def test_a_decay_that_grows_is_too_strong_and_one_that_falls_too_weak() -> None:
    sentence, remedy = said_of("width", weight(decay=as_power(1)))
    assert "the weight decay of w is 10 times too strong" in sentence
    assert remedy == "Divide the weight decay of `w` by width/64."
    sentence, remedy = said_of("width", weight(decay=as_power(-1)))
    assert "the weight decay of w is 10 times too weak" in sentence
    assert remedy == "Multiply the weight decay of `w` by width/64."


def test_a_start_that_is_divided_twice_says_where_the_other_time_is() -> None:
    branch = weight(ends_branch=True, multiplier=as_power(-1).own, init=as_power(-0.5, 0))
    _, remedy = said_of("depth", branch)
    assert remedy.endswith("in the init of `w`: the branch is divided by depth/2 already.")
    _, remedy = said_of("depth", weight(init=as_power(-0.5, 0)))
    assert "already" not in remedy


def test_depth_mup_is_a_multiplier_of_branches_along_the_depth() -> None:
    root = weight(ends_branch=True, multiplier=as_power(-0.5).own)
    assert is_depth_mup(Fault("multiplier", "depth", 0.5, (root,)))
    assert not is_depth_mup(Fault("multiplier", "width", 0.5, (root,)))
    assert not is_depth_mup(Fault("step", "depth", 0.5, (root,)))


def test_a_branch_without_multiplier_has_none() -> None:
    (finding,) = audited("branch not multiplied").at("fail")
    assert "depth^0" not in finding.sentence
    assert "the forward pass does not multiply it by a power of depth" in finding.sentence
    assert "it should, by depth^−1." in finding.sentence


def test_several_tensors_without_an_optimizer_are_several() -> None:
    hidden = audited(optimizer=lambda model: Muon([model.blocks[0].mlp.up.weight]), depths=[2])
    (finding,) = (one for one in hidden.at("fail") if "no parameter group" in one.sentence)
    assert "or freeze them by requires_grad_(False), if they are meant to stay" in finding.remedy
    assert "`blocks.*.attn.qkv.weight` and 6 more into a group" in finding.remedy


def test_a_multiplier_is_said_to_be_there_twice_only_if_one_of_it_is_right() -> None:
    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, targets)

    workload = Workload("rows", Rows, rows_batch, loss_of, Size(64, 1))
    made = audit(workload, optimizer=lambda model: SGD(model.parameters(), lr=0.1), train=False)
    (finding,) = (one for one in made.findings if one.code == "TH209")
    assert finding.remedy == "Multiply the logits (`last.weight`) by √(64/width), not by 64/width."


def test_what_does_not_follow_the_size_is_said_in_words() -> None:
    (finding,) = audited("hidden lr not divided", depths=[2]).at("fail")
    assert "their learning rate does not change with width" in finding.sentence
    assert "by the rule of adamw it should go as width^−1." in finding.sentence
    (finding,) = audited("embedding lr divided", depths=[2]).at("warn")
    assert "goes as width^−1; by the rule of adamw it should not change with width." in finding.sentence


def test_the_standard_parameterization_is_called_by_its_name() -> None:
    def notes(found: Audit) -> int:
        return sum("the standard parameterization" in note for note in found.notes)

    def plain(model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), lr=0.01)

    standard = "constant std", "readout not multiplied"
    assert notes(audited(*standard, optimizer=plain)) == 1
    assert notes(audited("constant std", optimizer=plain)) == 0  # the readout is multiplied
    assert notes(audited(*standard)) == 0
    assert notes(audited()) == 0


def remedy(fault: Fault) -> str:
    return REMEDIES[fault.cause](fault, Size(64, 2))


def test_the_remedy_of_a_learning_rate_keeps_the_decay_of_a_step() -> None:
    """lr·decay is right before, and lr changes: the decay has to go against it."""
    (alone,) = find_faults([weight(lr=as_power(0, -1), decay=as_power(0))], "width")
    assert remedy(alone).endswith(
        "by width/64. Multiply its weight decay by width/64, so that learning rate × decay stays as it is."
    )
    (small,) = find_faults([weight(lr=as_power(-1, 0), decay=as_power(0))], "width")
    assert "Divide its weight decay by width/64, so that" in remedy(small)
    # A decay that is off as the learning rate is comes right with it; where nothing decays there is none.
    (with_it,) = find_faults([weight(lr=as_power(0, -1), decay=as_power(1, 0))], "width")
    assert "decay" not in remedy(with_it)
    (without,) = find_faults([weight(lr=as_power(0, -1))], "width")
    assert "decay" not in remedy(without)


def test_only_the_tensors_whose_decay_would_change_are_named() -> None:
    one = weight(name="a", lr=as_power(0, -1), decay=as_power(0))
    (both,) = find_faults([one, replace(one, name="b", decay=as_power(1, 0))], "width")
    assert "Multiply the weight decay of `a` by width/64" in remedy(both)


def test_a_missing_multiplier_of_the_readout_is_not_put_on_its_bias() -> None:
    readout = weight(
        name="head.weight", role="output", in_block=False, lr=as_power(0, -1), init=as_power(0, -1)
    )
    (found,) = find_faults([readout], "width")
    assert remedy(found) == "Multiply the input of the readout (`head.weight`) by 64/width."


def test_a_learning_rate_beside_a_wrong_multiplier_is_held_against_the_rule_of_the_right_one() -> None:
    """1/√L on the branch and on the rate: both are for branches of one layer."""
    root = as_power(-0.5)
    off = {"init": as_power(0, -0.5), "lr": as_power(-0.5, -0.5)}
    ends = weight(name="e", ends_branch=True, multiplier=root.own, **off)
    starts = weight(name="s", lr=as_power(-0.5, 0))
    steps = [one for one in find_faults([starts, ends], "depth") if one.cause == "step"]
    assert [(one.excess, len(one.scalings)) for one in steps] == [(-0.5, 2)]
    (alone,) = (one for one in find_faults([ends, starts], "depth") if one.cause == "step")
    said = SENTENCES["step"](alone)
    assert "goes as depth^−0.5; by the rule of adamw it should not change with depth." in said


def test_a_branch_divided_by_the_root_of_a_sum_is_depth_mup_too() -> None:
    """τ/√(1 + τ²) of u-muP, over a few depths: nearly a root."""
    made = weight(
        ends_branch=True, multiplier=as_power(-0.42).own, init=as_power(0, -0.58), lr=as_power(0, -0.58)
    )
    (found,) = find_faults([made], "depth")
    assert is_depth_mup(found)
    assert not is_depth_mup(replace(found, excess=1.0))


def test_a_multiplier_belongs_to_the_branches_along_the_depth_and_else_to_the_output() -> None:
    grows = weight(ends_branch=True, multiplier=as_power(1).own)
    assert remedy(Fault("multiplier", "width", 1.0, (grows,))) == (
        "Do not multiply the output of `w` by width/64."
    )
    assert remedy(Fault("multiplier", "depth", 1.0, (grows,))) == (
        "Do not multiply the branches that `w` end by depth/2."
    )


def test_the_factor_of_nanogpt_is_called_as_it_is_written_there_and_others_by_their_power() -> None:
    _, root = said_of("depth", weight(init=as_power(-0.5, 0)))
    assert root == "Leave out the 1/√(2·depth), or 1/√depth, in the init of `w`."
    _, other = said_of("depth", weight(init=as_power(-1, 0)))
    assert other == "Leave out the factor 2/depth in the init of `w`."


def test_a_decay_is_called_twice_multiplied_only_if_the_learning_rate_is_in_it() -> None:
    _, twice = said_of("width", weight(lr=as_power(-1, -1), decay=as_power(-2, -1)))
    assert "it is multiplied by the learning rate twice, once by you and once by AdamW" in twice
    _, once = said_of("width", weight(decay=as_power(0, -1)))
    assert once == "Divide the weight decay of `w` by width/64."
