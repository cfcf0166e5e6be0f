"""Drift of games against closed forms, explicit matrices, and the order of the error."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm
from torch import Tensor, nn

from theodolite import probes
from theodolite.core.errors import UseError

mse = nn.functional.mse_loss


class Point(nn.Module):
    """A player with one vector."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor(values, dtype=torch.float64))


def bilinear(one: Any, two: Any, batch: Any) -> Tensor:
    return (one.place * two.place).sum()


def dirac(one: Any, two: Any, batch: Any) -> Tensor:
    return nn.functional.softplus(one.place * two.place).sum()


def _networks() -> tuple[tuple[nn.Sequential, nn.Sequential], Any, Tensor]:
    """A small GAN: a discriminator with a bias that cancels, a generator with dropout and batch norm."""
    torch.manual_seed(0)
    judge = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1))
    maker = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 2))

    def losses(one: nn.Module, two: nn.Module, data: Tensor) -> tuple[Tensor, Tensor]:
        made = one(two(torch.randn(len(data), 2, dtype=data.dtype)))
        wrong = nn.functional.softplus(-one(data)).mean() + nn.functional.softplus(made).mean()
        return wrong, nn.functional.softplus(-made).mean()

    return (judge, maker), losses, torch.randn(12, 2)


def test_on_the_bilinear_game_everything_has_a_closed_form() -> None:
    lr, steps = 0.1, 7
    found = probes.game_drift((Point(1.2), Point(-0.5)), bilinear, None, lr=lr, steps=steps, rtol=1e-7)
    start = 1.2 - 0.5j
    walked = start * (1 + 1j * lr) ** steps  # φ + iθ turns to i(φ + iθ)
    flowed = start * np.exp(1j * lr * steps)
    modified = start * np.exp((1j * lr + lr**2 / 2) * steps)
    assert found.distance == pytest.approx(abs(walked - flowed), rel=1e-6)
    assert found.modified == pytest.approx(abs(walked - modified), rel=1e-5)
    assert found.self_only == pytest.approx(found.distance, rel=1e-6)
    assert found.interaction_only == pytest.approx(found.modified, rel=1e-6)
    assert found.explained == pytest.approx(1 - abs(walked - modified) / abs(walked - flowed), rel=1e-6)
    assert found.length == pytest.approx(abs(walked - start), rel=1e-9)
    speeds = [lr * abs(start), lr * abs(walked), lr * abs(start)]
    assert found.speeds == pytest.approx(speeds, rel=1e-7)
    assert found.growth == pytest.approx((0, 0, lr**2 / 2), abs=1e-12)
    for player, place in zip(found.players, (start.real, start.imag), strict=True):
        assert player.self_term == 0
        assert player.interaction_term == pytest.approx(lr / 2 * abs(place), rel=1e-9)
    assert found.players[0].losses[1] == pytest.approx(walked.real * walked.imag, rel=1e-9)
    assert found.players[1].losses[2] == pytest.approx(-flowed.real * flowed.imag, rel=1e-6)
    assert found.converged


# The fields are this times z: f in the first two rows, g in the others.
QUADRATIC = np.array(
    [[-0.3, 0.2, -1.1, 0.4], [0.2, -0.5, 0.3, 0.7], [0.9, -0.6, -0.2, 0.1], [0.5, 0.8, 0.1, -0.4]]
)


def quadratics(one: Any, two: Any, batch: Any) -> tuple[Tensor, Tensor]:
    matrix = -torch.from_numpy(QUADRATIC)
    a, b = one.place, two.place
    first = a @ matrix[:2, :2] @ a / 2 + a @ matrix[:2, 2:] @ b
    return first, b @ matrix[2:, 2:] @ b / 2 + b @ matrix[2:, :2] @ a


def _quadratic_rounds(lr: tuple[float, float], updates: tuple[int, int], alternating: bool) -> np.ndarray:
    """One round as a matrix: products of the matrices of single updates."""

    def update(player: int) -> np.ndarray:
        matrix = np.eye(4)
        rows = slice(2 * player, 2 * player + 2)
        matrix[rows] += lr[player] * QUADRATIC[rows]
        return matrix

    first, second = (np.linalg.matrix_power(update(player), updates[player]) for player in (0, 1))
    if alternating:
        return second @ first
    return np.vstack([first[:2], second[2:]])


WAYS = [
    ((0.2, 0.2), (1, 1), False),
    ((0.2, 0.2), (1, 1), True),
    ((0.1, 0.3), (1, 1), False),
    ((0.3, 0.1), (1, 1), True),
    ((0.1, 0.2), (3, 2), False),
    ((0.2, 0.1), (2, 4), True),
]


