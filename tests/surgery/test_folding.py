"""Folding gives the plain architecture back, with the function that training made of the converted one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from theodolite.surgery import convert, fold, remove_gains, scale_vectors
from theodolite.surgery.vectors import ScaledGain, ScaledWeight

from .hand import INPUTS, WIDTH, Hand, plain
from .networks import (
    NETWORKS,
    SIZES,
    TOKENS,
    apart,
    exactly,
    gradients,
    hugging_face,
    logits,
    moved,
    network,
    train,
)
from .test_converting import OPTIONS


def skeleton(model: nn.Module) -> dict[str, Any]:
    """All about a network but its values."""
    held = {name: (tuple(one.shape), one.dtype) for name, one in model.state_dict().items()}
    every = [(name, one.requires_grad) for name, one in model.named_parameters(remove_duplicate=False)]
    ids = [id(one) for _, one in model.named_parameters(remove_duplicate=False)]
    modules = [(name, type(one)) for name, one in model.named_modules()]
    return {
        "state": held,
        "parameters": sorted(every),
        "ties": sorted(ids.count(one) for one in ids),
        "modules": modules,
    }


CASES = [(name, OPTIONS[(7 * place + 3) % len(OPTIONS)]) for place, name in enumerate(NETWORKS)]


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_a_trained_network_folds_into_the_plain_architecture(name: str, options: dict[str, Any]) -> None:
    plain = network(name)
    with exactly(name):
        model = train(convert(copy.deepcopy(plain), TOKENS, **options))
        trained = logits(model).detach()
        assert apart(trained, logits(plain).detach()) > 1e-3  # it learned something
        model, proof = fold(model, TOKENS)
        folded, _ = gradients(model)
    assert apart(folded, trained) < 1e-12
    assert 0 <= proof.gradients < 1e-10  # type: ignore[operator]
    assert skeleton(model) == skeleton(plain)
    own = dict(model.named_parameters())
    for gain in proof.moved:
        constant = 0.0 if name == "Gemma2" else 1.0
        assert bool((own[gain] == constant).all())
    for gain in proof.left:
        assert not bool((own[gain] == 1.0).any())  # one that stayed is as it was trained


@pytest.mark.parametrize("name", ["gpt", "gpt layer", "GPT2", "GPTNeoX", "Gemma2"])
def test_a_plain_network_folds_too(name: str) -> None:
    plain = network(name)
    with exactly(name):
        before = logits(plain).detach()
        model, proof = fold(copy.deepcopy(plain), TOKENS)
        assert apart(logits(model).detach(), before) < 1e-12
    assert skeleton(model) == skeleton(plain)
    assert proof.moved


@pytest.mark.parametrize("form", [None, "direction", "product", "exp"])
def test_weights_are_multiplied_in_float64_and_rounded_once(form: str | None) -> None:
    """diag(b)·W·diag(γ) by hand, in bfloat16: equal to the last bit."""
    model = moved(convert(network("gpt", torch.bfloat16), TOKENS, reparameterization=form))
    weight = model.get_parameter("readout.parametrizations.weight.original").double()
    found = next(one for one in model.modules() if isinstance(one, ScaledWeight) and "readout" in one.weight)
    b, gain = (_by_hand(one[0], form) for one in (found.outputs, found.inputs))  # type: ignore[arg-type]
    model, proof = fold(model, TOKENS)
    assert torch.equal(model.get_parameter("readout.weight"), (b[:, None] * weight * gain).bfloat16())
    assert proof.dtype == "bfloat16"


def _by_hand(vector: nn.Module, form: str | None) -> Tensor:
    parts = {name: one.detach().double() for name, one in vector.named_parameters()}
    if form is None:
        return parts["gain"]
    alpha, beta = parts["direction"], parts["magnitude"]
    if form == "direction":
        return beta * alpha / alpha.square().mean().sqrt()
    return alpha * (beta.exp() if form == "exp" else beta)


def test_a_shift_goes_into_the_biases() -> None:
    """W(γ∘n + β) + c = W·diag(γ) n + (c + Wβ)."""
    model = network("gpt layer")
    norm, up = model.blocks[0].feed_forward.norm_in, model.blocks[0].feed_forward.branch.up  # type: ignore[index, union-attr]
    weight, bias = up.weight.detach().clone(), up.bias.detach().clone()
    gain, shift = norm.weight.detach().clone(), norm.bias.detach().clone()
    for edited in (convert(copy.deepcopy(model), TOKENS), fold(copy.deepcopy(model), TOKENS)[0]):
        after = edited.blocks[0].feed_forward  # type: ignore[index, union-attr]
        assert torch.allclose(after.branch.up.weight, weight @ gain.diag(), rtol=1e-14)
        assert torch.allclose(after.branch.up.bias, bias + weight @ shift, rtol=1e-13)
        assert bool((after.norm_in.bias == 0).all())
        assert bool((after.norm_in.weight == 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt layer", "gpt experts", "Llama", "Gemma2"])
def test_coarser_dtypes_round_and_no_more(name: str, dtype: torch.dtype) -> None:
    """As far from float64 as the plain network in that dtype is, or a few times that."""
    plain = network(name, dtype)
    before = logits(plain).detach()
    wide = copy.deepcopy(plain).double()
    with exactly(name):
        exact = logits(wide).detach()
    model, made = scale_vectors(plain, TOKENS)
    after = logits(model).detach()
    model, unmade = fold(model, TOKENS)
    again = logits(model).detach()
    assert {one.dtype for one in model.state_dict().values() if one.is_floating_point()} == {dtype}
    rounding = apart(before, exact)
    assert rounding > 0
    assert apart(after, exact) < 4 * rounding
    assert apart(again, exact) < 4 * rounding
    assert {made.dtype, unmade.dtype} == {str(dtype).removeprefix("torch.")}


def test_some_gains_can_be_chosen() -> None:
    model = network("gpt")
    model, proof = scale_vectors(model, TOKENS, gains=["blocks.*.attention.*"])
    assert proof.moved == ("blocks.0.attention.norm_in.weight",)
    scaled = [one.weight for one in model.modules() if isinstance(one, ScaledWeight)]
    assert [name.split(".")[-2] for name in scaled] == ["query", "key", "value"]
    model, proof = fold(model, TOKENS, gains=["norm.weight"])
    assert proof.moved == ("norm.weight",)
    gain = model.get_parameter("blocks.0.attention.norm_in.weight")
    assert bool((gain == 1).all())  # folded with the vectors that it had become
    assert not bool((model.get_parameter("blocks.0.feed_forward.norm_in.weight") == 1).any())


def test_a_part_of_a_larger_network_folds_under_its_new_name() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Tensor) -> Tensor:
            made: Tensor = self.inner(tokens)
            return made

    model = Wrapped(train(convert(network("gpt layer"), TOKENS)))
    before = logits(model).detach()
    fold(model, TOKENS)
    assert apart(logits(model).detach(), before) < 1e-12
    assert skeleton(model.inner) == skeleton(network("gpt layer"))


@pytest.mark.parametrize("converted", [False, True])
def test_a_network_without_gains_computes_the_same_and_trains_none(converted: bool) -> None:
    model = network("gpt")
    if converted:
        model = train(convert(model, TOKENS))
    before = logits(model).detach()
    model, proof = remove_gains(model, TOKENS)
    assert apart(logits(model).detach(), before) < 1e-12
    assert len(proof.moved) == 3
    assert all(one.dim() > 1 for one in model.parameters())
    assert not any(isinstance(one, ScaledWeight | ScaledGain) for one in model.modules())
    assert set(model.state_dict()) == set(network("gpt").state_dict())


def test_zero_centred_gains_are_removed_at_zero() -> None:
    model = hugging_face("Gemma2", **SIZES)
    before = logits(model).detach()
    model, proof = remove_gains(model, TOKENS)
    assert apart(logits(model).detach(), before) < 1e-6
    assert len(proof.moved) == 5
    assert not any("norm" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_norm_before_a_convolution_is_folded_with_its_shift(kernel: int) -> None:
    def step(block: Any, x: Tensor) -> Tensor:
        made: Tensor = block.down(F.pad(block.conv(block.norm(x).mT), (0, kernel - 1)).mT.relu())
        return made

    model = Hand(step, norm=nn.LayerNorm(WIDTH), conv=nn.Conv1d(WIDTH, 2 * WIDTH, kernel))
    before = model(INPUTS).detach()
    scale_vectors(model, INPUTS)
    assert apart(model(INPUTS).detach(), before) < 1e-12
    fold(model, INPUTS)
    assert apart(model(INPUTS).detach(), before) < 1e-12
    assert torch.equal(model.norm.weight, torch.ones(WIDTH).double())
    assert not model.norm.bias.any()


def test_frozen_weights_and_gains_that_are_trained_are_folded_and_stay_so() -> None:
    model = Hand(plain)
    for name, one in model.named_parameters():
        one.requires_grad_("norm" in name)
    before = model(INPUTS).detach()
    fold(model, INPUTS)
    assert apart(model(INPUTS).detach(), before) < 1e-12
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["norm.weight"]


def test_what_was_frozen_after_converting_is_frozen_after_folding() -> None:
    model = convert(network("gpt layer"), TOKENS).requires_grad_(False)
    fold(model, TOKENS)
    assert not any(one.requires_grad for one in model.parameters())


def test_a_part_of_what_was_converted_can_be_folded() -> None:
    whole = nn.Sequential(network("gpt"), nn.Identity())
    before = whole(TOKENS).detach()
    convert(whole, TOKENS)
    fold(whole[0], TOKENS)
    assert skeleton(whole[0]) == skeleton(network("gpt"))
    assert apart(whole(TOKENS).detach(), before) < 1e-12


def test_a_gain_that_two_norms_share_is_removed_from_both() -> None:
    def step(block: Any, x: Tensor) -> Tensor:
        made: Tensor = block.down(block.up(block.norm(x)).relu() + block.up2(block.other(x)))
        return made

    model = Hand(step, other=nn.RMSNorm(WIDTH), up2=nn.Linear(WIDTH, 2 * WIDTH))
    nn.init.ones_(model.norm.weight)
    model.other.weight = model.norm.weight
    remove_gains(model, INPUTS)
    assert not any("norm" in name or "other" in name for name, _ in model.named_parameters())
