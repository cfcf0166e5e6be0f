"""On a GPU: groups, their optimizers and the own parameterization do what they do on the CPU."""

from __future__ import annotations

import copy
import math
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.models import GPT
from theodolite.planning.own import own
from theodolite.workloads import Workload, next_token_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("one_dissection"),
]

TOKENS = torch.arange(32).reshape(2, 16)
LR, VECTOR_LR = 0.02, 0.003


def network() -> GPT:
    torch.manual_seed(0)
    return GPT(64, 2, tied=True, experts=4)


def moved(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By how much one step moves each tensor."""
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    device = next(model.parameters()).device
    next_token_loss(model(TOKENS.to(device)), TOKENS.roll(-1, 1).to(device)).backward()
    for optimizer in optimizers:
        optimizer.step()
    return {name: (after.detach() - before[name]).cpu() for name, after in model.named_parameters()}


def test_a_network_on_the_gpu_is_grouped_as_on_the_cpu_and_moves_by_the_factors_of_the_table() -> None:
    model = network()
    expected = th.groups(model, TOKENS, lr=LR, vector_lr=VECTOR_LR)
    found = th.groups(model.cuda(), TOKENS.cuda(), lr=LR, vector_lr=VECTOR_LR)
    assert found.rows == expected.rows
    for name, change in moved(model, found.optimizer()).items():
        row = found[name]
        if row.rule == "muon":  # UVᵀ, whose singular values are about one
            largest = torch.linalg.matrix_norm(change, ord=2)
            assert ((largest > 0.6 * LR) & (largest < 1.3 * LR)).all(), name
        else:  # AdamW's first step is the sign of the gradient
            assert change.abs().max().item() == pytest.approx(VECTOR_LR, rel=1e-3), name


def test_the_groups_of_torchs_own_optimizers_make_the_same_step_on_the_gpu() -> None:
    groups = th.groups(GPT(64, 2), TOKENS, lr=LR, vector_lr=VECTOR_LR)
    torch.manual_seed(0)
    one = GPT(64, 2).cuda()
    other = copy.deepcopy(one)
    muon, adamw = groups.split(other)
    expected = moved(one, groups.optimizer(one))
    found = moved(other, torch.optim.Muon(muon), torch.optim.AdamW(adamw))
    for name, change in expected.items():  # torch's Newton–Schulz is in bfloat16; it shows at low rank
        assert (found[name] - change).norm() < 0.25 * change.norm(), name


def test_an_exported_file_trains_on_the_gpu_as_the_plan_does(tmp_path: Path) -> None:
    plan = th.plan(GPT, TOKENS, base=th.Size(32, 1), size=th.Size(64, 2), lr=VECTOR_LR, weight_decay=0.1)
    path = plan.export("torch").save(tmp_path / "planned.py")
    file = runpy.run_path(str(path))
    one, other = plan.build(seed=0, device="cuda"), file["initialize"](GPT(64, 2).cuda(), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    expected = moved(one, plan.optimizer(one))
    for name, change in moved(other, *file["make_optimizers"](other)).items():
        torch.testing.assert_close(change, expected[name], rtol=1e-3, atol=1e-6)


def test_a_run_of_the_own_parameterization_on_the_gpu_is_that_of_the_factory(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.25)

    def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
        return TOKENS, TOKENS.roll(-1, 1)

    workload = Workload("mine", GPT, batch, next_token_loss, th.Size(32, 1), optimizer=make)
    plan = own(GPT, TOKENS, make, size=th.Size(32, 1))
    model = plan.build(seed=3, device="cuda")
    twin = copy.deepcopy(model)
    found = moved(model, plan.optimizer(model))
    for name, change in moved(twin, make(twin)).items():
        assert torch.equal(found[name], change), name
    checked = th.probes.coordinates(
        workload, [th.Size(32, 1), th.Size(64, 1)], parameterization="own", steps=2, seeds=1, device="cuda"
    )
    assert all(math.isfinite(slope.value) for slope in checked.slopes)
    swept = th.sweep(
        workload,
        widths=[32],
        depths=[1],
        lr=[0.125, 0.25],
        steps=3,
        seeds=1,
        parameterization="own",
        device="cuda",
        out=tmp_path,
    )
    (curve,) = swept.families[0].curves
    assert math.isfinite(curve.losses.sum())
