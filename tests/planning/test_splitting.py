"""The lists for torch's Muon and AdamW: their steps are those of the groups."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.planning.mixed import PIXELS, TOKENS, Attention, Convolutions, MixedGPT, Transposed
from torch import Tensor, nn

from theodolite.optimizers.orthogonal import newton_schulz
from theodolite.planning import groups
from theodolite.planning.translation import MUONS

torch_muon = pytest.importorskip("torch.optim._muon", reason="torch has no Muon before 2.9")


class Stack(nn.Module):
    """Hidden weights that are tall, wide and square, stored either way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16, bias=False), nn.Linear(16, 3, bias=False)
        self.tall, self.wide = nn.Linear(16, 40, bias=False), nn.Linear(40, 16, bias=False)
        self.turned, self.back = Transposed(16, 40), Transposed(40, 16)
        self.square = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(torch.tanh(self.tall(torch.tanh(self.first(x)))))
        x = self.back(torch.tanh(self.turned(torch.tanh(x))))
        found: Tensor = self.last(torch.tanh(self.square(torch.tanh(x))))
        return found


INPUTS = torch.randn(64, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _stack() -> Stack:
    torch.manual_seed(0)
    return Stack().double()


def _train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 3) -> dict[str, Tensor]:
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: one.detach() - before[name] for name, one in model.named_parameters()}


