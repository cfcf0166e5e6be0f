"""From faults to findings: how severe they are, along which axis, and whether the remedy is one."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW

from theodolite.core.size import Size
from theodolite.surveying import Audit, audit
from theodolite.surveying.finding import Finding
from theodolite.workloads import Workload

from .hand_made import LR, batch, building, loss, make_optimizer, recipe


def audited(*faults: str, optimizer: Any = make_optimizer, sizes: Any = None, **options: Any) -> Audit:
    workload = Workload("mine", building(recipe(*faults, **options)), batch, loss, Size(32, 2))
    return audit(workload, optimizer=optimizer, train=False, **(sizes or {}))


def of_code(found: Audit, code: str) -> Finding:
    (finding,) = (one for one in found.findings if one.code == code)
    return finding


class Residual(nn.Module):
    """Branches of two layers, with the multiplier 1/√depth, which is right for one: two need 1/depth."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, width, bias=False), nn.Linear(width, 2, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x))) / len(self.up) ** 0.5
        return self.last(x)


def test_the_multiplier_of_depth_mup_is_named_and_is_no_failure(rows: Any) -> None:
    def make(model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), lr=LR)

    found = audit(rows(Residual), optimizer=make, widths=[32], depths=[2, 4, 8], train=False)
    finding = of_code(found, "TH209")
    assert (finding.level, found.at("fail")) == ("warn", ())
    assert "depth-muP" in finding.sentence


def test_findings_are_in_the_order_of_their_codes() -> None:
    found = audited("decay times lr twice", "readout not multiplied", "hidden lr not divided", eps=1e-4)
    codes = [one.code for one in found.findings]
    assert codes == sorted(codes)
    assert len(set(codes)) == 4


def test_eps_and_decay_are_judged_along_the_depth_where_no_other_axis_is() -> None:
    along = {"widths": [32], "depths": [2, 4, 8]}
    limited = of_code(audited("eps left alone", eps=1e-3, sizes=along), "TH208")
    assert (limited.level, limited.title) == ("warn", "An eps that limits the steps")

    def coupled(model: nn.Module) -> Adam:
        groups = make_optimizer(model).param_groups
        kept = [{key: one[key] for key in ("params", "lr", "weight_decay", "eps")} for one in groups]
        return Adam(kept)

    titles = {one.title for one in audited(optimizer=coupled, sizes=along).findings}
    assert "A weight decay that is none" in titles


def test_an_eps_as_small_as_the_remedy_says_limits_nothing() -> None:
    limited = of_code(audited("eps left alone", eps=1e-4), "TH208")
    (small,) = re.findall(r"such as (\S+)\.$", limited.remedy)
    assert 0 < float(small) < 1e-4
    assert of_code(audited("eps left alone", eps=float(small)), "TH208").level == "ok"


def test_an_unknown_optimizer_without_a_learning_rate_is_said_once() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    found = audited(optimizer=lambda model: Own(model.parameters()), sizes={"depths": [2]})
    (said,) = [one.sentence for one in found.findings if one.sentence.startswith("Not judged")]
    assert "How large the steps of Own are is not known here" in said


def test_attention_logits_that_shrink_are_no_failure_and_those_that_grow_are() -> None:
    """Heads grow with width; their right scale is 1/d, and √(8/d) is multiplied in, or divided by."""
    levels = []
    for power in (-0.5, 0.5):

        def build(width: int, depth: int, power: float = power) -> nn.Module:
            model = building(recipe(growing_heads=True))(width, depth)
            for block in model.blocks:
                block.attn.scale *= (block.attn.dim / 8) ** power
            return model

        workload = Workload("mine", build, batch, loss, Size(32, 2))
        found = audit(workload, optimizer=make_optimizer, depths=[2], train=False)
        levels.append(of_code(found, "TH209").level)
    assert levels == ["warn", "fail"]
