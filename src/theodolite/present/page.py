"""A plain page: a heading, sections of HTML and figures, in the survey's type; one file that asks nobody."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib import resources

from theodolite.present.figure import Figure

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def sheet(
    *, title: str, kicker: str, heading: str, sections: Sequence[str], figures: Sequence[Figure]
) -> str:
    """The whole page.

    Args:
        title: of the window.
        kicker: a quiet line above the heading.
        heading: what the page says, in one sentence.
        sections: of HTML, what is text in it escaped. `figure_html` places a figure.
        figures: in the order of their numbers.
    """
    body = "\n".join(f"<section>{section}</section>" for section in sections)
    panels = [figure.to_dict()["panels"] for figure in figures]
    # No HTML parser must mistake anything in the data or the scripts for the end of them.
    specs = json.dumps(panels, ensure_ascii=False).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{_asset("page.css")}
</style>
</head>
<body>
<header>
<p class="kicker">{escape(kicker)}</p>
<h1>{escape(heading)}</h1>
</header>
<main>
{body}
</main>
<script type="application/json" id="figures">{specs}</script>
<script>{_plotly() if figures else ""}</script>
<script>
{_asset("page.js")}
</script>
</body>
</html>
"""


def figure_html(figure: Figure, number: int) -> str:
    """Where a figure stands: its panels side by side, then its caption."""
    panels = "".join(
        f'<div class="panel"><p class="panel-title">{escape(panel.title)}</p>'
        f'<div class="plot" data-figure="{number}" data-panel="{index}" '
        f'style="min-height: {panel.layout["height"]}px"></div></div>'
        for index, panel in enumerate(figure.panels)
    )
    return (
        f'<figure class="drawn"><div class="panels" role="img" aria-label="{escape(figure.alt)}">'
        f"{panels}</div><figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def table_html(columns: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A table; the first `words` columns are words, the others numbers."""
    kinds = ["" if index < words else ' class="number"' for index in range(len(columns))]
    heads = "".join(
        f'<th scope="col"{kind}>{escape(column)}</th>' for column, kind in zip(columns, kinds, strict=True)
    )
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td data-label="{escape(column)}"{kind}>{escape(cell)}</td>'
            for column, cell, kind in zip(columns, row, kinds, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="anatomy"><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>'


def _asset(name: str) -> str:
    return (resources.files("theodolite.present") / "assets" / name).read_text(encoding="utf-8")


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script.replace("</script", r"<\/script")
