"""What a search has found, read off the rows: the best settings at the base."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from theodolite.core.size import Size
from theodolite.sweeping.curves import Row, setting


def best_settings(
    rows: Sequence[Row], base: Size, axes: Sequence[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    """By optimizer and parameterization, the settings with the least mean loss over seeds at the base.

    >>> rows = [{"optimizer": "adamw", "parameterization": "plan", "width": 64, "depth": 4, "seed": 0,
    ...          "status": "finished", "lr": lr, "held_out": loss} for lr, loss in ((0.1, 3.0), (0.2, 2.0))]
    >>> best_settings(rows, Size(64, 4), ["lr"])
    {('adamw', 'plan'): {'lr': 0.2}}
    """
    losses: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        if Size(row["width"], row["depth"]) == base and row["status"] != "failed":
            mine = losses.setdefault((row["optimizer"], row["parameterization"]), {})
            loss = math.inf if row["held_out"] is None else row["held_out"]
            mine.setdefault(_settings(row, axes), []).append(loss)
    return {
        key: json.loads(min(mine, key=lambda settings: sum(mine[settings]) / len(mine[settings])))
        for key, mine in losses.items()
    }


def of_the_best(rows: Sequence[Row], base: Size, axes: Sequence[str]) -> list[Row]:
    """The rows that have, but for the learning rate, the best settings of their kind."""
    best = best_settings(rows, base, ["lr", *axes])
    kept = {key: json.dumps({name: settings[name] for name in axes}) for key, settings in best.items()}
    return [
        row for row in rows if kept.get((row["optimizer"], row["parameterization"])) == _settings(row, axes)
    ]


def _settings(row: Row, axes: Sequence[str]) -> str:
    return json.dumps({name: setting(row, name) for name in axes})
