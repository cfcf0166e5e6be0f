"""Inversion: the noise that a sampler turns into a given target, found without derivatives.

For a deterministic sampler f and a target y, repeat `z ← z − η (f(z) − y)`. With the differences dz and df to
the solution, `|dz − η df|² = |dz|² − 2η⟨dz, df⟩ + η²|df|²`, so the distance shrinks for every z if

    η < inf 2⟨dz, df⟩/|df|²

over all pairs of noises. Pairs that are far apart average over places where f stretches and overestimate the
bound; close pairs find them. If f stretches in a few places only, such a step is too small everywhere else.
For one pair the best step is half its ratio, and each example can measure that on its own last two noises.

References:
    Ronai, Kulikov, Michaeli, FlowOpt: fast optimization through whole flow processes for training-free
    editing, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from theodolite.core.arguments import number, one_of, positive, whole
from theodolite.core.arguments import seed as checked_seed
from theodolite.core.errors import UseError
from theodolite.core.exclusive import exclusive
from theodolite.core.files import plain
from theodolite.core.progress import Progress, share
from theodolite.data.batches import generator
from theodolite.flows.fields import check_function, check_shape
from theodolite.flows.quality import check_examples
from theodolite.flows.sampling import not_finite_allowed
from theodolite.present.figure import ACCENT, QUIET, Figure, Panel, frame, guide, line
from theodolite.present.result import Block, Result
from theodolite.present.text import Column, Table, counted
from theodolite.present.text import number as shown

Sampler = Callable[[Tensor], Tensor]
"""`sampler(noise)`: the sample (B, ...) of each noise (B, ...), the same at every call."""
StepRule = Literal["auto", "bound", "given"]
Ending = Literal["converged", "stalled", "iterations"]

SAFETY = 0.9
"""The step `bound` is this share of the bound, which is a minimum over finitely many pairs."""
LEVELS = (0.0, 0.01, 0.1, 0.5)
"""Quantiles of the ratios of pairs that are reported."""
CLOSE = 1e-4
"""The distance of close pairs: root mean square of the entries of dz."""
TURNS = 2
"""Further directions for each noise when `invert` measures the bound."""
PROGRESS = 0.01
"""An example stalls if its least residual falls by less than this share in `patience` iterations."""


@dataclass(frozen=True)
class StepBound(Result):
    """The steps below which inversion contracts. Made by `step_bound`."""

    kind: ClassVar[str] = "step bound"
    loads: ClassVar[bool] = True
    least: float
    """The least ratio 2⟨dz, df⟩/|df|² of all pairs: no larger step contracts everywhere."""
    quantiles: tuple[tuple[float, float], ...]
    """Levels and quantiles of the ratios."""
    opposed: float
    """The share of pairs with ⟨dz, df⟩ ≤ 0, for which no step contracts."""
    positive: float
    """The least positive ratio; nan if there is none."""
    pairs: int

    def table(self) -> Table:
        """Levels and quantiles."""
        return Table(("share of pairs", "step below"), list(self.quantiles))

    @property
    def sentence(self) -> str:
        """The bound in words."""
        if self.least > 0:
            return f"steps below {shown(self.least)} contract for all of {counted(self.pairs, 'close pair')}"
        return (
            f"no step contracts for {_percent(self.opposed)} of {counted(self.pairs, 'close pair')}: their "
            "samples move against the noise"
        )

    def blocks(self) -> Iterator[Block]:
        """The bound in words, and the quantiles."""
        yield self.sentence
        yield self.table()


@dataclass(frozen=True)
class Inversion(Result):
    """Noises whose samples come near given targets. Made by `invert`.

    `noise` and `residuals` are tensors and stay out of JSON, which has the quantiles of each iteration.
    """

    kind: ClassVar[str] = "inversion"
    rule: StepRule
    """How steps are found, see `invert`."""
    step: float
    """η; for `auto` that of the first iteration."""
    bound: StepBound | None
    """The steps that contract; None if the step was given."""
    tolerance: float
    status: Ending
    """`converged` (all examples), `stalled` (the others make no more progress) or `iterations` (all used)."""
    converged: float
    """The share of examples with a residual of at most `tolerance`."""
    evaluations: int
    """Calls of the sampler with the whole batch."""
    noise: Tensor = field(compare=False, repr=False)
    """For each example the noise with the least residual, (B, ...)."""
    residuals: Tensor = field(compare=False, repr=False)
    """Root mean square of f(z) − y before each iteration and after the last, (iterations + 1, B), float64."""

    @property
    def iterations(self) -> int:
        """Updates of the noise."""
        return len(self.residuals) - 1

    def table(self) -> Table:
        """Quantiles of the residuals at some of the iterations."""
        rows = self._rows()
        return Table(
            ("iteration", "median residual", "90 %", "largest", Column("converged", _percent)),
            [rows[at] for at in _some(len(rows))],
        )

    def blocks(self) -> Iterator[Block]:
        """The step, the residuals, how it ended."""
        rules = {
            "auto": ", then half the ratio of its last two noises for each example",
            "bound": f", {SAFETY:g} of the least positive ratio of close pairs",
            "given": "",
        }
        yield f"step {shown(self.step)}{rules[self.rule]}"
        if self.bound is not None:
            yield self.bound.sentence
        yield self.table()
        ends = {
            "converged": "all examples have converged",
            "stalled": "the other examples make no more progress: try a smaller step or another start",
            "iterations": "give more iterations",
        }
        yield (
            f"{_percent(self.converged)} of {counted(self.residuals.shape[1], 'example')} have a residual of "
            f"at most {shown(self.tolerance)} after {counted(self.iterations, 'iteration')}; "
            f"{ends[self.status]}"
        )
        yield self.figure()

    def figure(self) -> Figure:
        """Residuals over iterations."""
        rows = self._rows()
        layout = frame(height=220, x="iteration", y="residual")
        layout["yaxis"] |= {"type": "log", "exponentformat": "power"}
        layout["shapes"] = [guide(y=self.tolerance)] if self.tolerance else []
        drawn = []
        for place, name in ((3, "largest"), (2, "90 %"), (1, "median")):
            values = [row[place] if row[place] > 0 else None for row in rows]
            drawn.append(line(range(len(rows)), values, hover=f"{name} %{{y:.3g}}"))
            drawn[-1]["line"] = {"color": ACCENT if place == 1 else QUIET, "width": 2 if place == 1 else 1}
        return Figure(
            f"Residuals: the median, and, thin, the 90 % quantile and the largest. Step {shown(self.step)}.",
            f"The median residual goes from {shown(rows[0][1])} to {shown(rows[-1][1])} "
            f"in {counted(self.iterations, 'iteration')}.",
            (Panel("", tuple(drawn), layout),),
        )

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON knows: quantiles of the residuals in place of the tensors."""
        names = ("iteration", "median", "upper", "largest", "converged")
        rows = [plain(dict(zip(names, row, strict=True))) for row in self._rows()]
        return {**super().to_dict(), "residuals": rows}

    def _rows(self) -> list[tuple[int, float, float, float, float]]:
        levels = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
        values = self.residuals.quantile(levels, dim=1, interpolation="higher").T.tolist()
        done = (self.residuals.cummin(0).values <= self.tolerance).double().mean(1).tolist()
        return [(at, *row, part) for at, (row, part) in enumerate(zip(values, done, strict=True))]


