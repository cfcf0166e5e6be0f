"""Factors in groups that training loops multiply in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from theodolite.optimizers.group_scales import apply_group_scales, note_of_scales


def made(**options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], **options}], lr=0.1, weight_decay=0.2)


@pytest.mark.parametrize(
    ("options", "lr", "decay"),
    [
        ({}, 0.1, 0.2),
        ({"lr_scale": 0.5}, 0.05, 0.2),
        ({"lr_mult": 2, "wd_mult": 0.0}, 0.2, 0.0),
        ({"lr_scale": 1.0}, 0.1, 0.2),
        ({"lr_scale": "half"}, 0.1, 0.2),
    ],
)
def test_each_factor_multiplies_its_option_once(options: dict[str, Any], lr: float, decay: float) -> None:
    optimizer = made(**options)
    changing = {name for name, factor in options.items() if factor not in (1, "half")}
    assert set(apply_group_scales([optimizer])) == changing
    assert apply_group_scales([optimizer]) == ()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (lr, decay)


def test_an_option_that_the_optimizer_reads_itself_is_left_to_it() -> None:
    class Reading(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "lr_scale": 0.5})

    optimizer, other = Reading([nn.Parameter(torch.ones(2))]), made(lr_scale=0.5)
    assert apply_group_scales([optimizer, other]) == ("lr_scale",)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert other.param_groups[0]["lr"] == 0.05


def test_the_note_names_what_was_assumed() -> None:
    assert note_of_scales([]) == ""
    assert "lr_scale, which no optimizer reads: lr is taken times it" in note_of_scales(["lr_scale"])
    assert ": lr and weight_decay are taken" in note_of_scales(["lr_mult", "wd_mult"])
