"""The built-in workloads can be learned, and need no data before their first batch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from theodolite import UseError, Workload, data, workload
from theodolite.workloads import built_in

NEEDS = {
    "gpt-enwik8": "enwik8",
    "gpt-enwik8-bare": "enwik8",
    "mlp-fashion": "fashion-mnist",
    "lenet-fashion": "fashion-mnist",
    "resnet-cifar10": "cifar10",
}
# A small size of each network, with which a chance-level loss is left behind within a few steps.
SMALL = {
    "gpt-sotu": (32, 1),
    "gpt-enwik8": (32, 1),
    "gpt-enwik8-bare": (32, 1),
    "mlp-mixture": (32, 2),
    "mlp-fashion": (32, 2),
    "lenet-fashion": (30, 2),
    "resnet-cifar10": (4, 1),
    "modular-addition": (256, 1),
}


def _train(chosen: Workload, size: tuple[int, int], steps: int, lr: float) -> float:
    torch.manual_seed(0)
    model = chosen.build(*size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        chosen.evaluate(model, chosen.draw(0, step)).backward()
        optimizer.step()
    with torch.no_grad():
        return chosen.evaluate(model, chosen.draw(1, steps)).item()


@pytest.mark.parametrize("name", built_in())
def test_every_workload_learns_more_than_chance(name: str, need) -> None:
    if name in NEEDS:
        need(NEEDS[name])
    chosen = workload(name)
    outputs = chosen.build(*SMALL[name])(chosen.batch(0, 0)[0]).shape[-1]
    steps, lr = (100, 1e-2) if name == "modular-addition" else (15, 1e-2)
    assert _train(chosen, SMALL[name], steps, lr) < math.log(outputs)


@pytest.mark.parametrize("name", built_in())
def test_the_default_size_can_be_built_and_doubled(name: str) -> None:
    chosen = workload(name)
    with torch.device("meta"):
        sizes = [(1, 1), (2, 1), (1, 2)]
        models = [chosen.build(chosen.size.width * wide, chosen.size.depth * deep) for wide, deep in sizes]
    here, wider, deeper = (sum(p.numel() for p in model.parameters()) for model in models)
    assert here < wider
    assert here < deeper


@pytest.mark.parametrize(("name", "data_set"), [("gpt-enwik8", "enwik8"), ("resnet-cifar10", "cifar10")])
def test_missing_data_is_missed_at_the_first_batch_only(
    name: str, data_set: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("THEODOLITE_DATA", str(tmp_path))
    chosen = workload(name)
    with pytest.raises(UseError, match=f"theodolite data fetch {data_set}"):
        chosen.batch(0, 0)


def test_the_mixture_is_learned_to_the_accuracy_of_its_formula() -> None:
    chosen = workload("mlp-mixture")
    torch.manual_seed(0)
    model = chosen.build(64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(100):
        optimizer.zero_grad()
        chosen.evaluate(model, chosen.batch(0, step)).backward()
        optimizer.step()
    fresh = data.mixture(8192, seed=1)
    accuracy = (model(fresh.inputs()).argmax(1) == fresh.labels).double().mean().item()
    best = data.mixture_accuracy()
    assert best - 0.03 < accuracy < best + 4 * math.sqrt(best * (1 - best) / 8192)


def test_the_adder_can_represent_modular_addition() -> None:
    """Neurons of frequency k with matched phases add up to the answer (see formulas of the mechanism).

    With cosines of period P as input rows, cos²-like ReLU responses and output rows of twice the phase, the
    logits peak at x + y. Every frequency is given to neurons of evenly spread phases.
    """
    modulus, phases = 59, 8
    chosen = workload("modular-addition")
    model = chosen.build((modulus // 2) * phases, 1)
    frequency = torch.arange(1, modulus // 2 + 1).repeat_interleave(phases)[:, None].double()
    phase = (2 * math.pi * torch.arange(phases) / phases).repeat(modulus // 2)[:, None].double()
    angle = 2 * math.pi * frequency * torch.arange(modulus)[None] / modulus
    with torch.no_grad():
        model[0].weight.copy_(torch.cos(angle + phase))
        model[-1].weight.copy_(torch.cos(angle + 2 * phase).T)
    table = data.modular_addition(modulus)
    assert torch.equal(model(table.inputs()).argmax(1), table.labels)


@pytest.mark.parametrize("name", sorted(set(SMALL) - {"modular-addition"}))
def test_held_out_examples_are_not_trained_on(name, need):
    if name in NEEDS:
        need(NEEDS[name])
    chosen = workload(name)
    trained = {each.numpy().tobytes() for step in range(4) for each in chosen.draw(0, step)[0]}
    judged = {each.numpy().tobytes() for step in range(4) for each in chosen.draw_held_out(step)[0]}
    assert not trained & judged
    assert torch.equal(chosen.draw_held_out(0)[0], chosen.draw_held_out(0)[0])


def test_without_held_out_batches_a_seed_stands_in_that_no_run_has():
    chosen = workload("modular-addition")
    assert chosen.held_out is None
    assert torch.equal(chosen.draw_held_out(3)[1], chosen.batch(2**31 - 1, 3)[1])
