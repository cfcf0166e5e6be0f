"""Other losses than the plain cross-entropy, and a softmax that is saturated."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from theodolite.probes.curvature.operator import hessian

from .explicit import apart, explicit, sketch
from .networks import Case, vectors

CLASSES = torch.tensor([0, 1, 2, 2, 1, 0])
IGNORING = torch.tensor([0, -100, 2, 2, -100, 0])
SOFT = torch.tensor([[0.2, 0.5, 0.3], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]]).repeat(2, 1).double()
UNEVEN = torch.tensor([0.2, 1.0, 3.0]).double()


def focal(logits, targets):
    chosen = logits.log_softmax(-1).gather(-1, targets[:, None])
    return -((1 - chosen.exp()).square() * chosen).mean()


def with_logit_penalty(logits, targets):
    return F.cross_entropy(logits, targets) + 0.1 * logits.logsumexp(-1).square().mean()


LOSSES = {
    "sum": (lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum"), CLASSES),
    "label smoothing": (
        lambda logits, targets: F.cross_entropy(logits, targets, label_smoothing=0.2),
        CLASSES,
    ),
    "ignored targets": (F.cross_entropy, IGNORING),
    "class weights": (lambda logits, targets: F.cross_entropy(logits, targets, weight=UNEVEN), CLASSES),
    "weights and smoothing": (
        lambda logits, targets: F.cross_entropy(logits, targets, weight=UNEVEN, label_smoothing=0.1),
        CLASSES,
    ),
    "soft targets": (F.cross_entropy, SOFT),
    "targets that do not sum to one": (F.cross_entropy, 2 * SOFT + 0.1),
    "negative log-likelihood": (lambda logits, targets: F.nll_loss(logits.log_softmax(1), targets), CLASSES),
    "half a mean square": (lambda logits, targets: (logits - targets).square().mean() / 2, SOFT),
    "sum of squares": (lambda logits, targets: F.mse_loss(logits, targets, reduction="sum"), SOFT),
    "binary": (F.binary_cross_entropy_with_logits, SOFT),
    "log cosh": (lambda logits, targets: (logits - targets).cosh().log().mean(), SOFT),
    "focal": (focal, CLASSES),
    "penalty on logits": (with_logit_penalty, CLASSES),
    "divergence": (
        lambda logits, targets: F.kl_div(logits.log_softmax(-1), targets + 0.1, reduction="sum"),
        SOFT,
    ),
    "not convex": (lambda logits, targets: logits.sin().mean() + (logits * targets).mean(), SOFT),
    "shape (1,)": (lambda logits, targets: F.cross_entropy(logits, targets).reshape(1), CLASSES),
}


def made(loss, targets):
    base = vectors(nn.LayerNorm(5), nn.Tanh())
    return Case(base.model.double(), loss, (base.batch[0], targets))


@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_of_the_logits(name):
    one = made(*LOSSES[name])
    expected, found = explicit(one), hessian(one.model, one.loss, one.batch)
    assert apart(sketch(found), sketch(expected.hessian)) < 1e-6
    assert apart(sketch(found.gauss_newton), sketch(expected.gauss_newton)) < 1e-6
    assert apart(sketch(found.residual), sketch(expected.residual)) < 1e-6
    assert apart(found.gradient, expected.gradient) < 1e-9
    assert found.loss == pytest.approx(expected.loss)


def test_a_loss_that_is_a_cross_entropy_only_near_zero_is_not_taken_for_one():
    def clamped(logits, targets):
        return F.cross_entropy(logits.clamp(-6, 6), targets)

    one = made(clamped, CLASSES)
    one.model[-1].weight.data *= 30
    logits = one.model(one.batch[0])
    assert 0.2 < (logits.abs() > 6).double().mean() < 0.8
    expected, found = (
        explicit(Case(one.model, clamped, one.batch)),
        hessian(one.model, clamped, one.batch),
    )
    assert apart(found.gradient, expected.gradient) < 1e-9
    assert apart(sketch(found), sketch(expected.hessian)) < 1e-5


def test_classes_in_the_second_dimension():
    model = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Conv1d(4, 3, 1)).double()
    one = Case(model, F.cross_entropy, (torch.randn(2, 2, 4).double(), torch.randint(3, (2, 3))))
    expected, found = explicit(one), hessian(model, one.loss, one.batch)
    assert apart(sketch(found), sketch(expected.hessian)) < 1e-6
    assert apart(sketch(found.gauss_newton), sketch(expected.gauss_newton)) < 1e-6


def test_the_model_itself_may_return_log_probabilities():
    base = made(F.nll_loss, CLASSES)
    model = nn.Sequential(*base.model, nn.LogSoftmax(-1))
    one = Case(model, F.nll_loss, base.batch)
    expected, found = explicit(one), hessian(model, one.loss, one.batch)
    assert apart(sketch(found), sketch(expected.hessian)) < 1e-6
    # The loss is linear in what the model returns.
    assert sketch(found.gauss_newton).norm() < 1e-9


def saturated(factor):
    """In float32: logits of the size of the factor, of which two are near each other and two far below.

    The unlikelier of the two has the probability e^−Δ for Δ up to 70, and 1 − p is 0 from Δ = 17 on.
    """
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
    inputs = torch.randn(8, 5)
    with torch.no_grad():
        model[2].bias += torch.tensor([3.0, 3.0, -3.0, -3.0])
        model[2].weight *= factor
        model[2].bias *= factor
        features = model[:2](inputs)
        apart = torch.linspace(2, 70, 8)
        # The second class is the first less Δ, on these eight examples.
        fitted = torch.linalg.lstsq(torch.cat([features, torch.ones(8, 1)], 1), apart[:, None]).solution[:, 0]
        model[2].weight[1] = model[2].weight[0] - fitted[:-1]
        model[2].bias[1] = model[2].bias[0] - fitted[-1]
    return model, inputs


@pytest.mark.parametrize("factor", [1e2, 1e4])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_saturated_softmax_is_right_in_float32(factor, place):
    """With the likeliest class as the target, the second, and one far below."""
    model, inputs = saturated(factor)
    exact = copy.deepcopy(model).double()
    targets = exact(inputs.double()).argsort(-1, descending=True)[:, place]
    # Logits of this size are rounded to so much, and probabilities are so much off.
    close = 1e-4 + 2e-6 * factor
    # One example at a time: in a mean the least saturated one would hide the others.
    for row, target in enumerate(targets):
        one = slice(row, row + 1)
        found = hessian(model, F.cross_entropy, (inputs[one], targets[one]))
        gradient, first = closed_form(exact, inputs[row].double(), target)
        assert apart(found.gradient.double(), gradient) < close
        assert apart(sketch(found.gauss_newton).double(), sketch(first)) < close
        high = hessian(exact, F.cross_entropy, (inputs[one].double(), targets[one]))
        assert apart(high.gradient, gradient) < 1e-9
        assert apart(sketch(high.gauss_newton), sketch(first)) < 1e-9
        assert apart(sketch(found.residual).double(), sketch(high.residual)) < close


def closed_form(model, inputs, target):
    """The gradient `Σ p_k (J_k − J_y)`; G from `J_k − J_m` with the likeliest class m.

    Nothing here is a difference of numbers that are near each other.
    """
    logits, parameters = model(inputs), list(model.parameters())
    jacobian = torch.stack([
        torch.cat([one.flatten() for one in torch.autograd.grad(logit, parameters, retain_graph=True)])
        for logit in logits
    ])  # fmt: skip
    p = logits.detach().softmax(-1)
    around = jacobian - jacobian[p.argmax()]
    mean = p @ around
    return p @ (jacobian - jacobian[target]), (around.T * p) @ around - torch.outer(mean, mean)
