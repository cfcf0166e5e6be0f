"""The DiracGAN in closed form: a discriminator φx, a generator that makes the single point θ, and data at 0.

`L₁ = softplus(φθ) = −L₂` gives the fields `f = −s·θ` and `g = s·φ` with `s = sigmoid(φθ)`. The flow goes
round a circle, as `φf + θg = 0`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor, nn

from theodolite.controllers.interaction import cancel_interaction
from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.records import Record

SIZES = (0.05, 0.1, 0.2)
TIME = 20.0
FINE, SHORT = (0.05, 0.025, 0.0125), 2.0
"""Step sizes and the time over which the order of an error is measured."""
LARGE, LONG = 0.2, 500
"""Step size and number of steps of the long runs."""
RADII = (0.5, 2.0)
WAYS = ("simultaneous", "alternating")

Point = Array
"""(φ, θ)."""
Step = Callable[[Point, float], Point]
Velocity = Callable[[Point], Point]


def start_of(seed: int) -> Point:
    """(1, 1) for seed 0; for others a random direction, and a radius between 0.5 and 2."""
    if seed == 0:
        return np.array([1.0, 1.0])
    rng = np.random.default_rng(seed)
    radius, angle = rng.uniform(*RADII), rng.uniform(0, 2 * math.pi)
    return radius * np.array([math.cos(angle), math.sin(angle)])


def dirac(seed: int) -> Iterator[Record]:
    """Steps beside both flows at several step sizes, and the end of long runs, all from one start."""
    start = start_of(seed)
    for way in WAYS:
        for sizes, time in ((SIZES, TIME), (FINE, SHORT)):
            for h in sizes:
                yield {"game": way, "h": h, "time": time, **beside_flows(start, way, h, time)}
    for name, walk in long_runs().items():
        end = walk(start)
        yield {"game": name, "h": LARGE, "steps": LONG, "radius": _size(end) / _size(start)}


def beside_flows(start: Point, way: str, h: float, time: float) -> Record:
    """The end of steps over some time, and its distances from those of the flow and of the modified flow."""
    end = walked(start, simultaneous if way == "simultaneous" else alternating, h, round(time / h))
    plain, better = flowed(start, field, time), flowed(start, lambda at: modified(at, h, way), time)
    return {
        "radius": _size(end) / _size(start),
        "flow radius": _size(plain) / _size(start),
        "distance": _size(end - plain),
        "unexplained": _size(end - better),
    }


def field(at: Point) -> Point:
    """f and g."""
    phi, theta = at
    share = _sigmoid(phi * theta)
    return share * np.array([-theta, phi])


def jacobian(at: Point) -> Array:
    """The derivatives of f in the first row and of g in the second, by φ and by θ."""
    phi, theta = at
    share = _sigmoid(phi * theta)
    bent = share * (1 - share)
    cross = share + bent * phi * theta
    return np.array([[-bent * theta**2, -cross], [cross, bent * phi**2]])


def modified(at: Point, h: float, way: str) -> Point:
    """The field of the modified flow for equal learning rates; see `theodolite.probes.game_drift`."""
    here, slopes = field(at), jacobian(at)
    if way == "alternating":
        slopes[1, 0] *= -1
    return here - h / 2 * slopes @ here


def simultaneous(at: Point, h: float) -> Point:
    """Both players step."""
    return at + h * field(at)


def alternating(at: Point, h: float) -> Point:
    """φ steps, then θ."""
    moved = np.array([at[0] + h * field(at)[0], at[1]])
    return np.array([moved[0], at[1] + h * field(moved)[1]])


def without_drift(at: Point, h: float) -> Point:
    """Simultaneous steps with self terms and interaction terms cancelled."""
    return at + h * (field(at) + h / 2 * jacobian(at) @ field(at))


def consensus(at: Point, h: float, *, gamma: float) -> Point:
    """Simultaneous steps with γ/2·(f² + g²) added to both losses."""
    return at + h * (field(at) - gamma * jacobian(at).T @ field(at))


def extragradient(at: Point, h: float) -> Point:
    """A step with the field at the end of a simultaneous one."""
    return at + h * field(simultaneous(at, h))


def cancelled(start: Point, h: float = LARGE, steps: int = LONG) -> Point:
    """The end of simultaneous steps of modules whose gradients `cancel_interaction` fills."""
    players = tuple(_Point(float(value)) for value in start)
    optimizer = torch.optim.SGD([player.at for player in players], lr=h)
    for _ in range(steps):
        cancel_interaction((players[0], players[1]), _loss, None, lr=h)
        optimizer.step()
    return np.array([player.at.item() for player in players])


def long_runs() -> dict[str, Callable[[Point], Point]]:
    """Ways to take the long run, by name."""
    steps: dict[str, Step] = {
        "simultaneous": simultaneous,
        "alternating": alternating,
        "all drift cancelled": without_drift,
        "consensus, γ = h/2": lambda at, h: consensus(at, h, gamma=h / 2),
        "consensus, γ = h": lambda at, h: consensus(at, h, gamma=h),
        "extragradient": extragradient,
    }
    found: dict[str, Callable[[Point], Point]] = {"interaction cancelled": cancelled}
    for name, step in steps.items():
        found[name] = lambda start, step=step: walked(start, step, LARGE, LONG)  # type: ignore[misc]
    return found


def walked(start: Point, step: Step, h: float, steps: int) -> Point:
    """The end of so many steps."""
    at = start
    for _ in range(steps):
        at = step(at, h)
    return at


def flowed(start: Point, velocity: Velocity, time: float) -> Point:
    """The end of a flow."""
    found = solve_ivp(lambda _, at: velocity(at), (0, time), start, method="DOP853", rtol=1e-11, atol=1e-12)
    end: Point = found.y[:, -1]
    return end


class _Point(nn.Module):
    """A player with one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.tensor([value], dtype=torch.float64))


def _loss(one: nn.Module, two: nn.Module, _: object) -> Tensor:
    """Of player 1; player 2 has its negative."""
    assert isinstance(one, _Point)
    assert isinstance(two, _Point)
    return nn.functional.softplus(one.at * two.at).sum()


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def _size(at: Point) -> float:
    return float(np.linalg.norm(at))
