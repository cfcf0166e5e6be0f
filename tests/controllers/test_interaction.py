"""Cancelled interaction terms against explicit matrices, closed forms and finite differences."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from theodolite.controllers import cancel_interaction
from theodolite.core.errors import UseError

softplus = nn.functional.softplus


class Place(nn.Module):
    """A player with one vector."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def product(one: Any, two: Any, batch: Any) -> Tensor:
    return (one.at * two.at).sum()


def dirac(one: Any, two: Any, batch: Any) -> Tensor:
    return softplus(one.at * two.at).sum()


def _gan(dtype: torch.dtype = torch.float64) -> tuple[tuple[nn.Module, nn.Module], Any, Tensor]:
    """A discriminator with a bias that cancels, and the loss of generators that does not vanish."""
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)
    maker = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)

    def losses(one: nn.Module, two: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        made = one(two(data.flip(0)))
        return softplus(-one(data)).mean() + softplus(made).mean(), softplus(-made).mean()

    return (judge, maker), losses, torch.randn(12, 2, dtype=dtype)


def _flat(gradients: Any) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in gradients])


def _grads(player: nn.Module) -> Tensor:
    return _flat(one.grad for one in player.parameters())


@pytest.mark.parametrize("strength", [0.0, 0.7, 1.0])
def test_on_a_quadratic_game_the_gradients_are_products_with_matrices(strength: float) -> None:
    matrices = np.random.default_rng(0).normal(size=(2, 4, 4))
    matrices += matrices.transpose(0, 2, 1)  # the Hessians of both losses
    lr = 0.3, 0.1
    one, two = Place(1.0, -0.4), Place(0.3, 0.8)

    def loss(which: int) -> Any:
        def value(a: Any, b: Any, batch: Any) -> Tensor:
            z = torch.cat([a.at, b.at])
            return z @ torch.from_numpy(matrices[which]) @ z / 2

        return value

    z = np.array([1.0, -0.4, 0.3, 0.8])
    first, second = matrices[0, :2] @ z, matrices[1, 2:] @ z
    values = cancel_interaction((one, two), (loss(0), loss(1)), None, lr=lr, strength=strength)
    assert [float(value) for value in values] == pytest.approx([z @ each @ z / 2 for each in matrices])
    assert not any(value.requires_grad for value in values)
    expected = first - strength * lr[1] / 2 * matrices[0, :2, 2:] @ second
    assert _grads(one).numpy() == pytest.approx(expected, rel=1e-12)
    expected = second - strength * lr[0] / 2 * matrices[1, 2:, :2] @ first
    assert _grads(two).numpy() == pytest.approx(expected, rel=1e-12)


def test_in_a_zero_sum_game_each_descends_the_squared_gradient_of_the_other() -> None:
    players, losses, batch = _gan()
    lr = 0.2, 0.6

    def loss(one: nn.Module, two: nn.Module, data: Tensor) -> Tensor:
        value: Tensor = losses(one, two, data)[0]
        return value

    def squared(player: int) -> float:
        found = torch.autograd.grad(loss(*players, batch), list(players[player].parameters()))
        return float(_flat(found).square().sum())

    plain = [_flat(torch.autograd.grad(loss(*players, batch), list(each.parameters()))) for each in players]
    cancel_interaction(players, loss, batch, lr=lr)
    for own, other, sign in ((0, 1, 1), (1, 0, -1)):
        added, slopes, step = _grads(players[own]) - sign * plain[own], [], 1e-5
        for tensor in players[own].parameters():
            for place in np.ndindex(*tensor.shape):
                ends = []
                for shift in (step, -step):
                    with torch.no_grad():
                        tensor[place] += shift
                    ends.append(squared(other))
                    with torch.no_grad():
                        tensor[place] -= shift
                slopes.append(lr[other] / 4 * (ends[0] - ends[1]) / (2 * step))
        assert added.numpy() == pytest.approx(np.array(slopes), rel=1e-5, abs=1e-9)
        assert float(added.norm()) > 1e-3


def test_what_is_left_of_the_drift_is_of_the_third_order_but_for_the_self_terms() -> None:
    """Of the bilinear game there are none: the corrected step is z(1 + ih − h²/2) for z = φ + iθ."""
    z, lr, steps = 1.2 - 0.5j, 0.2, 6
    one, two = Place(z.real), Place(z.imag)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=lr)
    for _ in range(steps):
        cancel_interaction((one, two), product, None, lr=lr)
        optimizer.step()
    end = complex(one.at.item(), two.at.item())
    assert end == pytest.approx(z * (1 + 1j * lr - lr**2 / 2) ** steps, rel=1e-12)
    plain, flow = z * (1 + 1j * lr) ** steps, z * np.exp(1j * lr * steps)
    assert abs(end - flow) < 0.1 * abs(plain - flow)


