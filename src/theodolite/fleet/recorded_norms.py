"""The gradient norms of a run in a ledger, as a refined schedule needs them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from theodolite.core.errors import UseError
from theodolite.fleet.ledger import Ledger

PROBE = "gradient"


def gradient_norms(ledger: str | Path | Ledger, run: str | None = None) -> tuple[float, ...]:
    """One gradient norm (l2, of the whole network) for each step of a run that finished.

    Args:
        ledger: the folder, its file, or an open ledger.
        run: the identity, or the beginning of it; may be left out if only one run has norms.

    The run has to have the probe `gradient`. If it recorded only every so many steps, those between lie on
    straight lines: a refined schedule takes medians over a tenth of the run anyway.
    """
    if isinstance(ledger, Ledger):
        return _norms(ledger, run)
    with Ledger.read(ledger) as opened:
        return _norms(opened, run)


def _norms(ledger: Ledger, run: str | None) -> tuple[float, ...]:
    row = _chosen(ledger, run)
    identity = row["identity"]
    if row["status"] != "finished":
        raise UseError(
            f"run {identity} in {ledger.path} {row['status']} at step {row['step']}: its norms are not those "
            "of a run to follow. Give one that finished"
        )
    recorded = ledger.metrics(identity).get(PROBE)
    if not recorded:
        raise UseError(
            f"run {identity} in {ledger.path} recorded no gradient norms: make it with "
            f"Run(…, probes=({PROBE!r},))"
        )
    steps, norms = zip(*recorded, strict=True)
    for step, norm in recorded:
        if not math.isfinite(norm):
            raise UseError(f"the gradient norm of run {identity} is {norm} at step {step}: give another run")
    if steps[0] != 0 or steps[-1] != row["steps"] - 1:
        raise UseError(
            f"run {identity} in {ledger.path} has gradient norms from step {steps[0]} to {steps[-1]}, and "
            f"{row['steps']} steps: the others are missing"
        )
    return tuple(np.interp(np.arange(row["steps"]), steps, norms).tolist())


def _chosen(ledger: Ledger, run: str | None) -> dict[str, Any]:
    rows = ledger.rows()
    found = [row for row in rows if row["identity"].startswith(run or "")]
    if run is None:
        found = [row for row in found if PROBE in row["probes"]]
        if not found:
            raise UseError(
                f"none of the {len(rows)} runs in {ledger.path} recorded gradient norms: make one with "
                f"Run(…, probes=({PROBE!r},))"
            )
    if len(found) != 1:
        few = ", ".join(row["identity"] for row in (found or rows)[:3])
        said = f"{len(found)} runs" if found else "no run"
        asked = "with gradient norms" if run is None else f"whose identity begins with {run!r}"
        raise UseError(f"{ledger.path} has {said} {asked}: say which by run=…, as {few}")
    return found[0]
