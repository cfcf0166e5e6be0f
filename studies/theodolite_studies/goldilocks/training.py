"""Figures 2, 4 and 5: the runs, by the learning-rate rules of appendix G, and what came of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from theodolite.fleet.run import Run
from theodolite_studies.framework.records import Record
from theodolite_studies.goldilocks.setting import (
    NORMED,
    RESNET,
    TRAINED,
    Column,
    GoldilocksSetting,
    Network,
    workload_name,
)

TRAINING_PARTS = ("temperature", "scale", "adam", "neighbours")
EPS = 1e-8
"""Adam's, at T = 1."""
Rule = Literal["temperature", "homogeneous", "normed", "identity", "adam"]


@dataclass(frozen=True)
class MapCell:
    """One square of a map: a column, a temperature or a scale, a learning rate, a seed."""

    part: str
    network: Network
    column: Column
    rule: Rule
    at: float
    """log10 of T; of α in the part `scale`."""
    rate: float
    """log10 of η₀."""
    seed: int

    def run(self, setting: GoldilocksSetting) -> Run:
        """How it is trained."""
        adam, scaled = self.rule == "adam", self.part == "scale"
        temperature = 1.0 if scaled else 10.0**self.at
        return Run(
            workload_name(self.network.name, self.column),
            self.network.size,
            lr=10.0 ** exponent_of_rate(self.rule, self.network, self.at, self.rate),
            optimizer="adamw" if adam else "sgd",
            parameterization="standard",
            seed=self.seed,
            steps=setting.epochs,
            eps=EPS / temperature if adam else None,
            init_scale=10.0**self.at if scaled else 1.0,
            temperature=temperature,
            schedule="constant",
            precision=setting.precision,
            held_out=1,
            every=setting.epochs,
            probes=("accuracy",),
        )


def exponent_of_rate(rule: Rule, network: Network, at: float, rate: float) -> float:
    """log10 of the learning rate by the rules of appendix G.

    | rule | η' |
    |---|---|
    | temperature | T·η₀ |
    | homogeneous | α^{2−L}·η₀ |
    | identity | α^{2−L+ℒ}·η₀, where the identity path prevails |
    | normed | α·η₀ |
    | adam | η₀, and ε/T: Adam's step does not depend on the size of the gradient |

    >>> exponent_of_rate("homogeneous", RESNET, 0.5, -2.0), exponent_of_rate("identity", RESNET, -1.0, -2.0)
    (-3.0, -2.0)
    """
    powers: Mapping[Rule, int] = {
        "temperature": 1,
        "homogeneous": 2 - network.layers,
        "identity": 2 - network.layers + network.branched,
        "normed": 1,
        "adam": 0,
    }
    return powers[rule] * at + rate


def map_cells(part: str, setting: GoldilocksSetting, seeds: Sequence[int] = ()) -> list[MapCell]:
    """The cells of a part, the tamest first: engines try the first run to see whether all can be made."""
    found = [
        MapCell(part, network, column, rule, at, rate, seed)
        for network, column, rule, ats, rates in _maps(part, setting)
        for at in ats
        for rate in rates
        for seed in (seeds or setting.seeds)
    ]
    return sorted(found, key=lambda cell: (abs(cell.at), cell.rate))


def runs_of_a_map(part: str, setting: GoldilocksSetting) -> int:
    """How many runs the largest map of a part takes for each seed."""
    return max(len(ats) * len(rates) for *_, ats, rates in _maps(part, setting))


_Map = tuple[Network, Column, Rule, tuple[float, ...], tuple[float, ...]]


def _maps(part: str, setting: GoldilocksSetting) -> Iterator[_Map]:
    if part == "neighbours":
        for column in ("A", "B", "D"):
            yield RESNET, column, "temperature", setting.trained_temperatures(RESNET), setting.rates
        return
    for column, network in TRAINED.items():
        temperatures, alphas = setting.trained_temperatures(network), setting.trained_alphas()
        if part == "temperature":
            yield network, column, "temperature", temperatures, setting.rates
        elif part == "adam":
            yield network, column, "adam", temperatures, setting.adam_rates
        else:
            rule: Rule = "normed" if column in NORMED else "homogeneous"
            yield network, column, rule, alphas, setting.rates
            if column == "C":
                small = tuple(alpha for alpha in alphas if alpha < 0)
                yield network, column, "identity", small, setting.rates


def run_records(setting: GoldilocksSetting, rows: Iterable[Mapping[str, Any]]) -> list[Record]:
    """From a ledger's rows: one record for each column, temperature or scale, and seed, over all rates.

    None stands for a run that diverged. A map of which a run is missing is left out: parts share runs, so a
    part that was never asked for may have some.
    """
    by_identity = {row["identity"]: row for row in rows if row["status"] != "failed"}
    seeds = sorted({row["seed"] for row in by_identity.values()})
    records: list[Record] = []
    for part in TRAINING_PARTS if seeds else ():
        by_map: dict[tuple[Any, ...], dict[float, list[MapCell]]] = {}
        for cell in map_cells(part, setting, seeds):
            places = by_map.setdefault((cell.network.name, cell.column, cell.rule, cell.seed), {})
            places.setdefault(cell.at, []).append(cell)
        for _, places in sorted(by_map.items()):
            found = {
                at: [by_identity.get(cell.run(setting).identity) for cell in some]
                for at, some in sorted(places.items())
            }
            if all(row is not None for some in found.values() for row in some):
                records += [
                    _record(places[at], [row for row in some if row is not None])
                    for at, some in found.items()
                ]
    return records


def _record(some: Sequence[MapCell], rows: Sequence[Mapping[str, Any]]) -> Record:
    first = some[0]
    return {
        "part": first.part,
        "network": first.network.name,
        "column": first.column,
        "rule": first.rule,
        "at": first.at,
        "seed": first.seed,
        "rates": [cell.rate for cell in some],
        "train": [_short(row.get("train accuracy")) for row in rows],
        "test": [_short(row.get("accuracy")) for row in rows],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
