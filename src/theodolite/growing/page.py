"""What growing found as one page, and the same as data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from theodolite.core.files import html_path, plain, write_whole
from theodolite.growing.certificate import Certificate
from theodolite.growing.grown import Grown, Stage
from theodolite.present.figure import ACCENT, FAINT, QUIET, Figure, Panel, frame


def save_page(grown: Grown, name: str, path: str | Path) -> Path:
    """Write the page, and JSON beside it."""
    path = html_path(path, kind="growth")
    write_whole(path, page(grown, name))
    write_whole(path.with_suffix(".json"), json.dumps(to_dict(grown, name), indent=2))
    return path


def page(grown: Grown, name: str) -> str:
    """The whole as one self-contained HTML page."""
    from theodolite.present.page import figure_html, sheet, table_html  # stands above

    figures: list[Figure] = []
    splits = ("estimate", "choose", "certify")
    means = [(getattr(grown.before, split), getattr(grown.after, split)) for split in splits]
    rows = [
        [f"to {split}", f"{units:,}", f"{before:.5g}", f"{after:.5g}"]
        for split, units, (before, after) in zip(splits, grown.units, means, strict=True)
    ]
    sections: list[str] = [table_html(["units", "number", "mean loss before", "after"], rows)]
    if grown.certificate is not None:
        figures.append(certificate_figure(grown))
        _, *lines = str(grown.certificate).splitlines()
        meaning = " ".join(line for line in lines if not line.startswith("  "))
        sections.append(f"<h2>How sure it is</h2>{figure_html(figures[-1], 0)}<p>{escape(meaning)}</p>")
    for number, stage in enumerate(grown.stages, 1):
        parts = [f"<h2>Block {number}: the signal by depth</h2>"]
        figures.append(stage.signal.figure())
        parts.append(figure_html(figures[-1], len(figures) - 1))
        if stage.contenders:
            figures.append(jump_figure(stage))
            parts.append(_contenders(stage))
            parts.append(figure_html(figures[-1], len(figures) - 1))
        if stage.chosen is None:
            parts.append(f"<p>No block: {escape(stage.why)}.</p>")
        sections.append("".join(parts))
    return sheet(
        title=f"Growth of {name}",
        kicker=f"Growth of {name}",
        heading=sentence(grown),
        sections=sections,
        figures=figures,
    )


def sentence(grown: Grown) -> str:
    """The result in one."""
    if not grown.blocks or grown.certificate is None:
        return f"No block was inserted: {grown.stages[-1].why}"
    many = f"{len(grown.blocks)} block{'s' if len(grown.blocks) > 1 else ''} more ({', '.join(grown.blocks)})"
    verdict = str(grown.certificate).splitlines()[0]
    return f"{many}. {verdict[0].upper()}{verdict[1:]}"


def to_dict(grown: Grown, name: str) -> dict[str, Any]:
    """As values that JSON knows."""
    found: dict[str, Any] = plain(
        {
            "growth": name,
            "blocks": list(grown.blocks),
            "units": dict(zip(("estimate", "choose", "certify"), grown.units, strict=True)),
            "before": vars(grown.before),
            "after": vars(grown.after),
            "certificate": _certificate(grown.certificate),
            "stages": [_stage(stage) for stage in grown.stages],
        }
    )
    return found


def jump_figure(stage: Stage) -> Figure:
    """The loss against the length of the step, for each point that was tried."""
    panels = []
    for one in stage.contenders:
        unit = one.jump.length / one.jump.step if one.jump.step else 1.0
        steps = [(step * unit, loss) for step, loss in sorted(one.jump.tried)]
        layout = frame(height=220)
        layout["xaxis"] |= {
            "type": "log",
            "title": {"text": "length of the step", "standoff": 6},
            "nticks": 4,
        }
        layout["yaxis"] |= {"nticks": 5}
        layout["shapes"] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": one.jump.before, "y1": one.jump.before}
            | {"line": {"color": FAINT, "width": 1}}
        ]
        drawn = {
            "type": "scatter",
            "mode": "lines+markers",
            "x": plain([step for step, _ in steps]),
            "y": plain([loss for _, loss in steps]),
            "line": {"color": ACCENT, "width": 2},
            "marker": {"color": ACCENT, "size": 6},
            "hovertemplate": "%{x:.3g}: %{y:.5g}<extra></extra>",
        }
        predicted = {
            "type": "scatter",
            "mode": "lines",
            "x": plain([step for step, _ in steps]),
            "y": plain([one.jump.before - one.slope * step / unit for step, _ in steps]),
            "line": {"color": QUIET, "width": 1, "dash": "dot"},
            "hoverinfo": "skip",
        }
        low, high = _span([one.jump.before, *(loss for _, loss in steps)])
        layout["yaxis"]["range"] = [low, high]
        panels.append(Panel(f"A block at {one.point.name}", (drawn, predicted), layout))
    return Figure(
        caption="Mean loss of the second split against the length of the step along the signal. Level: "
        "without the block; dotted: as the loss falls at first.",
        alt="; ".join(f"{one.point.name}: {one.jump}" for one in stage.contenders),
        panels=tuple(panels),
    )


def certificate_figure(grown: Grown) -> Figure:
    """The certified intervals of the fall of the loss."""
    stages = [stage for stage in grown.stages if stage.chosen is not None]
    rows = [(stage.chosen.point.name, stage.certificate) for stage in stages if stage.chosen is not None]
    if len(rows) > 1:
        rows.append(("all together", grown.certificate))
    known = [(name, one) for name, one in rows if one is not None]
    layout = frame(height=90 + 34 * len(known))
    layout["xaxis"] |= {"title": {"text": "fall of a unit's loss, in the mean", "standoff": 6}, "nticks": 6}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed"}
    layout["shapes"] = [
        {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1}
        | {"line": {"color": QUIET, "width": 1, "dash": "dot"}}
    ]
    drawn = {
        "type": "scatter",
        "mode": "markers",
        "x": plain([one.mean for _, one in known]),
        "y": [name for name, _ in known],
        "marker": {"color": ACCENT, "size": 8},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": plain([one.upper - one.mean for _, one in known]),
            "arrayminus": plain([one.mean - one.lower for _, one in known]),
            "color": ACCENT,
            "thickness": 2,
        },
        "hovertemplate": "%{y}: %{x:.4g}<extra></extra>",
    }
    level = 1 - (grown.certificate.delta if grown.certificate else 0.05)
    return Figure(
        caption=f"The fall of the loss on the third split, clipped; each end of a bar holds at "
        f"{100 * level:g} %. Right of the dotted line the loss fell.",
        alt="; ".join(f"{name}: {str(one).splitlines()[0]}" for name, one in known),
        panels=(Panel("Certified fall", (drawn,), layout),),
    )


def _contenders(stage: Stage) -> str:
    from theodolite.present.page import table_html  # stands above

    columns = ["point", "slope", "±", "step", "predicted", "fell by", "on the first split"]
    rows = [
        [
            f"{one.point.name}{' (chosen)' if one is stage.chosen else ''}",
            *(
                f"{value:.3g}"
                for value in (
                    one.slope,
                    one.error,
                    one.jump.length,
                    one.jump.predicted,
                    one.jump.gain,
                    one.train_gain,
                )
            ),
        ]
        for one in stage.contenders
    ]
    return table_html(columns, rows)


def _stage(stage: Stage) -> dict[str, Any]:
    return {
        "chosen": stage.chosen.point.name if stage.chosen is not None else None,
        "why": None if stage.chosen is not None else stage.why,
        "proof": None
        if stage.proof is None
        else {"outputs": stage.proof.outputs, "dtype": stage.proof.dtype},
        "certificate": _certificate(stage.certificate),
        "threshold": stage.signal.threshold,
        "deepest": stage.signal.deepest,
        "points": [
            {
                "name": one.name,
                "norm": one.norm,
                "gain": one.gain,
                "error": one.error,
                "preconditioned": one.preconditioned,
                "preconditioned_error": one.preconditioned_error,
                "gradient": one.gradient,
                "alignment": one.alignment,
                "alignment_bound": one.alignment_bound,
            }
            for one in stage.signal.points
        ],
        "tried": [
            {
                "name": one.point.name,
                "slope": one.slope,
                "error": one.error,
                "train_gain": one.train_gain,
                **{key: value for key, value in vars(one.jump).items() if key != "tried"},
                "steps": [list(each) for each in one.jump.tried],
            }
            for one in stage.contenders
        ],
    }


def _certificate(found: Certificate | None) -> Mapping[str, Any] | None:
    return None if found is None else {**vars(found), "holds": found.holds}


def _span(values: list[float]) -> tuple[float, float]:
    """Where the falling part of a curve can be seen, whatever its other end does."""
    low, start = min(values), values[0]
    room = max(start - low, 1e-9 * abs(start), 1e-12)
    return low - 0.3 * room, start + 1.5 * room
