"""What the paper claims of diffGrad, what its control explains, and the figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from theodolite.present.svg import BLUE, INK, ORANGE, SvgAxis, SvgFigure, SvgLine, SvgRow, power_of, ticks
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, settled

Array = NDArray[np.float64]
CLEAR = 1e-3
"""By how much the end on a function has to be lower to be a win."""
CONTROL = 0.4
"""Per cent: what is expected to be left, once the learning rate is halved."""
USUAL = -10
"""2⁻¹⁰ is the paper's learning rate for networks, 10⁻³."""


def claims(records: Sequence[Record]) -> list[Claim]:
    """All that there are records for."""
    functions, networks = _tasks(records, "function"), _tasks(records, "network")
    found: list[Claim] = []
    if functions:
        found += [
            _won(records, functions, "on 1-D functions it ends lower than Adam", 0),
            _won(records, functions, "… and than Adam at half the learning rate", 1),
        ]
    if networks:
        found += _of_networks(records, networks)
    return found


def _won(records: Sequence[Record], tasks: Sequence[str], claim: str, lower: int) -> Claim:
    return settled(
        claim,
        "reaches the minimum" if not lower else "–",
        "wins − losses > 0, part of all",
        [Case(task, _net_wins(records, task, lower)) for task in tasks],
        limit=0.0,
        below=False,
    )


def _of_networks(records: Sequence[Record], tasks: Sequence[str]) -> list[Claim]:
    return [
        settled(
            "on networks it beats Adam at learning rate 2⁻¹⁰",
            "outperforms",
            "gain > 0 %",
            [Case(task, _at_usual(records, task)) for task in tasks],
            limit=0.0,
            below=False,
            unit=" %",
        ),
        settled(
            "on networks its best beats Adam’s best",
            "outperforms",
            "gain > 0 %",
            [Case(task, _best_gain(records, task)) for task in tasks],
            limit=0.0,
            below=False,
            unit=" %",
        ),
        settled(
            "it beats Adam at half the learning rate",
            "–",
            f"mean gain over the grid > {CONTROL} %",
            [Case(task, _against(records, task).mean(1)) for task in tasks],
            limit=CONTROL,
            below=False,
            unit=" %",
        ),
        settled(
            "it is Adam at half the learning rate",
            "–",
            f"off by ≤ {CONTROL} % at every learning rate",
            [Case(task, np.abs(_against(records, task)).max(1)) for task in tasks],
            limit=CONTROL,
            below=True,
            unit=" %",
        ),
        settled(
            "ξ is about one half",
            "from 1/2 to 1",
            "mean ≤ 0.55",
            [Case(task, _factors(records, task)) for task in tasks],
            limit=0.55,
            below=True,
        ),
    ]


def notes(records: Sequence[Record]) -> str:
    """Losses by learning rate, means over seeds."""
    lines = []
    for part in ("function", "network"):
        for task in _tasks(records, part):
            rates = _rates(records, task)
            what = "gap to the minimum" if part == "function" else "held-out loss"
            lines.append(
                f"{task + ', ' + what:24}"
                + "".join(f"{'2^' + str(rate):>9}" for rate in rates)
                + f"{'mean ξ':>9}"
            )
            for name, optimizer, lower in ROWS:
                losses = _losses(records, task, optimizer, [rate - lower for rate in rates])
                factor = f"{_factors(records, task).mean():9.3f}" if optimizer == "diffgrad" else ""
                lines.append(
                    f"  {name:22}" + "".join(f"{_shown(value):>9}" for value in losses.mean(0)) + factor
                )
    return "\n".join(lines)


