"""Records of a world in which every claim about depth expansion holds."""

import math

DEPTHS, WIDTHS, SEEDS = (1, 2, 4, 8), (4, 8, 16), (0, 1, 2)


PAIRS = {"alive": 4, "near": 0.95, "beyond": 0.06, "quantiles": [0.02, 0.05, 0.2], "edge": 1.1}


def made_up(**values):
    """Records of a world in which every claim holds, but for what is given, as functions of n, width."""
    world = {
        "train": lambda n, w: w * (0.2 + 0.8 * math.exp(2 - 2 * n)),
        "test": lambda n, w: 0.2 * w / n,
        "loss": lambda n, w: 1.0,
        "risk": lambda n, w: 0.5 + 8 / w**2 + 0.1 * abs(math.log2(n) - 0.1 - 0.45 * math.log2(w)),
        "top": lambda n, w: 1.0 / w,
        "trace": lambda n, w: 1.0,
        "near": lambda n, w: 0.95,
        "beyond": lambda n, w: 0.06,
        "failing": lambda n, w, size: 0.4 / size / w,
        "bound": lambda n, w, size: 0.5 / size,
        "gain": lambda n, w: 1 / n,
    } | values
    return [_record(world, n, w, seed) for n in DEPTHS for w in WIDTHS for seed in SEEDS]


def _record(world, n, w, seed):
    wobble = 1 + 0.002 * seed
    pairs = {**PAIRS, "near": world["near"](n, w), "beyond": world["beyond"](n, w), "counts": [1] * 40}
    point = {
        split: {
            "norm": wobble * world[split](n, w),
            "trace": world["trace"](n, w),
            "top": world["top"](n, w),
            "dims": w,
            "num": 100,
        }
        for split in ("train", "test")
    }
    failing = [world["failing"](n, w, size) for size in (16, 64, 256)]
    point["alignment"] = {
        "sizes": [16, 64, 256],
        "fresh": failing,
        "crossed": failing,
        "bound": [world["bound"](n, w, size) for size in (16, 64, 256)],
        "draws": 2000,
    }
    return {
        "regime": "augmented",
        "depth": n,
        "width": w,
        "seed": seed,
        "train_loss": world["loss"](n, w),
        "train_bias": 0.1,
        "test_loss": wobble * world["risk"](n, w),
        "test_right": 0.5,
        "points": {name: {**point, "pairs": pairs} for name in ("stage1", "stage2", "pool")},
        "entries": [pairs] * 3,
        "candidates": {"preconditioned": [wobble * world["gain"](n, w), 0.0]},
    }
