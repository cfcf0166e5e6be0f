"""Claims and figures of a coordinate study."""

from __future__ import annotations

from typing import Any

from theodolite_studies.coordinates.report import QUANTITIES
from theodolite_studies.coordinates.study import STUDY


def record(parameterization: str, width: int, depth: int, **powers: float) -> dict[str, Any]:
    """Values that follow powers of the width; branches fall with the depth as they should."""
    values = []
    for name in QUANTITIES:
        power = powers.get(name.replace(" ", "_").replace(".", "_"), 0.0)
        values.append([1.0, 1.0, width**power / (depth if "branch" in name else 1)])
    where = {"parameterization": parameterization, "width": width, "depth": depth, "seed": 0}
    return {"network": "gpt-pre", "optimizer": "adamw", **where, "status": "finished", "values": values}


def test_a_claim_is_the_slope_that_is_furthest_off() -> None:
    sizes = [(64, 4), (128, 4), (256, 4), (128, 2), (128, 8)]
    records = [record("plan", *size, stream=0.05, branch_1=-0.08, logits=3.0) for size in sizes]
    records += [record("standard", *size, change_of_logits=1.0) for size in sizes]
    depth, width = STUDY.decide(records)
    assert width.statement == "gpt-pre, adamw: sizes do not depend on the width"
    assert (width.here, width.verdict) == (
        "branch.1 -0.08 ± nan; standard change of logits +1.00 ± nan",
        "holds",
    )
    assert depth.verdict == "holds"
    records[0]["values"][QUANTITIES.index("stream")][-1] = None
    wide = STUDY.decide(records)[1]
    assert wide.verdict == "fails"
    assert wide.here.startswith("stream: diverged")
