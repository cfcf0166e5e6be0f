"""Records of the study of collapse with known verdicts."""

from __future__ import annotations

from typing import Any

from theodolite_studies.collapse.networks import ARMS
from theodolite_studies.collapse.tied import BASES

QUOTIENTS = [2.0 * 0.9**step for step in range(41)]
LAST = {"usual": 0.1, "features ×10": 0.05, "head ×10": 0.1, "penalty": 0.05}
"""NC1 before the head, of each arm."""


def flows(part: str, seeds: int = 3, **changes: Any) -> list[dict[str, Any]]:
    """Of two starts, with no check at which NC1 rises."""
    found = []
    for noise, offset in ((0.3, 0.0), (0.3, 3.0)):
        for seed in range(seeds):
            own = {"part": part, "noise": noise, "decay": 0.0, "offset": offset, "seed": seed}
            seen = {"rising": 0, "largest": -1e-4, "peak": 1.0, "pinv": 1e-4 + 1e-6 * seed, "nc2 start": 0.3}
            own |= {**seen, "nc2": 0.01, "quotients": QUOTIENTS, "end": 0.4 + 0.01 * seed}
            found.append({**own, **changes})
    return found


def minima(seeds: int = 3, **changes: Any) -> list[dict[str, Any]]:
    """At a strong and at a weak tie, at each of which λ_H has twice the effect of λ_W."""
    found = []
    for base in BASES:
        for seed in range(seeds):
            for tie in (0.1, 0.01):
                own = {"part": "minima", "noise": 0.1, "base": base, "seed": seed, "tie": tie}
                own |= {"given": 1.0, "nc1": tie, "pinv": 1e-4, "feature effect": 4.0, "head effect": 2.0}
                found.append({**own, "ratio": 2.0 + 0.01 * seed, "error": 0.01 + 1e-4 * seed, **changes})
    return found


def networks(seeds: int = 3, **changes: Any) -> list[dict[str, Any]]:
    """NC1 falls at each of five blocks, and the last one is half with more decay before the head."""
    found = []
    for network in ("MLP, mixture", "ResNet, fashion"):
        for arm in ARMS:
            for seed in range(seeds):
                last = LAST[arm] * (1 + 0.01 * seed * (arm == "usual") - 0.01 * seed * (arm == "head ×10"))
                own: dict[str, Any] = {"part": "network", "network": network, "arm": arm, "seed": seed}
                for when in ("start", "end", "held out"):
                    own[f"profile {when}"] = [1.0, 0.8, 0.6, 0.4, 0.2, last]
                    own[f"pinv {when}"] = [0.5] * 6
                    own |= {f"nc4 {when}": 0.999 + 1e-4 * seed, f"accuracy {when}": 1.0, f"loss {when}": 0.01}
                    own |= {f"{name} {when}": 1.0 if when == "start" else 0.2 for name in ("nc2", "nc3")}
                found.append({**own, **changes})
    return found
