"""A multiplier that is part of a norm: the same function, without a hook."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import theodolite as th
from theodolite import Size, UseError
from theodolite.models import GPT
from theodolite.planning.readout_multiplier import attach_multipliers, attached
from theodolite.surgery import SurgeryError, bake, baking
from theodolite.surgery.gains import GainFinder

from .networks import HF, SIZES, TOKENS, apart, hugging_face, logits, moved

tied = partial(GPT, vocab=64, head_dim=16, tied=True)
GPTS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "gpt layer": {"norm": "layer", "bias": True},
    "gpt post": {"norm_placement": "post"},
}


def build(name: str) -> nn.Module:
    if name in GPTS:
        return tied(32, 1, **GPTS[name])
    return hugging_face(name, **{**SIZES, "tie_word_embeddings": True}, **HF[name])


@pytest.mark.parametrize("name", [*GPTS, "GPT2", "Gemma2"])
def test_a_baked_network_is_the_same_one_without_a_hook(name: str) -> None:
    """The gain as the norm applies it and the shift are multiplied, and nothing else."""
    model = moved(build(name)).double().eval()
    head = "readout" if name in GPTS else "lm_head"
    attach_multipliers(model, {head: 0.3})
    expected, before = logits(model).detach(), {key: one.clone() for key, one in model.state_dict().items()}
    same, proof = bake(model, TOKENS)
    assert same is model
    assert not attached(model)
    plain = build(name).double().eval()
    plain.load_state_dict(model.state_dict())
    for network in (model, plain):
        assert apart(logits(network).detach(), expected) < (1e-12 if name in GPTS else 1e-6)
    (gain,) = proof.moved
    one = 1.0 if name == "Gemma2" else 0.0
    after = model.state_dict()
    torch.testing.assert_close(after[gain] + one, 0.3 * (before[gain] + one))
    shift = gain.replace("weight", "bias")
    if name in ("gpt layer", "GPT2"):
        torch.testing.assert_close(after[shift], 0.3 * before[shift])
    changed = {key for key, value in after.items() if not torch.equal(value, before[key])}
    assert changed == {gain} | ({shift} & set(after))
    assert str(proof).startswith(f"bake: {gain} takes up the multiplier 0.3 of {head}\noutputs differ by ")


@pytest.mark.parametrize("name", ["GPT2", "Gemma2"])
def test_a_plan_bakes_what_save_pretrained_writes(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    def made(width: int, depth: int) -> nn.Module:
        sizes = {**SIZES, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": depth}
        own = {"n_embd": width} if name == "GPT2" else {}
        return hugging_face(name, **{**sizes, **HF[name], **own, "tie_word_embeddings": True})

    def loss(model: nn.Module) -> float:
        return F.cross_entropy(logits(model).flatten(0, 1), TOKENS.flatten()).item()

    def written(model: Any, folder: str) -> float:
        with redirect_stderr(io.StringIO()):
            model.save_pretrained(tmp_path / folder)
            again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        return loss(again.eval())

    plan = th.plan(made, TOKENS, size=Size(64, 1), base=Size(16, 1), lr=2**-6)
    model = moved(plan.build(seed=0)).eval()
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(20)  # so that the loss is not that of guessing
    expected = loss(model)
    assert abs(written(model, "plain") - expected) > 0.01
    bake(model, plan=plan)
    assert written(model, "baked") == pytest.approx(expected, rel=1e-6)


@contextmanager
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_wrappers_may_be_around_it_and_compiled_code_forgets_the_hook() -> None:
    model = moved(Head("norm"))
    attach_multipliers(model, {"head": 0.25})
    expected = logits(model)
    with one_process():
        wrapped = DistributedDataParallel(copy.deepcopy(model))
        assert bake(wrapped, TOKENS)[0] is wrapped
        assert torch.equal(logits(wrapped), expected)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled), expected)
    bake(compiled, TOKENS)
    torch.testing.assert_close(logits(compiled), expected)
    torch.compiler.reset()


class Head(nn.Module):
    """A tied readout behind something else than a norm of its own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(64, 8)
        self.layer = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8, elementwise_affine=way != "no gain")
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(8, 3)
        self.odd = nn.LayerNorm(8)
        if way == "shared":
            self.odd.weight = self.norm.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        x = x + self.layer(self.odd(x))
        if self.way == "no norm":
            return self.head(x)
        y = self.norm(x)
        if self.way == "another reader":
            return self.head(y), self.other(y)
        if self.way == "nonlinear":
            return self.head(y.relu())
        if self.way == "returned":
            return self.head(y), y
        if self.way == "constant":
            return self.head(y + 1)
        return self.head(y)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("no norm", "There is no norm with a gain before it"),
        ("no gain", "The norm before it has no gain: build it with one"),
        ("another reader", "norm.weight, the gain .*: other.weight reads it too, and is not multiplied"),
        ("nonlinear", "it reaches a nonlinearity, relu"),
        ("returned", "it reaches the network's output"),
        ("constant", "a constant is added to it"),
        ("shared", "it is shared by norm.weight and odd.weight"),
    ],
)
def test_what_would_not_be_exact_is_refused_with_its_reason(way: str, reason: str) -> None:
    model = Head(way)
    attach_multipliers(model, {"head": 0.25})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SurgeryError, match=f"the multiplier 0.25 of head cannot be folded.*{reason}"):
        bake(model, TOKENS)
    assert attached(model) == {"head": 0.25}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Forgetful(GainFinder):
    """Does not know that Gemma's norms add 1 to their gains."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__(model, inputs)
        self.uses = {
            name: [dataclasses.replace(use, offset=0.0) for use in uses] for name, uses in self.uses.items()
        }


def test_a_fault_is_seen_by_the_proof_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = moved(build("Gemma2"))
    attach_multipliers(model, {"lm_head": 0.25})
    expected = logits(model)
    with monkeypatch.context() as patch:
        patch.setattr(baking, "GainFinder", Forgetful)
        with pytest.raises(SurgeryError, match="bake would change the network: outputs by"):
            bake(model, TOKENS)
    assert torch.equal(logits(model), expected)
    assert model.config.theodolite == {"multipliers": {"lm_head": 0.25}}


def test_a_plan_bakes_its_own_multipliers_once(tmp_path: Path) -> None:
    plan = th.plan(tied, TOKENS, size=Size(32, 1), base=Size(16, 1), lr=2**-8)
    model = plan.build(seed=0)
    plan.save(tmp_path / "plan.json")
    with pytest.raises(UseError, match=r"inputs are missing: call bake\(model, inputs\)"):
        bake(model, plan=th.Plan.load(tmp_path / "plan.json"))
    other = copy.deepcopy(model)
    attach_multipliers(other, {"readout": 0.1})
    with pytest.raises(SurgeryError, match=r"multipliers .*0.1.*, and the plan .*0.5"):
        bake(other, plan=plan)
    expected = logits(model)
    bake(model, TOKENS, plan=th.Plan.load(tmp_path / "plan.json"))
    assert torch.equal(logits(model), expected)
    with pytest.raises(SurgeryError, match="nothing to bake: there is no multiplier on this GPT"):
        bake(model, plan=plan)
    plain = th.plan(tied, TOKENS, size=Size(16, 1), base=Size(16, 1), lr=2**-8)
    _, proof = bake(tied(16, 1), plan=plain)
    assert (proof.outputs, proof.moved) == (0.0, ())
    assert "the plan has no multipliers, nothing was changed" in str(proof)
