"""Records of the study of modular addition with known verdicts."""

from __future__ import annotations

from typing import Any

from theodolite_studies.modular_addition.claims import ADAMW, DESCENT, EQUAL, WIDTHS
from theodolite_studies.modular_addition.reading import TEST_TIME

SEEDS = 5
GOOD: dict[str, float] = {
    "single": 0.97,
    "alignment": 0.995,
    "same": 1.0,
    "unused": 0,
    "dispersion": 0.8,
    "symmetry 1": 0.9,
    "symmetry 2": 0.5,
    "symmetry 4": 0.3,
    "ghosts": 0.5,
    "time": 0.95,
    "won": 1.0,
    "misalignment": 0.2,
    "equal": 0.95,
    "even": 1.0,
    "odd": 0.04,
    "memorised": 0.02,
    "end": 0.99,
    "without": 0.2,
    "rise": 0.2,
    "growth": 1.2,
    "shrinkage": 0.9,
    "late rise": 0.05,
    "doubling": 0.7,
    "new at first": 0.0,
    "new in the end": 0.99,
    "new without": 0.1,
}
"""Values under which every claim holds but one, which says that the least misalignment predicts winners."""


def records(**changes: float) -> list[dict[str, Any]]:
    """Of all parts, with some of the values of `GOOD` changed; keys have underscores for spaces."""
    values = GOOD | {key.replace("_", " "): value for key, value in changes.items()}
    found: list[dict[str, Any]] = []
    for seed in range(SEEDS):
        found += _waves(values, seed)
        for place, network in enumerate(WIDTHS):
            found += _stages(values, network, "grokking", seed, 2000 * values["doubling"] ** place)
        found += _stages(values, "p 23", "ordered", seed, 2000)
    return found


def _waves(values: dict[str, float], seed: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    names = ("single", "alignment", "same", "unused", "dispersion", "ghosts")
    names = (*names, "symmetry 1", "symmetry 2", "symmetry 4")
    for network in (*ADAMW, *DESCENT, *EQUAL):
        own = {"part": "waves", "network": network, "decay": 0.0, "seed": seed}
        slight = 0.001 * seed
        for when in ("quarter", "end"):
            read = {name: values[name] for name in names} | {"loss": 0.1, "concentration": 0.8}
            found.append({**own, "kind": "mechanism", "when": when, "step": 100, **read})
        least = values["equal"] if network in EQUAL else values["misalignment"]
        shares = {"time": values["time"] - slight, "start": 0.6, "amplitude": 0.5, "misalignment": least}
        won = dict.fromkeys(shares, values["won"])
        quarters = {"by lead": [0.8, 0.9, 1.0, 1.0], "leads": [1.0, 1.1, 1.2, 1.5]}
        found.append({**own, "kind": "lottery", "all": shares, "won": won, **quarters})
        accuracy = {name: values["odd" if name in ("x", "x³") else "even"] for name in TEST_TIME}
        found.append({**own, "kind": "swapped", "accuracy": accuracy})
        if seed == 0:
            phases = {"doubled": [0.0, 1.0], "psi": [0.1, 1.1]}
            spread = {"concentrations": [0.5, 0.9], "at the start": [0.1, 0.2]}
            found.append({**own, "kind": "neurons", **phases, **spread})
    return found


def _stages(
    values: dict[str, float], network: str, part: str, seed: int, step: float
) -> list[dict[str, Any]]:
    """Three moments with decay, and two without."""
    found: list[dict[str, Any]] = []
    ordered = part == "ordered"
    first = {"test": 0.7 if ordered else values["memorised"], "new": values["new at first"]}
    last = {"test": values["end"], "new": values["new in the end"]}
    rise = values["rise"]
    for decay in (1.0, 0.0):
        own = {
            "part": part,
            "network": network,
            "decay": decay,
            "seed": seed,
            "mirrored": 1.0 if ordered else None,
        }
        moment = {**own, "kind": "moment"}
        at_first = {"step": 500, "concentration": 0.3, "norm": 50.0, **first}
        found.append({**moment, "moment": "memorised", **at_first})
        grown = 50.0 * values["growth"]
        if decay:
            between = {"concentration": 0.3 + rise, "norm": grown, "test": 0.96, "new": 0.9}
            found.append(
                {**moment, "moment": "generalised", "step": round(step * (1 + 0.01 * seed)), **between}
            )
        else:
            last = {"test": values["without"], "new": values["new without"]}
        ends = {"concentration": 0.3 + rise + values["late rise"], "norm": grown * values["shrinkage"]}
        found.append({**moment, "moment": "end", "step": 6000, **ends, **last})
        series = {name: [0.1, 0.5, 1.0] for name in ("train", "test", "new", "concentration", "norm")}
        series |= {"mirrored": [0.1, 0.5, 1.0]}
        found.append({**own, "kind": "curve", "curves": {"steps": [0, 20, 6000], **series}})
    return found