@pytest.mark.parametrize(("lr", "updates", "alternating"), WAYS)
def test_on_a_quadratic_game_rounds_and_flows_are_matrices(
    lr: tuple[float, float], updates: tuple[int, int], alternating: bool
) -> None:
    start = np.array([1.0, -0.4, 0.3, 0.8])
    players = Point(*start[:2]), Point(*start[2:])
    options: Any = {"lr": lr, "updates": updates, "alternating": alternating}
    found = probes.game_drift(players, quadratics, None, steps=3, rtol=1e-6, **options)
    walked = np.linalg.matrix_power(_quadratic_rounds(lr, updates, alternating), 3) @ start

    def left(generator: np.ndarray) -> float:
        return float(np.linalg.norm(walked - expm(3 * generator) @ start))

    # A round is 1 + εA + ε²C + … at rates ε times as large, so its logarithm is εA + ε²(C − A²/2) + ….
    small = 1e-3
    rounds = [_quadratic_rounds((e * lr[0], e * lr[1]), updates, alternating) for e in (small, -small)]
    flow = (rounds[0] - rounds[1]) / (2 * small)
    bend = (rounds[0] + rounds[1] - 2 * np.eye(4)) / (2 * small**2) - flow @ flow / 2
    own = np.zeros((4, 4))
    for player, rows in enumerate((slice(0, 2), slice(2, 4))):
        own[rows] = -lr[player] / 2 * QUADRATIC[rows, rows] @ flow[rows]
    assert found.distance == pytest.approx(left(flow), rel=1e-4)
    assert found.modified == pytest.approx(left(flow + bend), rel=1e-3)
    assert found.self_only == pytest.approx(left(flow + own), rel=1e-4)
    assert found.interaction_only == pytest.approx(left(flow + bend - own), rel=1e-4)
    for player, rows in enumerate((slice(0, 2), slice(2, 4))):
        time = lr[player] * updates[player]
        seen = found.players[player]
        assert seen.gradient == pytest.approx(float(np.linalg.norm(QUADRATIC[rows] @ start)), rel=1e-9)
        assert seen.self_term == pytest.approx(float(np.linalg.norm(own[rows] @ start)) / time, rel=1e-6)
        crossed = float(np.linalg.norm((bend - own)[rows] @ start)) / time
        assert seen.interaction_term == pytest.approx(crossed, rel=1e-4)
    # The derivative of log ‖A z‖ along each of them.
    speed = flow @ start
    for rate, way in zip(found.growth, (flow, own, bend - own), strict=True):
        assert rate == pytest.approx(speed @ flow @ way @ start / (speed @ speed), rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(("lr", "updates", "alternating"), WAYS)
def test_the_drift_is_of_the_second_order_and_what_the_modified_flow_leaves_of_the_third(
    lr: tuple[float, float], updates: tuple[int, int], alternating: bool
) -> None:
    players, losses, batch = _networks()
    distances = []
    for scale in (0.02, 0.01):
        rates = scale * lr[0], scale * lr[1]
        found = probes.game_drift(
            players, losses, batch, lr=rates, updates=updates, alternating=alternating, rtol=1e-9
        )
        distances.append((found.distance, found.modified, found.self_only, found.interaction_only))
    orders = [math.log2(one / other) for one, other in zip(*distances, strict=True)]
    assert orders == pytest.approx([2, 3, 2, 2], abs=0.05)


@pytest.mark.parametrize(("lr", "updates", "alternating"), WAYS)
def test_the_terms_of_networks_are_finite_differences_of_their_gradients(
    lr: tuple[float, float], updates: tuple[int, int], alternating: bool
) -> None:
    (judge, _), _, batch = _networks()
    players = judge.double(), nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    batch, own = batch.double(), [list(player.parameters()) for player in players]

    def losses(one: Any, two: Any, data: Tensor) -> tuple[Tensor, Tensor]:
        made = one(two(data.flip(0)))
        return nn.functional.softplus(-one(data)).mean() + made.square().mean(), -made.tanh().mean()

    def fields() -> list[Tensor]:
        values = losses(*players, batch)
        found = [torch.autograd.grad(v, p, retain_graph=True) for v, p in zip(values, own, strict=True)]
        return [-torch.cat([one.flatten() for one in each]) for each in found]

    def shift(player: int, way: Tensor) -> None:
        with torch.no_grad():
            vector = nn.utils.parameters_to_vector(own[player]) + way
            nn.utils.vector_to_parameters(vector, own[player])

    def along(field: int, player: int, way: Tensor) -> Tensor:
        """The derivative of one field as one player moves."""
        ends, step = [], 1e-5
        for sign in (step, -2 * step):
            shift(player, sign * way)
            ends.append(fields()[field])
        shift(player, step * way)
        return (ends[0] - ends[1]) / (2 * step)

    f, g = fields()
    f_f, f_g, g_f, g_g = along(0, 0, f), along(0, 1, g), along(1, 0, f), along(1, 1, g)
    options: Any = {"updates": updates, "alternating": alternating}
    found = probes.game_drift(players, losses, batch, lr=lr, rtol=1e-2, **options)
    (h_1, h_2), (m_1, m_2) = lr, updates
    time_1, time_2 = m_1 * h_1, m_2 * h_2
    for seen, self_term, interaction in zip(
        found.players,
        (h_1 / 2 * f_f, h_2 / 2 * g_g),
        (time_2 / 2 * f_g, time_1 / 2 * g_f),
        strict=True,
    ):
        assert seen.self_term == pytest.approx(float(self_term.norm()), rel=1e-6)
        assert seen.interaction_term == pytest.approx(float(interaction.norm()), rel=1e-6)


def test_rounds_of_networks_are_those_of_sgd() -> None:
    players, _, batch = _networks()
    players = players[0], nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))

    def losses(one: Any, two: Any, data: Tensor) -> tuple[Tensor, Tensor]:
        made = one(two(data.flip(0)))
        return mse(one(data), made.tanh()), nn.functional.softplus(-made).mean()

    found = probes.game_drift(
        players, losses, batch, lr=(0.1, 0.3), steps=2, updates=(2, 1), alternating=True, rtol=1e-2
    )
    twins = [copy.deepcopy(player).double() for player in players]
    optimizers = [
        torch.optim.SGD(twin.parameters(), lr=lr) for twin, lr in zip(twins, (0.1, 0.3), strict=True)
    ]
    for player in (0, 0, 1, 0, 0, 1):
        optimizers[player].zero_grad()
        losses(twins[0], twins[1], batch.double())[player].backward()
        optimizers[player].step()
    ends = losses(twins[0], twins[1], batch.double())
    for seen, value in zip(found.players, ends, strict=True):
        assert seen.losses[1] == pytest.approx(value.item(), rel=1e-9)


