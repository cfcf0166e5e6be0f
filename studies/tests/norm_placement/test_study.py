"""The study of norm placements: its readings, its runs, and claims on records whose verdict is known."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from theodolite.fleet.training import train
from theodolite_studies.norm_placement import study as norm_placement
from theodolite_studies.norm_placement.study import (
    FULL,
    SMALL,
    cells,
    read_stream,
    run_of,
    trained,
    workload_of,
)

TINY = dataclasses.replace(SMALL, seeds=(0, 1), steps=6, warmup=1, num=2, length=16, held_out=2)


def test_cells_come_in_the_order_of_their_worth():
    order = [(cell["placement"], cell["depth"]) for cell in cells(FULL)]
    assert order[:3] == [("pre", 16), ("post", 16), ("peri", 16)]
    assert set(order[:12]) == set(itertools.product(("pre", "post", "peri"), (4, 8, 16, 32)))
    assert len(FULL.seeds) >= 3


def test_the_stream_of_branches_that_add_nothing_is_the_embedding():
    """Then h_l = e for all l, and the loss has the same gradient with respect to each."""
    workload = workload_of(TINY, "pre")
    model = workload.build(64, 3)
    for name, parameter in model.named_parameters():
        if name.endswith(("branch.out.weight", "down.weight")):
            torch.nn.init.zeros_(parameter)
    inputs, targets = workload.draw_held_out(0)
    embedded = model.embed(inputs).detach().requires_grad_()
    loss = workload.loss(model.readout(model.norm(embedded)), targets) * targets.numel()
    (gradient,) = torch.autograd.grad(loss, embedded)
    reading = read_stream(model, dict(model.state_dict()), workload)
    size = embedded.square().mean().sqrt().item()
    assert gradient.abs().max() > 0
    assert reading["stream"] == pytest.approx([size] * 4, rel=1e-3)
    assert reading["gradient"] == pytest.approx([gradient.square().mean().sqrt().item()] * 4, rel=1e-3)
    entries = embedded.abs()
    assert reading["peak"] == pytest.approx((entries.max() / entries.median()).item(), rel=1e-3)


def test_reading_leaves_no_trace():
    workload = workload_of(TINY, "post")
    model = workload.build(64, 2).train()
    model.blocks[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    read_stream(model, dict(model.state_dict()), workload)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(block._forward_hooks for block in model.blocks)


def test_networks_come_out_as_the_fleet_trains_them_alone():
    workload, depth = workload_of(TINY, "peri"), 2
    wanted = [("plan", 0, -6), ("standard", 1, -8)]
    records = trained(TINY, workload, depth, wanted, "cpu")
    for each, record in zip(wanted, records, strict=True):
        alone = train(run_of(TINY, workload, depth, *each), workload)
        assert record["held_out"] == pytest.approx(alone.held_out, abs=2e-4)
        norms = [norm for _, norm in alone.metrics["gradient"]][TINY.warmup :]
        unrest = np.abs(np.diff(np.log2(norms))).mean()
        assert record["unrest"] == pytest.approx(unrest, rel=1e-2)
    read, other = records
    assert list(read["stream"]) == ["0", "1", "3", "6"]
    assert all(len(sizes) == depth + 1 for sizes in read["stream"].values())
    assert "stream" not in other


def test_a_network_that_diverges_is_a_result(monkeypatch):
    workload = workload_of(TINY, "pre")
    monkeypatch.setattr(norm_placement, "LOOK_EVERY", 2)
    (record,) = trained(TINY, workload, 2, [("standard", 0, 40)], "cpu")
    assert record["held_out"] is None
    assert record["unrest"] is None


def test_what_is_too_large_for_memory_is_made_in_halves(monkeypatch):
    made = []

    def scarce(setting, workload, depth, wanted, device):
        if len(wanted) > 2:
            raise torch.OutOfMemoryError
        made.extend(wanted)
        return [{"each": each} for each in wanted]

    monkeypatch.setattr(norm_placement, "trained", scarce)
    found = list(norm_placement.run({"placement": "pre", "depth": 4}, SMALL, "cpu"))
    assert sorted(made) == sorted(itertools.product(("base",), SMALL.seeds, SMALL.exponents))
    assert len(found) == len(made)


def test_post_is_tried_at_lower_learning_rates_too(monkeypatch):
    made = {}

    def seen(setting, workload, depth, wanted, device):
        made[workload.name] = {exponent for _, _, exponent in wanted}
        return []

    monkeypatch.setattr(norm_placement, "trained", seen)
    for placement in ("pre", "post"):
        list(norm_placement.run({"placement": placement, "depth": 8}, FULL, "cpu"))
    assert made == {"gpt-pre": set(range(-9, -3)), "gpt-post": set(range(-12, -3))}
