"""A tiny setting of the growing study, and records that were made up."""

import dataclasses

import numpy as np

from theodolite_studies.growing.ranking import SIGNALS
from theodolite_studies.growing.training import SMALL, Lesson, enrolled

TINY = dataclasses.replace(
    SMALL,
    length=16,
    num=4,
    held_out=8,
    units=4,
    certify=24,
    width=32,
    depth=2,
    before=4,
    after=12,
    warmup=2,
    decay=3,
    looks=2,
    draws=1,
    ranked_depth=1,
    ranked_before=3,
    moments=(1, 2),
    orders=1,
)


LESSON = Lesson.of(TINY, "cpu")


def pupil_of(depth=2, seed=0):
    return enrolled(TINY, TINY.width, depth, seed, "cpu")


def grown_records(s=2.0, alpha=1 / 3):
    depths = range(1, 9)
    losses = {k: 1.0 + (3.0 ** (1 - s) + (s - 1) * 0.5 * k) ** (-1 / (s - 1)) for k in depths}
    found = [
        {
            "kind": kind,
            "seed": seed,
            "depth": k,
            "steps": 100 * k,
            "loss": (losses[k] if kind == "grown" else 3 + 0.5**k) + 0.0002 * seed,
            "gain": (losses[k] - 1) ** s,
            "parameters": 1,
        }
        for kind in ("grown", "alone")
        for seed in range(3)
        for k in depths
    ]
    return found + [
        {
            "kind": "coupled",
            "seed": seed,
            "depth": d,
            "steps": 1,
            "parameters": 1000 * d**3,
            "loss": 1 + 2 * (d**3) ** -alpha + 0.0002 * seed,
        }
        for seed in range(3)
        for d in (1, 2, 3, 5, 8)
    ]


def growing_records(signal_ends):
    ends = {
        "none": 1.2,
        "scratch": 1.3,
        "even": 1.1,
        "stack": 1.15,
        "weakest": 1.12,
        "signal": signal_ends,
        "tried": 1.0,
        "jump": 1.0,
    }
    return [
        {
            "part": "growing",
            "seed": seed,
            "added": 2,
            "way": way,
            "before": 1.5,
            "steps": 10,
            "first": 1.9 if way == "stack" else 1.4 if way == "jump" else 1.5,
            "loss": end + 0.1 * seed + 0.001 * ((seed * 7 + len(way)) % 3),
            "curve": [[1e12, 1.5], [2e12, end + 0.1 * seed]],
            **extra,
        }
        for seed in range(3)
        for way, end, extra in [
            *((way, end, {"places": [0, 1]}) for way, end in ends.items()),
            *(("random", 1.1, {"draw": draw, "places": [draw, 3]}) for draw in range(2)),
        ]
    ]


def ranking_records(sign, second=1):
    generator = np.random.default_rng(1)
    return [
        {
            "part": "ranking",
            "seed": seed,
            "variant": variant,
            "order": order,
            "point": point,
            **dict.fromkeys(SIGNALS, 2.0**point),
            "gained": {str(m): sign * second**order * point + 0.1 * generator.normal() for m in (10, 100)},
        }
        for seed in range(3)
        for variant in ("new", "all")
        for order in (0, 1)
        for point in range(9)
    ]
