"""What a coordinate study found, from its file of records: the claims, and figures beside the file."""

from __future__ import annotations

from pathlib import Path

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite.core.size import Size
from theodolite.probes.scaling.coordinates import AXES
from theodolite_studies.coordinates.figures import draw
from theodolite_studies.coordinates.study import claims, table
from theodolite_studies.framework.records import read_records


def report(path: str | Path) -> str:
    """Draw one figure for each optimizer and axis beside the file, and give the table of claims."""
    path = Path(path)
    about, records = read_records(path)
    if about.get("study") != "coordinates":
        raise UseError(f"{path} holds no coordinate study: its first line is about {about.get('study')!r}")
    if not records:
        raise UseError(f"{path} holds no runs yet: run the study first")
    centre = Size(**about["centre"])
    drawn = {
        path.with_name(f"{path.stem}-{optimizer}-{axis}.svg"): draw(
            records, optimizer=optimizer, axis=axis, centre=centre, step=about["steps"]
        )
        for optimizer in dict.fromkeys(record["optimizer"] for record in records)
        for axis in AXES
    }
    found = claims(records)
    held = sum(claim.holds for claim in found)
    said = [
        table(found),
        "",
        f"{held} of {len(found)} claims hold: slopes within ±0.1 of what they should be, after "
        f"{about['steps']} steps. Figures: {', '.join(file.name for file in drawn)}",
    ]
    for file, svg in drawn.items():
        write_whole(file, svg)
    return "\n".join(said)
