"""Tables of the Goldilocks study: where the zones are, what was trained, and how curvature went with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from theodolite_studies.framework.records import Record
from theodolite_studies.goldilocks.course import TEMPERATURES
from theodolite_studies.goldilocks.curves import Accuracies, accuracies, curve, zone
from theodolite_studies.goldilocks.networks import NETWORKS, VARIANTS

MAPS = (
    ("temperature", ("temperature",), "descent, T"),
    ("scale", ("homogeneous", "normed", "identity"), "descent, α"),
    ("adam", ("adam",), "Adam, T"),
    ("neighbours", ("temperature",), "descent, ResNet-4, T"),
)
"""Part, rules of the learning rate, and what to call it."""


def zones(records: Sequence[Record]) -> str:
    """Where the zones are: a line for each network and variant, with t, G and S at the peak along T."""
    edges = f"{'T from':>9} {'to':>9}  {'α from':>9} {'to':>9}"
    lines = [f"{'zone':<20}{'peak':>6}{'t':>6}{'of G':>6}{'of S':>7}  {edges}"]
    for network in NETWORKS.values():
        for column in network.columns:
            curves = [
                curve(records, part="zone", network=network.name, column=column, row=row)
                for row in ("temperature", "alpha")
            ]
            found = [zone(each) for each in curves]
            if all(each is None for each in curves):
                continue
            peak = ["–"] * 4
            along = curves[0]
            if along is not None and found[0] is not None:
                top = int(np.nanargmax(along.mean()))
                names = ("excess", "t", "excess of G", "excess of S")
                peak = [f"{along.mean(name)[top]:.2f}" for name in names]
            cells = [
                "–" if each is None else _edge(edge)
                for each in found
                for edge in ((each.low, each.high) if each else (0.0, 0.0))
            ]
            lines.append(
                f"{network.name + ' ' + column:<20}{peak[0]:>6}{peak[1]:>6}{peak[2]:>6}{peak[3]:>7}  "
                f"{cells[0]:>9} {cells[1]:>9}  {cells[2]:>9} {cells[3]:>9}"
            )
    return "\n".join(lines) if len(lines) > 1 else ""


def trained(records: Sequence[Record]) -> str:
    """Accuracies with the best learning rate, at each place; the mean over all rates; what diverged."""
    blocks = []
    for part, rules, name in MAPS:
        by_places: dict[tuple[float, ...], list[tuple[str, Accuracies]]] = {}
        for rule in rules:
            for column in VARIANTS:
                found = accuracies(records, part=part, column=column, rule=rule)
                if found is not None:
                    label = f"{column}{' identity' if rule == 'identity' else ''}"
                    by_places.setdefault(tuple(found.at), []).append((label, found))
        for places, some in by_places.items():
            heads = "".join(f"{_exponent(place):>9}" for place in places)
            lines = [f"{name + ' =':<22}{heads}    mean  diverged"]
            for label, found in sorted(some, key=lambda pair: pair[0]):
                for kind in ("train", "test"):
                    best = "".join(f"{value:>9.3f}" for value in found.best(kind).mean(0))
                    mean, diverged = getattr(found, kind).mean(), found.diverged.mean()
                    lines.append(f"{f'{label}, {kind}':<22}{best}{mean:>8.3f}{diverged:>10.0%}")
            blocks.append("\n".join(lines))
    if not blocks:
        return ""
    return "\n".join(["Accuracy with the best η₀, seeds’ mean; the mean is over all η₀:", *blocks])


def courses(records: Sequence[Record]) -> str:
    """The excess before and after training."""
    lines = []
    for column in VARIANTS:
        cells = []
        for at in TEMPERATURES:
            followed = curve(records, part="course", column=column, temperature=at)
            excess = np.empty(0) if followed is None else followed.mean()
            cells.append(f"{excess[0]:.2f} → {excess[-1]:.2f}" if len(excess) else "")
        if any(cells):
            lines.append(f"{column:<14}{''.join(f'{cell:>16}' for cell in cells)}".rstrip())
    if not lines:
        return ""
    heads = "".join(f"{_exponent(at):>16}" for at in TEMPERATURES)
    return "\n".join([f"{'excess, T =':<14}{heads}", *lines])


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
