"""Records of a world in which every claim about routing holds, or every one fails."""

from __future__ import annotations

from typing import Any

TIMES, BRANCHES = 3, 4


def made_up(*, holds: bool = True, seeds: int = 4) -> list[dict[str, Any]]:
    """Three learning rates, the middle one best by the validation loss alone."""
    return [
        _record(residual, seed, lr, holds)
        for residual in ("add", "routed", "time-routed")
        for seed in range(seeds)
        for lr in (-7.0, -6.0, -5.0)
    ]


def _record(residual: str, seed: int, lr: float, holds: bool) -> dict[str, Any]:
    wobble = 1 + 0.001 * seed
    place = ("add", "routed", "time-routed").index(residual)
    better = -0.01 * place * wobble if holds else 0.01 * place * wobble
    plain = residual == "add"
    if holds:
        inflation, fall, cosine = (3.0, 4.0, 0.99) if plain else (1.0, 1.1, 0.8)
    else:
        inflation, fall, cosine = (1.1, 1.2, 0.5) if plain else (1.2, 1.5, 0.7)
    late = _reading(inflation * wobble, fall * wobble, cosine - 0.0001 * seed, 0.3 if holds else 0.01)
    record = {
        "residual": residual,
        "seed": seed,
        "lr": lr,
        "parameters": 100,
        "validation": 0.5 if lr == -6 else 0.6,
        "test": 0.7 + better if lr == -6 else 0.1,
        "course": [1.0, 0.7],
        "late": late,
    }
    if plain:
        record["early"] = {
            key: values[:1]
            for key, values in _reading((0.8 if holds else 1.2) * inflation, fall, cosine, 0.3).items()
        }
    return record


def _reading(inflation: float, fall: float, cosine: float, slope: float) -> dict[str, Any]:
    """Numbers that grow with time by `slope` for each time, alike in both halves."""
    times = [1 + slope * time for time in range(TIMES)]
    cosines = [1 - (1 - cosine) * factor for factor in times]
    return {
        "start": [[2.0] * TIMES] * 2,
        "share": [[0.1] * TIMES] * 2,
        "stream": [[[2.0] * (BRANCHES - 1) + [2 * inflation * factor] for factor in times]] * 2,
        "added": [[[0.5] * (BRANCHES - 1) + [inflation] for _ in times]] * 2,
        "gradient": [[[2 * fall * factor] + [2.0] * (BRANCHES - 1) for factor in times]] * 2,
        "cosine": [[[value - 0.001, value, value, value + 0.001] for value in cosines]] * 2,
    }
