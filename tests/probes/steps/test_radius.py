"""The radius: against brute force for the nearest complex zero, and finite differences for the slopes."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import theodolite as th
from theodolite.probes import radius
from theodolite.probes.curvature.objective import Objective
from theodolite.probes.steps.direction import push
from theodolite.probes.steps.radius import nearest_ghost

cross_entropy = nn.functional.cross_entropy


def brute_force(z: Tensor, a: Tensor, reach: float) -> float:
    """The least |τ| with F(τ) = 0: Newton from every point of a fine grid over the upper half-disc."""
    z, a = z.double().numpy(), a.double().numpy()
    side = np.linspace(-reach, reach, 61)
    tau = (side[None, :] + 1j * side[side > 0][:, None]).ravel()
    with np.errstate(all="ignore"):
        for _ in range(40):
            exponents = z + tau[:, None] * a
            terms = np.exp(exponents - exponents.real.max(1, keepdims=True))
            tau = tau - terms.sum(1) / (terms * a).sum(1)
        exponents = z + tau[:, None] * a
        terms = np.exp(exponents - exponents.real.max(1, keepdims=True))
        found = np.abs(tau[np.abs(terms.sum(1)) < 1e-10])
    return float(found.min())


def linear_case(z: Tensor, a: Tensor) -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Tensor]]:
    """A network whose logits are z + τ a, with τ its one weight."""
    num = len(z)

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tau = nn.Parameter(torch.zeros(1, dtype=torch.float64))

        def forward(self, rows: Tensor) -> Tensor:
            return z[rows] + self.tau * a[rows]

    batch = torch.arange(num), torch.zeros(num, dtype=torch.long)
    return Line(), batch, {"tau": torch.ones(1, dtype=torch.float64)}


def test_of_two_classes_it_is_the_distance_of_the_nearest_complex_zero() -> None:
    z, a = torch.randn(8, 2, dtype=torch.float64) * 3, torch.randn(8, 2, dtype=torch.float64)
    for row in range(8):
        model, batch, step = linear_case(z[row : row + 1], a[row : row + 1])
        found = radius(model, cross_entropy, batch, step)
        reach = 1.5 * float(found.exact)
        assert found.exact == pytest.approx(brute_force(z[row], a[row], reach), rel=1e-9)
        assert abs(found.ghost) == pytest.approx(found.exact, rel=1e-9)
        assert found.value <= found.exact


def test_of_many_classes_it_is_a_lower_bound_which_equals_the_search() -> None:
    ratios = []
    for seed in range(40):
        torch.manual_seed(seed)
        classes = int(torch.randint(3, 9, ()))
        z, a = torch.randn(classes, dtype=torch.float64) * 2, torch.randn(classes, dtype=torch.float64)
        model, batch, step = linear_case(z[None], a[None])
        found = radius(model, cross_entropy, batch, step)
        assert found.exact is None
        ghost = abs(found.ghost)
        assert found.value <= ghost * (1 + 1e-12)
        if seed < 5:
            assert ghost == pytest.approx(brute_force(z, a, 1.1 * ghost), rel=1e-6)
        ratios.append(ghost / found.value)
    assert 1.05 < min(ratios) < 3  # a bound, and not an idle one


def test_it_is_tight_where_the_two_extreme_classes_tie() -> None:
    z = torch.tensor([[0.0, 0.0, -60.0, -60.0]], dtype=torch.float64)
    a = torch.tensor([[1.0, -1.5, 0.3, 0.9]], dtype=torch.float64)
    model, batch, step = linear_case(z, a)
    found = radius(model, cross_entropy, batch, step)
    assert found.value == pytest.approx(math.pi / 2.5, rel=1e-12)
    assert abs(found.ghost) == pytest.approx(found.value, rel=1e-9)
    assert nearest_ghost(torch.zeros(3), torch.ones(3)) == complex(math.inf, 0)


def test_a_series_converges_within_the_radius_and_not_beyond() -> None:
    # log F of the worst row, by its Taylor coefficients (FFT on a circle inside the radius).
    z, a = torch.tensor([0.3, -0.2, 1.0]).double(), torch.tensor([2.0, -1.0, 0.5]).double()
    model, batch, step = linear_case(z[None], a[None])
    ghost = abs(radius(model, cross_entropy, batch, step).ghost)
    circle = 0.5 * ghost * np.exp(2j * np.pi * np.arange(512) / 512)
    values = np.log(np.exp(z.numpy() + circle[:, None] * a.numpy()).sum(1))
    coefficients = np.abs(np.fft.fft(values)[1:40] / 512) / (0.5 * ghost) ** np.arange(1, 40)
    # A pair of logarithms at distance ρ: n c_n swings between ±2/ρⁿ.
    growth = np.max((coefficients * np.arange(1, 40) / 2)[25:39] ** (1 / np.arange(26, 40)))
    assert 1 / growth == pytest.approx(ghost, rel=0.02)


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * ctx.saved_tensors[0].cos()


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sine.apply(x)


class Products(nn.Module):
    """With constants on either side, with itself, with a mask, in place and across dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(12))
        self.register_buffer("table", torch.randn(1, 12))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.table + self.table * x.tanh() + torch.mul(x, self.gain) * (x > 0)
        x = x.mul(self.table.float()) * x + 2.0 * x * torch.tensor(3.0)
        x *= self.table
        return x


