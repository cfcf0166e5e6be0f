"""Samplers: from noise to data along a velocity field, by an ODE or by an SDE with the same marginals."""

# B batch

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from theodolite.core import arguments
from theodolite.core.arguments import number, one_of, whole
from theodolite.core.calling import described
from theodolite.core.errors import UseError
from theodolite.core.progress import Progress, share
from theodolite.data.batches import generator
from theodolite.flows.fields import Field, check_field, check_shape, path_of
from theodolite.flows.interpolants import LINEAR, InfiniteError, Interpolant, convert, find_interpolant
from theodolite.flows.training import as_data

Method = Literal["euler", "heun", "dpm2m", "sde"]
"""How a step is made: see `sample`."""

BeforeStep = Callable[[Tensor, float, float], Tensor]
"""`before_step(x, t, dt) -> x`, called before the step from t to t + dt."""


def sample(
    field: Field,
    noise: Tensor,
    *,
    steps: int | None = None,
    method: Method = "euler",
    path: str | Interpolant | None = None,
    start: float = 0.0,
    end: float = 1.0,
    times: Sequence[float] | Tensor | None = None,
    diffusion: float | None = None,
    seed: int = 0,
    before_step: BeforeStep | None = None,
    progress: Progress | None = None,
    differentiable: bool = False,
) -> Tensor:
    """Move noise to data along a velocity field.

    | method | order | evaluations in a step | |
    |---|---|---|---|
    | `euler` | 1 | 1 | on the linear path the same as DDIM |
    | `heun` | 2 | 2 | also at the last time |
    | `dpm2m` | 2 | 1 | DPM-Solver++(2M), which needs the path |
    | `sde` | 1 (weak) | 1 | `dx = (v + w score) dt + √(2w) dB` with `w = diffusion · σ(t)`; needs the path |

    Times are equally spaced. Those of `dpm2m` are equally spaced in `log(α/σ)`; where that is infinite, as at
    both ends of the linear path, the first or last step has the length of one of `steps` equal steps in t.
    The last step of `sde` adds no noise. Samples that are not finite raise a `UseError`.

    Args:
        field: `field(x, t) -> velocity`: of `field_of`, `GaussianMixture.field`, or a function.
        noise: standard normal numbers (B, ...), or points at the time `start`.
        steps: number of steps.
        method: how a step is made.
        path: the interpolant or its name, for `dpm2m` and `sde`. By default that of the field; a function
            does not know its own, and is taken to have the linear one.
        start: the first time.
        end: the last time. `euler` and `heun` also go backwards, from data to noise.
        times: all times, instead of `steps`, `start` and `end`.
        diffusion: the strength of the noise of `sde`, 1 by default; with 0 it is `euler`.
        seed: of that noise.
        before_step: called as `before_step(x, t, dt)` before each step; returns the point to go on from.
        progress: called with the fraction that is done.
        differentiable: keep the graph for gradients with respect to noise and weights.

    >>> from theodolite.flows import GaussianMixture
    >>> mixture = GaussianMixture([[3.0]], std=0.5)
    >>> noise = torch.tensor([[0.0], [1.0]])
    >>> sample(mixture.field(), noise, steps=20, method="heun")
    tensor([[3.0000],
            [3.5...]])

    References:
        Song et al., Denoising diffusion implicit models, 2021. Lu et al., DPM-Solver++, 2022. Ma et al., SiT:
        exploring flow and diffusion-based generative models with scalable interpolant transformers, 2024.
    """
    check_field("field", field)
    path = _path(field, path)
    one_of("method", method, get_args(Method))
    strength = _strength(diffusion, method)
    arguments.seed("seed", seed)
    check_noise(noise)
    grid = _grid(steps, method, path, start, end, times)
    step = {"euler": _euler, "heun": _heun, "sde": _sde(path, strength, seed), "dpm2m": _dpm2m(path)}[method]
    told = share(progress, "sampling")
    x, finite = noise, [noise.isfinite().all()]
    with contextlib.nullcontext() if differentiable else torch.no_grad(), _named_ends(grid, times is None):
        for index, (t, after) in enumerate(pairwise(grid)):
            if before_step is not None:
                moved = before_step(x, t, after - t)
                x = check_shape("before_step", moved, x, "return the points to go on from")
            x = step(_checked(field), x, grid, index)
            finite.append(x.isfinite().all())
            told((index + 1) / (len(grid) - 1))
    refuse_not_finite(finite, grid)
    return x


