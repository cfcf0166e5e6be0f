"""Runs whose law is known."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

POINTS = Path(
    os.environ.get("THEODOLITE_CHINCHILLA")
    or Path(__file__).parents[3] / "shared" / "data" / "chinchilla_points.csv"
)
"""The public Chinchilla points; they are no part of the repository."""
NAMES = {"parameters": "Model Size", "compute": "Training FLOP"}
TRUTH = {"A": 480.0, "B": 2100.0, "E": 1.8, "alpha": 0.35, "beta": 0.37}


def noisy(values, share, seed):
    """Each value, off by a normal share of itself."""
    return values * np.exp(share * np.random.default_rng(seed).standard_normal(values.shape))


def surface(parameters, tokens):
    t = TRUTH
    return t["E"] + t["A"] * parameters ** -t["alpha"] + t["B"] * tokens ** -t["beta"]


def grid(num=6):
    """Sizes and amounts of data that vary separately."""
    return map(np.ravel, np.meshgrid(np.logspace(7, 10, num), np.logspace(9, 12, num)))


def shaped(width, depth, a=4.0, b=0.08):
    """A loss whose best shape at each number of parameters lies on log w = a + b·L, by construction."""
    parameters = 12 * depth * width**2
    off = np.log(width) - a - b * depth
    return 1.5 + 60 * parameters**-0.25 * np.exp(0.02 * off**2)