def test_the_terms_of_the_dirac_gan_are_those_found_by_hand() -> None:
    phi, theta, lr = 0.7, -1.3, (0.1, 0.4)
    found = probes.game_drift((Point(phi), Point(theta)), dirac, None, lr=lr, alternating=True)
    share = 1 / (1 + math.exp(-phi * theta))
    bent = share * (1 - share)
    f, g = -share * theta, share * phi
    f_phi, f_theta = -bent * theta**2, -share - bent * phi * theta
    g_phi, g_theta = share + bent * phi * theta, bent * phi**2
    one, two = found.players
    assert (one.gradient, two.gradient) == pytest.approx((abs(f), abs(g)), rel=1e-9)
    assert one.self_term == pytest.approx(lr[0] / 2 * abs(f_phi * f), rel=1e-9)
    assert two.self_term == pytest.approx(lr[1] / 2 * abs(g_theta * g), rel=1e-9)
    assert one.interaction_term == pytest.approx(lr[1] / 2 * abs(f_theta * g), rel=1e-9)
    assert two.interaction_term == pytest.approx(lr[0] / 2 * abs(g_phi * f), rel=1e-9)


@pytest.mark.parametrize("alternating", [False, True])
def test_the_dirac_gan_leaves_its_circle_by_simultaneous_steps_alone(alternating: bool) -> None:
    h, steps = 0.2, 20
    found = probes.game_drift(
        (Point(1.0), Point(1.0)), dirac, None, lr=h, steps=steps, alternating=alternating, rtol=1e-6
    )

    def fields(phi: float, theta: float) -> tuple[float, ...]:
        """f, g, f_φ f, f_θ g, g_φ f, g_θ g."""
        share = 1 / (1 + math.exp(-phi * theta))
        bent = share * (1 - share)
        f, g, turn = -share * theta, share * phi, share + bent * phi * theta
        return f, g, -bent * theta**2 * f, -turn * g, turn * f, bent * phi**2 * g

    def modified(_: float, at: Any) -> tuple[float, float]:
        f, g, f_f, f_g, g_f, g_g = fields(*at)
        turned = -1 if alternating else 1
        return h * (f - h / 2 * (f_f + f_g)), h * (g - h / 2 * (turned * g_f + g_g))

    phi = theta = 1.0
    for _ in range(steps):
        new = phi + h * fields(phi, theta)[0]
        theta += h * fields(new if alternating else phi, theta)[1]
        phi = new
    ends = [
        solve_ivp(field, (0, steps), (1.0, 1.0), rtol=1e-9, atol=1e-9).y[:, -1]
        for field in (lambda _, at: h * np.array(fields(*at)[:2]), modified)
    ]
    assert np.linalg.norm(ends[0]) == pytest.approx(math.sqrt(2), rel=1e-6)
    walked = np.array([phi, theta])
    assert found.distance == pytest.approx(np.linalg.norm(walked - ends[0]), rel=1e-4)
    assert found.modified == pytest.approx(np.linalg.norm(walked - ends[1]), rel=1e-4)
    assert found.length == pytest.approx(np.linalg.norm(walked - 1), rel=1e-9)
    assert found.players[0].losses[1] == pytest.approx(math.log1p(math.exp(phi * theta)), rel=1e-9)
    radius = float(np.linalg.norm(walked)) / math.sqrt(2)
    assert 0.95 < radius < 1 if alternating else radius > 1.05


