"""The gradient flow of a scale vector, against the calculus."""

import numpy as np
import pytest
import torch

from theodolite_studies.framework.claims import decide
from theodolite_studies.scale_vectors import flow
from theodolite_studies.scale_vectors.claims import FLOW_CLAIMS


def test_the_velocity_is_the_gradient():
    problem = flow.FlowProblem.drawn(0)
    weight, gain = (torch.tensor(each, requires_grad=True) for each in (problem.weight_OD, problem.gain_D))
    moments, target = torch.tensor(problem.moments_DD), torch.tensor(problem.target_OD)
    gap = weight * gain - target
    loss = 0.5 * torch.einsum("od,de,oe->", gap, moments, gap)
    decay = 0.5 * (0.3 * weight.square().sum() + 0.7 * gain.square().sum())
    (loss + decay).backward()
    down, down_gain = problem.velocity(problem.weight_OD, problem.gain_D, on_weight=0.3, on_gain=0.7)
    np.testing.assert_allclose(-weight.grad.numpy(), down, rtol=1e-12)
    np.testing.assert_allclose(-gain.grad.numpy(), down_gain, rtol=1e-12)


@pytest.mark.parametrize("on_gain", [0.0, 0.3])
def test_noise_moves_the_gain_as_ito_says(monkeypatch, on_gain):
    """`d/dt E‖γ‖² = −2μ‖γ‖² − 2aᵀ(a − a*) + Dq`, where all start at one."""
    monkeypatch.setattr(flow, "REPLICAS", 20_000)
    monkeypatch.setattr(flow, "NOISE_TIME", 0.125)
    monkeypatch.setattr(flow, "NOISE_STEP", 0.125 / 8)
    record = flow.noisy_gain(0, on_gain)
    target = np.random.default_rng(1000).normal(size=flow.DIMENSION)
    slope = -2 * on_gain * flow.DIMENSION - 2 * (1 - target).sum() + flow.DIMENSION * flow.NOISE
    # Curved a little over an eighth of a time unit.
    assert record["values"] == [pytest.approx(flow.DIMENSION + 0.125 * slope, abs=0.25)]
    assert record["bound"] == (
        None if not on_gain else pytest.approx(max(4, (4 + 0.5 * (target**2).sum()) / 0.6))
    )


def test_the_claims_of_the_flow_hold_and_a_wrong_formula_fails(monkeypatch):
    monkeypatch.setattr(flow, "NOISE_TIME", 8.0)
    monkeypatch.setattr(flow, "STEPS", tuple(2.0**-exponent for exponent in range(4, 10)))
    records = [*flow.experiments(0), *flow.experiments(1)]
    assert [claim.verdict for claim in decide(FLOW_CLAIMS, records)] == ["holds"] * 8
    spoilt = [{**one, "error": 0.1} if one["kind"] == "flow" else one for one in records]
    assert [claim.verdict for claim in decide(FLOW_CLAIMS, spoilt)].count("fails") == 1
