"""`stragglers`: from measured step times, what each scheme would have taken."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from theodolite.core.arguments import number, whole
from theodolite.core.arguments import seed as checked_seed
from theodolite.core.errors import UseError
from theodolite.core.progress import Progress, part, silent
from theodolite.fleet.straggling import simulation
from theodolite.fleet.straggling.report import BACKUP, LEAVE, WAIT, OverheadRange, SchemeTime, StragglerReport
from theodolite.fleet.straggling.schemes import GradientCoding, MultiplexedCoding, SelectiveReattempt
from theodolite.fleet.straggling.simulation import Seconds
from theodolite.fleet.straggling.times import read_times

PATIENCE = (0.0, 0.1, 0.25, 0.5, 1.0)
"""The μ that are tried: a worker is late after (1 + μ) times the fastest one's time."""
MOST_MODELS = 64
STEPS = 100
"""Steps of the overhead, from none to all, at which the best scheme is looked for."""
SHOWN = 20
"""Steps of it that are drawn."""
LEVEL = 0.95


@dataclass(frozen=True)
class Candidate:
    """A scheme with its parameters, and the seconds of each round with the load that the times have."""

    scheme: str
    setting: str
    models: int
    load: float
    """In multiples of 1/workers."""
    sends: int
    seconds: Seconds

    def factor(self, overhead: float | Seconds, sending: float) -> Any:
        """By how much a round is longer than with the load that the times have."""
        return overhead + sending * self.sends + (1 - overhead - sending) * self.load