ROWS = (("diffGrad", "diffgrad", 0), ("Adam", "adam", 0), ("Adam at lr/2", "adam", 1))


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Losses against the learning rate."""
    drawn = (("function", "functions", "gap"), ("network", "networks", "loss"))
    for part, name, label in drawn:
        tasks = _tasks(records, part)
        if not tasks:
            continue
        rates = _rates(records, tasks[0])
        across = SvgAxis(rates[0], max(rates[-1], rates[0] + 1), {r: power_of(2, r) for r in rates[::2]})
        panels = [
            [_line(records, task, optimizer, lower, style) for (_, optimizer, lower), style in STYLES]
            for task in tasks
        ]
        tops = [y for panel in panels for line in panel for _, y in line.points if math.isfinite(y)]
        low, high = math.floor(10 * min(tops)) / 10, math.ceil(10 * max(tops)) / 10 + 0.1
        marks = ticks([round(low + (high - low) * step / 4, 2) for step in range(5)])
        yield (
            name,
            SvgFigure(
                f"Where diffGrad and Adam end, {part}s",
                [("diffGrad", BLUE), ("Adam", ORANGE), ("dashed: Adam at lr/2", INK)],
                tasks,
                [
                    SvgRow(
                        label,
                        across,
                        SvgAxis(low, high, marks),
                        panels,
                        "learning rate; of Adam at lr/2, twice it",
                    )
                ],
            ).svg(),
        )


STYLES = tuple(zip(ROWS, ((BLUE, False), (ORANGE, False), (INK, True)), strict=True))


def _line(
    records: Sequence[Record], task: str, optimizer: str, lower: int, style: tuple[str, bool]
) -> SvgLine:
    rates = _rates(records, task)
    losses = _losses(records, task, optimizer, [rate - lower for rate in rates])
    points = list(zip(map(float, rates), losses.mean(0).tolist(), strict=True))
    if len(losses) < 2 or style[1]:
        return SvgLine(points, style[0], dashed=style[1])
    return SvgLine(points, style[0], lows=losses.min(0).tolist(), highs=losses.max(0).tolist())


def _tasks(records: Sequence[Record], part: str) -> list[str]:
    return list(dict.fromkeys(one["task"] for one in records if one["part"] == part))


def _rates(records: Sequence[Record], task: str) -> list[int]:
    """Those of diffGrad."""
    return sorted({one["rate"] for one in records if one["task"] == task and one["optimizer"] == "diffgrad"})


def _losses(records: Sequence[Record], task: str, optimizer: str, rates: Sequence[int]) -> Array:
    """By seed and learning rate; nan where it diverged or was not run."""
    own = [one for one in records if one["task"] == task]
    found = {(one["seed"], one["rate"]): one["loss"] for one in own if one["optimizer"] == optimizer}
    seeds = sorted({one["seed"] for one in own})
    values = [[found.get((seed, rate)) for rate in rates] for seed in seeds]
    return np.array([[math.nan if value is None else value for value in row] for row in values])


def _pairs(records: Sequence[Record], task: str, lower: int) -> tuple[Array, Array]:
    """diffGrad, and Adam at the same learning rates or at half of them."""
    rates = _rates(records, task)
    adam = _losses(records, task, "adam", [rate - lower for rate in rates])
    return _losses(records, task, "diffgrad", rates), adam


def _net_wins(records: Sequence[Record], task: str, lower: int) -> Array:
    """Of all learning rates: those at which diffGrad ends clearly lower, less those at which it does not."""
    ours, theirs = _pairs(records, task, lower)
    return ((ours < theirs - CLEAR).astype(float) - (ours > theirs + CLEAR)).mean(1)


def _against(records: Sequence[Record], task: str) -> Array:
    """By seed and learning rate: by how many per cent it ends below the control, where both end."""
    ours, theirs = _pairs(records, task, 1)
    gains = 100 * (1 - ours / theirs)
    return gains[:, np.isfinite(gains).all(0)]


def _best_gain(records: Sequence[Record], task: str) -> Array:
    """Each at its own best learning rate of the grid, which is one for all seeds."""
    ours, theirs = _pairs(records, task, 0)
    return 100 * (1 - ours[:, _best(ours)] / theirs[:, _best(theirs)])


def _best(losses: Array) -> int:
    return int(np.nanargmin(losses.mean(0)))


def _at_usual(records: Sequence[Record], task: str) -> Array:
    rates = _rates(records, task)
    place = rates.index(USUAL) if USUAL in rates else 0
    ours, theirs = _pairs(records, task, 0)
    return 100 * (1 - ours[:, place] / theirs[:, place])


def _factors(records: Sequence[Record], task: str) -> Array:
    own = [one for one in records if one["task"] == task and one["optimizer"] == "diffgrad"]
    seeds = sorted({one["seed"] for one in own})
    return np.array([np.mean([one["factor"] for one in own if one["seed"] == seed]) for seed in seeds])


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"
