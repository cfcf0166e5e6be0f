"""Records of the study of guidance with known verdicts."""

from __future__ import annotations

from typing import Any

WAYS = ("plain", "picard 1", "picard 2", "picard 3", "anderson 2", "anderson 3")


def records(*, kind: str, projected: float, seeds: int = 5) -> list[dict[str, Any]]:
    """Of one layout and field: the best projection has so many times the distance of the best scale."""
    found: list[dict[str, Any]] = []
    part = {"exact": "exact", "noisy labels": "labels"}.get(kind, "learned")
    for seed in range(seeds):
        slight = 0.001 * seed
        own = {"part": part, "layout": "three", "field": kind, "seed": seed}
        found.append({**own, "kind": "floor", "distances": [0.01, 0.01]})
        for way in WAYS:
            best = 0.1 if way == "plain" else 0.1 * projected + slight
            # The range over w = 1 to 4 is 0.3, or 0.3 times `projected`.
            wide = 0.3 if way == "plain" else 0.3 * projected
            pairs = [[best, best], [best + wide, best + wide]]
            row = {"budget": 40, "way": way, "scales": [1.0, 4.0], "distances": pairs}
            found.append({**own, "kind": "grid", **row})
            gap = 1.0 if way == "plain" else projected + slight
            found.append(
                {**own, "kind": "moments", "scale": 2, "way": way, "gap": gap, "off": 0.1, "spread": 1.0}
            )
        for method, factor in (("picard", 1.0), ("anderson", projected + slight)):
            found.append({**own, "kind": "residuals", "method": method, "residuals": [factor] * 6})
    return found


def inversions(*, good: bool, seeds: int = 5) -> list[dict[str, Any]]:
    """Of the linear flow and of three mixtures."""
    found: list[dict[str, Any]] = []
    for layout in ("one", "wide", "overlap", "three"):
        for seed in range(seeds):
            own = {"part": "inversion", "layout": layout, "field": "exact", "seed": seed}
            bound = {"close": 1.0, "random": 2.0 if good else 1.1, "median": 2.0, "opposed": 0.0}
            found.append({**own, "kind": "bound", **bound})
            early = 0.1 if layout == "three" else 1.0
            shares = {"early": early, "converged": 1.0 if good else 0.9, "iterations": 500}
            for multiple, diverged in ((0.9, 0.0), (1.1, 1.0 if good else 0.5)):
                found.append({**own, "kind": "steps", "multiple": multiple, **shares, "diverged": diverged})
            found.append({**own, "kind": "auto", **shares, "early": 1.0 if good else 0.5, "diverged": 0.0})
    return found