@exclusive()
@torch.no_grad()
def step_bound(
    sampler: Sampler, noise: Tensor, *, distance: float = CLOSE, turns: int = 2, seed: int = 0
) -> StepBound:
    """The least ratio `2⟨dz, df⟩/|df|²` of pairs (z, z + dz) around given noises, with its quantiles.

    Each noise starts with a random direction, and every further turn takes the direction df of the last one,
    which turns towards where f stretches most, as power iteration does. In many dimensions random directions
    alone would miss it.

    Args:
        sampler: f, deterministic.
        noise: the points z, (B, ...).
        distance: root mean square of the entries of dz; in half precision at least 16 roundings of 1.
        turns: further directions for each noise; each costs one evaluation beside the first two.
        seed: of the directions.

    A linear map with the factors 1 and 4 contracts for steps below 2/4:

    >>> factors = torch.tensor([1.0, 4.0], dtype=torch.float64)
    >>> bound = step_bound(lambda noise: factors * noise, torch.zeros(1, 2).double(), turns=8)
    >>> round(bound.least, 6)
    0.5
    """
    check_examples("noise", noise)
    positive("distance", distance)
    whole("turns", turns, least=0)
    checked_seed("seed", seed)
    return _bound(_ratios(sampler, noise, distance, turns, seed))