@pytest.fixture
def same_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Newton–Schulz computes in bfloat16; ours in the dtype of the gradient."""

    def precise(grad: Tensor, coefficients: Any, steps: int, eps: float) -> Tensor:
        return newton_schulz(grad, steps=steps, eps=eps)

    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", precise)


def _ours_and_theirs(optimizer: str, **given: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    given = {"lr": 0.02, "vector_lr": 0.003, "weight_decay": 0.3, **given}
    ours, theirs = _stack(), _stack()
    one = groups(ours, INPUTS, optimizer=optimizer, **given).optimizer()
    muon, adamw = groups(theirs, INPUTS, optimizer=optimizer, **given).split()
    return _train(ours, [one]), _train(theirs, [torch.optim.Muon(muon), torch.optim.AdamW(adamw)])


@pytest.mark.usefixtures("same_iteration")
@pytest.mark.parametrize("optimizer", MUONS)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"decay": "independent"},
        {"options": {"steps": 7, "momentum": 0.8}},
        {"eps": 1e-3, "no_decay": ["tall.weight"]},
    ],
)
def test_torch_makes_the_same_steps(optimizer: str, given: dict[str, Any]) -> None:
    ours, theirs = _ours_and_theirs(optimizer, **given)
    for name, moved in ours.items():
        torch.testing.assert_close(theirs[name], moved, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("same_iteration")
@pytest.mark.parametrize("optimizer", MUONS)
def test_torch_makes_the_same_steps_at_translated_rates(optimizer: str) -> None:
    ours, theirs = _ours_and_theirs(optimizer, lr=None, adamw_lr=0.01, vector_lr=None)
    for name, moved in ours.items():
        torch.testing.assert_close(theirs[name], moved, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", MUONS)
def test_in_its_own_precision_torch_goes_the_same_way_as_far(optimizer: str) -> None:
    ours, theirs = _stack(), _stack()
    generator = torch.Generator().manual_seed(5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        one.grad = torch.randn(one.shape, generator=generator, dtype=one.dtype)
        other.grad = one.grad.clone()
    start = {name: one.detach().clone() for name, one in ours.named_parameters()}
    groups(ours, INPUTS, optimizer=optimizer, lr=0.02).optimizer().step()
    torch.optim.Muon(groups(theirs, INPUTS, optimizer=optimizer, lr=0.02).split().muon).step()
    for name in ("tall.weight", "wide.weight", "turned.weight", "back.weight", "square.weight"):
        moved, torchs = (one.get_parameter(name).detach() - start[name] for one in (ours, theirs))
        assert torch.cosine_similarity(torchs.flatten(), moved.flatten(), dim=0) > 0.99
        assert torchs.norm() / moved.norm() == pytest.approx(1, abs=0.02)


def test_every_tensor_is_in_one_list_and_the_options_are_torchs() -> None:
    model = MixedGPT()
    made = groups(model, TOKENS, lr=0.02, options={"steps": 6}, vector_options={"betas": (0.8, 0.9)})
    muon, adamw = made.split()
    named = [name for group in [*muon, *adamw] for name in group["param_names"]]
    assert sorted(named) == sorted(dict(model.named_parameters()))
    assert {group["ns_steps"] for group in torch.optim.Muon(muon).param_groups} == {6}
    assert {group["betas"] for group in torch.optim.AdamW(adamw).param_groups} == {(0.8, 0.9)}
    assert all(parameter.ndim == 2 for group in muon for parameter in group["params"])


def test_kernels_and_experts_go_to_adamw_and_the_notes_name_them() -> None:
    for model, inputs, patterns in (
        (MixedGPT(), TOKENS, "blocks.2.up, blocks.2.down"),
        (Convolutions(), PIXELS, "wide.weight, back.weight"),
    ):
        made = groups(model, inputs, lr=0.02, vector_lr=0.003, weight_decay=0.1)
        split = made.split()
        assert f"AdamW gets {patterns}, at lr 0.003" in str(split.notes)
        by_name = {name: group for group in split.adamw for name in group["param_names"]}
        for name in patterns.split(", "):
            assert (by_name[name]["lr"], by_name[name]["weight_decay"]) == (0.003, 0.1)
            assert by_name[name]["eps"] == 1e-8


def test_what_adamw_gets_of_translated_rates_has_the_rate_that_they_come_from() -> None:
    made = groups(Convolutions(), PIXELS, adamw_lr=0.01, vector_lr=0.003, weight_decay=0.1)
    rates = {name: group["lr"] for group in made.split().adamw for name in group["param_names"]}
    assert (rates["wide.weight"], rates["back.weight"]) == (0.01, 0.01)
    assert {rate for name, rate in rates.items() if name not in ("wide.weight", "back.weight")} == {0.003}


def test_what_adamw_gets_decays_by_the_policy() -> None:
    given: Any = {"lr": 0.02, "vector_lr": 0.003, "weight_decay": 0.1}
    independent = groups(Convolutions(), PIXELS, decay="independent", **given)
    kept = groups(Convolutions(), PIXELS, no_decay=["wide.weight"], **given)
    for made, wide, back in ((independent, 0.1, 0.1), (kept, 0.0, 0.003 * 0.1)):
        adamw = {name: group for group in made.split().adamw for name in group["param_names"]}
        taken = {name: group["lr"] * group["weight_decay"] for name, group in adamw.items()}
        assert taken["wide.weight"] == pytest.approx(wide)
        assert taken["back.weight"] == pytest.approx(back)


def test_fused_matrices_are_one_for_torch_and_move_by_the_same_root_mean_square() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block, self.last = nn.Linear(4, 16), Attention(16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.last(self.block(self.first(x)))
            return found

    scales = {"muon": 1.0, "muon-original": 1.0, "muon-kimi": 0.2 * math.sqrt(16), "muon-spectral": 1.0}
    torchs = {"original": math.sqrt(48 / 16), "match_rms_adamw": 0.2 * math.sqrt(48)}
    for optimizer, scale in scales.items():
        made = groups(Fused(), torch.randn(2, 5, 4), optimizer=optimizer, lr=0.02)
        split = made.split()
        (group,) = [one for one in split.muon if "block.qkv.weight" in one["param_names"]]
        assert "orthogonalises the 3 matrices of block.qkv.weight as one" in str(split.notes)
        # UVᵀ of 48×16 has 16 singular values of one; three of 16×16 have as many each.
        theirs = group["lr"] * torchs[group["adjust_lr_fn"]] * math.sqrt(16 / (48 * 16))
        ours = 0.02 * scale * math.sqrt(16 / (16 * 16))
        assert theirs == pytest.approx(ours)


def test_decay_takes_the_same_fraction() -> None:
    for optimizer in MUONS:
        made = groups(_stack(), INPUTS, optimizer=optimizer, lr=0.02, weight_decay=0.3)
        for group in made.split().muon:
            assert group["lr"] * group["weight_decay"] == pytest.approx(0.02 * 0.3)


def test_the_split_prints_its_groups_and_notes() -> None:
    text = str(groups(MixedGPT(), TOKENS, optimizer="muon-kimi", lr=0.02).split())
    assert "match_rms_adamw" in text
    turned = "blocks.1.up.weight, blocks.1.down.weight: stored as (in, out), which gives the same step"
    assert turned in " ".join(text.split())
    content = groups(MixedGPT(), TOKENS, lr=0.02).split().to_dict()
    assert content["muon"][0]["param_names"][0] == "blocks.0.qkv.weight"


def test_learning_rates_that_make_up_for_torchs_factor_are_named() -> None:
    """√max(1, A/B) is another factor than muon's 1 for a tall matrix alone, and kimi's torch has itself."""
    square = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
    for model, inputs, optimizer, adjusted in (
        (_stack(), INPUTS, "muon", True),
        (_stack(), INPUTS, "muon-kimi", False),
        (square, torch.zeros(1, 4), "muon", False),
    ):
        notes = groups(model, inputs, optimizer=optimizer, lr=0.02).split().notes
        assert any("lr makes up for that" in note for note in notes) is adjusted


def test_skipped_tensors_are_in_neither_list() -> None:
    made = groups(MixedGPT(), TOKENS, size=None, lr=0.02)
    muon, adamw = made.split(skip=["blocks.0.*"])
    assert not [
        name for one in [*muon, *adamw] for name in one["param_names"] if name.startswith("blocks.0.")
    ]


def test_a_split_needs_no_hidden_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    made = groups(model, torch.zeros(1, 4), lr=0.1)
    assert made.notes[0].startswith("Warning: no tensor is a hidden weight")
    muon, adamw = made.split()
    assert (muon, sum(len(one["params"]) for one in adamw)) == ([], 4)
