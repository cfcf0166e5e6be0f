"""A hand-made GPT: what is right passes, and every planted mistake is found and named, alone."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW

from theodolite import Size, Workload
from theodolite.core.errors import UseError
from theodolite.surveying.auditing.audit import audit
from theodolite.surveying.auditing.report import Audit

from .hand_made import CONTEXT, FAULTS, batch, building, loss, make_optimizer, needs_config, recipe

BASE = Size(32, 2)


def audited(*faults: str, factory: Any = make_optimizer, train: bool = False, **options: Any) -> Audit:
    sizes = {key: options.pop(key) for key in ("widths", "depths") if key in options}
    workload = Workload("hand-made", building(recipe(*faults, **options)), batch, loss, BASE)
    return audit(workload, optimizer=factory, train=train, **sizes)


def wrong(found: Audit) -> list[tuple[str, str, str]]:
    return [(one.level, one.code, one.sentence) for one in found.findings if one.level != "ok"]


RIGHT: dict[str, dict[str, Any]] = {
    "CompleteP": {},
    "with LayerNorm, biases, q, k and v apart": {"norm": "layer", "bias": True, "fused": False},
    "the logits multiplied": {"multiply": "after"},
    "multiplied in place": {"multiply": "in place"},
    "tied": {"tied": True},
    "tied, multiplied in place": {"tied": True, "multiply": "in place"},
    "heads that grow, with 1/d": {"growing_heads": True},
    "one eps for all": {"one_eps": True},
    "an eps near the gradients that follows them": {"eps": 1e-4},
    "multipliers absorbed": {"absorbed": True, "eps": 1e-5},
    "SGD": {"optimizer": "sgd"},
    "SGD with LayerNorm and biases": {"optimizer": "sgd", "norm": "layer", "bias": True},
    "SGD, multipliers absorbed": {"optimizer": "sgd", "norm": "layer", "bias": True, "absorbed": True},
    "Muon with AdamW": {"optimizer": "muon", "fused": False},
    "Muon as Kimi's, with AdamW": {"optimizer": "muon-rms"},
    "muP in width alone": {"depth": False, "depths": [2]},
    "widths that are no powers of two": {"widths": [32, 48, 96, 160], "depths": [2, 3, 5]},
    "the base size in the middle": {"widths": [16, 32, 64], "depths": [1, 2, 3]},
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes_without_a_word(name: str) -> None:
    found = audited(**RIGHT[name])
    assert wrong(found) == []
    assert found.right
    assert {finding.code for finding in found.findings} == {"TH206", "TH207", "TH208", "TH209"}


@dataclass(frozen=True)
class Planted:
    """A mistake, and what has to be said of it."""

    code: str
    tensors: str
    """The ends of the names of all tensors that are off."""
    axis: str
    times: float
    """Times too large at ten times the size; a decay too strong."""
    remedy: str
    """A part of it."""
    level: str = "fail"


HIDDEN = "attn.qkv.weight attn.proj.weight mlp.up.weight mlp.down.weight"
ENDS = "attn.proj.weight mlp.down.weight"
ROOT = 10**0.5
PLANTED: dict[tuple[str, ...], Planted] = {
    ("readout not multiplied",): Planted("TH209", "head.weight", "width", 10, "32/width"),
    ("readout not multiplied", "tied"): Planted("TH209", "wte.weight", "width", 10, "32/width"),
    ("readout not multiplied", "sgd"): Planted("TH209", "head.weight", "width", 10, "32/width"),
    ("readout multiplied twice",): Planted(
        "TH209", "head.weight", "width", 0.1, "32/width once, not twice", "warn"
    ),
    ("branch not multiplied",): Planted("TH209", ENDS, "depth", 10, "2/depth"),
    ("branch not multiplied", "sgd"): Planted("TH209", ENDS, "depth", 10, "2/depth"),
    ("attention by the root", "growing_heads"): Planted("TH209", "", "head dimension", ROOT, "2.83/head_dim"),
    ("constant std",): Planted("TH207", HIDDEN, "width", ROOT, "√(width/32)"),
    ("depth in init and branch",): Planted("TH207", ENDS, "depth", 1 / ROOT, "1/√(2·depth)", "warn"),
    ("tied std as hidden", "tied"): Planted("TH207", "wte.weight", "width", 1 / ROOT, "√(32/width)", "warn"),
    ("hidden lr not divided",): Planted("TH206", HIDDEN, "width", 10, "by width/32"),
    ("hidden lr not divided", "muon-rms"): Planted("TH206", HIDDEN, "width", ROOT, "by √(width/32)"),
    ("embedding lr divided",): Planted(
        "TH206", "wte.weight wpe.weight", "width", 0.1, "Do not divide the learning rate", "warn"
    ),
    ("readout lr divided",): Planted(
        "TH206", "head.weight", "width", 0.1, "multiplies its output by 32/width already", "warn"
    ),
    ("tied as hidden", "tied"): Planted("TH206", "wte.weight", "width", 0.1, "Do not divide", "warn"),
    ("tied as hidden", "tied std as hidden", "tied"): Planted(
        "TH206", "wte.weight", "width", 0.1, "whatever else reads it", "warn"
    ),
    ("decay left alone",): Planted("TH208", HIDDEN, "width", 0.1, "by width/32", "warn"),
    ("decay times lr twice",): Planted(
        "TH208", HIDDEN, "width", 0.01, "multiplied by the learning rate twice", "warn"
    ),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True},
    "sgd": {"optimizer": "sgd"},
    "muon-rms": {"optimizer": "muon-rms"},
    "growing_heads": {"growing_heads": True},
}


@pytest.mark.parametrize("case", PLANTED, ids=", ".join)
def test_a_planted_mistake_is_found_and_named_and_nothing_else(case: tuple[str, ...]) -> None:
    planted = PLANTED[case]
    options = {key: value for one in case if one in OPTIONS for key, value in OPTIONS[one].items()}
    found = audited(*(one for one in case if one in FAULTS), **options)
    (finding,) = (one for one in found.findings if one.level != "ok")
    assert (finding.code, finding.level) == (planted.code, planted.level)
    assert planted.remedy in finding.remedy
    (times,) = (value for name, value in finding.evidence.numbers.items() if name.endswith(planted.axis))
    assert times == pytest.approx(planted.times, rel=0.05)
    ends = {str(row["tensor"]).removeprefix("blocks.*.") for row in finding.evidence.rows if "tensor" in row}
    assert ends == set(planted.tensors.split())
    assert not found.right


def test_several_mistakes_are_several_findings() -> None:
    faults = "hidden lr not divided", "constant std", "readout not multiplied", "branch not multiplied"
    found = audited(*faults)
    assert sorted(one.code for one in found.at("fail")) == ["TH206", "TH207", "TH209", "TH209"]


def test_an_eps_that_does_not_follow_gradients_matters_only_near_them() -> None:
    assert wrong(audited("eps left alone", eps=1e-12)) == []
    ((level, code, sentence),) = wrong(audited("eps left alone", eps=1e-4))
    assert (level, code) == ("warn", "TH208")
    assert "eps limits the steps" in sentence


def test_depth_that_nothing_follows_is_one_finding() -> None:
    (finding,) = (one for one in audited(depth=False).findings if one.level != "ok")
    assert finding.code == "TH209"
    assert "depth" in finding.sentence


def test_tensors_that_no_group_has_or_two_have_are_named_and_frozen_ones_are_not() -> None:
    ((level, code, sentence),) = wrong(audited("head left out", "positions frozen"))
    assert (level, code) == ("fail", "TH206")
    assert "no optimizer trains it: head.weight" in sentence
    assert "rozen tensors need none (wpe.weight)" in sentence
    ((level, code, sentence),) = wrong(audited("head twice"))
    assert (level, code) == ("fail", "TH206")
    assert "head.weight" in sentence
    assert wrong(audited("positions frozen")) == []


def test_a_schedule_that_starts_at_zero_is_left_aside() -> None:
    found = audited("scheduler")
    assert wrong(found) == []
    assert any("LambdaLR" in note for note in found.notes)


def test_factories_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(UseError, match=r"keeps state between calls.*wte\.weight with lr 0\.01, then 0\.02"):
        audited("state")
    with pytest.raises(UseError, match="needs config beside the model"):
        audited(factory=needs_config)
    assert wrong(audited(factory=functools.partial(needs_config, config={"lr": 0.1}))) != []
    with pytest.raises(UseError, match="return its optimizer"):
        audited(factory=lambda model: None)


def test_learning_rates_that_the_training_loop_multiplies_by_an_option_are_read_with_it() -> None:
    # As in nanoGPT-mup: lr is one number, and its loop sets lr·lr_scale before each step.
    def make(model: nn.Module) -> AdamW:
        groups = make_optimizer(model).param_groups
        for group in groups:
            group["lr_scale"], group["lr"] = group["lr"] / 0.01, 0.01
        return AdamW([{key: group[key] for key in KEYS} for group in groups])

    found = audited(factory=make)
    assert wrong(found) == []
    assert any("lr_scale" in note for note in found.notes)


KEYS = "params", "lr", "lr_scale", "weight_decay", "eps"


def test_reading_leaves_the_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(CONTEXT)
    torch.manual_seed(5)
    audited("hidden lr not divided")
    assert torch.equal(torch.rand(CONTEXT), expected)
