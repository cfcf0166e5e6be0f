"""Tensors of every kind a network has, written by hand: what a rule takes, without a dissection."""

from __future__ import annotations

from typing import Any

from theodolite.anatomy.part import Part
from theodolite.optimizers import Ratios

WIDTH, INPUTS, OUTPUTS = 64, 8, 2
"""Fans at base size: the width, and two that never grow."""

COLUMNS = {
    "input": "input",
    "embedding": "input",
    "input bias": "input",
    "final gain": "input",
    "first hidden": "hidden",
    "last hidden": "hidden",
    "experts": "hidden",
    "convolution": "hidden",
    "output": "output",
    "first bias": "vector in block",
    "last bias": "vector in block",
    "block gain": "vector in block",
    "depthwise": "input in block",
    "router": "output in block",
    "fixed keys": "output in block",
    "fixed gain": "fixed in block",
    "readout bias": "fixed",
}
"""Every kind of tensor, and the column of the table it belongs to."""

VECTORS = {kind for kind in COLUMNS if kind.endswith(("bias", "gain"))}
WEIGHTS = COLUMNS.keys() - VECTORS


def tensor(kind: str, r_n: float = 1.0, r_L: float = 1.0, *, layers: int = 2) -> tuple[Part, Ratios]:
    """A tensor of a network that is r_n times as wide and r_L times as deep as its base."""
    n = round(WIDTH * r_n)
    inside = {"block": 0, "branch": 0, "branch_layers": layers}
    ends = {**inside, "ends_branch": True}
    match kind:
        case "input":
            part = _weight((n, INPUTS), "input", INPUTS, n)
        case "embedding":
            # One-hot inputs: a table of rows.
            part = Part(kind, (INPUTS, n), "embedding", "input", INPUTS, n, False, True, (0,), (1,))
        case "output":
            part = _weight((OUTPUTS, n), "output", n, OUTPUTS)
        case "first hidden":
            part = _weight((n, n), "hidden", n, n, **(ends if layers == 1 else inside))
        case "last hidden":
            part = _weight((n, n), "hidden", n, n, **ends)
        case "experts":
            part = Part(kind, (8, n, n), "linear", "hidden", n, n, True, True, (2,), (1,), **inside)
        case "convolution":
            shape = (n, n, 3, 3)
            part = Part(kind, shape, "conv", "hidden", 9 * n, n, True, True, (1, 2, 3), (0,), **inside)
        case "depthwise":
            part = Part(kind, (n, 1, 3, 3), "conv", "input", 9, n, False, True, (1, 2, 3), (0,), **inside)
        case "router":
            part = _weight((4, n), "output", n, 4, **inside)
        case "fixed keys":
            part = _weight((16, n), "output", n, 16, **inside)
        case "input bias":
            part = _vector(n, "bias")
        case "readout bias":
            part = _vector(OUTPUTS, "bias", grows=False)
        case "first bias":
            part = _vector(n, "bias", **(ends if layers == 1 else inside))
        case "last bias":
            part = _vector(n, "bias", **ends)
        case "block gain":
            part = _vector(n, "gain", norm="input", **inside)
        case "final gain":
            part = _vector(n, "gain", norm="input")
        case "fixed gain":
            part = _vector(16, "gain", grows=False, norm="output", **inside)
        case _:
            raise AssertionError(kind)
    fan_in = r_n if part.width_in else 1.0
    return part, Ratios(fan_in, r_n if part.width_out else 1.0, r_L)


def _weight(shape: tuple[int, int], role: Any, fan_in: int, fan_out: int, **place: Any) -> Part:
    grows = role != "input", role != "output"
    return Part("weight", shape, "linear", role, fan_in, fan_out, *grows, (1,), (0,), **place)


def _vector(size: int, role: Any, *, grows: bool = True, **place: Any) -> Part:
    op = "add" if role == "bias" else "norm"
    return Part("vector", (size,), op, role, 1, size, False, grows, (), (0,), **place)
