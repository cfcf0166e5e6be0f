"""Gradient-normalized smoothness: the steps, the rule, and what it leaves alone."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import nn

from theodolite import UseError
from theodolite.controllers import NormalizedSmoothness, smoothness
from theodolite.controllers.smoothness import solve
from theodolite.probes import hessian

CURVATURES = ("gauss_newton", "hessian", "fisher")
every = pytest.mark.parametrize("curvature", CURVATURES)


def matrix_of(values, seed=0):
    """Symmetric, with these eigenvalues."""
    basis = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return basis * torch.tensor(values, dtype=torch.float64) @ basis.T


def bits(model):
    return [tensor.detach().numpy().tobytes() for tensor in model.state_dict().values()]


def logistic(dtype=torch.float64, num=60, features=5, seed=1):
    """Classes that overlap, so that there is a minimum."""
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, features, generator=rng, dtype=torch.float64)
    truth = torch.randn(features, generator=rng, dtype=torch.float64)
    noise = 2 * torch.randn(num, generator=rng, dtype=torch.float64)
    targets = (inputs @ truth + noise > 0).double()[:, None]
    model = nn.Linear(features, 1).to(dtype)
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    return model, F.binary_cross_entropy_with_logits, (inputs.to(dtype), targets.to(dtype))


def network(dtype=torch.float64):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
    inputs = torch.randn(20, 4, dtype=torch.float64)
    return model, F.cross_entropy, (inputs.to(dtype), (inputs.sum(1) * 2).long().abs() % 3)


# Conjugate gradients


@pytest.mark.parametrize("shift", [10.0, 0.1, 1e-4])
def test_conjugate_gradients_solve_what_numpy_solves(shift):
    A = matrix_of(np.geomspace(1e-3, 10, 30))
    g = torch.randn(30, dtype=torch.float64)
    found = solve(A.mv, g, shift=shift, rtol=1e-12, most_products=400)
    expected = np.linalg.solve(A.numpy() + shift * np.eye(30), -g.numpy())
    assert found.end == "converged"
    np.testing.assert_allclose(found.step.numpy(), expected, rtol=1e-8, atol=1e-10)
    loose = solve(A.mv, g, shift=shift, rtol=0.1, most_products=400)
    left = np.linalg.norm(A.numpy() @ loose.step.numpy() + shift * loose.step.numpy() + g.numpy())
    assert loose.residual == pytest.approx(left / g.norm().item(), rel=1e-9)
    # Not more than asked for, nor than what the shift itself leaves of the gradient.
    assert loose.residual <= min(0.1, 1.0001 * shift * loose.step.norm().item() / g.norm().item())
    assert loose.products < found.products


def test_distinct_eigenvalues_are_what_products_are_needed_for():
    A = matrix_of([1.0] * 10 + [3.0] * 10 + [10.0] * 10)
    g = torch.randn(30, dtype=torch.float64)
    assert solve(A.mv, g, shift=0.5, rtol=1e-10, most_products=30).products == 3
    cut = solve(A.mv, g, shift=0.5, rtol=1e-10, most_products=2)
    assert (cut.end, cut.products) == ("most products", 2)
    # It is the best of the plane of the first two Krylov vectors.
    basis = torch.linalg.qr(torch.stack([g, A @ g], 1))[0]
    shifted = A + 0.5 * torch.eye(30, dtype=torch.float64)
    best = basis @ torch.linalg.solve(basis.T @ shifted @ basis, -basis.T @ g)
    torch.testing.assert_close(cut.step, best)


@pytest.mark.parametrize("lowest, end", [(-50.0, "negative curvature"), (-1.0, None)])
def test_with_negative_curvature_the_step_ends_on_the_sphere_and_lowers_the_quadratic(lowest, end):
    A = matrix_of([lowest, 0.5, 1.0, 2.0, 3.0, 4.0])
    g = torch.randn(6, dtype=torch.float64)
    shift = 0.7
    found = solve(A.mv, g, shift=shift, rtol=1e-10, most_products=50)
    assert found.end in ("negative curvature", "at the radius")
    if end:
        assert found.end == end
    assert found.step.norm().item() == pytest.approx(g.norm().item() / shift, rel=1e-10)
    shifted = A + shift * torch.eye(6, dtype=torch.float64)
    cauchy = -g / shift  # to the sphere along the gradient
    reached, along = (g @ d + d @ shifted @ d / 2 for d in (found.step, cauchy))
    assert (
        reached <= along + 1e-9 * along.abs()
    )  # where the first product is negative they are one and the same
    assert g @ found.step < 0


def test_a_product_that_is_not_finite_is_refused():
    with pytest.raises(UseError, match="product with the curvature is not finite"):
        solve(lambda v: v * math.nan, torch.ones(2), shift=1.0, rtol=0.1, most_products=9)


# The empirical Fisher matrix


@pytest.mark.parametrize("made", [logistic, network])
def test_the_fisher_is_the_mean_of_outer_products_of_single_gradients(made):
    model, loss, (inputs, targets) = made()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(0.3)
    rows = []
    for one, target in zip(inputs, targets, strict=True):
        found = torch.autograd.grad(loss(model(one[None]), target[None]), list(model.parameters()))
        rows.append(torch.cat([each.flatten() for each in found]))
    single = torch.stack(rows)
    expected = single.T @ single / len(single)
    H = hessian(model, loss, (inputs, targets))
    eye = torch.eye(H.size, dtype=torch.float64)
    torch.testing.assert_close(H.fisher @ eye, expected, rtol=1e-10, atol=1e-12)
    assert ((H.gauss_newton @ eye) - expected).norm() > 0.05 * expected.norm()
    source = H.fisher._source  # as on a GPU, many vectors at once
    many = source._product(source._point(), "fisher", eye, many=True)
    torch.testing.assert_close(many, expected, rtol=1e-10, atol=1e-12)
    half = [(inputs[:7], targets[:7]), (inputs[7:], targets[7:])]
    torch.testing.assert_close(hessian(model, loss, half).fisher @ eye, expected, rtol=1e-10, atol=1e-12)


def test_for_a_cross_entropy_the_gauss_newton_is_the_true_fisher():
    model, loss, (inputs, _) = network()
    H = hessian(model, loss, (inputs, torch.zeros(len(inputs), dtype=torch.long)))
    eye, total = torch.eye(H.size, dtype=torch.float64), 0.0
    chances = model(inputs).softmax(-1).detach()
    for index, chance in enumerate(chances):  # over targets as the model would draw them
        for label, share in enumerate(chance):
            one = loss(model(inputs[index][None]), torch.tensor([label]))
            g = torch.cat([each.flatten() for each in torch.autograd.grad(one, list(model.parameters()))])
            total = total + share * g[:, None] * g / len(inputs)
    torch.testing.assert_close(H.gauss_newton @ eye, total, rtol=1e-9, atol=1e-11)


# The step


@pytest.mark.parametrize(
    "curvature, made", [("gauss_newton", network), ("fisher", network), ("hessian", logistic)]
)
def test_a_step_is_the_one_of_the_paper(curvature, made):
    """Against Algorithm 1 with explicit matrices and an exact solve, over several steps."""
    model, loss, batch = made()
    twin = copy.deepcopy(model)
    gamma, seen = 30.0, set()
    stepper = NormalizedSmoothness(model, loss, curvature=curvature, gamma=gamma, rtol=1e-12)
    for _ in range(6):
        found = stepper.step(batch)
        H = hessian(twin, loss, batch)
        operator = H if curvature == "hessian" else getattr(H, curvature)
        A, g, before = operator @ torch.eye(H.size).double(), H.gradient, H.loss
        start = nn.utils.parameters_to_vector(twin.parameters()).detach()
        for _tries in range(1, 41):
            shift = g.norm() / gamma
            d = torch.linalg.solve(A + shift * torch.eye(len(g)).double(), -g)
            nn.utils.vector_to_parameters(start + d, twin.parameters())
            after = hessian(twin, loss, batch)
            if before - after.loss >= after.gradient.square().sum() / (8 * shift):
                break
            gamma /= 2
        assert (found.status, found.tries, found.gamma) == ("accepted", _tries, gamma)
        seen.add(_tries)
        assert found.loss == pytest.approx(before, rel=1e-9)
        assert found.loss_after == pytest.approx(after.loss, rel=1e-9)
        assert found.shift == pytest.approx(shift.item(), rel=1e-9)
        assert found.gradient_norm == pytest.approx(g.norm().item(), rel=1e-9)
        assert found.gradient_norm_after == pytest.approx(after.gradient.norm().item(), rel=1e-9)
        assert found.length == pytest.approx(d.norm().item(), rel=1e-9)
        gamma *= 2
        assert stepper.gamma == gamma
        reached = nn.utils.parameters_to_vector(model.parameters())
        torch.testing.assert_close(reached, start + d, rtol=1e-8, atol=1e-10)
    assert len(seen) > 1, "no try was refused, so half of the rule is untested"


def test_on_a_quadratic_the_closed_form():
    model = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, -4.0]]))
    batch = torch.diag(torch.tensor([1.0, 2.0])).double(), torch.zeros(2, 1).double()
    # ½(w₁² + 4w₂²), as mean over two examples; g = (3, −16), A = diag(1, 4)
    stepper = NormalizedSmoothness(model, F.mse_loss, gamma=10.0, rtol=1e-13)
    found = stepper.step(batch)
    shift = math.hypot(3, 16) / 10
    expected = [3 * shift / (1 + shift), -4 * shift / (4 + shift)]
    assert found.loss == pytest.approx(36.5)
    assert found.shift == pytest.approx(shift)
    assert model.weight.tolist()[0] == pytest.approx(expected, rel=1e-12)
    assert found.accepted


@pytest.mark.parametrize(
    "curvature, split", [(each, False) for each in CURVATURES] + [("gauss_newton", True)]
)
def test_logistic_regression_ends_where_scipy_ends(curvature, split):
    model, loss, (inputs, targets) = logistic()
    rows = np.hstack([inputs.numpy(), np.ones((len(inputs), 1))])
    signs = 2 * targets.numpy()[:, 0] - 1

    def value(w):
        margins = signs * (rows @ w)
        slope = -(rows * (signs / (1 + np.exp(margins)))[:, None]).mean(0)
        return np.logaddexp(0, -margins).mean(), slope

    best = scipy.optimize.minimize(value, np.zeros(6), jac=True, method="BFGS", options={"gtol": 1e-13}).x
    for _ in range(5):  # Newton, to the last digit
        chance = 1 / (1 + np.exp(-rows @ best))
        best = best - np.linalg.solve(rows.T * (chance * (1 - chance)) @ rows / 60, value(best)[1])
    batch = [(inputs[:13], targets[:13]), (inputs[13:], targets[13:])] if split else (inputs, targets)
    stepper = NormalizedSmoothness(model, loss, curvature=curvature)
    for count in range(200):  # noqa: B007
        found = stepper.step(batch)
        if found.gradient_norm_after < 1e-12:
            break
    assert count < (60 if curvature == "fisher" else 10)
    if curvature != "fisher":
        assert stepper.counts.tries == stepper.counts.steps, "a solve too loose makes the rule refuse steps"
    reached = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    assert np.abs(reached - best).max() < 1e-10


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_lower_precision_gets_as_far_as_its_rounding(dtype, close):
    model, loss, batch = logistic(dtype)
    stepper = NormalizedSmoothness(model, loss)
    norms = [stepper.step(batch).gradient_norm_after for _ in range(8)]
    assert norms[-1] < close * norms[0]
    assert model.weight.dtype is dtype


@every
def test_negative_curvature_is_left_behind(curvature):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.mul_(0.05)
    inputs = torch.randn(30, 3).double()
    batch = inputs, (inputs[:, 0] * inputs[:, 1] > 0).long()
    lowest = torch.linalg.eigvalsh(hessian(model, F.cross_entropy, batch) @ torch.eye(26).double())[0]
    assert lowest < -1e-3
    stepper = NormalizedSmoothness(model, F.cross_entropy, curvature=curvature)
    readings = [stepper.step(batch) for _ in range(25)]
    assert all(step.loss_after < step.loss for step in readings)
    assert readings[-1].loss_after < 0.75 * readings[0].loss
    if curvature == "hessian":
        assert {"negative curvature", "at the radius"} & {step.solved for step in readings}


# What it leaves alone


class Strange(nn.Module):
    """A loss that is finite at the start only."""

    def __init__(self, elsewhere):
        super().__init__()
        self.elsewhere = elsewhere
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        away = (self.weight - 1).abs().max() > 0
        return x * self.weight + (self.elsewhere if away else 0.0)


@pytest.mark.parametrize("elsewhere", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_refused_leaves_every_bit(elsewhere):
    model = Strange(elsewhere)
    model.weight.grad = torch.full((2,), 7.0).double()
    stepper = NormalizedSmoothness(model, lambda logits, _: logits.mean())
    before, state = bits(model), torch.get_rng_state()
    found = stepper.step((torch.ones(3, 2).double(), torch.zeros(3, 2).double()))
    assert (found.status, found.tries, found.accepted) == ("refused", smoothness.MOST_TRIES, False)
    assert bits(model) == before
    assert model.weight.grad.tolist() == [7.0, 7.0]
    assert torch.equal(torch.get_rng_state(), state)
    # The next step tries on where this one ended.
    assert (2 * stepper.gamma, found.gamma) == (2.0 ** (1 - smoothness.MOST_TRIES),) * 2
    assert (stepper.counts.steps, stepper.counts.accepted) == (1, 0)


def test_a_first_radius_that_is_far_too_large_is_left_behind():
    model, loss, batch = network()
    stepper = NormalizedSmoothness(model, loss, curvature="hessian", gamma=1e20)
    statuses = [stepper.step(batch).status for _ in range(4)]
    assert statuses == ["refused", "accepted", "accepted", "accepted"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_minimum_that_rounding_limits_leaves_the_radius(dtype):
    """Else it would take dozens of doublings to train on other data."""
    model, loss, (inputs, targets) = logistic(dtype)
    stepper = NormalizedSmoothness(model, loss)
    for _ in range(10):
        before = bits(model)
        found = stepper.step((inputs, targets))
        assert (bits(model) != before) is found.accepted
    assert stepper.gamma >= 1
    other = [stepper.step((inputs, 1 - targets)) for _ in range(7)]
    assert other[-1].gradient_norm_after < 1e-5 * other[0].gradient_norm


def test_a_step_that_rounds_to_nothing_is_none():
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(1.0)
    # The least gradient that there is.
    batch = torch.ones(1, 1).double(), torch.full((1, 1), 1 - 2.0**-53, dtype=torch.float64)
    stepper = NormalizedSmoothness(model, F.mse_loss, gamma=1e-17)
    found = stepper.step(batch)
    assert (found.status, found.tries, stepper.gamma) == ("stationary", 1, 1e-17)
    assert stepper.counts.accepted == 0
    assert model.weight.item() == 1.0


def test_an_accepted_step_changes_nothing_but_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3)).double()
    model[0].bias.requires_grad_(False)
    batch = torch.randn(20, 4).double(), torch.arange(20) % 3
    frozen, buffers = model[0].bias.clone(), [each.clone() for each in model.buffers()]
    pointers, state = [each.data_ptr() for each in model.parameters()], torch.get_rng_state()
    assert NormalizedSmoothness(model, F.cross_entropy).step(batch).accepted
    assert torch.equal(model[0].bias, frozen)
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), buffers, strict=True))
    assert all(each.grad is None for each in model.parameters())
    assert [each.data_ptr() for each in model.parameters()] == pointers
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_where_the_gradient_is_zero_nothing_moves():
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.zero_(), model.bias.zero_()
    stepper, before = NormalizedSmoothness(model, F.mse_loss, gamma=3.0), bits(model)
    found = stepper.step((torch.randn(4, 2).double(), torch.zeros(4, 1).double()))
    assert (found.status, found.loss, found.products, found.tries) == ("stationary", 0.0, 0, 0)
    assert bits(model) == before
    assert stepper.gamma == 3.0


@every
@pytest.mark.parametrize("how", ["weight", "input", "gradient"])
def test_what_is_not_finite_is_refused_by_name(curvature, how):
    class Rooted(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.odd = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return self.first(x) + (self.odd.abs().sqrt() if how == "gradient" else self.odd)

    model, inputs = Rooted().double(), torch.randn(4, 2).double()
    if how == "weight":
        model.odd.data[1] = math.inf
    if how == "input":
        inputs[2, 1] = math.nan
    before = bits(model)
    said = {"weight": "odd is not finite", "input": "the loss is nan", "gradient": "gradient of odd is not"}[
        how
    ]
    with pytest.raises(UseError, match=said):
        NormalizedSmoothness(model, F.mse_loss, curvature=curvature).step(
            (inputs, torch.zeros(4, 2).double())
        )
    assert bits(model) == before


@every
def test_a_run_that_is_saved_goes_on_bit_for_bit(curvature):
    model, loss, batch = network(torch.float32)
    stepper = NormalizedSmoothness(model, loss, curvature=curvature)
    for _ in range(4):
        stepper.step(batch)
    saved, weights = json.loads(json.dumps(stepper.state_dict())), copy.deepcopy(model)
    resumed = NormalizedSmoothness(weights, loss, curvature=curvature, gamma=99.0)
    resumed.load_state_dict(saved)
    assert [stepper.step(batch) for _ in range(5)] == [resumed.step(batch) for _ in range(5)]
    assert bits(model) == bits(weights)
    assert stepper.counts == resumed.counts
    assert stepper.counts.steps == 9


@pytest.mark.parametrize(
    "options, said",
    [
        ({"curvature": "newton"}, "It is one of gauss_newton, hessian, fisher"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": math.nan}, "gamma"),
        ({"rtol": 1.5}, "rtol is 1.5"),
        ({"most_products": 0}, "most_products"),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(UseError, match=said):
        NormalizedSmoothness(nn.Linear(2, 1), F.mse_loss, **options)


def test_a_state_of_another_kind_is_refused():
    one = NormalizedSmoothness(nn.Linear(2, 1), F.mse_loss)
    with pytest.raises(UseError, match="curvature='fisher'"):
        one.load_state_dict({**one.state_dict(), "curvature": "fisher"})
    with pytest.raises(UseError, match="no 'gamma'"):
        one.load_state_dict({name: value for name, value in one.state_dict().items() if name != "gamma"})


def test_a_step_and_the_counts_are_read_back(tmp_path):
    model = nn.Linear(2, 1, bias=False).double()
    stepper = NormalizedSmoothness(model, F.mse_loss)
    step = stepper.step((torch.eye(2).double(), torch.ones(2, 1).double()))
    assert smoothness.NewtonStep.load(step.save(tmp_path / "step.json")) == step
    assert smoothness.NewtonCounts.load(stepper.counts.save(tmp_path / "counts.json")) == stepper.counts
    assert str(stepper.counts).startswith("1 of 1 steps accepted, 1 tries")
