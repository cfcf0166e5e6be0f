"""The runs that one law goes through: the same recipe at every size, with one base learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from theodolite.core.arguments import did_you_mean, positive
from theodolite.core.errors import UseError
from theodolite.fits.minimizing import Array
from theodolite.present.text import counted, listed, number

Row = Mapping[str, Any]
Network = tuple[int, int]
"""Width and depth."""

SETTINGS = (
    *("workload", "optimizer", "weight_decay", "decay", "eps", "vector_lr", "init_scale", "temperature"),
    *("schedule", "final", "precision", "held_out_batches"),
)
"""What has to be the same at every size, with the options of the optimizer and the base. Steps, warmup and
batch go with the size."""
PREFIXES = ("base_", "options.", "vector_options.")
WIDELY_RUN = 0.8
"""A learning rate can be chosen if it was run at this share of the cells at which the most common one was."""


@dataclass(frozen=True)
class SizedRun:
    """A finished run: how large it was, and its loss."""

    identity: str
    width: int
    depth: int
    parameters: int
    tokens: int
    seed: int
    flop: float
    """Of all its training."""
    loss: float
    """The held-out loss."""


def settings_of(row: Row) -> dict[str, Any]:
    """What a later run has to share with this one to be a run of the same recipe."""
    names = [name for name in row if name in SETTINGS or name.startswith(PREFIXES)]
    return {name: row[name] for name in sorted(names) if row[name] is not None}


def recipe(
    rows: Sequence[Row], parameterization: str, *, optimizer: str | None, where: Mapping[str, Any]
) -> list[Row]:
    """The settled rows of one parameterization and of one recipe; the error names what differs."""
    chosen = [row for row in rows if row["parameterization"] == parameterization]
    chosen = [row for row in chosen if row["status"] != "failed"]
    if optimizer is not None:
        chosen = [row for row in chosen if row["optimizer"] == optimizer]
    for name, value in where.items():
        if rows and not any(name in row for row in rows):
            near = did_you_mean(name, {column for row in rows for column in row})
            raise UseError(f"where {name}={value}: the ledger has no column {name!r}.{near}")
        chosen = [row for row in chosen if _same(row.get(name), value)]
    if not any(row["status"] == "finished" for row in chosen):
        return []
    kinds: dict[str, dict[str, Any]] = {}
    for row in chosen:
        for name, value in settings_of(row).items():
            kinds.setdefault(name, {})[repr(value)] = value
    for name, values in kinds.items():
        if len(values) > 1:
            first = next(iter(values.values()))
            raise UseError(
                f"the {parameterization} runs differ in {name}: {listed([*map(str, values.values())])}. A "
                f"forecast is for one recipe: give where={{{name!r}: {first!r}}}, or --where {name}={first}"
            )
    return chosen


def tokens_of(row: Row) -> int:
    """Targets that a run has seen."""
    return int(row.get("reading.tokens", row.get("tokens")) or 0)


def network_of(row: Row) -> Network:
    """Width and depth."""
    return int(row["width"]), int(row["depth"])


def rates_of(rows: Iterable[Row]) -> list[float]:
    """The base learning rates that were run, from the lowest."""
    return sorted({float(row["lr"]) for row in rows})


def best_rate(rows: Sequence[Row], cells: Sequence[tuple[Network, int]]) -> float:
    """The base learning rate whose loss is the least above the best one, on average over these cells.

    A cell is a network and its steps. A rate that diverged at one of them is infinitely bad.
    """
    losses = _losses_by_rate(rows)
    known = [losses[cell] for cell in cells if cell in losses]
    num_run = {rate: sum(rate in cell for cell in known) for cell in known for rate in cell}
    enough = WIDELY_RUN * max(num_run.values())
    rates = sorted(rate for rate, num in num_run.items() if num >= enough)

    def excess(rate: float) -> float:
        above = []
        for cell in known:
            best = min(cell.values())
            if rate in cell and math.isfinite(best):
                above.append(math.log(cell[rate]) - math.log(best))
        return fmean(above) if above else math.inf

    return min(rates, key=excess)


def larger_half(rows: Sequence[Row]) -> list[tuple[Network, int]]:
    """The cells of the larger networks and longer runs."""
    sizes = {_cell(row): _extent(row) for row in rows if row["status"] == "finished"}
    ordered = sorted(sizes, key=lambda cell: sizes[cell])
    return ordered[len(ordered) // 2 :]


def of_smallest(rows: Sequence[Row]) -> list[tuple[Network, int]]:
    """The cells of the smallest network."""
    finished = [row for row in rows if row["status"] == "finished"]
    smallest = min(finished, key=lambda row: row["parameters"])
    return sorted({_cell(row) for row in finished if network_of(row) == network_of(smallest)})


def better_rate_at_largest(rows: Sequence[Row], rate: float) -> tuple[float, float] | None:
    """At the largest cell, the best rate and how far below the loss at `rate` it is; None if `rate` is it."""
    losses = _losses_by_rate(rows)
    largest = _cell(max((row for row in rows if row["status"] == "finished"), key=_extent))
    there = losses[largest]
    best = min(there, key=lambda one: there[one])
    if rate not in there or best == rate:
        return None
    return best, 1 - there[best] / there[rate]


def checked_rate(rows: Sequence[Row], lr: float) -> float:
    """A learning rate that was run; the error names those that were."""
    positive("lr", lr)
    known = rates_of(rows)
    near = [rate for rate in known if math.isclose(rate, lr, rel_tol=1e-6)]
    if not near:
        raise UseError(
            f"lr is {lr:g}, at which no run of the ledger was made: its base learning rates are "
            f"{', '.join(f'{rate:.4g}' for rate in known)}. Give one of them, or run this one first"
        )
    return near[0]


def at_rate(rows: Iterable[Row], rate: float) -> list[Row]:
    """The finished rows with this base learning rate."""
    return [row for row in rows if row["status"] == "finished" and float(row["lr"]) == rate]


def at_own_best(rows: Sequence[Row]) -> list[Row]:
    """The finished rows with the rate that is the best at their own network and length."""
    best = {cell: min(there, key=lambda one: there[one]) for cell, there in _losses_by_rate(rows).items()}
    return [row for row in rows if row["status"] == "finished" and row["lr"] == best[_cell(row)]]


def sized(rows: Iterable[Row], flop_per_token: Mapping[Network, float]) -> tuple[SizedRun, ...]:
    """The rows as runs, from the smallest."""
    found = []
    for row in rows:
        tokens = tokens_of(row)
        if not tokens or not row.get("parameters"):
            raise UseError(
                f"run {row['identity']} has no readings of its parameters and tokens (targets): a law needs "
                "both. Its workload's batches need targets"
            )
        network = network_of(row)
        found.append(
            SizedRun(
                row["identity"],
                *network,
                int(row["parameters"]),
                tokens,
                int(row["seed"]),
                flop_per_token[network] * tokens,
                float(row["held_out"]),
            )
        )
    return tuple(sorted(found, key=lambda run: (run.flop, run.identity)))


def columns(runs: Sequence[SizedRun]) -> tuple[Array, Array, Array, Array]:
    """Parameters, tokens, FLOP and losses."""
    found = np.array([(run.parameters, run.tokens, run.flop, run.loss) for run in runs], dtype=float)
    return found[:, 0], found[:, 1], found[:, 2], found[:, 3]


def rises(runs: Sequence[SizedRun]) -> str | None:
    """Says so if, on the most tokens, the largest network has a higher mean loss than a smaller one."""
    most = max(run.tokens for run in runs)
    by_size: dict[int, list[float]] = {}
    for run in runs:
        if run.tokens == most:
            by_size.setdefault(run.parameters, []).append(run.loss)
    means = {num: fmean(losses) for num, losses in sorted(by_size.items())}
    if len(means) < 2:
        return None
    best, largest = min(means, key=lambda num: means[num]), max(means)
    if means[largest] <= means[best]:
        return None
    return (
        f"its loss rises with size, from {number(means[best], 4)} at {counted(best, 'parameter')} to "
        f"{number(means[largest], 4)} at {counted(largest, 'parameter')}: no scaling law falls through that"
    )


def _same(value: Any, wanted: Any) -> bool:
    """Are they equal, also if one is a text as from a command line?"""
    try:
        return str(value) == str(wanted) or float(value) == float(wanted)
    except (TypeError, ValueError):
        return False


def _losses_by_rate(rows: Iterable[Row]) -> dict[tuple[Network, int], dict[float, float]]:
    """By cell and rate the mean loss over seeds, infinite if one of them diverged."""
    found: dict[tuple[Network, int], dict[float, list[float]]] = {}
    for row in rows:
        loss = float(row["held_out"]) if row["status"] == "finished" else math.inf
        found.setdefault(_cell(row), {}).setdefault(float(row["lr"]), []).append(loss)
    return {cell: {rate: fmean(each) for rate, each in there.items()} for cell, there in found.items()}


def _cell(row: Row) -> tuple[Network, int]:
    return network_of(row), int(row["steps"])


def _extent(row: Row) -> float:
    return float(row["parameters"]) * tokens_of(row)
