"""A Fit for reading in a terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from theodolite.fits.diagnostics import symbol
from theodolite.fits.result import LEVEL, Estimate, Fit, HeldOut


def table(fit: Fit) -> str:
    """The equation, the constants with their intervals, what was foretold, and the warnings."""
    width = min(max(shutil.get_terminal_size((100, 24)).columns, 60), 110)
    parts = [heading(fit), constants_table(fit.constants)]
    if fit.optima:
        parts.append(grid([{key: number(value) for key, value in row.items()} for row in fit.optima]))
    parts.append(
        "\n".join(
            textwrap.fill(f"{about:<11}{said}", width, subsequent_indent=" " * 11)
            for about, said in remarks(fit).items()
        )
    )
    parts += [textwrap.fill(f"! {line}", width, subsequent_indent="  ") for line in fit.warnings]
    return "\n\n".join(parts)


def heading(fit: Fit) -> str:
    """The equation, and what it was fitted to."""
    num = len(fit.data["loss"])
    dropped = f" ({fit.num_dropped} of the highest loss left out)" if fit.num_dropped else ""
    return f"{fit.form.name}: {fit.form.equation}\n{num} points{dropped}"


def constants_table(constants: Mapping[str, Estimate]) -> str:
    """A line for each constant."""
    rows = [
        {
            "": symbol(name),
            "value": number(one.value),
            f"{LEVEL:.0%} interval": f"{number(one.low)} to {number(one.high)}",
            "error": number(one.error),
        }
        for name, one in constants.items()
    ]
    return grid(rows)


def predictions_table(said: Mapping[str, Estimate], at: str) -> str:
    """A line for each number that was predicted."""
    return f"at {at}\n" + constants_table(said)


def remarks(fit: Fit) -> dict[str, str]:
    """How the search went, how large the residuals are, what was foretold of the largest runs."""
    residuals = abs(fit.residuals)
    said = {}
    if fit.num_starts > 1:
        said["search"] = f"{fit.num_reached} of {fit.num_starts} starts reached this optimum"
    said["residuals"] = f"{residuals.mean():.2%} of the loss on average, {residuals.max():.2%} at most"
    said["held out"] = held_out(fit.held_out)
    return said


def held_out(found: HeldOut | None) -> str:
    """What came of foretelling the largest runs."""
    if found is None:
        return "nothing: without the largest runs too little would be left to fit"
    runs = "run" if found.num_points == 1 else f"{found.num_points} runs"
    if found.what != "loss":
        where = f"at {found.scale} {number(found.above)}, foretold from the smaller"
        return f"the {found.what} {where}: {found.worst:+.1%}"
    return (
        f"the largest {runs} ({found.scale} ≥ {number(found.above)}), foretold from the others: off by "
        f"{found.error:.2%} on average, {found.worst:+.2%} at worst, bias {found.bias:+.2%}"
    )


def number(value: float) -> str:
    """Four digits, as short as they can be written.

    >>> [number(value) for value in (477.826, 0.34731, 7.3e10, 12.0, 2143.4)]
    ['477.8', '0.3473', '7.3e+10', '12', '2143']
    """
    return f"{value:.4g}"


def grid(rows: Sequence[Mapping[str, str]]) -> str:
    """Columns under their names; the first flush left, the others flush right."""
    heads = list(rows[0])
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) for head in heads}

    def line(cells: Mapping[str, str]) -> str:
        first, *others = heads
        return "  ".join(
            [cells[first].ljust(widths[first]), *(cells[head].rjust(widths[head]) for head in others)]
        ).rstrip()

    rule = "─" * (sum(widths.values()) + 2 * (len(heads) - 1))
    return "\n".join([line({head: head for head in heads}), rule, *map(line, rows)])