def check_noise(noise: Any) -> None:
    """Check that it is a batch of floats."""
    if not isinstance(noise, Tensor) or not noise.is_floating_point() or noise.ndim < 2:
        raise UseError(f"noise is {described(noise)}: give floats of shape (B, ...)")


def _path(field: Field, path: str | Interpolant | None) -> Interpolant:
    own = path_of(field)
    if path is None:
        return LINEAR if own is None else own
    given = find_interpolant(path)
    if own is not None and own != given:
        raise UseError(f"path is {given.name}, but the field has the {own.name} path: leave out path")
    return given


def _strength(diffusion: float | None, method: Method) -> float:
    if diffusion is not None and method != "sde":
        raise UseError(
            f"diffusion is {diffusion!r}, but {method} adds no noise: use method='sde', or leave it out"
        )
    return number("diffusion", 1.0 if diffusion is None else diffusion, least=0)


_REFUSES = ContextVar("refuses samples that are not finite", default=True)


@contextlib.contextmanager
def not_finite_allowed() -> Iterator[None]:
    """Let `sample` return values that are not finite, for callers who look at each example."""
    token = _REFUSES.set(False)
    try:
        yield
    finally:
        _REFUSES.reset(token)


def refuse_not_finite(finite: list[Tensor], grid: Sequence[float]) -> None:
    """Check that the noise, and the points after each step, are finite.

    It looks at all of them at once, so that a GPU is not waited for in each step.
    """
    if not _REFUSES.get() or any(map(torch._C._functorch.is_functorch_wrapped_tensor, finite)):
        return
    good = torch.stack(finite).tolist()
    if not good[0]:
        raise UseError("noise has values that are not finite: give finite ones")
    if not all(good):
        step = good.index(False)
        raise UseError(
            f"after step {step} of {len(grid) - 1}, from t = {grid[step - 1]:.4g} to {grid[step]:.4g}, the "
            "samples are not finite: check the weights of the network, and its values there"
        )


@contextlib.contextmanager
def _named_ends(grid: Sequence[float], by_ends: bool) -> Iterator[None]:
    """Say which argument avoids a time at which the field is infinite."""
    try:
        yield
    except InfiniteError as error:
        if error.time not in (grid[0], grid[-1]):
            raise
        end = "start" if error.time == grid[0] else "end"
        fix = (
            f"{end}={error.instead:g}" if by_ends else f"{error.instead:g} instead of {error.time:g} in times"
        )
        raise UseError(f"{error.problem}: give {fix}") from None


Step = Callable[[Field, Tensor, Sequence[float], int], Tensor]
"""`step(field, x, times, index)`: the point at `times[index + 1]`."""


def _euler(field: Field, x: Tensor, times: Sequence[float], index: int) -> Tensor:
    t, after = times[index], times[index + 1]
    return x + (after - t) * field(x, _same_time(t, x))


def _heun(field: Field, x: Tensor, times: Sequence[float], index: int) -> Tensor:
    t, after = times[index], times[index + 1]
    first = field(x, _same_time(t, x))
    second = field(x + (after - t) * first, _same_time(after, x))
    return x + (after - t) / 2 * (first + second)


def _sde(path: Interpolant, diffusion: float, seed: int) -> Step:
    """Euler–Maruyama. As `w score = −diffusion · E[x_0 | x_t]`, nothing is divided by σ."""

    def step(field: Field, x: Tensor, times: Sequence[float], index: int) -> Tensor:
        t, after = times[index], times[index + 1]
        at = _same_time(t, x)
        velocity = field(x, at)
        x = x + (after - t) * (velocity - diffusion * convert(velocity, x, at, "velocity", "noise", path))
        if index == len(times) - 2:
            return x
        _, sigma = _coefficients(path, t)
        normal = as_data(generator("sde", seed, index).standard_normal(tuple(x.shape)), x)
        return x + math.sqrt(2 * diffusion * sigma * (after - t)) * normal

    return step


