"""Drift against closed forms on quadratics, and against scipy's integrator on a network."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from theodolite import probes
from theodolite.core.errors import UseError
from theodolite.probes.steps.drift import Descent, follow

mse = nn.functional.mse_loss


def _quadratic(values: list[float]) -> tuple[nn.Module, tuple[Tensor, Tensor], Tensor, Tensor]:
    """A linear regression with these eigenvalues, its minimum, and its Hessian."""
    torch.manual_seed(1)
    size = len(values)
    turn, _ = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))
    curved = turn @ torch.diag(torch.tensor(values).double()) @ turn.T
    # The mean over n examples of (xᵀθ − y)² has the Hessian 2/n·XᵀX.
    points = torch.linalg.cholesky(curved * size / 2).T
    best = torch.randn(size, dtype=torch.float64)
    model = nn.Linear(size, 1, bias=False).double()
    return model, (points, (points @ best)[:, None]), best, curved


# lr·λ_max: from 1 on the principal flow is complex, from 2 on gradient descent grows.
@pytest.mark.parametrize(("top", "steps"), [(0.5, 3), (1.5, 2), (5.0, 1)])
def test_on_a_quadratic_everything_has_a_closed_form(top: float, steps: int) -> None:
    model, batch, best, curved = _quadratic([10.0, 4.0, 1.0, 0.3])
    lr = top / 10
    found = probes.drift(model, mse, batch, lr=lr, steps=steps, k=4, rtol=1e-5)
    away = (model.weight.detach()[0]) - best
    values, vectors = torch.linalg.eigh(curved)
    parts = vectors.T @ away
    walked = (1 - lr * values) ** steps * parts
    flowed = torch.exp(-lr * steps * values) * parts
    bent = torch.exp(-lr * steps * values * (1 + lr * values / 2)) * parts
    assert found.distance == pytest.approx(float((walked - flowed).norm()), rel=1e-3)
    assert found.modified == pytest.approx(float((walked - bent).norm()), rel=1e-3)
    assert found.length == pytest.approx(float((walked - parts).norm()), rel=1e-9)
    assert found.principal < 1e-4 * found.length
    assert found.explained == pytest.approx(1, abs=1e-4)
    assert found.edge == pytest.approx(top / 2, rel=1e-5)
    assert found.growth == pytest.approx(1 - top, rel=1e-4)
    assert found.losses[1] == pytest.approx(float((values * walked**2).sum()) / 2, rel=1e-6)
    assert found.losses[2] == pytest.approx(float((values * flowed**2).sum()) / 2, rel=1e-2)
    assert found.converged


def test_what_is_not_among_the_eigenpairs_drifts_unexplained() -> None:
    model, batch, best, curved = _quadratic([10.0, 9.0])
    found = probes.drift(model, mse, batch, lr=0.15, k=1, rtol=1e-5)
    vectors = torch.linalg.eigh(curved).eigenvectors
    part = vectors[:, 0] @ (model.weight.detach()[0] - best)
    left = abs(float(part)) * abs(1 - 0.15 * 9 - math.exp(-0.15 * 9))
    assert found.principal == pytest.approx(left, rel=1e-3)


def _network() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.0), nn.BatchNorm1d(6), nn.Linear(6, 2))
    return model, (torch.randn(20, 3), torch.randn(20, 2))


def test_the_flow_of_a_network_is_that_of_scipy() -> None:
    model, batch = _network()
    descent = Descent(model, mse, batch)

    def field(_: float, at: np.ndarray) -> np.ndarray:
        twin = copy.deepcopy(model).double()
        nn.utils.vector_to_parameters(torch.from_numpy(at), twin.parameters())
        mse(twin(batch[0].double()), batch[1].double()).backward()
        return -torch.cat([p.grad.reshape(-1) for p in twin.parameters()]).numpy()  # type: ignore[union-attr]

    truth = solve_ivp(field, (0, 0.3), descent.start.numpy(), rtol=1e-8, atol=1e-10).y[:, -1]
    followed = follow(lambda at: -descent.gradient(at), descent.start, 0.3, atol=1e-9)
    assert followed.converged
    assert followed.end.numpy() == pytest.approx(truth, abs=1e-6)


def test_the_drift_is_of_the_second_order_and_what_flows_leave_of_the_third() -> None:
    model, batch = _network()
    found = [probes.drift(model, mse, batch, lr=lr, k=38, rtol=1e-7) for lr in (0.02, 0.01)]
    for name, order in (("distance", 2), ("modified", 3), ("principal", 3)):
        ratio = getattr(found[0], name) / getattr(found[1], name)
        assert math.log2(ratio) == pytest.approx(order, abs=0.1), name


def test_several_batches_are_one() -> None:
    model, (points, targets) = _network()
    model.eval()
    whole = probes.drift(model, mse, (points, targets), lr=0.1)
    parts = [(points[:12], targets[:12]), (points[12:], targets[12:])]
    split = probes.drift(model, mse, parts, lr=0.1)
    assert split.distance == pytest.approx(whole.distance, rel=1e-9)


def test_no_trace_is_left() -> None:
    model, batch = _network()
    model.train()
    mse(model(batch[0]), batch[1]).backward()
    model[0].eval()
    before = copy.deepcopy(model)
    grads = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    state = torch.get_rng_state()
    probes.drift(model, mse, batch, lr=0.1, steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
        assert model.state_dict()[name].dtype == tensor.dtype
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)  # type: ignore[arg-type]
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]


def test_a_step_that_leaves_the_numbers_is_a_result() -> None:
    model = nn.Linear(1, 1, bias=False)
    batch = torch.ones(1, 1), torch.zeros(1, 1)
    found = probes.drift(model, lambda out, _: out.pow(4).mean(), batch, lr=1e6, steps=60)
    assert found.distance == math.inf
    assert not found.converged
    assert "gradient descent diverged at step" in found.status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": 0.1, "steps": 0}, "steps is 0"),
        ({"lr": 0.1, "rtol": 2.0}, "rtol is 2.0"),
    ],
)
def test_bad_input(options: dict[str, float], message: str) -> None:
    model, batch = _network()
    with pytest.raises(UseError, match=message):
        probes.drift(model, mse, batch, **options)  # type: ignore[arg-type]


def test_no_gradient_is_no_step() -> None:
    model = nn.Linear(1, 1, bias=False)
    with pytest.raises(UseError, match="the gradient has the norm 0"):
        probes.drift(model, mse, (torch.zeros(1, 1), torch.zeros(1, 1)), lr=0.1)