def test_without_interaction_it_is_the_drift_of_each_by_itself() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in range(2)]
    batch = torch.randn(10, 3), torch.randn(10, 1)
    options: Any = {"steps": 2, "rtol": 1e-6}

    def loss(one: Any, two: Any, batch: Any) -> Tensor:
        return mse(one(batch[0]), batch[1])

    def other(one: Any, two: Any, batch: Any) -> Tensor:
        return mse(two(batch[0]), batch[1])

    found = probes.game_drift((models[0], models[1]), (loss, other), batch, lr=(0.2, 0.3), **options)
    alone = [
        probes.drift(model, mse, batch, lr=lr, **options)
        for model, lr in zip(models, (0.2, 0.3), strict=True)
    ]
    for name in ("distance", "modified", "length"):
        together = math.hypot(*(getattr(one, name) for one in alone))
        assert getattr(found, name) == pytest.approx(together, rel=1e-4), name
    assert found.self_only == pytest.approx(found.modified, rel=1e-9)
    assert [player.interaction_term for player in found.players] == [0, 0]
    assert found.players[1].losses == pytest.approx(alone[1].losses, rel=1e-9)


def test_losses_can_be_given_in_three_ways() -> None:
    players = Point(0.3, 1.0), Point(-0.6, 0.8)
    found = [
        probes.game_drift(players, losses, torch.ones(2), lr=0.1)
        for losses in (
            lambda one, two, batch: (batch * one.place * two.place.exp()).sum(),
            lambda one, two, batch: [s * (batch * one.place * two.place.exp()).sum() for s in (1, -1)],
            (
                lambda one, two, batch: (batch * one.place * two.place.exp()).sum(),
                lambda one, two, batch: -(batch * one.place * two.place.exp()).sum(),
            ),
        )
    ]
    assert str(found[0]) == str(found[1]) == str(found[2])
    assert found[0].distance > 0


def test_no_trace_is_left_also_after_an_error() -> None:
    players, losses, batch = _networks()
    players[0].requires_grad_(False)[2].requires_grad_(True)
    for value in losses(players[0], players[1], batch):
        value.backward(retain_graph=True)
    players[1][3].eval()
    before = copy.deepcopy(players)
    grads = [one.grad for player in players for one in player.parameters()]
    kept = [None if grad is None else grad.clone() for grad in grads]
    state = torch.get_rng_state()

    def breaking(one: nn.Module, two: nn.Module, data: Tensor) -> Tensor:
        two(torch.randn(3, 2, dtype=data.dtype))
        raise ZeroDivisionError

    probes.game_drift(players, losses, batch, lr=0.1, steps=2)
    with pytest.raises(ZeroDivisionError):
        probes.game_drift(players, breaking, batch, lr=0.1)
    assert torch.equal(torch.get_rng_state(), state)
    for player, twin in zip(players, before, strict=True):
        for name, tensor in twin.state_dict().items():
            assert torch.equal(player.state_dict()[name], tensor), name
            assert player.state_dict()[name].dtype == tensor.dtype
        for one, other in zip(player.parameters(), twin.parameters(), strict=True):
            assert one.requires_grad == other.requires_grad
        assert [m.training for m in player.modules()] == [m.training for m in twin.modules()]
    after = [one.grad for player in players for one in player.parameters()]
    for grad, same, value in zip(after, grads, kept, strict=True):
        assert grad is same
        assert (grad is None and value is None) or torch.equal(grad, value)  # type: ignore[arg-type]