def _dpm2m(path: Interpolant) -> Step:
    """DPM-Solver++(2M): the mean of the data, extrapolated in `λ = log(α/σ)` from the last two points.

    From (α, σ) to (a, s): `x ← (s/σ)(x − α D) + a D`, with `D = X + (X − X_before) h/(2 h_before)` and
    steps h of λ. Where a step of λ is infinite, D = X.
    """
    before: list[Tensor] = []

    def step(field: Field, x: Tensor, times: Sequence[float], index: int) -> Tensor:
        (alpha, sigma), (next_alpha, next_sigma) = (_coefficients(path, t) for t in times[index : index + 2])
        at = _same_time(times[index], x)
        mean = found = convert(field(x, at), x, at, "velocity", "data", path)
        if before:
            past, now, later = (_log_ratio(path, t) for t in times[index - 1 : index + 2])
            if math.isfinite(past) and math.isfinite(later):
                mean = found + (later - now) / (2 * (now - past)) * (found - before.pop())
        before[:] = [found]
        return next_sigma / sigma * (x - alpha * mean) + next_alpha * mean

    return step


def _checked(field: Field) -> Field:
    def checked(x: Tensor, t: Tensor) -> Tensor:
        return check_shape("the field", field(x, t), x, "return one velocity for each point")

    return checked


def _same_time(t: float, x: Tensor) -> Tensor:
    """One time for all examples; in float32 for points of half precision."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.full((len(x),), t, dtype=dtype, device=x.device)


def _coefficients(path: Interpolant, t: float) -> tuple[float, float]:
    """α and σ."""
    at = torch.tensor(t, dtype=torch.float64)
    return path.alpha(at).item(), path.sigma(at).item()


def _log_ratio(path: Interpolant, t: float) -> float:
    """log(α/σ), which is infinite where one of them is 0."""
    alpha, sigma = _coefficients(path, t)
    if not alpha or not sigma:
        return math.inf if alpha else -math.inf
    return math.log(alpha / sigma)


def _grid(
    steps: int | None,
    method: Method,
    path: Interpolant,
    start: float,
    end: float,
    times: Sequence[float] | Tensor | None,
) -> list[float]:
    if times is None:
        if steps is None:
            raise UseError("steps is missing: give the number of steps, or times")
        whole("steps", steps, least=1)
        start, end = number("start", start, least=0, most=1), number("end", end, least=0, most=1)
        if start == end:
            raise UseError(f"start and end are both {start:g}: give two times")
        grid = [*(start + (end - start) * index / steps for index in range(steps)), end]
    else:
        if steps is not None or (start, end) != (0.0, 1.0):
            raise UseError("times are given beside steps, start or end: give times alone")
        listed = times.tolist() if isinstance(times, Tensor) else times
        if not isinstance(listed, Iterable):
            raise UseError(f"times is {listed!r}: give at least two, in strict order")
        grid = [number("times", t, least=0, most=1) for t in listed]
    signs = {(after > t) - (after < t) for t, after in pairwise(grid)}
    if signs not in ({1}, {-1}):
        raise UseError(f"times are {grid}: give at least two, in strict order")
    if signs == {-1} and method in ("dpm2m", "sde"):
        raise UseError(
            f"{method} goes from noise to data, not from {grid[0]:g} to {grid[-1]:g}: use euler or heun"
        )
    return grid if method != "dpm2m" or times is not None else _equal_log_ratios(grid, path)


def _equal_log_ratios(grid: Sequence[float], path: Interpolant) -> list[float]:
    """As many times with equal steps of log(α/σ), but for steps from or to a time where it is infinite."""
    infinite = [not math.isfinite(_log_ratio(path, grid[place])) for place in (0, -1)]
    first, last = (1 if infinite[0] else 0), len(grid) - (2 if infinite[1] else 1)
    low, high = (_log_ratio(path, grid[place]) for place in (first, last))
    between = torch.linspace(low, high, max(last - first + 1, 2), dtype=torch.float64)[1:-1]
    return [*grid[: first + 1], *_times_of(between, path), *grid[max(last, first + 1) :]]


def _times_of(ratios: Tensor, path: Interpolant) -> list[float]:
    """The times at which log(α/σ) has these values, by bisection."""
    low, high = torch.zeros_like(ratios), torch.ones_like(ratios)
    for _ in range(60):
        middle = (low + high) / 2
        below = (path.alpha(middle) / path.sigma(middle)).log() < ratios
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    found: list[float] = high.tolist()
    return found
