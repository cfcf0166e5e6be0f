"""The claims of the study of ghosts. Thresholds were written down before anything was run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, settled

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


def claims(records: Sequence[Record]) -> list[Claim]:
    """Of each part that has been run."""
    found: list[Claim] = []
    if collapse := _of(records, "collapse"):
        found += _collapse_claims(collapse)
    if temperature := _of(records, "temperature"):
        found += _temperature_claims(temperature)
    if spike := _of(records, "spike"):
        found += _spike_claims(spike)
    return found


def _collapse_claims(records: Sequence[Record]) -> list[Claim]:
    trained = [record for record in records if record["stage"] == "trained"]
    return [
        settled(
            "no step with r < 1 raises the loss",
            "no model fails for r < 1",
            "r of the onset ≥ 1",
            _cases(records, ("network", "direction", "stage"), lambda record: _number(record["above"])),
            limit=1.0,
            below=False,
        ),
        settled(
            "no step with r < 1 leaves a trained network worse than guessing",
            "no model fails for r < 1",
            "r of the collapse ≥ 1",
            _cases(trained, ("network", "direction"), lambda record: _number(record["collapse"])),
            limit=1.0,
            below=False,
        ),
        settled(
            "collapse appears soon beyond r = 1",
            "appears once r ≥ 1",
            "r of the onset ≤ 2",
            _cases(records, ("network", "direction", "stage"), lambda record: _number(record["above"])),
            limit=2.0,
            below=True,
        ),
        settled(
            "in units of ρ_a onsets of all networks and directions lie closer together",
            "r separates safe from dangerous",
            "std of log₁₀ ≤ half of that of lengths",
            [Case("all cases", _ratios(records, "ρ_a"))],
            limit=0.5,
            below=True,
        ),
    ]


def _temperature_claims(records: Sequence[Record]) -> list[Claim]:
    cases = [
        Case(str(network), _ratios([one for one in records if one["network"] == network], "ρ_a"))
        for network in _values(records, "network")
    ]
    return [
        settled(
            "over temperatures, the onset spreads less in units of ρ_a",
            "std 0.992 → 0.164",
            "std of log₁₀ ≤ half of that of lengths",
            cases,
            limit=0.5,
            below=True,
        )
    ]


def _spike_claims(records: Sequence[Record]) -> list[Claim]:
    def part(method: str, *factors: float) -> list[Record]:
        return [one for one in records if one["method"] == method and one["factor"] in factors]

    largest = max(_values(records, "factor"))
    spikes = [factor for factor in _values(records, "factor") if factor > 1]
    axes = ("network", "optimizer", "factor")
    calm = {_key(one): _number(one["end"]) for one in part("nothing", 1.0)}
    return [
        settled(
            "with the controller training survives every spike",
            "to ×10⁴",
            "log₁₀ end/before the spike ≤ 0",
            _cases(part("safe", *spikes), axes, _survival),
            limit=0.0,
            below=True,
        ),
        settled(
            "with gradients clipped at 1 it does not survive the largest",
            "clipping still collapses",
            "log₁₀ end/before the spike ≥ 0",
            _cases(part("clip", largest), axes, _survival),
            limit=0.0,
            below=False,
        ),
        settled(
            "with nothing it does not either",
            "—",
            "log₁₀ end/before the spike ≥ 0",
            _cases(part("nothing", largest), axes, _survival),
            limit=0.0,
            below=False,
        ),
        settled(
            "without a spike the controller does no harm",
            "—",
            "end/end without it ≤ 1.1",
            _cases(
                part("safe", 1.0), ("network", "optimizer"), lambda one: _number(one["end"]) / calm[_key(one)]
            ),
            limit=1.1,
            below=True,
        ),
        settled(
            "no step under the controller is longer than ρ_a",
            "τ ≤ ρ_a",
            "largest r − 1 ≤ 10⁻⁴",
            [Case("all runs", _largest(records))],
            limit=1e-4,
            below=True,
        ),
    ]


def notes(records: Sequence[Record]) -> str:
    """By network and direction: where the loss rises, is above its start, and is worse than guessing."""
    lines: list[str] = []
    collapse = _of(records, "collapse")
    if collapse:
        lines += [
            "Median r after training, over seeds: the loss first rises · is above its start · above ln K"
        ]
        rows = [("", *_values(collapse, "direction"))]
        for network in _values(collapse, "network"):
            row = [str(network)]
            for direction in _values(collapse, "direction"):
                some = [
                    one
                    for one in collapse
                    if (one["network"], one["direction"], one["stage"]) == (network, direction, "trained")
                ]
                row.append(" · ".join(f"{_median(some, key):.3g}" for key in ("rises", "above", "collapse")))
            rows.append(tuple(row))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines += [
            "  ".join(text.ljust(wide) for text, wide in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        for place, direction in enumerate(_values(collapse, "direction")):
            onsets = [_number(one["above"]) for one in collapse if one["direction"] == direction]
            lines += [
                *([""] if place == 0 else []),
                f"Onset along {direction}: before r = 1 in {sum(r < 1 for r in onsets)} of {len(onsets)} "
                f"steps, least r {min(onsets):.3g}, median {np.median(onsets):.3g}",
            ]
    temperature = _of(records, "temperature")
    warm = [one for one in temperature if one["temperature"] >= 1]
    cold = [one for one in temperature if one["temperature"] <= 1]
    for title, some in (
        ("networks and directions", collapse),
        ("temperatures", temperature),
        ("temperatures ≥ 1", warm),
        ("temperatures ≤ 1", cold),
    ):
        if some:
            spreads = ", ".join(f"{name} {np.mean(_within(some, name)):.2f}" for name in PREDICTORS)
            lines += ["", f"Std of log₁₀ of the onset over {title}, in units of: {spreads}"]
    spike = _of(records, "spike")
    for place, method in enumerate(_values(spike, "method")):
        some = [one for one in spike if one["method"] == method]
        num = len(some) // len(_values(some, "factor"))
        counts = ", ".join(
            f"×{factor:g} {sum(_survival(one) < 0 for one in some if one['factor'] == factor)}"
            for factor in _values(some, "factor")
        )
        lines += [*([""] if place == 0 else []), f"Survived with {method}, of {num}: {counts}"]
    acted = [one["acted"] for one in spike if one["method"] == "safe" and one["factor"] == 1]
    if acted:
        lines += ["", f"Without a spike the controller acted on {np.mean(acted):.1%} of the steps"]
    return "\n".join(lines)


def _ratios(records: Sequence[Record], unit: str) -> NDArray[np.float64]:
    """By seed: the spread of log₁₀ of the onset in some unit, over that of the length itself."""
    return _spreads(records, unit) / _spreads(records, "the length itself")


def _within(records: Sequence[Record], unit: str) -> NDArray[np.float64]:
    """The spreads; where temperatures were varied, those of each network by itself."""
    if records[0]["part"] == "collapse":
        return _spreads(records, unit)
    networks = _values(records, "network")
    return np.concatenate(
        [_spreads([one for one in records if one["network"] == name], unit) for name in networks]
    )


def _spreads(records: Sequence[Record], unit: str) -> NDArray[np.float64]:
    found = []
    for seed in _values(records, "seed"):
        some = [one for one in records if one["seed"] == seed and _number(one["above"]) > 0]
        onsets = [min(_number(one["above"]), FARTHEST) * PREDICTORS[unit](one) for one in some]
        known = [math.log10(onset) for onset in onsets if not math.isnan(onset)]
        found.append(float(np.std(known)) if known else math.nan)
    return np.array(found)


def _cases(records: Sequence[Record], axes: Sequence[str], read: Callable[[Record], float]) -> list[Case]:
    """One case for each combination, its values over the seeds."""
    found: dict[str, list[float]] = {}
    for record in records:
        where = " ".join(f"×{record[axis]:g}" if axis == "factor" else str(record[axis]) for axis in axes)
        found.setdefault(where, []).append(read(record))
    return [Case(where, np.array(values)) for where, values in found.items()]


def _largest(records: Sequence[Record]) -> NDArray[np.float64]:
    """By seed: by how much the largest r under the controller is above 1."""
    safe = [one for one in records if one["method"] == "safe"]
    return np.array(
        [
            max(_number(one["largest"]) for one in safe if one["seed"] == seed) - 1
            for seed in _values(safe, "seed")
        ]
    )


def _survival(record: Record) -> float:
    """log₁₀ of the loss at the end over that before the spike: ratios spread over orders of magnitude."""
    return math.log10(_number(record["end"]) / record["before"])


def _number(value: float | None) -> float:
    """Nothing is kept for what is not finite."""
    return math.inf if value is None else float(value)


def _median(records: Iterable[Record], key: str) -> float:
    return float(np.median([_number(one[key]) for one in records]))


def _key(record: Record) -> tuple[object, ...]:
    return record["network"], record["optimizer"], record["seed"]


def _of(records: Sequence[Record], part: str) -> list[Record]:
    return [record for record in records if record["part"] == part]


def _values(records: Iterable[Record], key: str) -> list[Any]:
    return list(dict.fromkeys(record[key] for record in records))
