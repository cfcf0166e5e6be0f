"""Records of norm placements as the paper has them."""

import itertools
import math

import numpy as np


def streams(placement, depth, *, troubled):
    """Sizes before and after training, and gradients, over the blocks."""
    part = np.linspace(0, 1, depth + 1)
    if placement == "post":
        return np.ones(depth + 1), np.ones(depth + 1), 10.0 ** (3 * part * troubled)
    grown = {"pre": 4.0 ** (4 * part), "peri": np.sqrt(1 + depth * part)}[placement]
    return np.sqrt(1 + part), grown if troubled else np.sqrt(1 + 3 * part), 2.0 ** (1 - part)


def ideal(*, plan_helps=True, peri_gain=-0.02):
    """What the paper says, with a little noise between seeds."""
    records = []
    grid = itertools.product(("pre", "post", "peri"), (4, 16), range(3), range(-9, -3))
    for placement, depth, seed, exponent in grid:
        for kind in ("base",) if depth == 4 else ("plan", "standard"):
            troubled = kind == "standard" or (kind == "plan" and not plan_helps)
            noise = 0.001 * seed
            loss = 2.0 - 0.01 * math.log2(depth) * (1 + noise) + 0.04 * (exponent + 7) ** 2 + noise
            own = {"pre": 0.0, "peri": peri_gain * (1 + 0.1 * seed), "post": 0.3 + noise}[placement]
            loss += own * troubled
            if placement == "peri":
                loss -= 0.02 * max(0, exponent + 7) ** 2 * (1 + 0.1 * seed)
            diverged = placement == "post" and exponent > -7 and troubled
            record = {"placement": placement, "depth": depth, "small": False, "parameterization": kind}
            record |= {"lr": exponent, "seed": seed, "held_out": None if diverged else loss, "unrest": 0.1}
            if exponent == -7:
                before, after, slope = (one.tolist() for one in streams(placement, depth, troubled=troubled))
                record["unrest"] = 0.1 if placement == "peri" else 0.2 + noise
                record["stream"] = {"0": before, "9": [size * (1 + noise) for size in after]}
                record["gradient"] = {"0": slope, "9": slope}
                record["peak"] = {"0": 4.0, "9": 100.0 if placement == "pre" else 10.0}
            records.append(record)
    return records


def of(records, placement, kind="standard"):
    return [
        one
        for one in records
        if (one["placement"], one["depth"], one["parameterization"]) == (placement, 16, kind)
    ]
