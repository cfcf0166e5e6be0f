"""The claims of the study of ghosts, its tables and its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from theodolite.present.svg import BLUE, GREEN, ORANGE, VIOLET, SvgAxis, SvgFigure, SvgLine, SvgRow, ticks
from theodolite_studies.framework.claims import (
    Array,
    Claim,
    Observation,
    at_least,
    at_most,
    each,
    per,
    table,
)
from theodolite_studies.framework.figures import dots
from theodolite_studies.framework.records import Record, distinct, select

FARTHEST = 200.0
"""In units of ρ_a: as far as was looked. What did not happen before is taken to happen there in a spread."""
PREDICTORS = {
    "the length itself": lambda record: record["radius"],
    "ρ_a": lambda record: 1.0,
    "the nearest ghost": lambda record: 1.0 / record["ghost"],
    "the parabola (if it has an end)": lambda record: (
        1.0 / record["quadratic"] if record["quadratic"] else math.nan
    ),
}
"""What the onset, in units of ρ_a, is multiplied by to be in other units."""


def _number(value: float | None) -> float:
    """Nothing is kept for what is not finite."""
    return math.inf if value is None else float(value)


def _survival(record: Record) -> float:
    """log₁₀ of the loss at the end over that before the spike: ratios spread over orders of magnitude."""
    return math.log10(_number(record["end"]) / record["before"])


def _spreads(unit: str, records: Sequence[Record]) -> Array:
    """By seed: the spread of log₁₀ of the onset in some unit."""
    found = []
    for seed in distinct(records, "seed"):
        some = select(records, seed=seed, above=lambda onset: _number(onset) > 0)
        onsets = [min(_number(one["above"]), FARTHEST) * PREDICTORS[unit](one) for one in some]
        known = [math.log10(onset) for onset in onsets if not math.isnan(onset)]
        found.append(float(np.std(known)) if known else math.nan)
    return np.array(found)


def _ratios(records: Sequence[Record]) -> Array:
    """By seed: the spread in units of ρ_a over that of the length itself."""
    return _spreads("ρ_a", records) / _spreads("the length itself", records)


def _survived(records: Sequence[Record], method: str, *, largest: bool = False) -> list[Observation]:
    """Of every spike, or of the largest."""
    spikes = [factor for factor in distinct(select(records, part="spike"), "factor") if factor > 1]
    wanted = spikes if not largest else [max(spikes, default=0)]
    keys = ("network", "optimizer", "factor")
    chosen = select(records, part="spike", method=method, factor=lambda factor: factor in wanted)
    return list(per(keys, _survival, "{} {} ×{:g}")(chosen))


def _harm(records: Sequence[Record]) -> list[Observation]:
    """The end with the controller over that without, where there was no spike."""
    keys = ("network", "optimizer", "seed")
    calm = {
        tuple(one[key] for key in keys): _number(one["end"])
        for one in select(records, part="spike", method="nothing", factor=1.0)
    }
    safe = select(records, part="spike", method="safe", factor=1.0)
    ratio = per(keys[:2], lambda one: _number(one["end"]) / calm[tuple(one[key] for key in keys)])
    return list(ratio(safe))


def _largest(safe: Sequence[Record]) -> Array:
    """By seed: by how much the largest r under the controller is above 1."""
    seeds = distinct(safe, "seed")
    return np.array([max(_number(one["largest"]) for one in select(safe, seed=seed)) - 1 for seed in seeds])


ONSET = per(("network", "direction", "stage"), lambda one: _number(one["above"]), part="collapse")
CLAIMS = (
    Claim(
        "no step with r < 1 raises the loss",
        "no model fails for r < 1",
        "r of the onset ≥ 1",
        at_least(1.0, ONSET),
    ),
    Claim(
        "no step with r < 1 leaves a trained network worse than guessing",
        "no model fails for r < 1",
        "r of the collapse ≥ 1",
        at_least(
            1.0,
            per(
                ("network", "direction"),
                lambda one: _number(one["collapse"]),
                part="collapse",
                stage="trained",
            ),
        ),
    ),
    Claim(
        "collapse appears soon beyond r = 1",
        "appears once r ≥ 1",
        "r of the onset ≤ 2",
        at_most(2.0, ONSET),
    ),
    Claim(
        "in units of ρ_a onsets of all networks and directions lie closer together",
        "r separates safe from dangerous",
        "std of log₁₀ ≤ half of that of lengths",
        at_most(0.5, each("part", _ratios, lambda part: "all cases", part="collapse")),
    ),
    Claim(
        "over temperatures, the onset spreads less in units of ρ_a",
        "std 0.992 → 0.164",
        "std of log₁₀ ≤ half of that of lengths",
        at_most(0.5, each("network", _ratios, part="temperature")),
    ),
    Claim(
        "with the controller training survives every spike",
        "to ×10⁴",
        "log₁₀ end/before the spike ≤ 0",
        at_most(0.0, partial(_survived, method="safe")),
    ),
    Claim(
        "with gradients clipped at 1 it does not survive the largest",
        "clipping still collapses",
        "log₁₀ end/before the spike ≥ 0",
        at_least(0.0, partial(_survived, method="clip", largest=True)),
    ),
    Claim(
        "with nothing it does not either",
        "—",
        "log₁₀ end/before the spike ≥ 0",
        at_least(0.0, partial(_survived, method="nothing", largest=True)),
    ),
    Claim(
        "without a spike the controller does no harm",
        "—",
        "end/end without it ≤ 1.1",
        at_most(1.1, _harm),
    ),
    Claim(
        "no step under the controller is longer than ρ_a",
        "τ ≤ ρ_a",
        "largest r − 1 ≤ 10⁻⁴",
        at_most(1e-4, each("part", _largest, lambda part: "all runs", part="spike", method="safe")),
    ),
)


def notes(records: Sequence[Record]) -> str:
    """Where the loss rises, is above its start, and is worse than guessing; spreads; and what survived."""
    collapse, temperature, spike = (
        select(records, part=part) for part in ("collapse", "temperature", "spike")
    )
    blocks = [_onsets(collapse)] if collapse else []
    for title, some in (
        ("networks and directions", collapse),
        ("temperatures", temperature),
        ("temperatures ≥ 1", select(temperature, temperature=lambda value: value >= 1)),
        ("temperatures ≤ 1", select(temperature, temperature=lambda value: value <= 1)),
    ):
        if some:
            # Where temperatures were varied, the spreads of each network by itself.
            groups = (
                [some]
                if some[0]["part"] == "collapse"
                else [select(some, network=network) for network in distinct(some, "network")]
            )
            means = [
                f"{name} {np.mean(np.concatenate([_spreads(name, group) for group in groups])):.2f}"
                for name in PREDICTORS
            ]
            blocks.append(f"Std of log₁₀ of the onset over {title}, in units of: {', '.join(means)}")
    survived = []
    for method in distinct(spike, "method"):
        some = select(spike, method=method)
        factors = distinct(some, "factor")
        counts = [
            f"×{factor:g} {sum(_survival(one) < 0 for one in select(some, factor=factor))}"
            for factor in factors
        ]
        survived.append(f"Survived with {method}, of {len(some) // len(factors)}: {', '.join(counts)}")
    if survived:
        blocks.append("\n".join(survived))
    if acted := [one["acted"] for one in select(spike, method="safe", factor=1)]:
        blocks.append(f"Without a spike the controller acted on {np.mean(acted):.1%} of the steps")
    return "\n\n".join(blocks)


def _onsets(collapse: Sequence[Record]) -> str:
    directions = distinct(collapse, "direction")
    rows = []
    for network in distinct(collapse, "network"):
        row = [network]
        for direction in directions:
            some = select(collapse, network=network, direction=direction, stage="trained")
            medians = [
                np.median([_number(one[key]) for one in some]) for key in ("rises", "above", "collapse")
            ]
            row.append(" · ".join(f"{median:.3g}" for median in medians))
        rows.append(row)
    lines = [
        "Median r after training, over seeds: the loss first rises · is above its start · above ln K",
        table(("network", *directions), rows),
        "",
    ]
    for direction in directions:
        onsets = [_number(one["above"]) for one in select(collapse, direction=direction)]
        lines.append(
            f"Onset along {direction}: before r = 1 in {sum(r < 1 for r in onsets)} of {len(onsets)} "
            f"steps, least r {min(onsets):.3g}, median {np.median(onsets):.3g}"
        )
    return "\n".join(lines)


COLOURS = {"gradient": BLUE, "random": ORANGE, "adam": GREEN, "muon": VIOLET}
METHOD_COLOURS = {"nothing": ORANGE, "clip": VIOLET, "safe": BLUE}
NEAREST = -2.0
R_AXIS = SvgAxis(NEAREST, math.log10(FARTHEST), ticks([-2.0, -1.0, 0.0, 1.0, 2.0], power=True), strong=0.0)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Onsets by direction, onsets over temperatures, and the end of runs with spikes."""
    for part, draw in (("collapse", _collapse), ("temperature", _temperature), ("spike", _spike)):
        if own := select(records, part=part):
            yield part, draw(own).svg()


