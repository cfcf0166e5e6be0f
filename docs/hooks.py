"""The pages of the studies, which lie with their code, are studies/NAME.md on the site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

STUDIES = Path(__file__).parents[1] / "studies"
PAGES = {page.parent.name: page for page in sorted(STUDIES.glob("theodolite_studies/*/page.md"))}


def on_files(files: Files, config: Any) -> Files:
    """Add the list, every page, and its figures."""
    files.append(File.generated(config, "studies/index.md", content=index()))
    for folder, page in PAGES.items():
        name = folder.replace("_", "-")
        files.append(File.generated(config, f"studies/{name}.md", content=site_text(page)))
        for figure in sorted(page.parent.rglob("*.svg")):
            place = figure.relative_to(page.parent).as_posix()
            files.append(File.generated(config, f"studies/{name}/{place}", abs_src_path=str(figure)))
    return files


def index() -> str:
    """The list of studies, its links as they are on the site."""
    text = (STUDIES / "README.md").read_text(encoding="utf-8")
    for folder in PAGES:
        text = text.replace(f"](theodolite_studies/{folder}/page.md)", f"]({folder.replace('_', '-')}.md)")
    return text


def site_text(page: Path) -> str:
    """The text of a page, its links as they are on the site: to pages of docs/, other studies, figures."""
    text = page.read_text(encoding="utf-8").replace("](../../../docs/", "](../")
    for folder in PAGES:
        text = text.replace(f"](../{folder}/page.md", f"]({folder.replace('_', '-')}.md")
    for figure in page.parent.rglob("*.svg"):
        place = figure.relative_to(page.parent).as_posix()
        text = text.replace(f"]({place})", f"]({page.parent.name.replace('_', '-')}/{place})")
    return text
