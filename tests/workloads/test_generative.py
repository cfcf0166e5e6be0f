"""What the library does with any workload, it does with those of flows: each verb once, on small networks."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

import theodolite as th
from theodolite.flows.training import noisy, velocity_loss
from theodolite.models import DiT, UNet

PATTERNS = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def _draw(seed, step):
    """Images: noise around a pattern for each class."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    labels = torch.randint(10, (16,), generator=generator)
    return PATTERNS[labels] + 0.3 * torch.randn(16, 1, 8, 8, generator=generator), labels


def _workload(build, size):
    batch = noisy(_draw, classes=10, label_dropout=0.1, name="patterns")
    return th.Workload("patterns", build, batch, velocity_loss, size)


_DIT = partial(DiT, side=8, patch=2, head_dim=16)
WORKLOADS = {
    "zero": _workload(_DIT, th.Size(32, 2)),
    "random": _workload(partial(_DIT, modulation="random"), th.Size(32, 2)),
    "routed": _workload(partial(_DIT, modulation="random", residual="routed"), th.Size(32, 2)),
    "time-routed": _workload(partial(_DIT, modulation="random", residual="time-routed"), th.Size(32, 2)),
    "U-Net": _workload(partial(UNet, head_dim=16), th.Size(16, 1)),
    "points": th.workload("flow-mixture"),
}
each_workload = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)


def _trained(workload, steps=8):
    torch.manual_seed(0)
    model = workload.build(*(workload.size.width, workload.size.depth))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for step in range(steps):
        optimizer.zero_grad()
        workload.evaluate(model, workload.draw(0, step)).backward()
        optimizer.step()
    return model.eval()


@each_workload
def test_a_planned_network_trains_at_twice_the_size(workload):
    size = th.Size(2 * workload.size.width, 2 * workload.size.depth)
    plan = th.plan(workload.build, workload.draw(0, 0)[0], size=size, base=workload.size, lr=8e-3)
    assert not any(row.role in ("frozen", "unused") for row in plan.rows.values())
    model = plan.build(seed=0)
    optimizer = plan.optimizer(model)
    for step in range(24):
        inputs, velocity = workload.draw(0, step)
        loss = workload.loss(model(*inputs), velocity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.95 * velocity.var().item()  # which a constant velocity would have


@each_workload
def test_the_stream_has_a_reading_for_each_branch_at_each_time(workload):
    model, batch = _trained(workload), workload.draw(1, 0)
    branches = th.dissect(workload.build, batch[0], size=workload.size).branches
    found = th.probes.stream(model, workload.loss, batch, skip=False, along=batch[0][1], groups=3)
    assert [len(group.stream.branches) for group in found.groups] == [len(branches)] * 3
    assert sum(group.examples for group in found.groups) == len(batch[1])
    readings = [one for group in found.groups for one in group.stream.branches]
    assert all(math.isfinite(one.stream) and one.stream > 0 and one.added > 0 for one in readings)
    assert "nan" not in str(found)


@pytest.mark.parametrize("name", ["zero", "U-Net", "points"])
def test_a_block_can_be_added_without_changing_the_function(name):
    workload = WORKLOADS[name]
    model, batch = _trained(workload), workload.draw(1, 0)
    before = model(*batch[0])
    signal = th.probes.signal(model, workload.loss, [batch])
    assert all(math.isfinite(point.gain) for point in signal.points)
    torch.testing.assert_close(model(*batch[0]), before, rtol=0, atol=0)
    tensors = len(list(model.parameters()))
    grown, _ = th.surgery.insert_block(model, batch[0], signal.points[-1].point)
    assert len(list(grown.parameters())) > tensors
    torch.testing.assert_close(grown(*batch[0]), before, rtol=1e-4, atol=1e-5)


def test_gains_of_a_network_with_norms_become_scale_vectors_of_their_own():
    workload = WORKLOADS["points"]
    model, inputs = _trained(workload), workload.draw(1, 0)[0]
    before = model(*inputs)
    changed, _ = th.surgery.scale_vectors(model, inputs)
    torch.testing.assert_close(changed(*inputs), before, rtol=1e-4, atol=1e-5)
