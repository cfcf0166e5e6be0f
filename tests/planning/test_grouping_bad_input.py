"""Calls of `groups` that cannot be right, and errors that name the culprit, the value and the fix."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.planning.mixed import TOKENS, MixedGPT
from torch import nn

import theodolite as th
from theodolite.core.errors import UseError
from theodolite.planning import groups


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "lr is missing: give the learning rate of muon, or the one you use with AdamW as adamw_lr"),
        ({"lr": 0.1, "adamw_lr": 0.01}, "lr is 0.1 and adamw_lr is 0.01: give lr"),
        ({"lr": 0.0}, "lr is 0.0: give a positive finite number"),
        ({"lr": True}, "lr is True: give a positive finite number"),
        ({"adamw_lr": float("nan")}, "adamw_lr is nan: give a positive finite number"),
        ({"lr": 0.1, "vector_lr": -1}, "vector_lr is -1: give a positive finite number"),
        ({"lr": 0.1, "weight_decay": -0.1}, "weight_decay is -0.1: give a finite number, at least 0"),
        ({"lr": 0.1, "eps": -1.0}, "eps is -1.0: give a finite number, at least 0"),
        ({"lr": 0.1, "vector_options": {"eps": -1.0}}, r"vector_options\['eps'\] is -1.0"),
        ({"lr": 0.1, "optimizer": "muno"}, "optimizer is 'muno': it is one of adamw, .* Did you mean 'muon'"),
        ({"lr": 0.1, "optimizer": torch.optim.SGD}, "optimizer is <class .*: it is one of adamw"),
        ({"adamw_lr": 0.1, "optimizer": "soap"}, "adamw_lr is 0.1, and optimizer is 'soap': .* Give lr"),
        ({"lr": 0.1, "optimizer": "sgd", "vector_lr": 0.1}, "vector_lr and vector_options are for .* sgd"),
        ({"lr": 0.1, "decay": "some"}, "decay is 'some'. It is one of paper"),
        ({"lr": 0.1, "covers": "most"}, "covers is 'most'. It is one of hidden, all"),
        ({"lr": 0.1, "no_decay": "norm*"}, r"no_decay is 'norm\*': give a list of patterns, no_decay="),
        ({"lr": 0.1, "no_decay": ["gain*"]}, r"no_decay: no tensor has a name that matches 'gain\*'; there"),
        ({"lr": 0.1, "roles": {"nothing": "hidden"}}, "roles.'nothing'. matches no parameter"),
        ({"lr": 0.1, "size": th.Size(16, 1)}, "size is .* and model is a ready MixedGPT: leave size out"),
    ],
)
def test_bad_arguments_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UseError, match=message):
        groups(MixedGPT(), TOKENS, **given)


def test_a_build_function_needs_a_size() -> None:
    with pytest.raises(UseError, match=r"needs the size of the network: size=theodolite\.Size"):
        groups(MixedGPT, TOKENS, lr=0.1)


def test_a_forward_pass_that_fails_is_said_in_its_words() -> None:
    with pytest.raises(UseError, match="not here"):
        groups(_Failing(), TOKENS, lr=0.1)


class _Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not here")


def test_a_network_that_is_frozen_has_nothing_to_train() -> None:
    model = MixedGPT().requires_grad_(False)
    with pytest.raises(UseError, match="no tensor of the network is trained: all 17 are frozen"):
        groups(model, TOKENS, lr=0.1)


def test_options_are_those_of_the_optimizer() -> None:
    with pytest.raises(UseError, match="'momentun' is no option of Muon"):
        groups(MixedGPT(), TOKENS, lr=0.1, options={"momentun": 0.9})
    with pytest.raises(UseError, match="'beta' is no option of AdamW"):
        groups(MixedGPT(), TOKENS, lr=0.1, vector_options={"beta": 0.9, "eps": 1e-6})
    with pytest.raises(UseError, match="'eps' of Muon is set for each tensor"):
        groups(MixedGPT(), TOKENS, lr=0.1, options={"eps": 1e-6})
    for name in ("options", "vector_options"):
        with pytest.raises(UseError, match=rf"{name} is \[1\]: give options by name"):
            groups(MixedGPT(), TOKENS, lr=0.1, **{name: [1]})  # type: ignore[arg-type]


def test_tensors_frozen_later_are_named() -> None:
    model = MixedGPT()
    made = groups(model, TOKENS, lr=0.1)
    model.tokens.weight.requires_grad_(False)
    with pytest.raises(
        UseError,
        match=re.escape(
            "the groups train them. Unfreeze them, or leave them out: groups.optimizer(model, skip="
        ),
    ):
        made.optimizer()


def test_another_network_is_refused() -> None:
    made = groups(MixedGPT(), TOKENS, lr=0.1)
    with pytest.raises(UseError, match="the groups are for MixedGPT and do not fit this MixedGPT") as error:
        made.optimizer(MixedGPT(32))
    assert "tokens.weight is (23, 32), planned (23, 16)" in str(error.value)
    with pytest.raises(UseError, match="'lost' is not a tensor of these groups"):
        made["lost"]


def test_groups_without_a_network_ask_for_one() -> None:
    made = groups(MixedGPT, TOKENS, size=th.Size(16, 1), lr=0.1)
    for use in (made.optimizer, made.split, made.param_groups):
        with pytest.raises(UseError, match=r"these groups hold no network.*groups.optimizer\(model\)"):
            use()


def test_split_and_translation_are_for_muon() -> None:
    made = groups(MixedGPT(), TOKENS, lr=0.1, optimizer="sgd")
    with pytest.raises(UseError, match=r"split is for Muon, which torch has: one of muon, .* for sgd"):
        made.split()
    with pytest.raises(UseError, match="translation is between AdamW and Muon, and these groups are for sgd"):
        _ = made.translation


def test_what_is_no_network_is_named() -> None:
    with pytest.raises(UseError, match=r"model is 'gpt': give a module, or a function build\(width, depth\)"):
        groups("gpt", TOKENS, lr=0.1)  # type: ignore[arg-type]