def test_the_dirac_gan_stays_on_its_circle() -> None:
    """φ̇ = −σ(φθ)θ, θ̇ = σ(φθ)φ, 500 steps of 0.2: by hand, with and without the correction."""
    h, ends = 0.2, []
    for share in (0.0, 1.0):
        phi = theta = 1.0
        for _ in range(500):
            s = 1 / (1 + math.exp(-phi * theta))
            bent = s * (1 - s)
            f, g = -s * theta, s * phi
            f_theta, g_phi = -s - bent * phi * theta, s + bent * phi * theta
            phi, theta = (
                phi + h * (f + share * h / 2 * f_theta * g),
                theta + h * (g + share * h / 2 * g_phi * f),
            )
        ends.append(math.hypot(phi, theta))
        one, two = Place(1.0), Place(1.0)
        optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=h)
        for _ in range(500):
            cancel_interaction((one, two), dirac, None, lr=h, strength=share)
            optimizer.step()
        assert (one.at.item(), two.at.item()) == pytest.approx((phi, theta), rel=1e-6)
    assert ends[0] > 2.3 * math.sqrt(2)
    assert ends[1] == pytest.approx(math.sqrt(2), rel=0.01)


def test_without_strength_it_is_backward_and_both_see_one_mask() -> None:
    players, _, batch = _gan(torch.float32)
    players = players[0], nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    def losses(one: nn.Module, two: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        made = one(two(data))
        return softplus(-one(data)).mean() + softplus(made).mean(), softplus(-made).mean()

    twins = copy.deepcopy(players)
    torch.manual_seed(3)
    first, second = losses(*twins, batch)
    for value, player in ((first, twins[0]), (second, twins[1])):
        wanted = list(player.parameters())
        for tensor, grad in zip(wanted, torch.autograd.grad(value, wanted, retain_graph=True), strict=True):
            tensor.grad = grad
    after = torch.get_rng_state()
    for tensor in players[0].parameters():
        tensor.grad = torch.full_like(tensor, 7.0)  # of the step before
    torch.manual_seed(3)
    values = cancel_interaction(players, losses, batch, lr=0.1, strength=0)
    assert torch.equal(torch.get_rng_state(), after)
    assert [float(value) for value in values] == pytest.approx([first.item(), second.item()], rel=1e-6)
    for player, twin in zip(players, twins, strict=True):
        assert torch.allclose(_grads(player), _grads(twin), rtol=1e-5, atol=1e-7)
        for name, buffer in twin.named_buffers():
            assert torch.allclose(dict(player.named_buffers())[name], buffer), name


def test_what_is_frozen_or_idle_gets_no_gradient() -> None:
    one, two = Place(1.0), Place(2.0)
    one.idle = nn.Parameter(torch.ones(3))
    one.idle.grad = torch.ones(3)
    two.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def loss(a: Any, b: Any, batch: Any) -> Tensor:
        return product(a, b, batch) * b.frozen.sum()

    cancel_interaction((one, two), loss, None, lr=0.2)
    idle, frozen, *moved = [tensor.grad for tensor in (one.idle, two.frozen, one.at, two.at)]
    assert idle is None
    assert frozen is None
    expected = 2.0 + 0.2 / 2 * 1.0, -1.0 + 0.2 / 2 * 2.0
    assert _flat(moved).tolist() == pytest.approx(expected)


def test_where_no_player_acts_on_the_other_it_is_backward() -> None:
    one, two = Place(3.0), Place(5.0)
    losses = (lambda a, b, batch: a.at.square().sum() / 2, lambda a, b, batch: b.at.pow(3).sum() / 3)
    cancel_interaction((one, two), losses, None, lr=0.5)
    assert (one.at.grad, two.at.grad) == (torch.tensor([3.0]).double(), torch.tensor([25.0]).double())


class Fixed(torch.autograd.Function):
    """The square, with a gradient that has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


ONE = Place(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": (0.1, -1.0)}, r"lr\[1\] is -1.0"),
        ({"strength": -0.5}, "strength is -0.5"),
        ({"players": (ONE, nn.Identity())}, r"players\[1\] has no parameter that requires a gradient"),
        ({"players": (ONE, ONE)}, r"at of players\[0\] is at of players\[1\]"),
        ({"losses": 3}, "losses is the int 3"),
        ({"losses": lambda one, two, batch: product(one, two, batch).item()}, "returned the float"),
        ({"losses": lambda one, two, batch: product(one, two, batch).detach()}, "depends on no parameter"),
        (
            {"losses": (product, lambda one, two, batch: one.at.sum())},
            r"the loss of players\[1\] depends on none of its parameters",
        ),
        (
            {"losses": lambda one, two, batch: Fixed.apply(product(one, two, batch)).sum()},
            "Fixed has no second derivative",
        ),
    ],
)
def test_bad_input_changes_no_gradient(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"players": (ONE, Place(2.0)), "losses": product, "batch": None, "lr": 0.1}
    ONE.at.grad = before = torch.ones_like(ONE.at)
    with pytest.raises(UseError, match=message):
        cancel_interaction(**given | change)
    assert ONE.at.grad is before


def test_a_wrapped_player_is_refused_because_its_gradients_would_not_be_averaged(
    in_one_process_group: None,
) -> None:
    wrapped = nn.parallel.DistributedDataParallel(Place(1.0))
    with pytest.raises(UseError, match=r"players\[1\] is wrapped in DistributedDataParallel"):
        cancel_interaction((ONE, wrapped), product, None, lr=0.1)


@pytest.fixture
def in_one_process_group(tmp_path: Any) -> Any:
    """A group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()
