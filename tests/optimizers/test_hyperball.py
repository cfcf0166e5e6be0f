"""AdamH and MuonH: by their formula, along the sphere, and their slopes over width and depth."""

from __future__ import annotations

import copy
import dataclasses
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from theodolite.anatomy.part import Part
from theodolite.core.errors import UseError
from theodolite.optimizers import OPTIMIZERS, Base, Hyper, Ratios, decay_policies
from theodolite.optimizers.hyperball import AdamH, MuonH

from .reference import (
    Reference,
    Rows,
    State,
    adam_update,
    compact_svd,
    muon_update,
    orthogonal_rows,
    orthogonal_rows_alone,
    sign_first,
    sign_rows,
    sign_rows_alone,
)
from .small import model, noise, plan_for, train
from .test_slopes import AXES, measured, slopes_by_plan

BOTH = [AdamH, MuonH]


def on_sphere(w: Tensor, update: Tensor, lr: float, radius: Tensor) -> Tensor:
    moved = w - lr * radius * update / torch.linalg.matrix_norm(update, keepdim=True)
    return radius * moved / torch.linalg.matrix_norm(moved, keepdim=True)


def adamh(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    radius = state.setdefault("radius", torch.linalg.matrix_norm(w, keepdim=True))
    return on_sphere(w, adam_update(g, hyper, state, t), hyper.lr, radius)


def muonh(w: Tensor, g: Tensor, h: Tensor, hyper: Hyper, state: State, t: int) -> Tensor:
    radius = state.setdefault("radius", torch.linalg.matrix_norm(w, keepdim=True))
    return on_sphere(w, muon_update(g, hyper, state), hyper.lr, radius)


def first(weight: Tensor, update: Tensor, lr: float) -> Tensor:
    radius = torch.linalg.matrix_norm(weight, keepdim=True)
    return (weight - on_sphere(weight, update, lr, radius)) / lr


def adamh_first(gradient: Tensor, weight: Tensor, lr: float, eps: float, **_: Any) -> Tensor:
    return first(weight, sign_first(gradient, eps), lr)


def muonh_first(gradient: Tensor, weight: Tensor, lr: float, **_: Any) -> Tensor:
    """Along an orthogonal matrix of full rank, as the momentum of real gradients has it."""
    u, _, v = compact_svd(gradient)
    rank = min(gradient.shape[-2:])
    sides = []
    for known in (u, v.mT):
        more = noise(*known.shape[:-1], rank - known.shape[-1])
        basis, upper = torch.linalg.qr(torch.cat([known, more], dim=-1))
        sides.append(basis * upper.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2))
    return first(weight, sides[0] @ sides[1].mT, lr)


def rows_of(rows: Rows, lr: dict[str, float]) -> Rows:
    """Rows with the eps of others, other learning rates (powers of the width) and no decay."""

    def made(n: float, L: float) -> dict[str, Any]:
        alone = 1 / sqrt(L) if "output" not in rows(n, L) else 1
        return {key: (alone * n ** lr.get(key, 0.0), 0.0, eps) for key, (_, _, eps) in rows(n, L).items()}

    return made


BASE = Base(lr=0.05, weight_decay=0.5, eps=0.05)
REFERENCES = {
    "adamh": Reference(
        adamh,
        adamh_first,
        rows=rows_of(sign_rows, {"hidden": -0.5}),
        rows_alone=rows_of(sign_rows_alone, {"hidden": -0.5}),
        unequal=lambda i, o, L: (1 / sqrt(i), 0, 1 / (o * L)),
        base=BASE,
        eps=lambda entry, norm: entry,
    ),
    "muonh": Reference(
        muonh,
        muonh_first,
        rows=rows_of(orthogonal_rows, {}),
        rows_alone=rows_of(orthogonal_rows_alone, {}),
        unequal=lambda i, o, L: (sqrt(o / i), 0, sqrt(i / o) / L),
        base=dataclasses.replace(BASE, eps=0.5),
    ),
}


