"""What the scale-vector study found, from its folder or its summary: claims, tests, tables and figures."""

from __future__ import annotations

from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite_studies.framework.verdict import exceptions, table, tally
from theodolite_studies.scale_vectors.claims import claims, notes
from theodolite_studies.scale_vectors.figures import figures
from theodolite_studies.scale_vectors.study import STUDY, read


def report(path: str | Path) -> str:
    """Draw the figures beside the file or in the folder, and give the tables."""
    path = Path(path).expanduser()
    setting, records = read(path)
    if not records:
        raise UseError(f"{path} holds no records yet: run the study first")
    folder, stem = (path, STUDY) if path.is_dir() else (path.parent, path.stem)
    drawn = {folder / f"{stem}-{name}.svg": svg for name, svg in figures(records, setting)}
    found = claims(records, setting)
    said = [table(found), tally(found), exceptions(found)] if found else []
    said += [notes(records, setting), f"Figures: {', '.join(file.name for file in drawn)}"]
    for file, svg in drawn.items():
        write_whole(file, svg)
    return "\n\n".join(each for each in said if each)
