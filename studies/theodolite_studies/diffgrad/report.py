"""What the paper claims of diffGrad, what its control explains, and the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, INK, ORANGE, SvgAxis, SvgFigure, SvgRow, power_of, ticks
from theodolite.present.text import Column
from theodolite_studies.framework.claims import Array, Claim, Observe, at_least, at_most, each, table
from theodolite_studies.framework.figures import band, line
from theodolite_studies.framework.records import Record, distinct, select

CLEAR = 1e-3
"""By how much the end on a function has to be lower to be a win."""
CONTROL = 0.4
"""Per cent: what is expected to be left, once the learning rate is halved."""
USUAL = -10
"""2⁻¹⁰ is the paper's learning rate for networks, 10⁻³."""


def _rates(own: Sequence[Record]) -> list[int]:
    """Those of diffGrad."""
    return sorted({one["rate"] for one in select(own, optimizer="diffgrad")})


def _losses(own: Sequence[Record], optimizer: str, lower: int = 0) -> Array:
    """By seed and learning rate of diffGrad, or `lower` octaves below; nan where it diverged."""
    found = {(one["seed"], one["rate"]): one["loss"] for one in select(own, optimizer=optimizer)}
    seeds = sorted(distinct(own, "seed"))
    return np.array(
        [[found.get((seed, rate - lower)) for rate in _rates(own)] for seed in seeds], dtype=float
    )


def _net_wins(lower: int) -> Callable[[Sequence[Record]], Array]:
    """Of all learning rates: those at which diffGrad ends clearly lower, less those at which it does not."""

    def value(own: Sequence[Record]) -> Array:
        ours, theirs = _losses(own, "diffgrad"), _losses(own, "adam", lower)
        return ((ours < theirs - CLEAR).astype(float) - (ours > theirs + CLEAR)).mean(1)

    return value


def _gains(own: Sequence[Record], lower: int = 0) -> Array:
    """By seed and learning rate: by how many per cent diffGrad ends below Adam."""
    return 100 * (1 - _losses(own, "diffgrad") / _losses(own, "adam", lower))


def _against_control(own: Sequence[Record]) -> Array:
    """Where both end."""
    gains = _gains(own, lower=1)
    return gains[:, np.isfinite(gains).all(0)]


def _best_gain(own: Sequence[Record]) -> Array:
    """Each at its own best learning rate of the grid, which is one for all seeds."""
    best = [
        losses[:, np.nanargmin(losses.mean(0))] for losses in (_losses(own, "diffgrad"), _losses(own, "adam"))
    ]
    return 100 * (1 - best[0] / best[1])


def _at_usual(own: Sequence[Record]) -> Array:
    rates = _rates(own)
    return _gains(own)[:, rates.index(USUAL) if USUAL in rates else 0]


def _factors(own: Sequence[Record]) -> Array:
    mine = select(own, optimizer="diffgrad")
    seeds = sorted(distinct(mine, "seed"))
    return np.array([np.mean([one["factor"] for one in select(mine, seed=seed)]) for seed in seeds])


def _networks(value: Callable[[Sequence[Record]], Array]) -> Observe:
    return each("task", value, part="network")


CLAIMS = (
    Claim(
        "on 1-D functions it ends lower than Adam",
        "reaches the minimum",
        "wins − losses > 0, part of all",
        at_least(0.0, each("task", _net_wins(0), part="function")),
    ),
    Claim(
        "… and than Adam at half the learning rate",
        "–",
        "wins − losses > 0, part of all",
        at_least(0.0, each("task", _net_wins(1), part="function")),
    ),
    Claim(
        "on networks it beats Adam at learning rate 2⁻¹⁰",
        "outperforms",
        "gain > 0 %",
        at_least(0.0, _networks(_at_usual), unit=" %"),
    ),
    Claim(
        "on networks its best beats Adam’s best",
        "outperforms",
        "gain > 0 %",
        at_least(0.0, _networks(_best_gain), unit=" %"),
    ),
    Claim(
        "it beats Adam at half the learning rate",
        "–",
        f"mean gain over the grid > {CONTROL} %",
        at_least(CONTROL, _networks(lambda own: _against_control(own).mean(1)), unit=" %"),
    ),
    Claim(
        "it is Adam at half the learning rate",
        "–",
        f"off by ≤ {CONTROL} % at every learning rate",
        at_most(CONTROL, _networks(lambda own: np.abs(_against_control(own)).max(1)), unit=" %"),
    ),
    Claim("ξ is about one half", "from 1/2 to 1", "mean ≤ 0.55", at_most(0.55, _networks(_factors))),
)
ROWS = (
    ("diffGrad", "diffgrad", 0, BLUE),
    ("Adam", "adam", 0, ORANGE),
    ("Adam at lr/2", "adam", 1, INK),
)
"""Name, optimizer, octaves below the learning rates of diffGrad, and colour."""


def notes(records: Sequence[Record]) -> str:
    """Losses by learning rate, means over seeds."""
    tables = []
    for part, what in (("function", "gap to the minimum"), ("network", "held-out loss")):
        for task in distinct(select(records, part=part), "task"):
            own = select(records, task=task)
            rows = []
            for name, optimizer, lower, _ in ROWS:
                means = [_shown(value) for value in _losses(own, optimizer, lower).mean(0)]
                factor = f"{_factors(own).mean():.3f}" if optimizer == "diffgrad" else ""
                rows.append([name, *means, factor])
            heads = [*(f"2^{rate}" for rate in _rates(own)), "mean ξ"]
            columns = [Column(f"{task}, {what}"), *(Column(head, side="right") for head in heads)]
            tables.append(table(columns, rows))
    return "\n\n".join(tables)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Losses against the learning rate."""
    for part, label in (("function", "gap"), ("network", "loss")):
        tasks = distinct(select(records, part=part), "task")
        if not tasks:
            continue
        rates, panels = _rates(select(records, task=tasks[0])), []
        for task in tasks:
            own, lines = select(records, task=task), []
            for _, optimizer, lower, colour in ROWS:
                losses = _losses(own, optimizer, lower)
                if len(losses) < 2 or lower:
                    lines.append(line(_rates(own), losses.mean(0), colour, dashed=bool(lower)))
                else:
                    lines.append(band(_rates(own), losses, colour))
            panels.append(lines)
        heights = [y for panel in panels for one in panel for _, y in one.points if math.isfinite(y)]
        low, high = math.floor(10 * min(heights)) / 10, math.ceil(10 * max(heights)) / 10 + 0.1
        marks = ticks([round(low + (high - low) * step / 4, 2) for step in range(5)])
        across = SvgAxis(rates[0], max(rates[-1], rates[0] + 1), {r: power_of(2, r) for r in rates[::2]})
        note = "learning rate; of Adam at lr/2, twice it"
        figure = SvgFigure(
            f"Where diffGrad and Adam end, {part}s",
            [("diffGrad", BLUE), ("Adam", ORANGE), ("dashed: Adam at lr/2", INK)],
            tasks,
            [SvgRow(label, across, SvgAxis(low, high, marks), panels, note)],
        )
        yield f"{part}s", figure.svg()


def _shown(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.4f}"
