"""The page of a survey: one self-contained HTML file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from theodolite.anatomy.part import Fold, fold
from theodolite.present.page import asset, inlined_json, plotly_script
from theodolite.surveying.network import ROLE_MEANINGS, parameters_by_block, stages
from theodolite.surveying.survey import Survey

_CODE = re.compile(r"`([^`]+)`|(?<![\w/*.])[A-Za-z_*][\w*]*(?:\.[\w*]+)+")
"""What stands between backticks, and dotted names."""


def page(survey: Survey) -> str:
    """The survey as one self-contained HTML page."""
    import jinja2

    anatomy = survey.anatomy
    overview = parameters_by_block(anatomy) if anatomy is not None else None
    figures = [figure for finding in survey.ranked for figure in finding.evidence.figures]
    figures += [] if overview is None else [overview]
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"value": _value, "numeric": _numeric, "tensors": _tensors}
    environment.filters |= {"breakable": _breakable, "remarks": _remarks, "id_of": id}
    present = {part.role for part in anatomy.values()} if anatomy is not None else set()
    return environment.get_template("page.html").render(
        survey=survey,
        anatomy=anatomy,
        stages=stages(anatomy) if anatomy is not None else [],
        folds=fold(anatomy.values()) if anatomy is not None else [],
        roles={role: meaning for role, meaning in ROLE_MEANINGS.items() if role in present},
        overview=overview,
        numbers={id(figure): number for number, figure in enumerate(figures)},
        specs=inlined_json([figure.to_dict()["panels"] for figure in figures]),
        style=asset("page.css"),
        script=asset("page.js"),
        plotly=plotly_script() if figures else "",
    )


def _value(value: object) -> str:
    """A value of the evidence as a reader expects it."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:#.3g}".rstrip(".").replace("-", "−")
    return str(value)


def _numeric(column: Iterable[object]) -> bool:
    """Should this column be set flush right?"""
    return all(
        value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in column
    )


def _tensors(text: str) -> Any:
    """Set code and dotted names in the type of code, and let them break at their dots."""
    from markupsafe import Markup, escape

    pieces, end = [], 0
    for match in _CODE.finditer(text):
        code = _breakable(match[1] or match[0])
        pieces += [escape(text[end : match.start()]), Markup("<code>{}</code>").format(code)]
        end = match.end()
    return Markup("").join([*pieces, escape(text[end:])])


def _breakable(name: str) -> Any:
    """A name that may break after each of its dots."""
    from markupsafe import Markup

    return Markup(".<wbr>").join(name.split("."))


def _remarks(one: Fold) -> str:
    """What else is known of a line of the table."""
    part = one.part
    said = [
        (part.ends_branch, "ends its branch"),
        (part.norm is not None and part.op == "norm", f"{(part.norm or '').capitalize()}-Norm"),
        (part.norm is not None and part.op != "norm", "inside a weight"),
        (part.stack > 1, f"{part.stack} matrices in one tensor"),
        (len(part.rows) > 1, f"{len(part.rows)} fused"),
        (bool(part.tied), f"also {', '.join(part.tied)}"),
    ]
    return ", ".join(remark for holds, remark in said if holds)
