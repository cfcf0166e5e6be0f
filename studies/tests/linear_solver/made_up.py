"""Records of the study of linear solvers in which every claim holds."""

from __future__ import annotations

from typing import Any

CONJUGATE_GRADIENTS = {32: 80, 64: 160, 128: 320}
SIDES = dict.fromkeys(("random", "smooth"), (32, 64, 128))
SIDES |= dict.fromkeys(("points", "edge", "checkerboard", "high waves", "highest wave"), (32,))
NETWORKS = {
    # width, depth, grids, parameterization: loss, iterations
    (4, 1, 4, "plan"): (0.08, 20),
    (8, 1, 4, "plan"): (0.04, 18),
    (16, 1, 4, "plan"): (0.02, 16),
    (16, 2, 4, "plan"): (0.01, 12),
    (16, 1, 6, "plan"): (0.015, 14),
    (16, 1, 4, "standard"): (0.04, 22),
}


def records(seeds: int = 5) -> list[dict[str, Any]]:
    """Of the known solvers and of six networks; seeds differ by a little."""
    found = []
    for seed in range(seeds):
        for kind, sides in SIDES.items():
            for side in sides:
                own = {"kind": kind, "side": side, "seed": seed}
                found += [{**own, **_known(side)}, *({**own, **_trained(each, own)} for each in NETWORKS)]
    return found


def _known(side: int) -> dict[str, Any]:
    count = CONJUGATE_GRADIENTS[side]
    return {
        "part": "known",
        "cg": [count, count],
        "identity": [count, count],
        "multigrid": [5, 5],
        "cg work": 20 * side**2,
        "multigrid work": 70 * side**2,
        "cg residuals": [1.0, 1e-3, 1e-6],
        "multigrid residuals": [1.0, 1e-6],
    }


def _trained(network: tuple[int, int, int, str], own: dict[str, Any]) -> dict[str, Any]:
    loss, count = NETWORKS[network]
    return {
        "part": "trained",
        **dict(zip(("width", "depth", "levels", "parameterization"), network, strict=True)),
        "loss": loss * (1 + 0.01 * own["seed"]),
        "network": [count, count + (own["seed"] + network[0] // 4) % 2],
        "network work": 30 * own["side"] ** 2,
        "network residuals": [1.0, 1e-2, 1e-6],
    }