torch.manual_seed(0)  # the products have a kink, which finite differences must not meet
NETWORKS = {
    "layer norm": nn.Sequential(
        nn.Flatten(), nn.Linear(48, 12), nn.LayerNorm(12), nn.GELU(), nn.Linear(12, 4)
    ),
    "rms norm": nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.RMSNorm(12), nn.SiLU(), nn.Linear(12, 4)),
    "batch norm": nn.Sequential(
        nn.Flatten(), nn.Linear(48, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4)
    ),
    "convolution": nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 4)
    ),
    "no forward mode": nn.Sequential(
        nn.Flatten(), nn.Linear(48, 12), Own(), nn.LayerNorm(12), nn.Linear(12, 4)
    ),
    "products": nn.Sequential(nn.Flatten(), nn.Linear(48, 12), Products(), nn.Linear(12, 4)),
    "dropout": nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.Dropout(0.4), nn.Tanh(), nn.Linear(12, 4)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_slopes_are_those_of_finite_differences(name: str) -> None:
    model = copy.deepcopy(NETWORKS[name]).double().train()
    batch = torch.randn(10, 3, 4, 4, dtype=torch.float64), torch.randint(0, 4, (10,))
    objective = Objective(model, cross_entropy, batch)
    step = {key: torch.randn_like(tensor) for key, tensor in objective.tensors.items()}
    _, slopes = push(objective, batch, step)
    ends = []
    for side in (1e-5, -1e-5):
        moved = {key: tensor + side * step[key] for key, tensor in objective.stand_ins(grad=False).items()}
        with objective.conditions(), torch.no_grad():
            ends.append(objective.forward(moved, batch))
    expected = (ends[0] - ends[1]) / 2e-5
    torch.testing.assert_close(slopes, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))

    found = radius(model, cross_entropy, batch, step)
    unit = math.sqrt(sum(float(tensor.square().sum()) for tensor in step.values()))
    rows = math.pi * unit / (expected.amax(1) - expected.amin(1))
    torch.testing.assert_close(found.rows, rows, rtol=1e-5, atol=0)
    assert found.value == pytest.approx(float(rows.min()), rel=1e-5)
    assert found.worst == int(rows.argmin())
    assert found.length == pytest.approx(unit)


def small() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    return model, (torch.randn(20, 6, dtype=torch.float64), torch.randint(0, 4, (20,)))


def test_curvature_slope_and_edges_are_those_of_the_explicit_line() -> None:
    model, batch = small()
    found = radius(model, cross_entropy, batch, sharpness=True)
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    gradient = torch.func.grad(lambda flat: _loss(model, flat, batch))(start)
    unit = -gradient / gradient.norm()

    def along(tau: float) -> float:
        return float(_loss(model, start + tau * unit, batch))

    h = 1e-3
    bent = (along(h) - 2 * along(0.0) + along(-h)) / h**2
    assert found.length == pytest.approx(float(gradient.norm()))
    assert found.slope == pytest.approx(-float(gradient.norm()))
    assert found.curvature == pytest.approx(bent, rel=1e-4)
    assert found.edge == pytest.approx(2 / bent, rel=1e-4)
    assert found.quadratic == pytest.approx(2 * found.length / bent, rel=1e-4)
    assert found.loss == pytest.approx(along(0.0))
    assert found.sharpness is not None
    assert found.sharpness.edge < found.edge


