"""The page of a Fit: one HTML file that carries everything it needs, in the survey's type and colours."""

from __future__ import annotations

from html import escape
from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.fits.diagnostics import symbol
from theodolite.fits.result import Fit
from theodolite.fits.table import number, remarks
from theodolite.present.page import figure_html, sheet, table_html


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
    drawn = fit.figures()
    warnings = "".join(f'<p class="remedy"><b>Warning.</b> {escape(line)}</p>' for line in fit.warnings)
    notes = "".join(f"<p><b>{about}</b> {escape(said)}</p>" for about, said in remarks(fit).items())
    return sheet(
        title=f"{fit.form.name} fit",
        kicker=f"{fit.form.name} fit of {len(fit.data['loss'])} points",
        heading=fit.form.equation,
        sections=[
            f'{warnings}{_constants(fit)}<div class="table-note">{notes}</div>',
            "".join(figure_html(figure, place) for place, figure in enumerate(drawn)),
        ],
        figures=drawn,
    )


def _constants(fit: Fit) -> str:
    rows = [
        [
            symbol(name),
            number(one.value),
            f"{number(one.low)} to {number(one.high)}",
            number(one.error),
        ]
        for name, one in fit.constants.items()
    ]
    return table_html(("", "value", "95 % interval", "standard error"), rows)
