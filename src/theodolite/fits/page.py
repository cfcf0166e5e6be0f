"""The page of a Fit: one HTML file that carries everything it needs, in the survey's type and colours."""

from __future__ import annotations

import json
from html import escape
from importlib import resources
from pathlib import Path

from theodolite.errors import UseError
from theodolite.figures import Figure
from theodolite.fits.doubts import symbol
from theodolite.fits.result import Fit
from theodolite.fits.table import number, remarks


def page_path(path: str | Path) -> Path:
    """The path a page may be written to."""
    path = Path(path).expanduser()
    if path.suffix.lower() not in (".html", ".htm"):
        raise UseError(f"the page cannot be written to {path}: its name must end in .html")
    if not path.parent.is_dir():
        raise UseError(f"the page cannot be written to {path}: there is no folder {path.parent}")
    return path


def page(fit: Fit) -> str:
    """The fit as one self-contained HTML page."""
    from plotly.offline import get_plotlyjs

    drawn = fit.figures()
    panels = [figure.to_dict()["panels"] for figure in drawn]
    specs = json.dumps(panels, ensure_ascii=False).replace("<", "\\u003c")
    num = len(fit.data["loss"])
    warnings = "".join(f'<p class="remedy"><b>Warning.</b> {escape(line)}</p>' for line in fit.warnings)
    notes = "".join(f"<p><b>{about}</b> {escape(said)}</p>" for about, said in remarks(fit).items())
    plotly = get_plotlyjs().replace("</script", r"<\/script")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
<title>{escape(fit.form.name)} fit</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<header><p class="kicker">{escape(fit.form.name)} fit of {num} points</p>
<h1>{escape(fit.form.equation)}</h1></header>
<main><section>{warnings}{_constants(fit)}<div class="table-note">{notes}</div></section>
<section><div>{"".join(_figure(figure, place) for place, figure in enumerate(drawn))}</div></section></main>
<script type="application/json" id="figures">{specs}</script>
<script>{plotly}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _constants(fit: Fit) -> str:
    rows = "".join(
        f'<tr><td>{symbol(name)}</td><td class="number">{number(one.value)}</td>'
        f'<td class="number">{number(one.low)} to {number(one.high)}</td>'
        f'<td class="number">{number(one.error)}</td></tr>'
        for name, one in fit.constants.items()
    )
    heads = "".join(
        f'<th scope="col"{" class=number" if head else ""}>{head}</th>'
        for head in ("", "value", "95 % interval", "standard error")
    )
    return f'<table class="anatomy"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>'


def _figure(figure: Figure, place: int) -> str:
    panels = "".join(
        f'<div class="panel"><p class="panel-title">{escape(panel.title)}</p>'
        f'<div class="plot" data-figure="{place}" data-panel="{index}" '
        f'style="min-height: {panel.layout["height"]}px"></div></div>'
        for index, panel in enumerate(figure.panels)
    )
    return (
        f'<figure class="drawn"><div class="panels" role="img" aria-label="{escape(figure.alt)}">'
        f"{panels}</div><figcaption>{escape(figure.caption)}</figcaption></figure>"
    )


def _asset(name: str) -> str:
    return (resources.files("theodolite.report") / "assets" / name).read_text(encoding="utf-8")
