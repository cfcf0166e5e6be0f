"""Winning frequencies against scipy's integrator, and against the gradient flow of the real network."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from theodolite import UseError, data, probes
from theodolite.probes.features.cyclic import waves
from theodolite.probes.features.fourier_winners import blow_up_times


def _integrated(alpha: float, beta: float, misalignment: float, length: int) -> float:
    """T by a Runge–Kutta method of order 8 until β is large; from there aligned neurons need p/(2β)."""

    def field(_: float, state: np.ndarray) -> list[float]:
        a, b, phi, psi = state
        turn = 2 * phi - psi
        return [
            2 / length * a * b * math.cos(turn),
            a * a / length * math.cos(turn),
            -2 / length * b * math.sin(turn),
            a * a / b / length * math.sin(turn),
        ]

    def blown_up(_: float, state: np.ndarray) -> float:
        return state[1] - 1e5

    blown_up.terminal = True  # type: ignore[attr-defined]
    start = [alpha, beta, misalignment / 2, 0.0]
    found = solve_ivp(field, (0, 1e9), start, events=blown_up, rtol=1e-10, atol=1e-13, method="DOP853")
    assert found.status == 1
    return float(found.t[-1] + length / (2 * found.y[1, -1]))


def test_blow_up_times_are_those_of_the_integrated_equations() -> None:
    generator = np.random.default_rng(0)
    alpha, beta = generator.uniform(0.02, 0.3, (2, 12))
    turn = generator.uniform(-3, 3, 12)
    alpha[:3], beta[:3], turn[:5] = (1e-6, 1e-4, 1.0), (1.0, 1.0, 1e-6), (1.5707, 2.9, 1.0, 3.1, -3.14159)
    found = blow_up_times(alpha, beta, turn, 23)
    wanted = [_integrated(*one, 23) for one in zip(alpha, beta, turn, strict=True)]
    assert found == pytest.approx(wanted, rel=1e-6)


def test_nearly_opposed_neurons_have_the_times_of_exact_arithmetic() -> None:
    """The roots of Q by 50 digits: two of them almost coincide. The first waits at D = π for long."""
    with mpmath.workdps(50):
        for alpha, beta, below in ((0.1, 0.2, 1e-5), (0.1, 0.2, 1e-9), (0.3, 0.1, 1e-9), (0.06, 0.2, 1e-11)):
            turn = math.pi - below
            v, u, sine, half = (
                mpmath.mpf(alpha) ** 2,
                mpmath.mpf(beta) ** 2,
                mpmath.sin(turn),
                mpmath.mpf(0.5),
            )
            conserved = v - 2 * u
            roots = mpmath.polyroots(
                [4, 4 * conserved, conserved**2, -v * v * u * sine**2], maxsteps=500, extraprec=400
            )
            largest = max(mpmath.re(root) for root in roots if abs(mpmath.im(root)) < 1e-30)
            gaps = [largest - root for root in sorted(roots, key=lambda root: abs(root - largest))[1:]]
            down = mpmath.elliprf(*(u - root for root in roots))
            wanted = 23 * half * mpmath.re(2 * mpmath.elliprf(0, *gaps) - down)
            found = blow_up_times(np.array([alpha]), np.array([beta]), np.array([turn]), 23)
            assert found[0] == pytest.approx(float(wanted), rel=1e-9)


def test_a_neuron_that_does_not_grow_has_no_winner() -> None:
    w_in = torch.zeros(2, 5)
    w_in[1] = torch.cos(2 * math.pi * torch.arange(5) / 5)
    found = probes.fourier_winners(w_in, w_in.T)
    assert found.frequency.tolist() == [0, 1]
    assert str(found).startswith("1 neuron, 2 frequencies")
    assert "In 1 more neuron no frequency grows" in str(found)
    said = str(probes.fourier_winners(0 * w_in, w_in.T))
    assert said.startswith("No neuron grows: the weights in w_in are zero")
    assert "more neuron" not in said


def test_aligned_and_opposed_neurons_have_closed_forms() -> None:
    """D stays 0 or π, `β' = ±α²/p` and `α² = C + 2β²`, which is separated."""
    beta = np.array([0.01, 0.1, 1.0])
    assert blow_up_times(math.sqrt(2) * beta, beta, 0 * beta, 7) == pytest.approx(7 / (2 * beta))  # C = 0
    alpha = np.array([0.01, 0.1, 1.0])
    from_zero = 7 * math.pi / (2 * math.sqrt(2) * alpha)
    assert blow_up_times(alpha, 0 * alpha, 1 + 0 * alpha, 7) == pytest.approx(from_zero)
    c = 1 - 2 * 0.5**2  # D = π and C > 0: β falls through zero and comes out aligned
    through = 7 / math.sqrt(2 * c) * (math.pi / 2 + math.atan(0.5 * math.sqrt(2 / c)))
    opposed = np.array([math.pi])
    assert blow_up_times(np.array([1.0]), np.array([0.5]), opposed, 7) == pytest.approx(through, rel=1e-6)
    # D = π and C < 0: the flow runs into α = 0. Without α there is no flow.
    assert np.isinf(blow_up_times(np.array([0.5]), np.array([1.0]), opposed, 7)).all()
    assert np.isinf(blow_up_times(np.array([0.0, 0.0]), np.array([1.0, 0.0]), np.zeros(2), 7)).all()


def test_times_scale_with_the_inverse_of_the_weights() -> None:
    torch.manual_seed(0)
    w_in, w_out = torch.randn(20, 11).double(), torch.randn(11, 20).double()
    found = probes.fourier_winners(w_in, w_out)
    for scale in (1e-200, 1e-6, 1e6):
        other = probes.fourier_winners(scale * w_in, scale * w_out)
        assert torch.allclose(other.times * scale, found.times, rtol=1e-9)
        assert torch.equal(other.frequency, found.frequency)


class Flow:
    """The gradient flow of the network itself, by autograd, on all pairs modulo p."""

    def __init__(self, modulus: int, neurons: int, scale: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = [
            scale * torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((neurons, modulus), (modulus, neurons))
        ]
        table = data.modular_addition(modulus)
        self.inputs, self.labels = table.inputs().double(), table.labels

    def slope(self, weights: list[Tensor]) -> list[Tensor]:
        w_in, w_out = (one.clone().requires_grad_() for one in weights)
        logits = (self.inputs @ w_in.T).square() @ w_out.T
        loss = torch.nn.functional.cross_entropy(logits, self.labels)
        return [-one for one in torch.autograd.grad(loss, [w_in, w_out])]

    def go(self, time: float, steps: int) -> None:
        """The classical Runge–Kutta method."""
        h = time / steps
        for _ in range(steps):
            at = self.weights
            slopes = [self.slope(at)]
            for part in (h / 2, h / 2, h):
                slopes.append(self.slope([w + part * s for w, s in zip(at, slopes[-1], strict=True)]))
            self.weights = [
                w + h / 6 * (a + 2 * b + 2 * c + d) for w, a, b, c, d in zip(at, *slopes, strict=True)
            ]


@pytest.mark.parametrize("modulus", [7, 8])
def test_along_the_real_gradient_flow_every_time_falls_as_time_passes(modulus: int) -> None:
    """T of the weights after a time t is T of the initial ones less t, up to terms of the size of the logits.

    So the equations hold for every neuron and frequency, that of Nyquist too. The error falls
    with the scale of the weights: the softmax is uniform up to the logits, which are of third order in it.
    """
    errors = []
    for scale in (1e-2, 1e-3):
        flow = Flow(modulus, 6, scale, seed=1)
        before = probes.fourier_winners(*flow.weights)
        time = 0.5 * float(before.times.min())
        flow.go(time, 40)
        after = probes.fourier_winners(*flow.weights)
        # those that hardly move before the end, D near π, magnify errors
        clear = before.times < 20 * time
        assert int(clear.sum()) > 0.8 * clear.numel()
        errors.append(float(((after.times - (before.times - time)) / before.times).abs()[clear].max()))
    assert errors[1] < 2e-4
    assert errors[1] < errors[0] / 30


def test_the_flow_of_the_real_network_conserves_what_the_equations_do() -> None:
    flow = Flow(7, 5, 1e-3, seed=3)
    conserved = []
    for _ in range(2):
        (alpha, phi, _), (beta, psi, _) = waves(flow.weights[0]), waves(flow.weights[1].T.contiguous())
        conserved.append((alpha**2 - 2 * beta**2, alpha**2 * beta * torch.sin(2 * phi - psi), alpha**2))
        flow.go(0.6 * float(probes.fourier_winners(*flow.weights).times.min()), 40)
    (c, s, size), (c_after, s_after, size_after) = conserved
    assert float((size_after / size).max()) > 1.5  # they did move
    assert float((c_after - c).abs().max()) < 1e-4 * float(size.max())
    assert float((s_after - s).abs().max()) < 1e-4 * float(size.max()) ** 1.5


def test_the_predicted_frequency_wins_in_the_real_network() -> None:
    flow = Flow(7, 30, 1e-3, seed=2)
    predicted = probes.fourier_winners(*flow.weights)
    assert len(predicted.frequency.unique()) == 3
    flow.go(0.97 * float(predicted.time.min()), 120)
    won = probes.fourier(*flow.weights).frequency
    soon = predicted.time < 1.1 * predicted.time.min()
    assert int(soon.sum()) > 2
    assert torch.equal(won[soon], predicted.frequency[soon])


def test_rules_are_what_they_say_and_right_counts_them() -> None:
    torch.manual_seed(1)
    w_in, w_out = torch.randn(50, 23), torch.randn(23, 50)
    found = probes.fourier_winners(w_in, w_out)
    (alpha, phi, _), (beta, psi, _) = waves(w_in.double()), waves(w_out.T.double())
    turn = 2 * phi - psi
    assert torch.equal(found.by("misalignment"), torch.cos(turn).argmax(1) + 1)
    assert torch.equal(found.by("amplitude"), alpha.argmax(1) + 1)
    assert torch.equal(found.by("start"), (alpha**2 * beta * torch.cos(turn)).argmax(1) + 1)
    assert torch.equal(found.by("time"), found.frequency)
    for same in (found.frequency, found.frequency.numpy(), found.frequency.tolist()):
        assert found.right(same)["time"] == 1
    half = torch.where(torch.arange(50) < 25, found.frequency, 0)
    assert found.right(half)["time"] == 1
    shares = found.right(found.by("amplitude"))
    assert shares["amplitude"] == 1
    assert shares["time"] == pytest.approx((found.by("amplitude") == found.frequency).double().mean().item())
    with pytest.raises(UseError, match="rule is 'size': it is one of time, start, amplitude, misalignment"):
        found.by("size")
    with pytest.raises(
        UseError, match=r"frequency has the shape \(3,\): give one for each of the 50 neurons"
    ):
        found.right(torch.ones(3))


def test_a_result_says_the_times_and_is_read_back(tmp_path) -> None:
    w_in = torch.eye(3)[:1] @ torch.cos(2 * math.pi * torch.arange(3)[:, None] * torch.arange(3) / 3)
    found = probes.fourier_winners(w_in, w_in, out_axis=1)
    assert found.lead.isinf().all()  # there is one frequency
    torch.manual_seed(0)
    found = probes.fourier_winners(torch.randn(9, 5), torch.randn(5, 9))
    text = str(found)
    assert text.startswith("9 neurons, 2 frequencies: the winner blows up at lr × steps = ")
    assert "the first to blow up" in text
    assert str(probes.FourierWinners.load(found.save(tmp_path / "found.json"))) == text


def test_weights_of_other_neurons_are_refused() -> None:
    with pytest.raises(UseError, match="w_in has 4 rows of length 5 and w_out 3 rows of length 5"):
        probes.fourier_winners(torch.ones(4, 5), torch.ones(5, 3))
    with pytest.raises(UseError, match="w_out is complex"):
        probes.fourier_winners(torch.ones(4, 5), torch.ones(5, 4) * 1j)


def test_with_a_single_frequency_nothing_comes_next() -> None:
    torch.manual_seed(0)
    said = str(probes.fourier_winners(torch.randn(4, 3), torch.randn(3, 4)))
    assert said.startswith("4 neurons, 1 frequency: the winner blows up at lr × steps = ")
    assert "next frequency" not in said
