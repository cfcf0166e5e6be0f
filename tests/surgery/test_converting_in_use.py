"""Surgery leaves no trace but its edit, and a converted network does all that a plain one does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import theodolite as th
from theodolite.surgery import convert, fold, remove_gains, scale_vectors
from theodolite.surgery.vectors import ScaledWeight

from .networks import TOKENS, apart, gradients, logits, network, train
from .test_folding import skeleton


class Restless(nn.Module):
    """A network with what a forward pass in training leaves behind: dropout, and a count of passes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network("gpt layer", torch.float32)
        self.drop = nn.Dropout()
        self.passes = nn.BatchNorm1d(64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        made: torch.Tensor = self.drop(self.passes(self.inner(tokens).mT).mT)
        return made


@pytest.mark.parametrize("operate", [scale_vectors, fold])
def test_gradients_buffers_mode_and_randomness_are_as_before(operate: Any) -> None:
    model = Restless()
    model.train()
    model.inner.blocks.eval()  # type: ignore[union-attr]
    model.inner.embed.weight.grad = kept = torch.randn(64, 32)  # type: ignore[union-attr]
    buffers = {name: one.clone() for name, one in model.named_buffers()}
    modes = {name: one.training for name, one in model.named_modules()}
    randomness = torch.get_rng_state()
    operate(model, TOKENS)
    assert torch.equal(torch.get_rng_state(), randomness)
    assert {name: one.training for name, one in model.named_modules() if name in modes} == modes
    now = dict(model.named_buffers())
    assert all(torch.equal(now[name], one) for name, one in buffers.items())
    graded = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert graded == {"inner.embed.weight": kept}
    assert not any(one._forward_hooks for one in model.modules())


def test_a_copy_can_be_folded_and_the_original_goes_on() -> None:
    """The parametrizations of torch hold both by one class."""
    model = train(convert(network("gpt experts"), TOKENS))  # several weights of one module are scaled
    before, slopes = gradients(model)
    other, _ = fold(copy.deepcopy(model), TOKENS)
    after, again = gradients(model)
    assert torch.equal(after, before)
    assert all(torch.equal(again[name], one) for name, one in slopes.items())
    fold(model, TOKENS)
    assert skeleton(model) == skeleton(other)
    assert apart(logits(model).detach(), before) < 1e-12


def test_a_converted_network_compiles_whole() -> None:
    model = train(convert(network("gpt gated"), TOKENS))
    wanted, slopes = gradients(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, again = gradients(compiled)  # type: ignore[arg-type]
    assert apart(found, wanted) < 1e-12
    assert len(again) == len(slopes)
    for name, one in slopes.items():
        assert apart(again[f"_orig_mod.{name}"], one) < 1e-9, name
    fold(compiled, TOKENS)  # type: ignore[arg-type]
    assert apart(logits(model).detach(), wanted) < 1e-12


def test_a_converted_network_is_saved_and_loaded(tmp_path: Path) -> None:
    model = train(convert(network("gpt layer"), TOKENS))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    other = convert(network("gpt layer"), TOKENS)
    assert not torch.equal(logits(other), logits(model))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(other), logits(model))


def test_weights_are_computed_once_in_a_cache() -> None:
    model = convert(network("gpt"), TOKENS)
    calls = []
    for one in model.modules():
        if isinstance(one, ScaledWeight):
            one.register_forward_hook(lambda *_: calls.append(1))
    with torch.nn.utils.parametrize.cached():
        both = logits(model), logits(model)
    assert len(calls) == 5  # q, k, v, up, readout
    assert torch.equal(*both)


# Without memory.


def test_on_the_meta_device_a_network_is_edited_and_not_compared() -> None:
    with torch.device("meta"):
        model = th.models.GPT(32, 1, vocab=64, head_dim=16, norm="layer", bias=True)
    model, proof = scale_vectors(model, TOKENS)
    assert (proof.outputs, proof.gradients) == (None, None)
    assert "not compared: on the meta device nothing is computed" in str(proof)
    filled = model.to_empty(device="cpu")
    donor = convert(th.models.GPT(32, 1, vocab=64, head_dim=16, norm="layer", bias=True), TOKENS)
    filled.load_state_dict(donor.state_dict())
    assert torch.equal(logits(filled), logits(donor))


@pytest.mark.parametrize("options", [{}, {"norm_placement": "peri"}])
def test_removing_on_the_meta_device(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = th.models.GPT(32, 1, **options)
    model, _ = remove_gains(model, TOKENS)
    assert all(one.dim() > 1 for one in model.parameters())


def test_a_plan_of_a_converted_build_trains() -> None:
    def build(width: int, depth: int) -> nn.Module:
        return convert(th.models.GPT(width, depth, vocab=64, head_dim=16), TOKENS)

    plan = th.plan(build, TOKENS, size=th.Size(64, 1), base=th.Size(32, 1), lr=1e-2, weight_decay=0.1)
    model = plan.build(0)
    optimizer = plan.optimizer(model)
    planned = {id(one) for group in optimizer.param_groups for one in group["params"]}
    assert planned == {id(one) for one in model.parameters()}
    before = logits(model).detach().clone()
    logits(model).square().sum().backward()
    optimizer.step()
    assert apart(logits(model).detach(), before) > 1e-4
    fold(model, TOKENS)


# Two processes.

PROGRAM = Path(__file__).parent / "programs" / "scale_vectors.py"


def test_replicas_and_shards_train_as_one_process_does(in_two_processes: Callable[[Path], None]) -> None:
    in_two_processes(PROGRAM)