def test_a_parabola_that_is_bent_downwards_is_said_never_to_come_back() -> None:
    layer = nn.Linear(1, 2, bias=False).double()
    batch = torch.ones(1, 1, dtype=torch.float64), torch.tensor([0])
    straight = str(radius(layer, cross_entropy, batch))
    assert "a parabola is back at the loss" in straight

    class Bent(nn.Module):
        """Along the weight w the loss is `log(1 + e^(−w²))`: at w = 1/2 it is bent downwards."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.cat([inputs * self.weight**2, 0 * inputs], 1)

    found = radius(Bent(), cross_entropy, batch)
    assert found.curvature < 0
    assert f"a parabola is never back at the loss {math.log1p(math.exp(-0.25)):.4g}\n" in str(found)


def _loss(model: nn.Module, flat: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    state, done = {}, 0
    for name, tensor in model.named_parameters():
        state[name] = flat[done : done + tensor.numel()].view_as(tensor)
        done += tensor.numel()
    return cross_entropy(torch.func.functional_call(model, state, (batch[0],)), batch[1])


def test_ignored_rows_do_not_count_and_temperature_stretches_it() -> None:
    model, (inputs, targets) = small()
    step = {name: torch.randn_like(tensor) for name, tensor in model.named_parameters()}
    whole = radius(model, cross_entropy, (inputs, targets), step)
    without = targets.clone()
    without[whole.worst] = -100
    fewer = radius(model, cross_entropy, (inputs, without), step)
    assert fewer.value == pytest.approx(float(whole.rows.sort().values[1]))
    assert math.isinf(fewer.rows[whole.worst])
    warm = radius(model, cross_entropy, (inputs, targets), step, temperature=8.0)
    assert warm.value == pytest.approx(8 * whole.value)


def test_several_batches_an_optimizer_and_classes_in_the_middle() -> None:
    model, (inputs, targets) = small()
    cross_entropy(model(inputs), targets).backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    together = radius(model, cross_entropy, (inputs, targets), optimizer)
    halves = radius(
        model, cross_entropy, [(inputs[:15], targets[:15]), (inputs[15:], targets[15:])], optimizer
    )
    torch.testing.assert_close(halves.rows, together.rows)
    assert halves.worst == together.worst
    assert halves.curvature == pytest.approx(together.curvature)
    assert halves.slope == pytest.approx(together.slope)
    cut = together.worst  # so that the worst row is in the second batch
    halves = radius(
        model, cross_entropy, [(inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:])], optimizer
    )
    assert halves.worst == together.worst > 0
    torch.testing.assert_close(halves.worst_slopes, together.worst_slopes)
    torch.testing.assert_close(halves.worst_logits, together.worst_logits)
    stepped = [tensor.detach().clone() for tensor in model.parameters()]
    optimizer.step()
    pairs = zip(model.parameters(), stepped, strict=True)
    moved = math.sqrt(sum(float((now.detach() - then).square().sum()) for now, then in pairs))
    assert together.length == pytest.approx(moved)

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, inputs: Tensor) -> Tensor:
            return self.inside(inputs).mT  # (4, 5, 6) → (4, K, 5)

    step = {f"inside.{name}": torch.ones_like(tensor) for name, tensor in model.named_parameters()}
    turned = radius(Turned(), cross_entropy, (inputs.view(4, 5, 6), targets.view(4, 5)), step)
    plain = radius(
        model, cross_entropy, (inputs, targets), {k.removeprefix("inside."): v for k, v in step.items()}
    )
    torch.testing.assert_close(turned.rows, plain.rows)


def test_it_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Dropout(0.5), nn.Linear(10, 4))
    batch = torch.randn(20, 6), torch.randint(0, 4, (20,))
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer = torch.optim.AdamW(model.parameters())

    def trace() -> list[bytes]:
        tensors = [*model.state_dict().values(), *(tensor.grad for tensor in model.parameters())]
        return [*(tensor.numpy().tobytes() for tensor in tensors), torch.get_rng_state().numpy().tobytes()]

    before = trace()
    radius(model, cross_entropy, batch, optimizer)
    th.probes.profile(model, cross_entropy, batch, lengths=[0.5, 1.0])
    assert trace() == before
    assert not optimizer.state
    assert model.training


def test_bad_input_is_refused_by_name() -> None:
    model, batch = small()
    one_hot = nn.functional.one_hot(batch[1], 4).double()
    with pytest.raises(th.UseError, match="mse_loss is not a cross-entropy of the softmax"):
        radius(model, nn.functional.mse_loss, (batch[0], one_hot))
    with pytest.raises(th.UseError, match=r"binary_cross_entropy_with_logits is not.*two logits"):
        radius(model, nn.functional.binary_cross_entropy_with_logits, (batch[0], one_hot))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    with pytest.raises(th.UseError, match="direction is zero in all parameters"):
        radius(model, cross_entropy, batch, zeros)
    with pytest.raises(th.UseError, match=r"not finite in 2\.bias"):
        radius(model, cross_entropy, batch, {"2.bias": torch.full((4,), math.nan)})
    with pytest.raises(th.UseError, match="moves 'tail', which is not among the 4 parameters"):
        radius(model, cross_entropy, batch, {"tail": torch.ones(4)})
    with pytest.raises(th.UseError, match=r"2.bias has the shape \(3,\)"):
        radius(model, cross_entropy, batch, {"2.bias": torch.ones(3)})
    with pytest.raises(th.UseError, match="direction is a tensor"):
        radius(model, cross_entropy, batch, torch.ones(4))  # type: ignore[arg-type]


def test_a_step_that_moves_all_logits_alike_has_no_radius() -> None:
    model, batch = small()
    found = radius(model, cross_entropy, batch, {"2.bias": torch.ones(4).double()})
    assert math.isinf(found.value)
    assert found.r == 0
    assert "moves no logit against another" in str(found)


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "autocast"])
def test_in_low_precision_it_is_nearly_that_of_float64(kind: str) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
    inputs, targets = torch.randn(64, 64).double(), torch.arange(64) % 10
    cross_entropy(model(inputs), targets).backward()
    step = {name: -tensor.grad for name, tensor in model.named_parameters()}  # type: ignore[operator]
    expected = radius(model, cross_entropy, (inputs, targets), step)
    dtype = torch.float32 if kind == "autocast" else getattr(torch, kind)
    step = {name: tensor.to(dtype) for name, tensor in step.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        found = radius(model.to(dtype), cross_entropy, (inputs.to(dtype), targets), step)
    assert found.value == pytest.approx(expected.value, rel=0.05)
    assert found.slope == pytest.approx(expected.slope, rel=0.05)
    torch.testing.assert_close(found.rows, expected.rows, rtol=0.1, atol=0)


def test_it_may_be_asked_where_gradients_are_off() -> None:
    model, batch = small()
    expected = radius(model, cross_entropy, batch)
    with torch.no_grad():
        found = radius(model, cross_entropy, batch)
        onset = th.probes.profile(model, cross_entropy, batch, lengths=[1.0, 30.0]).onset
    assert found.value == expected.value
    assert found.curvature == expected.curvature
    assert onset == th.probes.profile(model, cross_entropy, batch, lengths=[1.0, 30.0]).onset


def test_a_list_of_two_is_a_pair_unless_it_holds_pairs() -> None:
    model, (inputs, targets) = small()
    expected = radius(model, cross_entropy, (inputs, targets))
    assert torch.equal(radius(model, cross_entropy, [inputs, targets]).rows, expected.rows)  # type: ignore[arg-type]
    for pairs in (
        [(inputs, targets), (inputs[:5], targets[:5])],
        [[inputs, targets], [inputs[:5], targets[:5]]],
    ):
        both = radius(model, cross_entropy, pairs)  # type: ignore[arg-type]
        assert len(both.rows) == 25

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, several: list[Tensor]) -> Tensor:
            return self.inside(several[0] + several[1])

    nested = radius(Sum(), cross_entropy, [[inputs / 2, inputs / 2], targets])  # type: ignore[arg-type]
    torch.testing.assert_close(nested.rows, expected.rows)
