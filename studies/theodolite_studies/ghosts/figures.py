"""The figures of the study of ghosts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import BLUE, GREEN, ORANGE, VIOLET, SvgAxis, SvgFigure, SvgLine, SvgRow, ticks
from theodolite_studies.framework.records import Record

COLOURS = {"gradient": BLUE, "random": ORANGE, "adam": GREEN, "muon": VIOLET}
METHOD_COLOURS = {"nothing": ORANGE, "clip": VIOLET, "safe": BLUE}
FARTHEST = math.log10(200)
NEAREST = -2.0
R_AXIS = SvgAxis(NEAREST, FARTHEST, ticks([-2.0, -1.0, 0.0, 1.0, 2.0], power=True), strong=0.0)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Onsets by direction, onsets over temperatures, and the end of runs with spikes."""
    by_part = {
        part: [one for one in records if one["part"] == part] for part in ("collapse", "temperature", "spike")
    }
    if by_part["collapse"]:
        yield "collapse", _collapse(by_part["collapse"]).svg()
    if by_part["temperature"]:
        yield "temperature", _temperature(by_part["temperature"]).svg()
    if by_part["spike"]:
        yield "spike", _spike(by_part["spike"]).svg()


def _collapse(records: Sequence[Record]) -> SvgFigure:
    networks = _values(records, "network")
    rows = []
    for stage in _values(records, "stage"):
        panels = [
            [
                SvgLine(
                    [
                        (place + 0.12 * (int(one["seed"]) - 2), _log(one["above"]))
                        for one in records
                        if (one["network"], one["stage"], one["direction"]) == (network, stage, direction)
                    ],
                    COLOURS[direction],
                    joined=False,
                )
                for place, direction in enumerate(COLOURS)
            ]
            for network in networks
        ]
        axis = SvgAxis(-0.5, 3.5, dict(enumerate(COLOURS)))
        rows.append(SvgRow(f"onset r, {stage}", axis, R_AXIS, panels))
    return SvgFigure(
        "How long a step may be before the loss is above its start, in units of ρ_a",
        list(COLOURS.items()),
        networks,
        rows,
    )


def _temperature(records: Sequence[Record]) -> SvgFigure:
    networks, low, high = _values(records, "network"), -2.0, 2.0
    axis = SvgAxis(low, high, ticks([-2.0, 0.0, 2.0], power=True))
    lengths = [_log(one["above"]) + math.log10(one["radius"]) for one in records]
    bottom, top = math.floor(min(lengths)), math.ceil(max(lengths))
    raw, scaled = [], []
    for network in networks:
        by_seed = [
            [one for one in records if (one["network"], one["seed"]) == (network, seed)]
            for seed in _values(records, "seed")
        ]
        raw.append(
            [
                SvgLine(
                    [
                        (math.log10(one["temperature"]), _log(one["above"]) + math.log10(one["radius"]))
                        for one in some
                    ],
                    ORANGE,
                )
                for some in by_seed
            ]
        )
        scaled.append(
            [
                SvgLine([(math.log10(one["temperature"]), _log(one["above"])) for one in some], BLUE)
                for some in by_seed
            ]
        )
    powers = ticks(
        [float(power) for power in range(bottom, top + 1, max(1, (top - bottom) // 4))], power=True
    )
    return SvgFigure(
        "Onset along the gradient with logits over T, a line for each seed",
        [("length τ", ORANGE), ("r = τ/ρ_a", BLUE)],
        networks,
        [
            SvgRow("τ", axis, SvgAxis(bottom, top, powers), raw),
            SvgRow("r", axis, R_AXIS, scaled, note="temperature T"),
        ],
    )


def _spike(records: Sequence[Record]) -> SvgFigure:
    networks = _values(records, "network")
    axis = SvgAxis(0.0, 4.0, ticks([0.0, 1.0, 2.0, 3.0, 4.0], power=True))
    worse = SvgAxis(-1.0, 2.0, ticks([-1.0, 0.0, 1.0, 2.0], power=True), strong=0.0)
    rows = []
    for optimizer in _values(records, "optimizer"):
        panels = []
        for network in networks:
            lines = []
            for method, colour in METHOD_COLOURS.items():
                some = [
                    one
                    for one in records
                    if (one["network"], one["optimizer"], one["method"]) == (network, optimizer, method)
                ]
                factors = sorted({float(one["factor"]) for one in some})
                ends = [[_end(one) for one in some if one["factor"] == factor] for factor in factors]
                lines.append(
                    SvgLine(
                        [
                            (math.log10(factor), float(np.median(each)))
                            for factor, each in zip(factors, ends, strict=True)
                        ],
                        colour,
                        lows=[min(each) for each in ends],
                        highs=[max(each) for each in ends],
                    )
                )
            panels.append(lines)
        rows.append(SvgRow(f"end/before, {optimizer}", axis, worse, panels, note="factor of the spike"))
    return SvgFigure(
        "The loss at the end over that before a spike of the learning rate",
        list(METHOD_COLOURS.items()),
        networks,
        rows,
    )


def _end(record: Record) -> float:
    """log₁₀ of the ratio; at the edge of the panel where training ended in infinity."""
    return 2.0 if record["end"] is None else math.log10(max(record["end"] / record["before"], 1e-3))


def _log(value: float | None) -> float:
    return FARTHEST if value is None else math.log10(max(value, 10**NEAREST))


def _values(records: Sequence[Record], key: str) -> list[str]:
    return list(dict.fromkeys(record[key] for record in records))