def stragglers(
    times: Any,
    *,
    overhead: float = 0.0,
    sending: float = 0.0,
    models: int = 4,
    mu: float | Sequence[float] = PATIENCE,
    missing: float | None = None,
    draws: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> StragglerReport:
    """Would backup workers or gradient coding have saved time, and which?

    The parameters of each scheme are those that would have taken the least time on the first half of the
    rounds; it is judged on the second half, against waiting for all, with a 95 % block bootstrap interval.
    A worker with k times as many examples that sends m gradients is taken to need
    `overhead + m·sending + k·(1 − overhead − sending)` times as long.

    Args:
        times: seconds, rounds × workers, measured with an equal share of the batch on each worker: a CSV, an
            array or a data frame.
        overhead: share of a step that does not grow with a worker's examples. With 0, the default, coding
            looks worst. `overhead_share` finds it from a second measurement.
        sending: share of a step that grows with the gradients that a worker sends: M-SGC sends several.
        models: models that can be trained in turn, of which SR-SGC and M-SGC need several.
        mu: a worker may be late only after (1 + μ) times the fastest one's time; the values to choose from.
        missing: seconds that stand for times that are not there; without it they are an error.
        draws: of the bootstrap.
        seed: of the bootstrap.
        progress: called while it works.

    >>> from theodolite import fleet
    >>> times = [[1.0, 1.0, 1.0, 4.0 if turn % 3 == 0 else 1.0] for turn in range(60)]
    >>> fleet.stragglers(times, overhead=0.9)["GC"].setting
    's = 1'
    """
    found, names = read_times(times, missing)
    number("overhead", overhead, least=0, most=1)
    number("sending", sending, least=0, most=1)
    if overhead + sending > 1:
        raise UseError(
            f"overhead and sending are {overhead + sending:g} together: shares of one step, at most 1"
        )
    whole("models", models, least=1, most=MOST_MODELS)
    patience = [number("mu", one, least=0) for one in (mu if isinstance(mu, Iterable) else [mu])]
    if not patience:
        raise UseError("mu is empty: give at least one value, such as 0")
    whole("draws", draws, least=1, most=10**6)
    checked_seed("seed", seed)
    half = len(found) // 2
    shares = np.append(np.linspace(0, 1 - sending, STEPS + 1), overhead)
    kept: dict[str, list[Candidate]] = {}
    for one in candidates(found, half, names, models, patience, progress or silent):
        kept[one.scheme] = _useful([*kept.get(one.scheme, ()), one], half, shares, sending)
    chosen = {name: _chosen(some, half, overhead, sending) for name, some in kept.items()}
    schemes = _judged(list(chosen.values()), half, overhead, sending, draws, seed)
    base = float(kept[WAIT][0].seconds[half:].mean())
    least = {name: _least(some, half, shares[:-1], sending, base) for name, some in kept.items()}
    slowest = np.bincount(found.argmax(1), minlength=len(names))
    return StragglerReport(
        workers=len(names),
        rounds=len(found),
        judged=len(found) - half,
        overhead=float(overhead),
        sending=float(sending),
        models=int(models),
        waiting=float(found.max(1).sum() / np.median(found, axis=1).sum()),
        slowest=names[int(slowest.argmax())],
        slowest_share=float(slowest.max() / len(found)),
        schemes=schemes,
        by_overhead=_ranges({name: times for name, (times, _) in least.items() if name != BACKUP}, sending),
        curves={
            name: tuple(ratios[:: STEPS // SHOWN].tolist())
            for name, (_, ratios) in least.items()
            if name != WAIT
        },
    )


def candidates(
    times: Seconds,
    half: int,
    names: Sequence[str],
    models: int,
    patience: Sequence[float],
    progress: Progress = silent,
) -> Iterator[Candidate]:
    """Every scheme with every set of parameters that is tried. `half` is where the first half ends."""
    workers = times.shape[1]
    yield Candidate(WAIT, "", 1, 1.0, 1, simulation.wait_for_all(times))
    order = np.argsort(-times[:half].mean(0), kind="stable")
    for num in range(1, max(1, workers // 4) + 1):
        load = workers / (workers - num)
        out = ", ".join(names[place] for place in order[:num]) if num <= 3 else f"the {num} slowest"
        rest = simulation.wait_for_all(np.delete(times, order[:num], axis=1))
        yield Candidate(LEAVE, f"without {out}", 1, load, 1, rest)
        late = simulation.without_slowest(times, num)
        yield Candidate(BACKUP, f"{num} of {workers}", 1, load, 1, late)
    for late_ones in _stragglers(workers, range(1, workers)):
        code = GradientCoding(workers, late_ones)
        seconds = simulation.gradient_coding(times, code.groups)
        yield Candidate("GC", f"s = {late_ones}", 1, code.load * workers, 1, seconds)
    yield from _reattempts(times, models, patience)
    pairs = [(burst, count - burst + 1) for count in _spread(models, 2) for burst in _spread(count // 2, 1)]
    for place, pair in enumerate(pairs):
        inner = part(progress, place / len(pairs), (place + 1) / len(pairs))
        yield from _multiplexed(times, *pair, patience, inner)


def _reattempts(times: Seconds, models: int, patience: Sequence[float]) -> Iterator[Candidate]:
    """SR-SGC, with the shortest window that its delay allows; a longer one is the same scheme."""
    workers = times.shape[1]
    for burst in _spread(models - 1, 1):
        for late in _stragglers(workers, _spread(min(workers - 1, 8), 1)):
            code = SelectiveReattempt(workers, burst, burst + 1, min(2 * late, workers))
            seconds = simulation.selective_reattempt(times, code, patience)
            for mu, own in zip(patience, seconds, strict=True):
                setting = f"B = {burst}, W = {code.window}, λ = {code.stragglers}, μ = {mu:g}"
                yield Candidate("SR-SGC", setting, code.models, code.load * workers, 1, own)


def _multiplexed(
    times: Seconds, burst: int, window: int, patience: Sequence[float], progress: Progress
) -> Iterator[Candidate]:
    workers = times.shape[1]
    most = [*_stragglers(workers, _spread(workers - 1, 1)), workers]
    codes = [MultiplexedCoding(workers, burst, window, late) for late in most]
    found = simulation.multiplexed(times, codes[0], [code.groups for code in codes], patience, progress)
    for code, rows in zip(codes, found, strict=True):
        for mu, own in zip(patience, rows, strict=True):
            setting = f"B = {burst}, W = {window}, λ = {code.stragglers}, μ = {mu:g}"
            yield Candidate("M-SGC", setting, code.models, code.load * workers, code.minitasks, own)


def _stragglers(workers: int, wanted: Iterable[int]) -> list[int]:
    """Numbers of late workers that a code is made for: the largest with as many groups as those wanted.

    >>> _stragglers(12, range(1, 12))
    [1, 2, 3, 5, 11]
    """
    return sorted({workers // (workers // (late + 1)) - 1 for late in wanted})


def _spread(most: int, least: int) -> list[int]:
    """Whole numbers up to `most`, further apart as they grow.

    >>> _spread(20, 1)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    powers = {3 * 2**k for k in range(8)} | {2**k for k in range(9)} | {most}
    return [value for value in sorted(powers) if least <= value <= most]


def _useful(some: list[Candidate], half: int, shares: Seconds, sending: float) -> list[Candidate]:
    """Those that are the best on the first half at one overhead at least: the others need no memory."""
    first = np.array([one.seconds[:half].mean() * one.factor(shares, sending) for one in some])
    return [some[place] for place in sorted(set(first.argmin(0).tolist()))]


def _chosen(some: list[Candidate], half: int, overhead: float, sending: float) -> Candidate:
    return min(some, key=lambda one: one.seconds[:half].mean() * one.factor(overhead, sending))


def _judged(
    chosen: Sequence[Candidate], half: int, overhead: float, sending: float, draws: int, seed: int
) -> tuple[SchemeTime, ...]:
    """On the second half, in blocks of √m of its m rounds, since stragglers come in bursts."""
    base, rows = chosen[0].seconds[half:], []
    places = _blocks(len(base), draws, np.random.default_rng(seed))
    waited = np.array([base[some].mean() for some in places])
    for one in chosen:
        factor = float(one.factor(overhead, sending))
        own = one.seconds[half:]
        drawn = np.array([own[some].mean() for some in places]) * factor / waited
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        rows.append(
            SchemeTime(
                one.scheme,
                one.setting,
                one.models,
                float(one.load),
                one.sends,
                one.scheme != BACKUP,
                float(one.seconds[:half].mean() * factor),
                float(own.mean() * factor),
                float(own.mean() * factor / base.mean()),
                float(low),
                float(high),
            )
        )
    return tuple(rows)


def _blocks(num: int, draws: int, generator: np.random.Generator) -> Iterable[Any]:
    """Places of rounds for each draw: blocks of √num, which go on from the first round after the last."""
    length = max(1, math.isqrt(num))
    starts = generator.integers(num, size=(draws, -(-num // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(draws, -1)[:, :num] % num
    return list(places)


def _least(
    some: list[Candidate], half: int, shares: Seconds, sending: float, base: float
) -> tuple[Seconds, Seconds]:
    """By overhead: the least time on the first half, and what it is on the second, in units of `base`."""
    factors = np.array([one.factor(shares, sending) for one in some])
    first = np.array([one.seconds[:half].mean() for one in some])[:, None] * factors
    second = np.array([one.seconds[half:].mean() for one in some])[:, None] * factors
    best, columns = first.argmin(0), np.arange(len(shares))
    return first[best, columns], second[best, columns] / base


def _ranges(least: dict[str, Seconds], sending: float) -> tuple[OverheadRange, ...]:
    """Overheads in a row with the same best scheme; the first of those that are equal."""
    names = list(least)
    best = np.array([least[name] for name in names]).argmin(0)
    found: list[OverheadRange] = []
    for place, index in enumerate(best):
        share = round(place / STEPS * (1 - sending), 6)
        if found and found[-1].scheme == names[index]:
            found[-1] = OverheadRange(found[-1].low, share, names[index])
        else:
            found.append(OverheadRange(share, share, names[index]))
    return tuple(found)
