"""The tables below the claims about modular addition, and the figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from theodolite.present.svg import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PINK,
    VIOLET,
    SvgAxis,
    SvgFigure,
    SvgLine,
    SvgRow,
    ticks,
)
from theodolite.present.text import Column
from theodolite_studies.framework.claims import table
from theodolite_studies.framework.figures import band, dots, line
from theodolite_studies.framework.paired import visible_shift
from theodolite_studies.framework.records import Record, distinct, select
from theodolite_studies.modular_addition.claims import LEVEL, steps_to

EARLIEST = 100
"""Step in the figure of the stages."""
TURN = 2 * math.pi
RULES = {
    "time": "flow",
    "start": "α²β cos D",
    "amplitude": "largest α",
    "misalignment": "least |D|",
}
PRINTED = (
    "loss",
    "single",
    "concentration",
    "alignment",
    "dispersion",
    "symmetry 1",
    "symmetry 2",
    "symmetry 4",
    "ghosts",
)
HEADS = (
    "loss",
    "one frequency",
    "concentration",
    "cos D",
    "variance/mean",
    "r = 1",
    "r = 2",
    "r = 4",
    "ghosts",
)


def notes(records: Sequence[Record]) -> str:
    """Means over the seeds: mechanism, lottery, other activations, stages."""
    found = [_mechanism(records), _lottery(records), _swapped(records), _stages(records), _power(records)]
    return "\n\n".join(each for each in found if each)


def figures(records: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """Waves, lottery, stages and widths, those that there are records of."""
    for name, draw in (("waves", _waves), ("lottery", _rules), ("stages", _curves), ("widths", _widths)):
        if (figure := draw(records)) is not None:
            yield name, figure.svg()


def _mechanism(records: Sequence[Record]) -> str:
    rows = []
    for network in distinct(own := select(records, kind="mechanism"), "network"):
        moments = [select(own, network=network, when=when) for when in ("solved", "quarter", "end")]
        for seeds in sorted(filter(None, moments), key=lambda seeds: _mean(seeds, "step")):
            steps = _range([one["step"] for one in seeds])
            rows.append((network, steps, *(_mean(seeds, name) for name in PRINTED)))
    columns = [Column("all pairs"), Column("step"), *(Column(head, _shown) for head in HEADS)]
    said = (
        "r: |mean exp(irφ)| over that of random phases. Ghosts: the height of the logits at 2x and 2y over "
        "that at x + y."
    )
    return f"{table(columns, rows)}\n{said}" if rows else ""


def _lottery(records: Sequence[Record]) -> str:
    rows = []
    for network in distinct(own := select(records, kind="lottery"), "network"):
        seeds = select(own, network=network)
        shares = [np.mean([one["all"][rule] for one in seeds]) for rule in RULES]
        won = np.array([one["won"]["time"] for one in seeds], dtype=float)
        quarters = np.mean([one["by lead"] for one in seeds], 0)
        rows.append((network, *shares, float(np.mean(won)), *quarters))
    heads = [*RULES.values(), "flow, of one frequency", *(f"flow, lead {place}/4" for place in (1, 2, 3, 4))]
    columns = [Column("share right"), *(Column(head, _shown) for head in heads)]
    said = "Lead: quarters of the neurons, from the least lead of the predicted frequency to the largest."
    return f"{table(columns, rows)}\n{said}" if rows else ""


def _swapped(records: Sequence[Record]) -> str:
    rows = []
    own = select(records, kind="swapped")
    for network in distinct(own, "network"):
        seeds = [one["accuracy"] for one in select(own, network=network)]
        rows.append((network, *(np.mean([one[name] for one in seeds]) for name in seeds[0])))
    heads = own[0]["accuracy"] if own else ()
    return table([Column("at test time"), *(Column(head, _shown) for head in heads)], rows) if rows else ""


def _stages(records: Sequence[Record]) -> str:
    rows = []
    own = select(records, kind="moment")
    for network in distinct(own, "network"):
        for decay in sorted(distinct(select(own, network=network), "decay"), reverse=True):
            for moment in ("memorised", "generalised", "end"):
                if seeds := select(own, network=network, decay=decay, moment=moment):
                    values = (
                        _mean(seeds, name) for name in ("test", "mirrored", "new", "concentration", "norm")
                    )
                    rows.append(
                        (network, decay, moment, len(seeds), _range([one["step"] for one in seeds]), *values)
                    )
    heads = ("test", "mirrored", "new", "concentration", "norm")
    columns = [*(Column(head) for head in ("network", "decay", "moment", "seeds", "step"))]
    return table([*columns, *(Column(head, _shown) for head in heads)], rows) if rows else ""


def _power(records: Sequence[Record]) -> str:
    num = len(set(distinct(records, "seed")))
    if num < 2:
        return ""
    return (
        f"With {num} seeds a one-sided t-test at {LEVEL:.0%} finds a difference of "
        f"{visible_shift(num):.1f} standard errors four times in five."
    )


def _mean(records: Sequence[Record], name: str) -> float:
    values = np.array([one[name] for one in records], dtype=float)
    return float(np.mean(values)) if len(values) else math.nan


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"{min(values)} to {max(values)}"


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return ""
    return f"{value:.1g}" if 0 < abs(value) < 0.005 else f"{value:.2f}" if abs(value) < 20 else f"{value:.0f}"


def _waves(records: Sequence[Record]) -> SvgFigure | None:
    if not (own := select(records, kind="neurons", seed=0, network=lambda name: "SGD" not in name)):
        return None
    phases = [
        [line((0, TURN), (0, TURN), INK, dashed=True), dots(one["doubled"], one["psi"], BLUE)] for one in own
    ]
    across = np.linspace(0, 1, len(own[0]["concentrations"]))
    shares = [
        [line(across, one["at the start"], INK, dashed=True), line(across, one["concentrations"], ORANGE)]
        for one in own
    ]
    turn = SvgAxis(0, TURN, {0: "0", math.pi: "π", TURN: "2π"})
    part = SvgAxis(0, 1, ticks([0, 0.5, 1]), strong=0.5)
    return SvgFigure(
        "Neurons as waves, seed 0",
        [
            ("neurons of one frequency", BLUE),
            ("concentration of all at the end", ORANGE),
            ("dashed: ψ = 2φ; the start", INK),
        ],
        [one["network"] for one in own],
        [
            SvgRow("ψ", turn, turn, phases, "2φ"),
            SvgRow("concentration", SvgAxis(0, 1, ticks([0, 0.5, 1])), part, shares, "part of the neurons"),
        ],
    )


def _rules(records: Sequence[Record]) -> SvgFigure | None:
    if not (own := select(records, kind="lottery")):
        return None
    names = distinct(own, "network")
    half = math.ceil(len(names) / 2) if len(names) > 4 else len(names)
    x = SvgAxis(-0.5, 3.5, dict(enumerate(("flow", "α²β cos D", "α", "|D|"))))
    rows = [
        SvgRow("share right", x, SvgAxis(0, 1.2, ticks([0, 0.5, 1])), [_shares(own, name) for name in some])
        for some in (names[:half], names[half:])
        if some
    ]
    return SvgFigure(
        "Neurons whose frequency each rule predicted, every seed",
        [("all neurons", BLUE), ("those with one frequency in the end", ORANGE)],
        [""] * half,
        rows,
    )


def _shares(records: Sequence[Record], network: str) -> list[SvgLine]:
    """All neurons, and beside them those of one frequency."""
    seeds = select(records, network=network)
    lines = []
    for key, colour, shift, label in (("all", BLUE, -0.12, network), ("won", ORANGE, 0.12, "")):
        values = np.array([[one[key][rule] for one in seeds] for rule in RULES], dtype=float)
        points = [(place + shift, float(value)) for place, own in enumerate(values) for value in own]
        lines.append(SvgLine(points, colour, joined=False, dot=4, label=label))
    return lines


def _curves(records: Sequence[Record]) -> SvgFigure | None:
    own = select(records, kind="curve")
    width = "256" if any(one["network"] == "p 59, width 256" for one in own) else "128"
    columns, rows = [], {name: list[list[SvgLine]]() for name in ("accuracy", "concentration", "norm")}
    for network, with_decay in itertools.product((f"p 59, width {width}", "p 23"), (True, False)):
        some = [one for one in select(own, network=network) if (one["decay"] > 0) == with_decay]
        if not some:
            continue
        seeds = [one["curves"] for one in some]
        columns.append(f"{network}, {'decay' if with_decay else 'no decay'}")
        held_out = (("mirrored", GREEN), ("new", PINK)) if network == "p 23" else (("test", PINK),)
        parts = (("train", BLUE), *held_out)
        rows["accuracy"].append([_curve(seeds, name, colour) for name, colour in parts])
        rows["concentration"].append([_curve(seeds, "concentration", ORANGE)])
        rows["norm"].append([_curve(seeds, "norm", VIOLET)])
    if not columns:
        return None
    across = SvgAxis(2, math.log10(30_000), ticks([2, 3, 4], power=True))
    axes = {
        "accuracy": SvgAxis(0, 1, ticks([0, 0.5, 1])),
        "concentration": SvgAxis(0, 1, ticks([0, 0.5, 1])),
        "norm": SvgAxis(0, 150, ticks([0, 50, 100, 150])),
    }
    return SvgFigure(
        "Stages of grokking: means and ranges over the seeds",
        [
            ("trained pairs", BLUE),
            ("mirror images of them", GREEN),
            ("new pairs", PINK),
            ("concentration", ORANGE),
            ("norm", VIOLET),
        ],
        columns,
        [SvgRow(name, across, axes[name], panels, "steps") for name, panels in rows.items()],
    )


def _curve(seeds: Sequence[Record], name: str, colour: str) -> SvgLine:
    steps, values = np.array(seeds[0]["steps"]), np.array([one[name] for one in seeds], dtype=float)
    late = steps >= EARLIEST
    return band(np.log10(steps[late]), values[:, late], colour)


def _widths(records: Sequence[Record]) -> SvgFigure | None:
    names = distinct(select(records, part="grokking", kind="moment"), "network")
    if not names:
        return None
    lines = []
    for moment, colour in (("memorised", BLUE), ("generalised", PINK)):
        points = [
            (math.log2(int(name.split()[-1])), math.log10(step))
            for name in names
            for step in steps_to(records, name, moment).values()
            if math.isfinite(step)
        ]
        lines.append(SvgLine(points, colour, joined=False, dot=5))
    across = SvgAxis(5.5, 9.5, {6: "64", 7: "128", 8: "256", 9: "512"})
    return SvgFigure(
        "Steps to memorise and to generalise, p 59, decay 1, every seed",
        [("99 % of the trained pairs are right", BLUE), ("95 % of the others", PINK)],
        ["by width"],
        [SvgRow("steps", across, SvgAxis(2, 4, ticks([2, 3, 4], power=True)), [lines], "width")],
    )
