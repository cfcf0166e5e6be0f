"""Tables and figures of the routing study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from theodolite.present.svg import (
    BLUE,
    FAINT,
    GREEN,
    LEFT,
    ORANGE,
    PINK,
    TOP,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgRow,
    head,
    power_of,
    turned,
)
from theodolite.present.text import Column
from theodolite_studies.framework.claims import Array, table
from theodolite_studies.framework.figures import dots, line
from theodolite_studies.framework.paired import smallest_effect
from theodolite_studies.routing.arms import (
    ADD,
    ROUTED,
    ROUTED_SHARP,
    TIME_ROUTED,
    TIME_ROUTED_SHARP,
    Arm,
    Arms,
    gradient_fall,
    inflation,
    largest_cosine,
    last_share,
    least_cosine,
    median_cosine,
    paired_loss,
)

COLOURS: Mapping[str, str] = {
    **{ADD: ORANGE, ROUTED: BLUE, TIME_ROUTED: GREEN},
    **{ROUTED_SHARP: VIOLET, TIME_ROUTED_SHARP: PINK},
}
COMPARISONS = (
    *((ROUTED, ADD), (TIME_ROUTED, ADD), (TIME_ROUTED, ROUTED)),
    *((ROUTED_SHARP, ADD), (TIME_ROUTED_SHARP, ADD)),
    *((ROUTED, ROUTED_SHARP), (TIME_ROUTED, TIME_ROUTED_SHARP)),
)
SYMPTOMS = {
    "stream": inflation,
    "gradient": gradient_fall,
    "least cosine": least_cosine,
    "median": median_cosine,
    "largest": largest_cosine,
    "last f/h": last_share,
}
ACROSS, DOWN, APART = 26, 150, 34
"""Of a heat map: the width of a time, the height of all branches, the space between maps."""


def notes(arms: Arms) -> str:
    """Losses, their comparisons, and symptoms by time."""
    found = (_losses(arms), _comparisons(arms), _symptoms(arms))
    return "\n\n".join(each for each in found if each)


def _losses(arms: Arms) -> str:
    setting, rows = arms.setting, []
    for arm in arms.found.values():
        cells = []
        for exponent in arm.exponents:
            losses = np.array([*arm.losses(exponent, "test").values()])
            star = "*" if exponent == arm.best_at else ""
            spread = f" ± {losses.std(ddof=1):.4f}" if len(losses) > 1 and np.isfinite(losses).all() else ""
            cells.append(f"2^{exponent:g} {losses.mean():.4f}{spread}{star}")
        edge = "" if arm.is_bracketed else "(at an edge)"
        rows.append((arm.residual, len(arm.test), arm.records[0]["parameters"], "   ".join(cells), edge))
    title = (
        f"{setting.size}, the plan from {setting.base}, {setting.steps} steps of {setting.num} images: test "
        "loss by\nlearning rate, mean ± standard deviation over the seeds; * is the best by validation loss"
    )
    return f"{title}\n{table(('residual', 'seeds', 'parameters', 'test loss', ''), rows)}"


def _comparisons(arms: Arms) -> str:
    rows = []
    for first, second in COMPARISONS:
        found = paired_loss(arms, first, second)
        if found is not None:
            least = smallest_effect(found.differences, sides=2)
            rows.append((f"{first} less {second}", str(found), f"{least:.2g}" if np.isfinite(least) else "?"))
    title = "Test losses paired by seed, and the smallest difference that is found in 80 % of such studies"
    return f"{title}\n{table(('', 'difference', 'smallest'), rows)}" if rows else ""


def _symptoms(arms: Arms) -> str:
    rows = []
    for arm in arms.found.values():
        readings = [*arm.readings().values()]
        if not readings:
            continue
        by_name = {
            name: np.mean([symptom(one).mean(0) for one in readings], axis=0)
            for name, symptom in SYMPTOMS.items()
        }
        count = len(by_name["stream"])
        for place in range(count):
            title = arm.residual if place == 0 else ""
            rows.append((title, _time(place, count), *(values[place] for values in by_name.values())))
    columns = [Column("residual"), Column("t"), *(Column(name, "{:.3f}".format) for name in SYMPTOMS)]
    title = (
        "Symptoms by time (0 is noise, 1 is data), means over seeds and images. stream: last over first; "
        "gradient: of the first\nbranch over the last; cosine of the stream before and after a branch: "
        "over branches; with routing the stream is the mixture"
    )
    return f"{title}\n{table(columns, rows)}" if rows else ""


def _time(place: int, count: int) -> str:
    return f"{(2 * place + 1) / (2 * count):.2f}"


def figures(arms: Arms) -> Iterator[tuple[str, str]]:
    """Depth × time for each symptom, and losses against learning rates."""
    read = {name: arm for name, arm in arms.found.items() if arm.readings()}
    if read:
        yield "maps", _maps(read)
    yield "losses", _rates(arms)


@dataclass(frozen=True)
class _Quantity:
    """A row of heat maps, which share a scale."""

    title: str
    values: Mapping[str, Array]
    """By residual, (T, L)."""
    logarithmic: bool


def _quantities(arms: Mapping[str, Arm]) -> list[_Quantity]:
    stream, gradient, cosine = {}, {}, {}
    for name, arm in arms.items():
        start_T = np.mean([np.mean(one["start"], axis=0) for one in arm.readings().values()], axis=0)
        stream[name] = np.log10(arm.map("stream") / start_T[:, None])
        gradient_TL = arm.map("gradient")
        gradient[name] = np.log10(gradient_TL / gradient_TL[:, -1:])
        cosine[name] = arm.map("cosine")
    return [
        _Quantity("stream/start", stream, logarithmic=True),
        _Quantity("gradient/last", gradient, logarithmic=True),
        _Quantity("cosine", cosine, logarithmic=False),
    ]


def _maps(arms: Mapping[str, Arm]) -> str:
    """Squares, the fainter, the nearer to the least value of the row."""
    quantities = _quantities(arms)
    times = len(next(iter(quantities[0].values.values())))
    wide = times * ACROSS
    width = max(LEFT + len(arms) * (wide + APART), 640)
    height = TOP + len(quantities) * (DOWN + APART) + 10
    pieces = [head(width, height, "Symptoms by depth (upwards) and time (to the right: noise to data)")]
    for column, name in enumerate(arms):
        x = LEFT + column * (wide + APART) + wide / 2
        pieces.append(f'<text x="{x}" y="{TOP - 8}" text-anchor="middle">{name}</text>')
    for row, quantity in enumerate(quantities):
        top = TOP + row * (DOWN + APART)
        known = np.concatenate([values.ravel() for values in quantity.values.values()])
        low, high = float(np.nanmin(known)), float(np.nanmax(known))
        ends = [f"{10**end if quantity.logarithmic else end:.3g}" for end in (low, high)]
        pieces.append(turned(quantity.title, 14, top + DOWN / 2))
        pieces.append(
            f'<text x="{LEFT}" y="{top + DOWN + 27}" font-size="10">faint {ends[0]}, strong {ends[1]}</text>'
        )
        for column, (name, values_TL) in enumerate(quantity.values.items()):
            left = LEFT + column * (wide + APART)
            pieces += _map(values_TL, (left, top), COLOURS[name], low, high)
    return "\n".join([*pieces, "</svg>", ""])


def _map(values_TL: Array, place: tuple[int, int], colour: str, low: float, high: float) -> list[str]:
    left, top = place
    times, branches = values_TL.shape
    tall = DOWN / branches
    pieces = [
        f'<rect x="{left}" y="{top}" width="{times * ACROSS}" height="{DOWN}" fill="none" stroke="{FAINT}"/>'
    ]
    for time in range(times):
        for branch in range(branches):
            value = values_TL[time, branch]
            if np.isfinite(value):
                part = (value - low) / (high - low) if high > low else 1.0
                pieces.append(
                    f'<rect x="{left + time * ACROSS}" y="{top + DOWN - (branch + 1) * tall:.1f}" '
                    f'width="{ACROSS}" height="{tall:.1f}" fill="{colour}" fill-opacity="{part:.2f}"/>'
                )
        if time in (0, times - 1):
            x = left + (time + 0.5) * ACROSS
            pieces.append(
                f'<text x="{x}" y="{top + DOWN + 13}" text-anchor="middle" font-size="9">'
                f"{_time(time, times)}</text>"
            )
    return pieces


def _rates(arms: Arms) -> str:
    """A dot for each seed, and a line through the means."""
    losses = {
        name: {exponent: [*arm.losses(exponent, "test").values()] for exponent in arm.exponents}
        for name, arm in arms.found.items()
    }
    panels = []
    for name, by_rate in losses.items():
        xs = [exponent for exponent, values in by_rate.items() for _ in values]
        ys = [value for values in by_rate.values() for value in values]
        means = [float(np.mean(values)) for values in by_rate.values()]
        panels.append([line(by_rate, means, COLOURS[name]), dots(xs, ys, COLOURS[name])])
    known = [y for panel in panels for each in panel for _, y in each.points if np.isfinite(y)]
    exponents = sorted({exponent for by_rate in losses.values() for exponent in by_rate})
    across = SvgAxis(
        exponents[0] - 0.3, exponents[-1] + 0.3, {value: power_of(2, value) for value in exponents}
    )
    return SvgFigure(
        "Test loss by learning rate: a dot for each seed",
        [(name, COLOURS[name]) for name in losses],
        [*losses],
        [SvgRow("test loss", across, _linear(known), panels, "learning rate at base size")],
    ).svg()


def _linear(values: Sequence[float]) -> SvgAxis:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = 0.08 * (high - low) or 0.1
    marks = np.linspace(low, high, 3) if high > low else [low]
    return SvgAxis(low - margin, high + margin, {float(mark): f"{mark:.3f}" for mark in marks})
