"""Optimizers that trainers and libraries make: the audit reads them as what they are."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from theodolite import Size, Workload
from theodolite.surveying.auditing.audit import audit
from theodolite.surveying.auditing.report import Audit

transformers = pytest.importorskip("transformers")
libraries = pytest.importorskip("pytorch_optimizer")

VOCAB, LENGTH = 64, 16
LR, DECAY = 1e-3, 0.1
Make = Callable[[nn.Module], Any]


def llama(width: int, depth: int) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        intermediate_size=3 * width,
        vocab_size=VOCAB,
        max_position_embeddings=LENGTH,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2(width: int, depth: int) -> nn.Module:
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        n_embd=width, n_layer=depth, n_head=width // 16, vocab_size=VOCAB, n_positions=LENGTH, **special
    )
    return transformers.GPT2LMHeadModel(config)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def audited(make: Make, build: Any = llama, **options: Any) -> Audit:
    workload = Workload("ready", build, batch, loss, Size(32, 2))
    sizes: dict[str, Any] = {"widths": [32, 64, 128], "depths": [2]} | options
    return audit(workload, optimizer=make, train=False, **sizes)


def trainer(optim: str = "adamw_torch", *, schedule: bool = False) -> Make:
    """The optimizer that a Trainer of transformers makes."""
    pytest.importorskip("accelerate")

    def make(model: nn.Module) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            options = {"learning_rate": LR, "weight_decay": DECAY, "warmup_steps": 10, "optim": optim}
            given = transformers.TrainingArguments(folder, report_to=[], use_cpu=True, **options)
            made = transformers.Trainer(model, given)
            if schedule:
                made.create_optimizer_and_scheduler(num_training_steps=100)
                return made.optimizer, made.lr_scheduler
            return made.create_optimizer()

    return make


def found_in(found: Audit) -> set[tuple[str, str, float]]:
    """Of each finding that is not ok: code, the first tensor without its block, times too large."""
    said = set()
    for finding in found.findings:
        if finding.level != "ok" and finding.evidence.rows and finding.evidence.numbers:
            (times,) = finding.evidence.numbers.values()
            name = str(finding.evidence.rows[0]["tensor"]).rpartition("*.")[2]
            said.add((finding.code, name, times))
    return said


STANDARD = {
    # What training code without muP has at ten times the width.
    ("TH206", "self_attn.q_proj.weight", 10.0),
    ("TH207", "self_attn.q_proj.weight", 3.16),
    ("TH209", "lm_head.weight", 10.0),
}


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "rmsprop"])
def test_the_optimizer_of_a_trainer(optim: str) -> None:
    found = audited(trainer(optim))
    assert found_in(found) == STANDARD
    assert {one.rule for one in found.width} == {"adamw"}


def test_a_trainers_schedule_with_warmup_is_left_aside() -> None:
    found = audited(trainer(schedule=True))
    assert found_in(found) == STANDARD
    assert any("LambdaLR" in note for note in found.notes)


def test_conv1d_a_tied_readout_and_the_initialisation_of_gpt2() -> None:
    found = audited(trainer(), gpt2, depths=[2, 4, 8])
    said = found_in(found)
    assert ("TH206", "attn.c_attn.weight", 10.0) in said
    assert ("TH209", "transformer.wte.weight", 10.0) in said
    assert ("TH209", "attn.c_proj.weight", 10.0) in said
    remedies = " ".join(finding.remedy for finding in found.findings)
    assert "2/depth" in remedies
    assert "std of `transformer.h.*.attn.c_proj.weight`" in remedies  # 1/√(2L) is in the init


def without_decay_on_vectors(model: nn.Module) -> AdamW:
    matrices = [tensor for tensor in model.parameters() if tensor.ndim > 1]
    vectors = [tensor for tensor in model.parameters() if tensor.ndim < 2]
    return AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=LR, weight_decay=DECAY)


def layer_decay(option: str) -> Make:
    """Learning rates that fall by 0.75 from block to block, as timm has them for fine-tuning."""

    def make(model: Any) -> AdamW:
        last = model.config.num_hidden_layers + 1
        groups = []
        for name, tensor in model.named_parameters():
            layer = 0 if "embed" in name else last
            if "layers." in name:
                layer = int(name.partition("layers.")[2].partition(".")[0]) + 1
            scale = 0.75 ** (last - layer)
            how = {"lr": LR * scale} if option == "lr" else {option: scale}
            groups.append({"params": [tensor], "weight_decay": 0.0, **how})
        return AdamW(groups, lr=LR)

    return make


@pytest.mark.parametrize("make", [without_decay_on_vectors, layer_decay("lr_scale"), layer_decay("lr")])
def test_groups_as_timm_makes_them(make: Make) -> None:
    assert found_in(audited(make)) == STANDARD
    # Decay from layer to layer is no mistake in depth: a deeper network has more layers.
    deeper = audited(make, widths=[32], depths=[2, 4, 8])
    assert {code for code, _, _ in found_in(deeper)} == {"TH209"}
    assert all("o_proj" in name for _, name, _ in found_in(deeper))


def test_factors_that_a_schedule_multiplies_in_are_mentioned() -> None:
    assert any("lr_scale" in note for note in audited(layer_decay("lr_scale")).notes)
    assert not any("lr_scale" in note for note in audited(layer_decay("lr")).notes)


def from_library(name: str, **options: Any) -> Make:
    kind = getattr(libraries, name)
    return lambda model: kind(model.parameters(), lr=LR, weight_decay=DECAY, **options)


@pytest.mark.parametrize(
    "name, rule",
    [("Lion", "lion"), ("ScheduleFreeAdamW", "schedule-free"), ("AdamP", "adamw"), ("Tiger", "lion")],
)
def test_optimizers_of_a_library_have_the_rules_of_their_kind(name: str, rule: str) -> None:
    found = audited(from_library(name))
    assert found_in(found) == STANDARD
    assert {one.rule for one in found.width} == {rule}


def test_muon_of_a_library_with_its_own_adamw() -> None:
    def make(model: nn.Module) -> Any:
        hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
        inside = {id(tensor) for tensor in hidden}
        others = [tensor for tensor in model.parameters() if id(tensor) not in inside]
        common = {"lr": LR, "weight_decay": DECAY}
        return libraries.Muon(
            [{"params": hidden, "use_muon": True, **common}, {"params": others, "use_muon": False, **common}]
        )

    found = audited(make)
    # Orthogonal updates of square matrices need no factor of the width.
    assert found_in(found) == STANDARD - {("TH206", "self_attn.q_proj.weight", 10.0)}
    assert {one.rule for one in found.width} == {"adamw", "muon-original"}


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_of_torch_takes_the_factor_of_the_stored_shape_of_a_table(adjust: str) -> None:
    """An embedding is stored as (in, out), which torch's Muon takes for (out, in)."""

    def rows(width: int) -> float:
        table = nn.Parameter(torch.zeros(VOCAB, width))
        table.grad = torch.randn(VOCAB, width, generator=torch.Generator().manual_seed(0))
        torch.optim.Muon([table], lr=1.0, weight_decay=0, adjust_lr_fn=adjust).step()
        return table.square().mean().sqrt().item()

    def make(model: nn.Module) -> Any:
        table = model.get_parameter("model.embed_tokens.weight")
        others = [tensor for tensor in model.parameters() if tensor is not table]
        return [torch.optim.Muon([table], lr=LR, adjust_lr_fn=adjust), AdamW(others, lr=LR)]

    workload = Workload("wide", llama, batch, loss, Size(VOCAB, 2))  # never narrower than the vocabulary
    found = audit(workload, optimizer=make, widths=[64, 256], depths=[2], train=False)
    (table,) = (one for one in found.width if one.name == "model.embed_tokens.weight")
    assert table.exponent("lr").rule == pytest.approx(-math.log(rows(256) / rows(64), 4), abs=0.1)


@pytest.mark.parametrize("name", ["Prodigy", "Lamb", "LARS", "CAME"])
def test_an_optimizer_that_is_not_known_is_said_to_be_unknown(name: str) -> None:
    found = audited(from_library(name))
    assert not found.right
    assert name in found.verdict or any(name in one.sentence for one in found.at("note"))
    known = audited(from_library(name), rules={name: "adamw"})
    assert ("TH206", "self_attn.q_proj.weight", 10.0) in found_in(known)


def test_soap_steps_vectors_as_adam() -> None:
    found = audited(from_library("SOAP"))
    rules = {one.name.rpartition("*.")[2]: one.rule for one in found.width}
    assert rules["self_attn.q_proj.weight"] == "soap"
    assert rules["input_layernorm.weight"] == "adamw"
