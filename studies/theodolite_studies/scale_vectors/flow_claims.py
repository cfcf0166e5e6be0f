"""What the gradient flow of a scale vector did, against the formulas.

Thresholds are those of rounding and of the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Case, Claim, Verdict, settled


def flow_claims(records: Sequence[Record]) -> list[Claim]:
    """The claims that the records of `scale_vectors_flow.experiments` decide."""
    kinds: dict[str, list[Record]] = {}
    for record in records:
        kinds.setdefault(record["kind"], []).append(record)
    if not kinds:
        return []
    still = [record for record in kinds["noise"] if not record["on_gain"]]
    decayed = [record for record in kinds["noise"] if record["on_gain"]]
    finest = min(record["step"] for record in kinds["conservation"])
    fine = [record for record in kinds["conservation"] if record["step"] == finest]
    kept = [record["shrunk"] for record in kinds["balance"] if "shrunk" in record]
    lopsided = [record for record in kinds["balance"] if record["on_weight"] and not record["on_gain"]]
    return [
        settled(
            "γ² − ‖w‖² drifts as the step",
            "conserved by the flow",
            "power off 1 by ≤ 0.1",
            [Case("GD", np.abs(np.array(_powers(kinds["conservation"])) - 1))],
            limit=0.1,
            below=True,
        ),
        _within("γ² follows from ‖a‖", "exact", [record["gain"] for record in fine], 0.01),
        _within("dA/dt is the formula's", "exact", [record["error"] for record in kinds["flow"]], 1e-6),
        _within("dc/dt = 2λ‖w‖² − 2μγ²", "exact", [record["error"] for record in kinds["balance"]], 1e-6),
        _within("μ = λ: c falls as e^-2λt", "balances", kept, 1e-6),
        settled(
            "μ = 0 < λ: γ drifts up",
            "drifts up",
            "> 0",
            [Case("mean of c", np.array([record["drift"] for record in lopsided]))],
            limit=0.0,
            below=False,
        ),
        settled(
            "noise, μ = 0: E‖γ‖² grows on",
            "no bound",
            "power ≥ 0.5",
            [Case("last 3 octaves", np.array([_last_power(record) for record in still]))],
            limit=0.5,
            below=False,
        ),
        settled(
            "noise, μ > 0: E‖γ‖² is bounded",
            "≤ (Dq + ½‖a*‖²)/2μ",
            "share ≤ 1",
            [Case("largest", np.array([max(record["values"]) / record["bound"] for record in decayed]))],
            limit=1.0,
            below=True,
        ),
    ]


def _within(claim: str, paper: str, errors: Sequence[float], limit: float) -> Claim:
    worst = max(errors)
    verdict: Verdict = "holds" if worst <= limit else "fails"
    return Claim(claim, paper, f"off ≤ {limit:g}", f"{worst:.1g} at most", verdict)


def _powers(records: Sequence[Record]) -> list[float]:
    """Of the step with which the drift goes, by seed, over the finer half of the steps."""
    found = []
    for seed in sorted({record["seed"] for record in records}):
        mine = sorted((record["step"], record["drift"]) for record in records if record["seed"] == seed)
        steps, drifts = np.array(mine[: len(mine) // 2]).T
        found.append(float(np.polyfit(np.log(steps), np.log(drifts), 1)[0]))
    return found


def _last_power(record: Record) -> float:
    """Of the time with which a quantity grows, over the last three octaves."""
    values, times = record["values"], record["times"]
    return float(np.log2(values[-1] / values[-4]) / np.log2(times[-1] / times[-4]))
