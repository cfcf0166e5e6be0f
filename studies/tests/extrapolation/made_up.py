"""Records of the study of extrapolation with known verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from theodolite.data.two_cylinders import GAPS
from theodolite_studies.extrapolation.setting import FULL
from theodolite_studies.extrapolation.study import cells

MIDDLES = [0.25 + 0.1 * place for place in range(28)]


def region_of(gap: float) -> str:
    """By the ranges of the workload."""
    return next(
        name for name in ("narrower", "trained", "hole", "wider") if any(a < gap < b for a, b in GAPS[name])
    )


def records(
    *,
    width: Mapping[str, float] = {},
    num: Mapping[str, float] = {},
    flips: Mapping[str, float] = {},
    level: Mapping[str, float] = {},
    everywhere: Mapping[str, float] = {},
    near: float = 1.5,
    by_width: float = 0.1,
    **ensemble: float,
) -> list[dict[str, Any]]:
    """Of all cells; without arguments every claim holds.

    Args:
        width: by region, the power of the width by which the error falls.
        num: of the number of flows.
        flips: by region, the factor of mirrored flows.
        level: by region, the error of the usual network.
        everywhere: by region, the error over that of training everywhere.
        near: the same at gaps of 0.4 to 0.5.
        by_width: the power of the width by which that cost grows, at narrow gaps.
        ensemble: rank correlations `spread` and `speed`; spread over error, `beyond` and `inside`.
    """
    powers = {"trained": 0.5, "hole": 0.5, "narrower": 0.0, "wider": 0.0}
    by_num = {"trained": 0.3, "hole": 0.3, "narrower": 0.0, "wider": 0.0}
    by_flips = {"trained": 0.75, "hole": 0.75, "narrower": 0.9, "wider": 0.9}
    levels = {"trained": 0.2, "hole": 0.22, "narrower": 1.0, "wider": 1.0}
    costs = {"trained": 1.0, "hole": 1.0, "narrower": 2.0, "wider": 1.5}
    for own, given in zip(
        (powers, by_num, by_flips, levels, costs), (width, num, flips, level, everywhere), strict=True
    ):
        own |= given
    found = []
    for cell in cells(FULL):
        if cell["part"] == "flow":
            own = {"residual": 1e-6, "order": 2.0, "through": 1e-15, "apart": 1e-12}
            found.append({**cell, **own})
            continue
        errors = []
        for gap in MIDDLES:
            region = region_of(gap)
            error = levels[region] * (32 / cell["width"]) ** powers[region]
            error *= (256 / cell["num"]) ** by_num[region]
            error *= by_flips[region] if cell["flips"] else 1.0
            if cell["gaps"] == "everywhere":
                error /= near if 0.4 < gap < 0.5 else costs[region]
                error /= (cell["width"] / 32) ** by_width if region == "narrower" else 1.0
            noise = 1 + 0.003 * ((3 * cell["seed"] + cell["width"] + cell["num"] // 64) % 5)
            errors.append((error * noise) ** 2)
        own = {"errors": errors, "misses": [1.0] * 28, "fit": 0.1}
        if cell["part"] == "ensemble":
            shares = [
                ensemble.get("inside" if 0.5 < gap < 2.5 else "beyond", 0.8) ** 2 + 1e-3 * cell["seed"]
                for gap in MIDDLES
            ]
            own["average"] = errors
            own["spread"] = [error * share for error, share in zip(errors, shares, strict=True)]
            regions = ("all", "trained", "hole", "narrower", "wider")
            own["ranks"] = {
                name: dict.fromkeys(regions, ensemble.get(name, usual) + 0.01 * cell["seed"])
                for name, usual in {"spread": 0.8, "speed": 0.5}.items()
            }
            own["ranks"]["speed"]["all"] -= 0.002 * cell["seed"]
        found.append({**cell, **own})
    return found