def same_lr(part: Part, ratios: Ratios, base: Base) -> Hyper:
    """The rule of either, with one learning rate for all widths."""
    return dataclasses.replace(OPTIMIZERS["adamh"].rule(part, ratios, base), lr=base.lr)


def test_one_learning_rate_for_all_widths_is_right_for_muonh_and_wrong_for_adamh() -> None:
    slopes = measured(2, "width", scheme=same_lr, optimizers=("adamh", "muonh"), kinds="hidden")
    for kind in ("hidden 0", "hidden 1"):
        assert slopes["change", "adamh", kind] == pytest.approx(0.5, abs=0.1)
        assert slopes["change", "muonh", kind] == pytest.approx(0.0, abs=0.1)


@pytest.mark.usefixtures("one_dissection")
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("rule", ["adamh", "muonh"])
def test_a_plan_moves_a_residual_mlp_as_far_at_every_size(rule: str, axis: str) -> None:
    slopes = slopes_by_plan(rule, 2, axis)
    assert slopes.keys() >= {"input", "output", "hidden 0", "hidden 1", "bias 0"}
    assert not {kind: slope for kind, slope in slopes.items() if abs(slope) > 0.1}


@pytest.mark.parametrize("kind", BOTH)
def test_a_step_is_as_long_as_the_learning_rate_times_the_norm(kind: Any) -> None:
    """Back from the sphere: a step V at a right angle to W, of length lr·R, ends at (W − V)/√(1 + lr²)."""
    weight = torch.eye(2, dtype=torch.float64) * 3
    param = nn.Parameter(weight.clone())
    param.grad = torch.tensor([[0.0, 2.0], [-2.0, 0.0]], dtype=torch.float64)
    kind([param], lr=0.3).step()
    before = param.detach() * sqrt(1 + 0.3**2)
    assert (before - weight).norm().item() == pytest.approx(0.3 * weight.norm().item(), rel=1e-7)
    assert param.detach().norm().item() == pytest.approx(weight.norm().item(), rel=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("kind", BOTH)
def test_the_norm_stays_for_many_steps(kind: Any, dtype: torch.dtype, tolerance: float) -> None:
    param = nn.Parameter(torch.randn(3, 9, 6, dtype=dtype))  # (expert, in, out)
    before, start = torch.linalg.matrix_norm(param.detach()), param.detach().clone()
    optimizer = kind([param], lr=0.2, axes=((1,), (2,)))
    for _ in range(50):
        param.grad = torch.randn_like(param)
        optimizer.step()
    assert bool((torch.linalg.matrix_norm(param.detach() - start) > 0.5 * before).all())
    torch.testing.assert_close(torch.linalg.matrix_norm(param.detach()), before, rtol=tolerance, atol=0)


@pytest.mark.parametrize("kind", BOTH)
def test_experts_and_rows_are_matrices_of_their_own(kind: Any) -> None:
    rows = (((0, 4),), ((4, 5), (6, 7)), ((5, 6), (7, 8)))
    places = ([0, 1, 2, 3], [4, 6], [5, 7])
    fused, experts = nn.Parameter(noise(8, 5)), nn.Parameter(noise(3, 4, 6, seed=1))
    blocks = [nn.Parameter(fused.detach()[place].clone()) for place in places]
    blocks += [nn.Parameter(experts.detach()[place].clone()) for place in range(3)]
    groups = [{"params": [fused], "rows": rows}, {"params": [experts], "axes": ((2,), (1,))}]
    together, apart = kind(groups, lr=0.1), kind(blocks, lr=0.1)
    for step in range(3):
        fused.grad, experts.grad = noise(8, 5, seed=10 + step), noise(3, 4, 6, seed=20 + step)
        grads = [*(fused.grad[place] for place in places), *experts.grad]
        for block, grad in zip(blocks, grads, strict=True):
            block.grad = grad
        together.step()
        apart.step()
    made = [*(fused[place] for place in places), *experts]
    for block, one in zip(blocks, made, strict=True):
        torch.testing.assert_close(one, block, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rule", ["adamh", "muonh"])
@pytest.mark.parametrize("policy", decay_policies.POLICIES)
def test_a_plan_decays_nothing_on_the_sphere(rule: str, policy: Any) -> None:
    plan = plan_for(rule, weight_decay=0.1, decay=policy)
    network = model()
    start = {name: param.detach().clone() for name, param in network.named_parameters()}
    optimizer = plan.optimizer(network)
    train(network, optimizer, 3)
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            if group["rule"] == rule:
                assert group["weight_decay"] == 0 == plan[name].weight_decay
                assert param.norm().item() == pytest.approx(start[name].norm().item(), rel=1e-6)
    beside = [group["weight_decay"] for group in optimizer.param_groups if group["rule"] == "adamw"]
    assert (max(beside) > 0) == (policy != "none")
    assert "keeps the norm" in str(plan.explain("blocks.0.feed_forward.branch.up.weight")) or policy == "none"


@pytest.mark.parametrize("kind", BOTH)
def test_weight_decay_is_refused(kind: Any) -> None:
    group = {"params": [nn.Parameter(torch.eye(2))], "weight_decay": 0.1}
    with pytest.raises(UseError, match=r"weight_decay is 0\.1: \w+H keeps the norm .* Set it to 0"):
        kind([group])


def test_a_group_that_is_added_to_a_plan_does_not_decay() -> None:
    optimizer = plan_for("muonh", weight_decay=0.1).optimizer(model())
    new = nn.Parameter(noise(3, 2))
    optimizer.add_param_group({"params": [new], "param_names": ["new"], "rule": "muonh"})
    assert optimizer.param_groups[-1]["weight_decay"] == 0


@pytest.mark.parametrize("kind", BOTH)
def test_a_matrix_of_zeros_is_refused_by_name_before_anything_moves(kind: Any) -> None:
    weights = {"up": nn.Parameter(torch.randn(3, 3)), "down": nn.Parameter(torch.zeros(3, 3))}
    before = weights["up"].detach().clone()
    for weight in weights.values():
        weight.grad = torch.ones(3, 3)
    with pytest.raises(UseError, match=r"down, of shape \(3, 3\), has a matrix of zeros"):
        kind(weights.items(), lr=0.1).step()
    assert torch.equal(weights["up"], before)


@pytest.mark.parametrize("kind", BOTH)
def test_what_has_no_direction_or_no_learning_rate_stays(kind: Any) -> None:
    weight = nn.Parameter(torch.randn(4, 3))
    before = weight.detach().clone()
    for lr, grad in ((0.1, torch.zeros(4, 3)), (0.0, torch.ones(4, 3))):
        weight.grad = grad
        kind([weight], lr=lr).step()
        assert torch.equal(weight, before)


@pytest.mark.parametrize("kind", BOTH)
def test_a_resumed_run_of_bfloat16_keeps_the_digits_of_its_radius(kind: Any) -> None:
    ends = []
    for resumed in (False, True):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(16, 8).bfloat16())
        optimizer = kind([param], lr=0.05)
        for step in range(8):
            param.grad = torch.randn(16, 8).bfloat16()
            optimizer.step()
            if resumed and step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = kind([param], lr=0.05)
                optimizer.load_state_dict(saved)
        ends.append((param.detach(), optimizer.state[param]["radius"]))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert ends[0][1].dtype == torch.float32


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("scale", [2.0**83, 2.0**-83])
def test_the_step_does_not_depend_on_the_scale_of_the_gradient(kind: Any, scale: float) -> None:
    if kind is AdamH:
        scale = sqrt(scale)  # its squares have to be numbers
    moved = []
    for factor in (1.0, scale):
        weight = nn.Parameter(noise(5, 4).float())
        weight.grad = noise(5, 4, seed=1).float() * factor
        kind([weight], lr=0.1, eps=0.0).step()
        moved.append(weight.detach())
    torch.testing.assert_close(*moved)