def _collapse(records: Sequence[Record]) -> SvgFigure:
    networks = distinct(records, "network")
    rows = []
    for stage in distinct(records, "stage"):
        panels = []
        for network in networks:
            lines = []
            for place, direction in enumerate(COLOURS):
                some = select(records, network=network, stage=stage, direction=direction)
                across = [place + 0.12 * (int(one["seed"]) - 2) for one in some]
                lines.append(dots(across, [_log(one["above"]) for one in some], COLOURS[direction]))
            panels.append(lines)
        axis = SvgAxis(-0.5, 3.5, dict(enumerate(COLOURS)))
        rows.append(SvgRow(f"onset r, {stage}", axis, R_AXIS, panels))
    title = "How long a step may be before the loss is above its start, in units of ρ_a"
    return SvgFigure(title, list(COLOURS.items()), networks, rows)


def _temperature(records: Sequence[Record]) -> SvgFigure:
    networks = distinct(records, "network")
    axis = SvgAxis(-2.0, 2.0, ticks([-2.0, 0.0, 2.0], power=True))
    lengths = [_log(one["above"]) + math.log10(one["radius"]) for one in records]
    bottom, top = math.floor(min(lengths)), math.ceil(max(lengths))
    panels: dict[str, list[list[SvgLine]]] = {ORANGE: [], BLUE: []}
    for network in networks:
        by_seed = [select(records, network=network, seed=seed) for seed in distinct(records, "seed")]
        for colour, drawn in panels.items():
            drawn.append(
                [SvgLine([_spot(one, in_radii=colour == BLUE) for one in some], colour) for some in by_seed]
            )
    powers = ticks(
        [float(power) for power in range(bottom, top + 1, max(1, (top - bottom) // 4))], power=True
    )
    return SvgFigure(
        "Onset along the gradient with logits over T, a line for each seed",
        [("length τ", ORANGE), ("r = τ/ρ_a", BLUE)],
        networks,
        [
            SvgRow("τ", axis, SvgAxis(bottom, top, powers), panels[ORANGE]),
            SvgRow("r", axis, R_AXIS, panels[BLUE], note="temperature T"),
        ],
    )


def _spot(one: Record, *, in_radii: bool) -> tuple[float, float]:
    onset = _log(one["above"]) + (0 if in_radii else math.log10(one["radius"]))
    return math.log10(one["temperature"]), onset


def _spike(records: Sequence[Record]) -> SvgFigure:
    networks = distinct(records, "network")
    axis = SvgAxis(0.0, 4.0, ticks([0.0, 1.0, 2.0, 3.0, 4.0], power=True))
    worse = SvgAxis(-1.0, 2.0, ticks([-1.0, 0.0, 1.0, 2.0], power=True), strong=0.0)
    rows = []
    for optimizer in distinct(records, "optimizer"):
        panels = []
        for network in networks:
            lines = []
            for method, colour in METHOD_COLOURS.items():
                some = select(records, network=network, optimizer=optimizer, method=method)
                factors = sorted(distinct(some, "factor"))
                ends = [[_end(one) for one in select(some, factor=factor)] for factor in factors]
                points = [
                    (math.log10(factor), float(np.median(own)))
                    for factor, own in zip(factors, ends, strict=True)
                ]
                lines.append(
                    SvgLine(points, colour, False, [min(own) for own in ends], [max(own) for own in ends])
                )
            panels.append(lines)
        rows.append(SvgRow(f"end/before, {optimizer}", axis, worse, panels, note="factor of the spike"))
    title = "The loss at the end over that before a spike of the learning rate"
    return SvgFigure(title, list(METHOD_COLOURS.items()), networks, rows)


def _end(record: Record) -> float:
    """log₁₀ of the ratio; at the edge of the panel where training ended in infinity."""
    return 2.0 if record["end"] is None else math.log10(max(record["end"] / record["before"], 1e-3))


def _log(value: float | None) -> float:
    return math.log10(FARTHEST) if value is None else math.log10(max(value, 10**NEAREST))