def test_what_is_frozen_stays_and_what_is_not_used_does_not_matter() -> None:
    players = Point(0.3), Point(-0.6)
    plain = probes.game_drift(players, bilinear, None, lr=0.1)
    players[0].idle = nn.Parameter(torch.ones(3))
    players[1].frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def loss(one: Any, two: Any, batch: Any) -> Tensor:
        return bilinear(one, two, batch) * two.frozen.sum()

    more = probes.game_drift(players, loss, None, lr=0.1)
    assert more.distance == pytest.approx(plain.distance, rel=1e-9)
    assert more.modified == pytest.approx(plain.modified, rel=1e-6)


def test_steps_that_leave_the_numbers_are_a_result(tmp_path: Path) -> None:
    def loss(one: Any, two: Any, batch: Any) -> Tensor:
        return (one.place.pow(4) / 4 + one.place * two.place).sum()

    found = probes.game_drift((Point(15.0), Point(1.0)), loss, None, lr=1e-2, steps=9, rtol=1e-2)
    assert found.distance == found.speeds[1] == math.inf
    assert not found.converged
    assert "the steps diverged at step" in found.status
    assert math.isnan(type(found).load(found.save(tmp_path / "found.json")).distance)


def test_it_prints_and_is_read_back(tmp_path: Path) -> None:
    found = probes.game_drift((Point(1.0), Point(1.0)), bilinear, None, lr=0.1)
    text = " ".join(str(found).split())
    assert "1 simultaneous step with lr 0.1 and 0.1" in text
    assert "the interaction terms lengthen it by 0.50% per round, and the self terms do not change it" in text
    assert probes.GameDrift.load(found.save(tmp_path / "found.json")) == found


class Rounded(torch.autograd.Function):
    """The square, with a gradient that has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]


ONE = Point(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": (0.1, math.nan)}, r"lr\[1\] is nan"),
        ({"lr": (0.1, 0.1, 0.1)}, "lr is a tuple of 3"),
        ({"steps": 0}, "steps is 0"),
        ({"updates": (1, 0)}, r"updates\[1\] is 0"),
        ({"rtol": 2.0}, "rtol is 2.0"),
        ({"players": ONE}, "players is a Point: give a tuple of two"),
        ({"players": (ONE, 3)}, r"players\[1\] is the int 3"),
        ({"players": (ONE, nn.Identity())}, r"players\[1\] has no parameter that requires a gradient"),
        ({"players": (ONE, ONE)}, r"place of players\[0\] is place of players\[1\]"),
        ({"losses": (bilinear,)}, "losses is a tuple of 1"),
        ({"losses": lambda one, two, batch: one.place.expand(3)}, "returned a tensor of shape"),
        ({"losses": lambda one, two, batch: torch.ones(())}, "depends on no parameter"),
        (
            {"losses": lambda one, two, batch: 0 * bilinear(one, two, batch)},
            "have the norms 0 and 0: there is no step",
        ),
        ({"losses": lambda one, two, batch: bilinear(one, two, batch) * math.nan}, "norms nan and nan"),
        (
            {"losses": (bilinear, lambda one, two, batch: one.place.sum())},
            r"the loss of players\[1\] depends on none of its parameters",
        ),
        (
            # The modules of the caller, where it is called with copies.
            {"losses": (lambda one, two, batch: bilinear(ONE, two, batch), bilinear)},
            r"the loss of players\[0\] depends on none of its parameters. Does it use the players that it is",
        ),
        (
            {"losses": lambda one, two, batch: one.place * two.place @ torch.ones(1)},
            r"float64 copies of the players .*dtype=batch.dtype",
        ),
        (
            {"losses": lambda one, two, batch: Rounded.apply(bilinear(one, two, batch)).sum()},
            "Rounded has no second derivative",
        ),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"players": (ONE, Point(2.0)), "losses": bilinear, "batch": None, "lr": 0.1}
    with pytest.raises(UseError, match=message):
        probes.game_drift(**given | change)


def test_the_drift_of_one_network_names_that_of_two() -> None:
    with pytest.raises(UseError, match=r"model is a tuple of 2 .* th\.probes\.game_drift"):
        probes.drift((ONE, Point(2.0)), mse, (torch.ones(1), torch.ones(1)), lr=0.1)  # type: ignore[arg-type]
