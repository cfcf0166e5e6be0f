"""What the Goldilocks study found, from its folder or its summary: claims and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite_studies.framework.records import Record
from theodolite_studies.framework.verdict import Claim, exceptions, table, tally
from theodolite_studies.goldilocks.figures import figures
from theodolite_studies.goldilocks.maps import maps
from theodolite_studies.goldilocks.setting import Setting
from theodolite_studies.goldilocks.study import read
from theodolite_studies.goldilocks.tables import courses, trained, zones
from theodolite_studies.goldilocks.training_claims import training_claims
from theodolite_studies.goldilocks.zone_claims import zone_claims


def report(path: str | Path) -> str:
    """Draw the figures beside the file or in the folder, and give the tables."""
    path = Path(path).expanduser()
    about, records = read(path)
    setting = Setting.from_about(about)
    if not records:
        raise UseError(f"{path} holds no records yet: run the study first")
    folder, stem = (path, "goldilocks") if path.is_dir() else (path.parent, path.stem)
    drawn = {folder / f"{stem}-{name}.svg": svg for name, svg in (*figures(records, setting), *maps(records))}
    found = claims(records, setting)
    said = [table(found), tally(found), exceptions(found)] if found else []
    names = ", ".join(file.name for file in drawn)
    said += [zones(records), trained(records), courses(records), f"Figures: {names}"]
    for file, svg in drawn.items():
        write_whole(file, svg)
    return "\n\n".join(each for each in said if each)


def claims(records: Sequence[Record], setting: Setting) -> list[Claim]:
    """What was claimed before anything was run, as far as there are records to tell."""
    return [*zone_claims(records, setting), *training_claims(records)]
