"""Successive growths of one network, and the recursion `δ_{k+1} = δ_k − aδ_k^s` of the excess loss."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from theodolite.fits import depth_expansion, power
from theodolite.fits.laws import depth_recursion
from theodolite.fits.minimizing import minimize
from theodolite.fits.result import Fit, FitEstimate
from theodolite_studies.framework.claims import Array
from theodolite_studies.framework.paired import Paired
from theodolite_studies.framework.records import Record
from theodolite_studies.growing.training import (
    GrowingSetting,
    Lesson,
    Pupil,
    PupilSteps,
    enrolled,
    judged,
    rounded,
    wsd,
)
from theodolite_studies.growing.ways import inserted, looked_at

GROWTH = 1.0
"""The r of depth = width^r in the networks from scratch."""
DRAWS = 100
"""Of the bootstrap."""
FEWEST = 5
"""Depths that a law of four constants takes at least."""
HELD = 2
"""Of the stages, the last ones: what a fit to the others is judged by."""


def grown_block_by_block(setting: GrowingSetting, seed: int, device: str) -> Iterator[Record]:
    """From one block to many, where gain·E[h²] is largest; beside it one block that trains as long.

    At the end of each stage a branch is trained on until its learning rate is zero: its loss counts.
    """
    lesson = Lesson.of(setting, device)
    for kind in ("grown", "alone"):
        pupil = enrolled(setting, setting.grown_width, 1, seed, device)
        for stage in range(setting.deepest):
            warmup = setting.warmup if stage == 0 or kind == "grown" else 0
            _trained(pupil, lesson, seed, stage * setting.stage, wsd(setting.stage, warmup=warmup, decay=0))
            branch = pupil.copied()
            factors = wsd(setting.stage_decay, warmup=0, decay=setting.stage_decay)
            _trained(branch, lesson, seed, (stage + 1) * setting.stage, factors)
            record = _record(kind, branch, lesson, (stage + 1) * setting.stage + setting.stage_decay)
            if kind == "grown":
                look = looked_at(pupil, lesson, f"{seed} {stage}")
                best = max(look.signal.points, key=look.relative)
                gains = {"gain": best.gain, "relative": look.relative(best)}
                record |= {name: rounded(value, 9) for name, value in gains.items()}
                inserted(pupil, look, best.point)
            yield record


def coupled(setting: GrowingSetting, seed: int, device: str) -> Iterator[Record]:
    """Networks from scratch whose depth grows as their width."""
    lesson = Lesson.of(setting, device)
    for width, depth in setting.coupled:
        pupil = enrolled(setting, width, depth, seed, device)
        steps = setting.coupled_steps
        _trained(pupil, lesson, seed, 0, wsd(steps, warmup=setting.warmup, decay=setting.decay))
        yield _record("coupled", pupil, lesson, steps)


def _trained(pupil: Pupil, lesson: Lesson, seed: int, first: int, factors: list[float]) -> None:
    PupilSteps(pupil, lesson, order=seed, first=first, factors=factors).go(len(factors))


def _record(kind: str, pupil: Pupil, lesson: Lesson, steps: int) -> dict[str, object]:
    embeddings = pupil.model.embed.weight.numel()
    parameters = sum(each.numel() for each in pupil.model.parameters())
    return {
        "kind": kind,
        "width": pupil.model.embed.embedding_dim,
        "depth": pupil.depth,
        "parameters": parameters - embeddings,
        "steps": steps,
        "loss": rounded(judged(pupil.model, lesson)),
    }


@dataclass(frozen=True, eq=False)
class Rivals:
    """The recursion against an exponential, its limit s → 1: their errors at stages that neither has seen."""

    power: Array
    """By seed, the root mean square error of log loss."""
    exponential: Array

    @property
    def less(self) -> Paired:
        """The recursion's error less the exponential's."""
        return Paired(self.power - self.exponential)

    def __str__(self) -> str:
        return f"power law {self.power.mean():.4f}, exponential {self.exponential.mean():.4f}: {self.less}"


@dataclass(frozen=True)
class Alone:
    """The same fits of one block that trains as long: what time does without depth."""

    s: FitEstimate
    foretold: FitEstimate
    rivals: Rivals | None


@dataclass(frozen=True)
class Envelope:
    """Exponents with their intervals."""

    s: FitEstimate
    """Of `δ_{k+1} = δ_k − aδ_k^s`, from successive growths."""
    floor: FitEstimate
    """The loss E that is left at any depth, from the same fit."""
    foretold: FitEstimate
    """`r/((2+r)(s−1))`."""
    in_depth: FitEstimate
    """α of `L = E + A·k^−α` through the same growths; 1/(s−1) where depth is large."""
    measured: FitEstimate | None
    """α of `L = E + A·N^−α` through the networks from scratch, if there are enough."""
    coupling: float | None
    """The slope of log gain against log δ over the growths: Assumption G says it is s."""
    rivals: Rivals | None
    """None of too few depths."""
    alone: Alone | None
    """None if it was not run."""


def envelope(records: Sequence[Record]) -> Envelope | None:
    """Fit what there is; None if too few depths were grown."""
    known = [one for one in records if one["loss"] is not None]
    grown = [one for one in known if one["kind"] == "grown"]
    if len({one["depth"] for one in grown}) < FEWEST:
        return None
    scratch = [one for one in known if one["kind"] == "coupled"]
    return _fitted(
        tuple((float(one["depth"]), one["loss"], one.get("gain") or 0.0) for one in grown),
        tuple((float(one["parameters"]), one["loss"]) for one in scratch),
        _stages(grown),
        _stages([one for one in known if one["kind"] == "alone"]),
    )


Rows = tuple[tuple[float, ...], ...]


def _stages(records: Sequence[Record]) -> Rows:
    """Seed, the number of the stage, and the loss at its end."""
    ends = sorted({one["steps"] for one in records})
    return tuple((one["seed"], ends.index(one["steps"]) + 1.0, one["loss"]) for one in records)


def _fitted(grown: Rows, scratch: Rows, stages: Rows, others: Rows) -> Envelope:
    _, loss, gain = np.array(grown).T
    by_depth = tuple(row[:2] for row in grown)
    law, alpha = _recursion(by_depth), _exponent(by_depth)
    measured = _exponent(scratch) if len({size for size, _ in scratch}) > 3 else None
    left = loss - law["E"].value
    good = (left > 0) & (gain > 0)
    coupling = None
    if good.sum() >= FEWEST:
        coupling = float(np.polyfit(np.log(left[good]), np.log(gain[good]), 1)[0])
    return Envelope(
        law["s"], law["E"], law["gamma"], alpha, measured, coupling, _rivals(stages), _alone(others)
    )


def _alone(rows: Rows) -> Alone | None:
    if len({stage for _, stage, _ in rows}) < FEWEST:
        return None
    law = _recursion(tuple(row[1:] for row in rows))
    return Alone(law["s"], law["gamma"], _rivals(rows))


@functools.cache
def _recursion(rows: Rows) -> Fit:
    depth, loss = np.array(rows).T
    return depth_expansion(depth=depth, loss=loss, growth=GROWTH, draws=DRAWS)


@functools.cache
def _exponent(rows: Rows) -> FitEstimate:
    x, loss = np.array(rows).T
    return power(x=x, loss=loss, draws=DRAWS)["alpha"]


@functools.cache
def _rivals(rows: Rows) -> Rivals | None:
    """Both laws are fitted to each seed by itself: seeds are what is independent."""
    errors = []
    for seed in sorted({row[0] for row in rows}):
        stage, loss = np.array(sorted(row[1:] for row in rows if row[0] == seed)).T
        if len(stage) >= FEWEST + HELD:
            errors.append([_error(stage, loss, exponential=limit) for limit in (False, True)])
    return Rivals(*np.array(errors).T) if errors else None


def _error(stage: Array, loss: Array, *, exponential: bool) -> float:
    law = depth_recursion(stage[:-HELD], loss[:-HELD])
    if exponential:  # s stays at its least, 1.001
        starts, high = law.starts.copy(), law.high.copy()
        starts[:, -1] = high[-1] = law.low[-1]
        law = replace(law, starts=np.unique(starts, axis=0), high=high)
    theta = minimize(law, np.log(loss[:-HELD])).theta
    foretold = depth_recursion(stage, loss).evaluate(theta[None])[0][0]
    return float(np.sqrt(np.mean((foretold - np.log(loss))[-HELD:] ** 2)))
