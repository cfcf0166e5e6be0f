"""Exports as plain tables, with one line for each tensor and every digit: csv, markdown, yaml."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from theodolite.planning.exporting.exported import Content, Format
from theodolite.planning.rows import WITH_EXTENT, WITHOUT_EPS, PlanRow

COLUMNS = (
    *("tensor", "shape", "role", "optimizer", "lr", "weight_decay", "eps", "extent", "multiplier"),
    *("init", "mean", "std", "bound", "factor", "in_axes", "out_axes", "rows"),
)


def cells(row: PlanRow) -> dict[str, Any]:
    """Every number of a row; what does not apply is None.

    >>> from theodolite.planning.init_distribution import InitDistribution
    >>> layout = {"fan_in": 4, "fan_out": 16, "in_axes": (1,), "out_axes": (0,), "rows": ()}
    >>> row = PlanRow("w", (16, 4), "hidden", 0, **layout, scale_free=False, init=InitDistribution("kept"))
    >>> row = {name: cell for name, cell in cells(row).items() if cell}
    >>> row["shape"], row["in_axes"], row["init"]
    ([16, 4], [1], 'kept')
    """
    init, trained = row.init, row.trained
    return {
        "tensor": row.name,
        "shape": list(row.shape),
        "role": row.role,
        "optimizer": row.rule or None,
        "lr": row.lr if trained else None,
        "weight_decay": row.weight_decay if trained else None,
        "eps": row.eps if trained and row.rule not in WITHOUT_EPS else None,
        "extent": row.extent if row.rule in WITH_EXTENT else None,
        "multiplier": None if row.multiplier == 1 else row.multiplier,
        "init": init.kind,
        "mean": None if init.kind == "kept" else init.mean,
        "std": None if init.kind == "kept" else init.std,
        "bound": init.bound,
        "factor": init.factor if init.kind == "own" else None,
        "in_axes": list(row.in_axes),
        "out_axes": list(row.out_axes),
        "rows": [[list(span) for span in block] for block in row.rows] or None,
    }


def _csv(content: Content) -> tuple[str, Sequence[str]]:
    """A header and a line for each tensor; the options of the optimizers are JSON in the last column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*COLUMNS, "options"])
    for row in content.rows.values():
        options = json.dumps(content.options[row.rule]) if content.options.get(row.rule) else ""
        writer.writerow([*map(_cell, cells(row).values()), options])
    notes = [f"The multiplier belongs to the input of the module {name}." for name in content.multipliers]
    return out.getvalue(), notes


def _markdown(content: Content) -> tuple[str, Sequence[str]]:
    """A table; columns that are empty for every tensor are left out."""
    made = [{name: _cell(cell) for name, cell in cells(row).items()} for row in content.rows.values()]
    columns = [name for name in COLUMNS if any(one[name] for one in made)]
    lines = [f"# {content.title}", ""]
    for rule in content.rules:
        if content.options[rule]:
            lines += [f"Options of {rule}: `{json.dumps(content.options[rule])}`", ""]
    for name, factor in content.multipliers.items():
        lines += [f"The input of the module `{name}` is multiplied by {factor!r}.", ""]
    for note in content.notes:
        lines += [note, ""]
    lines += [_line(columns), _line("---" for _ in columns)]
    lines += [_line(one[name].replace("|", "\\|") for name in columns) for one in made]
    return "\n".join(lines) + "\n", ()


def _line(cells_: Any) -> str:
    return f"| {' | '.join(cells_)} |"


def _yaml(content: Content) -> tuple[str, Sequence[str]]:
    """Options and multipliers, then a list with one line for each tensor."""
    lines = [f"# {line}" for line in (content.title, *content.notes)]
    lines.append(f"options: {_flow({rule: dict(content.options[rule]) for rule in content.rules})}")
    lines.append(f"multipliers: {_flow(dict(content.multipliers))}")
    lines.append("tensors:" if content.rows else "tensors: []")
    for row in content.rows.values():
        lines.append("- " + _flow({name: cell for name, cell in cells(row).items() if cell is not None}))
    return "\n".join(lines) + "\n", ()


def _flow(value: Any) -> str:
    """A value in YAML's flow style: quoted texts, and floats that YAML 1.1 takes for floats too.

    >>> _flow({"w": [1, 1e-08, None, True, "off"]})
    '{w: [1, 1.0e-08, null, true, "off"]}'
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)}: {_flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, float):
        digits, exponent, power = repr(value).partition("e")
        return digits + (".0" if exponent and "." not in digits else "") + exponent + power
    return json.dumps(value)


def _key(name: str) -> str:
    return (
        name if name.isidentifier() and name not in ("y", "n", "yes", "no", "on", "off") else json.dumps(name)
    )


def _cell(value: Any) -> str:
    """A cell of a table of texts: `16x4`, `0-2 2-4`."""
    if value is None:
        return ""
    if isinstance(value, list):
        if value and isinstance(value[0], list):
            return " ".join("+".join(f"{low}-{high}" for low, high in block) for block in value)
        return "x".join(map(str, value))
    return repr(value) if isinstance(value, float) else str(value)


FORMATS = (
    Format("csv", "a table for spreadsheets and programs", (".csv",), _csv),
    Format("markdown", "a table for a document", (".md",), _markdown),
    Format("yaml", "a list for programs of your own", (".yaml", ".yml"), _yaml),
)
