"""The page of a sweep: figures, then a table and what it says for each family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from theodolite.present.page import figure_html, sheet, table_html
from theodolite.sweeping.families import Best, Family
from theodolite.sweeping.pictures import figures
from theodolite.sweeping.sentences import verdicts
from theodolite.sweeping.table import column_text, lost_text, number, optimum_text, settings_text


def page(workload: str, heading: str, families: Sequence[Family], bests: Sequence[Best]) -> str:
    """The sweep as one self-contained HTML page."""
    drawn = figures(families)
    sections = ["".join(figure_html(figure, index) for index, figure in enumerate(drawn))]
    sections += [_family(family) for family in families]
    if bests:
        sections.append(_bests(bests))
    title = f"Sweep of {workload}"
    return sheet(title=title, kicker=title, heading=heading, sections=sections, figures=drawn)


def _family(family: Family) -> str:
    scale = family.scale
    values = sorted({value for curve in family.curves for value in curve.values})
    lost = {transfer.size: lost_text(transfer, family) for transfer in family.transfers}
    rows = []
    for curve, optimum in zip(family.curves, family.optima, strict=True):
        means = dict(zip(curve.values, curve.means, strict=True))
        losses = [number(means[value]) if value in means else "" for value in values]
        rows.append(
            [str(curve.size), optimum_text(optimum, scale), lost.get(curve.size, ""), *losses],
        )
    columns = ["size", "best", "lost by transfer", *(column_text(value, scale) for value in values)]
    said = "".join(f"<p>{escape(line)}</p>" for line in verdicts(family))
    return (
        f"<h2>{escape(family.title)}</h2>{said}{table_html(columns, rows)}"
        f'<p class="table-note">Held-out loss, mean over seeds, against {escape(scale.label)}.</p>'
    )


def _bests(bests: Sequence[Best]) -> str:
    rows = [
        [
            f"{best.optimizer}, {best.parameterization}",
            str(best.size),
            settings_text(best),
            number(best.loss),
            "not run" if math.isnan(best.lost) else number(best.lost),
        ]
        for best in bests
    ]
    columns = ["", "size", "best of all axes", "loss", "lost with the base's"]
    return f"<h2>The best of all axes</h2>{table_html(columns, rows, words=3)}"
