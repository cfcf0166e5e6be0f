"""The built-in workloads can be learned, and need no data before their first batch."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from theodolite import UseError, Workload, data, flows, workload
from theodolite.workloads import built_in

NEEDS = {
    "gpt-enwik8": "enwik8",
    "gpt-enwik8-bare": "enwik8",
    "mlp-fashion": "fashion-mnist",
    "lenet-fashion": "fashion-mnist",
    "resnet-cifar10": "cifar10",
    "dit-fashion": "fashion-mnist",
    "dit-cifar10": "cifar10",
    "unet-fashion": "fashion-mnist",
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
    "grokking": (256, 1),
    "dit-fashion": (32, 1),
    "dit-cifar10": (32, 1),
    "unet-fashion": (16, 1),
    "flow-mixture": (32, 2),
    "two-cylinders": (8, 1),
    "poisson": (4, 1),
}
FLOWS = ("dit-fashion", "dit-cifar10", "unet-fashion", "flow-mixture")
OTHERS = ("poisson", "two-cylinders")
"""Neither classifiers nor flows: what they learn is in tests of their own."""


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


@pytest.mark.parametrize("name", sorted(set(built_in()) - {*FLOWS, *OTHERS}))
def test_every_classifier_learns_more_than_chance(name: str, need) -> None:
    if name in NEEDS:
        need(NEEDS[name])
    chosen = workload(name)
    outputs = chosen.build(*SMALL[name])(chosen.batch(0, 0)[0]).shape[-1]
    steps, lr = (100, 1e-2) if name in ("modular-addition", "grokking") else (15, 1e-2)
    assert _train(chosen, SMALL[name], steps, lr) < math.log(outputs)


@pytest.mark.parametrize("name", FLOWS)
def test_every_flow_learns_more_than_the_mean_velocity(name: str, need) -> None:
    """The best velocity that depends on nothing is the mean, whose loss is the variance of the targets."""
    if name in NEEDS:
        need(NEEDS[name])
    chosen = workload(name)
    few = replace(chosen, batch=partial(_first, chosen.batch, 32 if name != "flow-mixture" else 256))
    assert _train(few, SMALL[name], 20, 1e-2) < 0.9 * few.batch(1, 20)[1].var().item()


def _first(batch, num: int, seed: int, step: int):
    inputs, target = batch(seed, step)
    return tuple(one[:num] for one in inputs), target[:num]


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
    trained = {each.numpy().tobytes() for step in range(4) for each in _examples(chosen.draw(0, step))}
    judged = {each.numpy().tobytes() for step in range(4) for each in _examples(chosen.draw_held_out(step))}
    assert not trained & judged
    assert torch.equal(_examples(chosen.draw_held_out(0)), _examples(chosen.draw_held_out(0)))


def _examples(batch) -> torch.Tensor:
    """The inputs; of a flow the data, `x_t + (1 − t)·velocity`, rounded to what noise cannot change."""
    inputs, targets = batch
    if not isinstance(inputs, tuple):
        return inputs
    x_t, t, _ = inputs
    return (x_t + (1 - t).view(-1, *[1] * (x_t.dim() - 1)) * targets).mul(1000).round()


def test_the_noise_of_a_flow_is_new_in_every_step_and_its_times_are_uniform():
    chosen = workload("flow-mixture")
    (_, t, labels), velocity = chosen.batch(0, 0)
    data = _examples(chosen.batch(0, 0)) / 1000
    noise = data - velocity
    assert abs(noise.mean()) < 4 / math.sqrt(noise.numel())
    assert abs(noise.var() - 1) < 4 * math.sqrt(2 / noise.numel())
    assert abs(t.mean() - 0.5) < 4 / math.sqrt(12 * len(t))
    dropped = sum((chosen.batch(0, step)[0][2] == 3).double().mean().item() for step in range(20)) / 20
    assert abs(dropped - 0.1) < 4 * math.sqrt(0.09 / (20 * len(labels)))
    assert not torch.equal(chosen.batch(0, 1)[1], velocity)


def test_a_flow_that_is_learned_comes_near_its_floor():
    """One label in ten is dropped, so the least loss is a mixture of those with and without labels."""
    chosen = workload("flow-mixture")
    mixture = flows.three_gaussians()
    floor = 0.9 * mixture.floor(labelled=True) + 0.1 * mixture.floor()
    torch.manual_seed(0)
    model = chosen.build(64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=300)
    for step in range(300):
        optimizer.zero_grad()
        chosen.evaluate(model, chosen.batch(0, step)).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        found = [chosen.evaluate(model, chosen.draw_held_out(step)).item() for step in range(40)]
    error = statistics.stdev(found) / math.sqrt(len(found))
    mean = statistics.fmean(found)
    assert floor - 4 * error < mean < 1.25 * floor


def test_without_held_out_batches_a_seed_stands_in_that_no_run_has():
    chosen = workload("modular-addition")
    assert chosen.held_out is None
    assert torch.equal(chosen.draw_held_out(3)[1], chosen.batch(2**31 - 1, 3)[1])
