"""On a GPU: what is measured along a step is what the CPU measures, and steps are as long as they may be."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import theodolite as th

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Batch = tuple[Tensor, Tensor]


def network(device: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    made = th.models.GPT(32, 2, vocab=17, context=16, head_dim=8)
    return made.to(device, dtype)


def batch(device: str) -> Batch:
    tokens = torch.randint(17, (4, 17), generator=torch.Generator().manual_seed(1)).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def both(measure: Any) -> tuple[Any, Any]:
    """On the GPU in float32, on the CPU in float64."""
    return measure(network("cuda", torch.float32), batch("cuda")), measure(
        network("cpu", torch.float64), batch("cpu")
    )


def test_the_radius_and_the_loss_along_a_step() -> None:
    def measure(model: nn.Module, pair: Batch) -> th.probes.Profile:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=pair[0].is_cuda)
        loss(model(pair[0]), pair[1]).backward()
        return th.probes.profile(model, loss, pair, optimizer)

    here, there = both(measure)
    assert here.radius.value == pytest.approx(there.radius.value, rel=1e-2)
    assert here.radius.curvature == pytest.approx(there.radius.curvature, rel=1e-2)
    assert here.above_at == pytest.approx(there.above_at, rel=2e-2)


@pytest.mark.parametrize("rule", ["adamw", "muon-kimi"])
def test_the_next_update_is_the_one_that_is_made(rule: str) -> None:
    model, pair = network("cuda", torch.float32), batch("cuda")
    sizes = {"size": th.Size(32, 2), "base": th.Size(16, 2)}
    build = lambda width, depth: th.models.GPT(width, depth, vocab=17, context=16, head_dim=8)  # noqa: E731
    optimizer = th.plan(build, batch("cpu")[0], **sizes, optimizer=rule, lr=1e-2).optimizer(model)
    for _ in range(4):  # at the third Muon plays what it has recorded
        optimizer.zero_grad()
        loss(model(pair[0]), pair[1]).backward()
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        update = th.probes.optimizer_step(optimizer)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
        optimizer.step()
        for name, tensor in model.named_parameters():
            torch.testing.assert_close(update[name], tensor.detach() - before[name], rtol=0, atol=1e-6)


def test_no_step_is_longer_than_the_radius() -> None:
    model, pair = network("cuda", torch.float32), batch("cuda")
    inside = torch.optim.AdamW(model.parameters(), lr=1e-3)
    safe = th.controllers.SafeStep(inside, model, loss, limit=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for step in range(12):
        inside.param_groups[0]["lr"] = 1e-3 * 10 ** (step % 4)
        safe.zero_grad()
        scaler.scale(loss(model(pair[0]), pair[1])).backward()
        scaler.step(safe, pair)
        scaler.update()
    assert safe.report.acted > 0
    assert safe.report.largest_after <= 1 + 1e-4


def test_the_drift_and_the_rate_that_follows_it() -> None:
    here, there = both(lambda model, pair: th.probes.drift(model, loss, pair, lr=0.5))
    assert here.distance == pytest.approx(there.distance, rel=2e-2)

    def rate(model: nn.Module, pair: Batch) -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        adjusted = th.controllers.DriftAdjusted(optimizer, model, loss)
        adjusted.step(pair)
        return adjusted.get_last_lr()[0]

    mine, theirs = both(rate)
    assert mine == pytest.approx(theirs, rel=1e-2)


@pytest.mark.parametrize("curvature", ["gauss_newton", "hessian", "fisher"])
def test_normalized_smoothness_goes_downhill(curvature: Any) -> None:
    def losses(model: nn.Module, pair: Batch) -> list[float]:
        steps = th.controllers.NormalizedSmoothness(model, loss, curvature=curvature)
        return [steps.step(pair).loss_after for _ in range(3)]

    here, there = both(losses)
    assert here == pytest.approx(there, rel=1e-2)
    assert here[-1] < here[0] < math.log(17) + 1


def test_the_finder_leaves_a_model_on_the_gpu_as_it_was() -> None:
    model, pair = network("cuda", torch.float32), batch("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss(model(pair[0]), pair[1]).backward()
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    generator = torch.cuda.get_rng_state()
    found = th.find_lr(model, loss, [pair], optimizer=optimizer, seeds=1, steps=5)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.high
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for now, then in zip(optimizer.state_dict()["state"].values(), state["state"].values(), strict=True):
        assert all(torch.equal(now[key], then[key]) for key in then)
    assert torch.equal(torch.cuda.get_rng_state(), generator)