@exclusive()
@torch.no_grad()
def invert(
    sampler: Sampler,
    target: Tensor,
    *,
    step: float | Literal["auto", "bound"] = "auto",
    iterations: int = 200,
    start: Tensor | None = None,
    tolerance: float = 1e-3,
    patience: int = 20,
    pairs: int = 256,
    seed: int = 0,
    progress: Progress | None = None,
) -> Inversion:
    """Find the noise z with `f(z) = y` by `z ← z − η (f(z) − y)`, one call of the sampler per iteration.

    To edit an example, give a sampler with another condition, the noise of the example as `start`, a few
    iterations and a small fixed step: each iteration moves the sample a little from the new condition towards
    the example. The steps `auto` would arrive there at once.

    Args:
        sampler: f, a deterministic function of the noise that keeps its shape, such as
            `lambda noise: sample(field, noise, steps=20)`. It is called without gradients.
        target: y, (B, ...). Noises are updated in float32 at least.
        step: η, or how it is found. `bound`: 0.9 of the least positive ratio of close pairs. `auto`: at first
            half their median; then each example takes half the ratio of its last two noises, and takes back a
            move that raised its residual.
        iterations: at most so many.
        start: the first noise; by default it is drawn from N(0, I).
        tolerance: an example has converged if the root mean square of f(z) − y over its entries is at most
            this. The call ends when all have.
        patience: the call ends when no other example's least residual falls by 1 % in so many iterations.
        pairs: at least so many pairs of noises to measure the bound.
        seed: of the start and of the pairs.
        progress: called with what is being done and the fraction done.

    The map `z/2` leaves the share 1 − η/2 of a residual:

    >>> found = invert(lambda noise: 0.5 * noise, torch.ones(1, 2), step=1.0, iterations=3, tolerance=0.0)
    >>> found.residuals[1:] / found.residuals[:-1]
    tensor([[0.5000],
            [0.5000],
            [0.5000]], dtype=torch.float64)
    """
    check_examples("target", target)
    for name, value in {"iterations": iterations, "patience": patience, "pairs": pairs}.items():
        whole(name, value, least=1)
    number("tolerance", tolerance, least=0)
    checked_seed("seed", seed)
    rule: StepRule = one_of("step", step, ("auto", "bound")) if isinstance(step, str) else "given"
    kind = torch.promote_types(target.dtype, torch.float32)
    noise = (_normal(target, "start", seed) if start is None else _checked_start(start, target)).to(kind)
    wanted, calls = target.to(kind), _Calls(sampler, target.dtype)
    error = _repeatable(calls, noise) - wanted
    bound = None
    if isinstance(step, str):
        told = share(progress, "measuring the step", 0.0, 0.2)
        bound = _bound_of_many(calls, target, pairs, seed, told)
        eta = SAFETY * bound.positive if rule == "bound" else max(bound.positive, bound.quantiles[-1][1]) / 2
    else:
        eta = positive("step", step, wanted="give a positive number, 'auto' or 'bound'")

    told = share(progress, "inverting", 0.2 if bound else 0.0)
    steps = torch.full((len(target),), eta, dtype=torch.float64, device=target.device)
    best, residuals = noise, [_rms(error)]
    lows, status = residuals[:], _status(residuals, tolerance, patience)
    while status == "iterations" and len(lows) <= iterations:
        moved = noise - _each(steps, error).to(kind) * error
        moved = torch.where(_each(moved.flatten(1).isfinite().all(1), moved), moved, best)
        found = calls(moved) - wanted
        residual = _rms(found)
        residual = residual.where(residual.isfinite(), torch.inf)
        kept = residual < lows[-1]
        best = torch.where(_each(kept, best), moved, best)
        lows.append(torch.minimum(residual, lows[-1]))
        if rule == "auto":
            steps = _secant(steps, moved - noise, found - error, kept)
            found, residual = torch.where(_each(kept, found), found, error), lows[-1]
        noise, error = best if rule == "auto" else moved, found
        residuals.append(residual)
        status = _status(lows, tolerance, patience)
        told((len(lows) - 1) / iterations)
    return Inversion(
        rule,
        eta,
        bound,
        float(tolerance),
        status,
        (lows[-1] <= tolerance).double().mean().item(),
        calls.count,
        best.to(target.dtype),
        torch.stack(residuals).cpu(),
    )


def _secant(steps_B: Tensor, shifts: Tensor, changes: Tensor, kept_B: Tensor) -> Tensor:
    """Half the ratio of the last pair, and at most half the last step where that raised the residual."""
    products, squares = ((one * changes).flatten(1).double().sum(1) for one in (shifts, changes))
    secant = products / squares
    secant = secant.where(secant.isfinite() & (secant > 0), steps_B)
    return torch.where(kept_B, secant, torch.minimum(secant, steps_B / 2))


class _Calls:
    """The sampler, counted; noises are given to it in its own precision, samples come back in float32."""

    def __init__(self, sampler: Sampler, dtype: torch.dtype) -> None:
        fix = "give a function of the noise, such as lambda noise: sample(field, noise, steps=20)"
        check_function("sampler", sampler, 1, fix)
        self.sampler, self.dtype, self.count = sampler, dtype, 0

    def __call__(self, noise: Tensor) -> Tensor:
        self.count += 1
        with not_finite_allowed():  # of some examples, for noises that are tried
            found = self.sampler(noise.to(self.dtype))
        check_shape("the sampler", found, noise, "give one that keeps the shape")
        return found.to(torch.promote_types(self.dtype, torch.float32))


