"""The words of a finding suit its tensors and numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Muon

from theodolite.core.size import Size
from theodolite.surveying import Audit, audit
from theodolite.workloads import Workload

from .hand_made import batch, building, loss, make_optimizer, recipe
from .test_report import Rows
from .test_report import batch as rows_batch


def audited(*faults: str, optimizer: Any = make_optimizer, **sizes: Any) -> Audit:
    workload = Workload("mine", building(recipe(*faults)), batch, loss, Size(32, 2))
    return audit(workload, optimizer=optimizer, train=False, **sizes)


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
