"""Pages: one HTML file that carries everything it needs and asks nobody for anything."""

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
{asset("page.css")}
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
<script type="application/json" id="figures">{inlined_json(panels)}</script>
<script>{plotly_script() if figures else ""}</script>
<script>
{asset("page.js")}
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


def inlined_json(value: object) -> str:
    """JSON that no HTML parser can mistake for the end of its script."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def asset(name: str) -> str:
    """A file of the page."""
    return (resources.files("theodolite.present") / "assets" / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """The script that draws figures."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script.replace("</script", r"<\/script")