def _status(lows: list[Tensor], tolerance: float, patience: int) -> Ending:
    """How it stands by the least residuals so far."""
    done = lows[-1] <= tolerance
    if bool(done.all()):
        return "converged"
    if len(lows) > patience and bool((done | (lows[-1] > (1 - PROGRESS) * lows[-1 - patience])).all()):
        return "stalled"
    return "iterations"


def _repeatable(sampler: _Calls, noise: Tensor) -> Tensor:
    """The sample, which has to be finite and the same twice."""
    first, second = sampler(noise), sampler(noise)
    if not bool(first.isfinite().all()):
        raise UseError("the sampler returns values that are not finite: give a start where it is finite")
    if bool((first - second).square().mean() > 1e-6 * first.square().mean()):
        raise UseError(
            "the sampler gives two samples for the same noise: give it a fixed seed, or no diffusion"
        )
    return first


def _bound_of_many(
    sampler: _Calls, target: Tensor, pairs: int, seed: int, told: Callable[[float], None]
) -> StepBound:
    """The bound of `pairs` pairs or more, in batches of the size of the target."""
    rounds = math.ceil(pairs / ((TURNS + 1) * len(target)))
    found = []
    for turn in range(rounds):
        noise = _normal(target, f"pairs {turn}", seed)
        found.append(_ratios(sampler, noise, CLOSE, TURNS, seed))
        told((turn + 1) / rounds)
    bound = _bound(torch.cat(found))
    if math.isnan(bound.positive):
        raise UseError(
            f"in all of {bound.pairs} pairs of noises the sample moves against the noise, so no step "
            "contracts: give step, and a start near the solution"
        )
    return bound


def _ratios(sampler: Sampler, noise: Tensor, distance: float, turns: int, seed: int) -> Tensor:
    """`2⟨dz, df⟩/|df|²` for each noise and each direction, in float64 on the CPU."""
    sampler = sampler if isinstance(sampler, _Calls) else _Calls(sampler, noise.dtype)
    distance = max(distance, 16 * torch.finfo(noise.dtype).eps)
    here = sampler(noise)
    directions, ratios = _normal(noise, "directions", seed).to(here.dtype), []
    for _ in range(turns + 1):
        moved = noise + (distance * directions / _each(_rms(directions), directions)).to(noise.dtype)
        shifts = moved.to(here.dtype) - noise.to(here.dtype)  # without what was rounded off
        changes = sampler(moved) - here
        products, squares = ((one * changes).flatten(1).double().sum(1) for one in (shifts, changes))
        if not bool((squares > 0).all() and squares.isfinite().all()):
            raise UseError(
                "the sampler is constant or not finite around some noise: no step can be measured. "
                f"Give step, or a distance above {distance:g}"
            )
        ratios.append(2 * products / squares)
        directions = changes
    return torch.cat(ratios).cpu()


def _bound(ratios: Tensor) -> StepBound:
    rising = ratios[ratios > 0]
    least = rising.min().item() if len(rising) else math.nan
    values = ratios.quantile(torch.tensor(LEVELS, dtype=torch.float64)).tolist()
    opposed = 1 - len(rising) / len(ratios)
    return StepBound(values[0], tuple(zip(LEVELS, values, strict=True)), opposed, least, len(ratios))


def _normal(like: Tensor, word: str, seed: int) -> Tensor:
    """Numbers of N(0, 1) that do not depend on the device."""
    drawn = generator("inversion", word, seed).standard_normal(tuple(like.shape))
    return torch.from_numpy(drawn).to(like.device, like.dtype)


def _checked_start(start: Tensor, target: Tensor) -> Tensor:
    check_examples("start", start)
    if start.shape != target.shape:
        raise UseError(
            f"start has shape {tuple(start.shape)} and target {tuple(target.shape)}: give a noise per target"
        )
    return start.to(target.device)


def _rms(values: Tensor) -> Tensor:
    """Root mean square over the entries of each example, (B,), in float64."""
    return values.flatten(1).double().square().mean(1).sqrt()


def _each(values_B: Tensor, like: Tensor) -> Tensor:
    """A number for each example, to be broadcast over its entries."""
    return values_B.view(-1, *[1] * (like.ndim - 1))


def _some(count: int) -> list[int]:
    """0, 1, 2, 5, 10, 20, 50, … and the last."""
    round_ones = {m * 10**k for k in range(len(str(count))) for m in (1, 2, 5)}
    return sorted({0, *(at for at in round_ones if at < count), count - 1})


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"
