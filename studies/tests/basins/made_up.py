"""Records of the study of basins with known verdicts."""

from __future__ import annotations

from typing import Any

from theodolite_studies.basins.lines import PAIRS
from theodolite_studies.basins.shifts import SHIFTS
from theodolite_studies.basins.study import BASE, VARIED

RISES = {"continued": 0.0, "same start": 0.2, "two small": 0.1, "different starts": 50.0}


def lines(*, seeds: int = 5, stored: float = 0.5, **rises: float) -> list[dict[str, Any]]:
    """Both networks at both rates; `same_high` is the barrier of one start at high rates."""
    found = []
    for network in ("plain", "normed"):
        for rates in ("low rates", "high rates"):
            for seed in range(seeds):
                for pair in PAIRS:
                    rise = rises.get(pair.replace(" ", "_"), RISES[pair])
                    if (pair, rates) == ("same start", "high rates"):
                        rise = rises.get("same_high", rise)
                    row = {"part": "lines", "network": network, "rates": rates, "seed": seed, "pair": pair}
                    row |= {"rise": rise * (1 + 0.01 * seed), "chord": rise, "distance": 5.0, "norm": 17.0}
                    row |= {"ends": [0.02, 0.01], "places": [0, 0.5, 1], "losses": [0.02, 0.5, 0.01]}
                    if network == "normed":
                        row["stored"] = row["rise"] + stored
                    found.append(row)
    return found


def spectra(
    *,
    seeds: int = 8,
    off: int = 0,
    scale: int = 1,
    with_width: int = 0,
    grown: float = 1.0,
    new: float = 1.0,
    parted: float = 3.0,
    share: float = 0.0,
    probe: int = 0,
    error: float = 0.0,
) -> list[dict[str, Any]]:
    """Every network that is run.

    Args:
        seeds: how many.
        off: more outliers than one less than the classes.
        scale: outliers for each class.
        with_width: more outliers at width 32.
        grown: the outliers at width 32 over those at 8.
        new: the share near zero of the eigenvalues that come with the width.
        parted: the outliers at separation 2 over those at 4.
        share: what the share near zero loses at separation 2.
        probe: by how many the probe miscounts.
        error: of what the density says, in parts.
    """
    found = []
    for change in VARIED:
        about = {**BASE, **change}
        for seed in range(seeds):
            size = 30 * int(about["width"])
            near = 0.9 * 240 + new * (size - 240) if "width" in change else 0.9 * size
            near -= share * size * (about["separation"] == 2.0)
            sharp = {8: 1.0, 16: 1.0, 32: grown}[int(about["width"])]
            sharp *= parted if about["separation"] == 2.0 else 1.0
            count = scale * (int(about["classes"]) - 1) + off + with_width * (about["width"] == 32)
            row: dict[str, Any] = {"part": "spectra", **about, "seed": seed, "size": size, "loss": 0.05}
            row |= {"outliers": count, "sharp": sharp * (1 + 0.01 * seed), "near": near}
            row |= {
                "near by density": near / size + error / 5,
                "wide gaps": 3,
                "wide gaps by probe": 3 + probe,
            }
            row |= {"r_e": 0.1, "r_e by density": 0.1 * (1 + error), "k_h1": 0.2}
            row |= {"k_h1 by density": 0.2 * (1 + 10 * error), "top": [2.0, 1.0, 0.1, 0.05]}
            found.append(row)
    return found


def shifts(*, sign: float = -1.0, seeds: int = 8, networks: int = 9) -> list[dict[str, Any]]:
    """Networks whose criteria rise where accuracy falls, or, with the sign +1, where it rises.

    A network is worse the further on, and the more so on data with a larger shift.
    """
    found = []
    for seed in range(seeds):
        for place in range(networks):
            swapped = place if place != seed % networks else networks - 1  # seeds differ a little
            row: dict[str, Any] = {"part": "shifts", "seed": seed, "size": 10, "lr": 0.1, "decay": 0.0}
            row |= {"loss": 0.3, "train": [0.95, *[0.1 - sign * 0.01 * swapped] * 3, 2.0 + 0.1 * (place % 3)]}
            for strength, name in enumerate(SHIFTS):
                fall = 0.01 * place * (1 + strength) + 0.02 * strength
                level = 1.0 - sign * 0.1 * (0.01 * swapped * (1 + strength) + 0.02 * strength)
                # Without a shift the accuracy says little of that with one.
                own = 0.9 - fall if strength else 0.9 - 0.001 * ((place * 4) % networks)
                row[name] = [own, *[level] * 3, 2.0]
            found.append(row)
    return found
