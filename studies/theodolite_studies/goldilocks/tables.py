"""Tables of the Goldilocks study: where the zones are, what was trained, and how curvature went with it."""

from __future__ import annotations

import numpy as np

from theodolite_studies.framework.claims import table
from theodolite_studies.goldilocks.curves import Accuracies, Measured, accuracies, zone
from theodolite_studies.goldilocks.setting import COURSE_TEMPERATURES, NETWORKS, VARIANTS

MAPS = (
    ("temperature", ("temperature",), "descent, T"),
    ("scale", ("homogeneous", "normed", "identity"), "descent, α"),
    ("adam", ("adam",), "Adam, T"),
    ("neighbours", ("temperature",), "descent, ResNet-4, T"),
)
"""Part, rules of the learning rate, and what to call it."""


def notes(data: Measured) -> str:
    """Zones, accuracies and courses, as far as there are records."""
    return "\n\n".join(each for each in (zones(data), trained(data), courses(data)) if each)


def zones(data: Measured) -> str:
    """Where the zones are: a line for each network and variant, with t, G and S at the peak along T."""
    rows = []
    for network in NETWORKS.values():
        for column in network.columns:
            curves = [data.curve(network.name, column, row) for row in ("temperature", "alpha")]
            if all(each is None for each in curves):
                continue
            found, along = [zone(each) for each in curves], curves[0]
            peak, edges = ["–"] * 4, ["–"] * 4
            if along is not None and found[0] is not None:
                top = int(np.nanargmax(along.mean()))
                names = ("excess", "t", "excess of G", "excess of S")
                peak = [f"{along.mean(name)[top]:.2f}" for name in names]
            for place, each in enumerate(found):
                if each is not None:
                    edges[2 * place : 2 * place + 2] = _edge(each.low), _edge(each.high)
            rows.append((f"{network.name} {column}", *peak, *edges))
    columns = ("zone", "peak", "t", "of G", "of S", "T from", "to", "α from", "to")
    return table(columns, rows) if rows else ""


def trained(data: Measured) -> str:
    """Accuracies with the best learning rate, at each place; the mean over all rates; what diverged."""
    blocks = []
    for part, rules, name in MAPS:
        by_places: dict[tuple[float, ...], list[tuple[str, Accuracies]]] = {}
        for rule in rules:
            for column in VARIANTS:
                if (found := accuracies(data.records, part=part, column=column, rule=rule)) is not None:
                    label = f"{column}{' identity' if rule == 'identity' else ''}"
                    by_places.setdefault(tuple(found.at), []).append((label, found))
        for places, some in by_places.items():
            rows = []
            for label, found in sorted(some, key=lambda pair: pair[0]):
                for kind in ("train", "test"):
                    best = (f"{value:.3f}" for value in found.best(kind).mean(0))
                    mean = f"{getattr(found, kind).mean():.3f}"
                    rows.append((f"{label}, {kind}", *best, mean, f"{found.diverged.mean():.0%}"))
            blocks.append(table((f"{name} =", *map(_exponent, places), "mean", "diverged"), rows))
    if not blocks:
        return ""
    return "\n".join(["Accuracy with the best η₀, seeds’ mean; the mean is over all η₀:", *blocks])


def courses(data: Measured) -> str:
    """The excess before and after training."""
    rows = []
    for column in VARIANTS:
        followed = [data.course(column, at) for at in COURSE_TEMPERATURES]
        excesses = [np.empty(0) if each is None else each.mean() for each in followed]
        cells = [f"{excess[0]:.2f} → {excess[-1]:.2f}" if len(excess) else "" for excess in excesses]
        if any(cells):
            rows.append((column, *cells))
    return table(("excess, T =", *map(_exponent, COURSE_TEMPERATURES)), rows) if rows else ""


def _exponent(exponent: float) -> str:
    """
    >>> _exponent(-9.0), _exponent(-1.333333)
    ('10^-9', '10^-1.33')
    """
    return f"10^{round(exponent, 2):g}"


def _edge(exponent: float) -> str:
    """A boundary; open where the excess never falls below half of its peak.

    >>> _edge(-0.25), _edge(float("inf"))
    ('10^-0.25', 'open')
    """
    return f"10^{exponent:.2f}" if abs(exponent) < 1e9 else "open"
