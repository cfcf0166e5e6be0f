"""Exports for torch and transformers: the file's optimizers take the plan's steps."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.planning.exporting.made import (
    LAYOUTS,
    SIZE,
    TIED,
    apart,
    gpt_plan,
    parts,
    parts_plan,
    run,
    settings,
    trained_gpt,
    trained_parts,
)
from torch import Tensor, nn

import theodolite as th
from theodolite.optimizers.orthogonal import newton_schulz

pytestmark = pytest.mark.usefixtures("one_dissection")

MUONS = ("muon", "muon-original", "muon-kimi", "muon-spectral")
BFLOAT16 = 0.02
"""torch's Muon orthogonalises in bfloat16."""


def _made(format: str, plan: th.Plan, model: nn.Module) -> list[Any]:
    file = run(plan.export(format).text)
    return list(file.make_optimizers(model)) if format == "torch" else [file.make_optimizer(model)]


@pytest.mark.parametrize("format", ["torch", "huggingface"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_entrywise_rules_have_the_plans_numbers_and_steps(format: str, optimizer: str) -> None:
    plan = gpt_plan(optimizer)
    ours, theirs = plan.build(seed=0), plan.build(seed=0)
    made = _made(format, plan, theirs)
    for name, group in settings(made, theirs).items():
        assert math.isclose(group["lr"], plan[name].lr, rel_tol=1e-11)
        assert math.isclose(group["weight_decay"], plan[name].weight_decay, rel_tol=1e-11)
        assert optimizer == "sgd" or math.isclose(group["eps"], plan[name].eps, rel_tol=1e-11)
    differ = apart(trained_gpt(theirs, *made), trained_gpt(ours, plan.optimizer(ours)))
    assert max(differ.values()) < 1e-5


@pytest.mark.parametrize("format", ["torch", "huggingface"])
@pytest.mark.parametrize("optimizer", MUONS)
def test_muon_beside_adamw_takes_the_plans_steps(
    format: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Gradients of a network have tiny singular values, which bfloat16 moves about: in float32 here.
    monkeypatch.setattr(
        torch.optim._muon,
        "_zeropower_via_newtonschulz",
        lambda matrix, _, steps, eps: newton_schulz(matrix, steps=steps, eps=eps),
    )
    plan = gpt_plan(optimizer, tied=True)
    ours, theirs = plan.build(seed=0), run(plan.export("torch").text).initialize(TIED(SIZE.width, SIZE.depth))
    made = _made(format, plan, theirs)
    differ = apart(trained_gpt(theirs, *made), trained_gpt(ours, plan.optimizer(ours)))
    assert max(differ.values()) < 1e-3


@pytest.mark.parametrize("rule", MUONS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_the_plans_steps(name: str, rule: str) -> None:
    plan = parts_plan((name,), rule)
    ours, theirs = parts(plan), parts(plan)
    made = _made("torch", plan, theirs)
    assert [type(one).__name__ for one in made] == [
        "Muon" if name in ("wide", "tall", "transposed") else "CutMuon"
    ]
    differ = apart(trained_parts(theirs, *made), trained_parts(ours, plan.optimizer(ours)))
    assert differ[name] < BFLOAT16


def test_options_of_muon_are_handed_on() -> None:
    plan = parts_plan(("tall", "fused"), options={"momentum": 0.8, "nesterov": False, "steps": 7})
    ours, theirs = parts(plan), parts(plan)
    made = _made("torch", plan, theirs)
    for group in settings(made, theirs).values():
        assert (group["momentum"], group["nesterov"], group["ns_steps"]) == (0.8, False, 7)
    differ = apart(trained_parts(theirs, *made), trained_parts(ours, plan.optimizer(ours)))
    assert max(differ.values()) < BFLOAT16


def test_shards_are_refused_before_they_are_cut() -> None:
    plan = parts_plan(("fused",))
    model = parts(plan)
    (made,) = _made("torch", plan, model)
    model.fused.device_mesh = "as of a DTensor"  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"CutMuon takes whole tensors"):
        trained_parts(model, made)


def test_a_schedule_reaches_the_cut_matrices() -> None:
    plan = parts_plan(("fused",))
    model = parts(plan)
    (made,) = _made("torch", plan, model)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.0)
    assert all(float(moved.norm()) == 0 for moved in trained_parts(model, made).values())


def test_adjusted_rates_are_said() -> None:
    for rule in MUONS:  # torch has the factors of Jordan and of Kimi
        said = any(
            "√max(1, rows/columns)" in note for note in parts_plan(("tall",), rule).export("torch").notes
        )
        assert said == (rule in ("muon", "muon-spectral"))
    assert any("fused (14×10 + 8×10 + 8×10)" in note for note in parts_plan().export("torch").notes)


def test_one_object_saves_and_loads_its_state_and_follows_a_schedule() -> None:
    plan = gpt_plan("muon")
    file = run(plan.export("huggingface").text)
    one, two = plan.build(seed=0), plan.build(seed=0)
    first, second = file.make_optimizer(one), file.make_optimizer(two)
    trained_gpt(one, first)
    two.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # torch would share the tensors
    for optimizer in (first, second):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    differ = apart(trained_gpt(two, second), trained_gpt(one, first))
    assert max(differ.values()) == 0
    assert {group["lr"] for group in first.param_groups} == {
        0.5 * group["initial_lr"] for group in first.param_groups
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_lowest_rate_of_a_schedule_is_relative_to_the_plans(optimizer: str) -> None:
    transformers = pytest.importorskip("transformers")
    plan = gpt_plan(optimizer)
    made = run(plan.export("huggingface").text).make_optimizer(plan.build(seed=0))
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (plan.lr, plan.weight_decay)
    schedule = transformers.get_scheduler(
        "cosine_with_min_lr", made, 0, 2, scheduler_specific_kwargs={"min_lr": plan.lr / 4}
    )
    for _ in range(2):
        made.step()
        schedule.step()
    for group in made.param_groups:
        assert group["lr"] == pytest.approx(group["initial_lr"] / 4)


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The batches of `trained_gpt`, row by row."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(17, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def _llama(width: int, depth: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=17,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=width // 8,
        head_dim=8,
        max_position_embeddings=16,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("given", ["factory", "optimizers"])
def test_the_trainer_of_transformers_takes_it(optimizer: str, given: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    plan = th.plan(
        _llama,
        {"input_ids": torch.zeros(1, 8, dtype=torch.long), "use_cache": False},
        size=SIZE,
        base=th.Size(16, 2),
        optimizer=optimizer,
        lr=2**-6,
        weight_decay=0.1,
    )
    file = run(plan.export("huggingface").text)
    model = file.initialize(_llama(SIZE.width, SIZE.depth))
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
    )
    taken = (
        {"optimizer_cls_and_kwargs": (file.OptimizerFactory, {})}
        if given == "factory"
        else {"optimizers": (file.make_optimizer(model), None)}
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens(), **taken)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    trainer.train()
    held = settings([trainer.optimizer], model)
    assert held.keys() == plan.rows.keys()
    for name, group in held.items():
        row = plan[name]
        if row.rule == "adamw":
            assert (group["lr"], group["weight_decay"], group["eps"]) == pytest.approx(
                (row.lr, row.weight_decay, row.eps), rel=1e-11
            )
        else:
            assert group["lr"] * group["weight_decay"] == pytest.approx(row.lr * row.weight_decay)
        assert not torch.equal(dict(model.named_parameters())[name], before[name])
