"""What the Goldilocks study found, from its folder or its summary: claims and figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from theodolite.errors import UseError
from theodolite.studies.goldilocks.conduct import read
from theodolite.studies.goldilocks.curves import curve, zone
from theodolite.studies.goldilocks.figures import figures
from theodolite.studies.goldilocks.maps import maps
from theodolite.studies.goldilocks.networks import NETWORKS
from theodolite.studies.goldilocks.setting import Setting
from theodolite.studies.goldilocks.training_claims import training_claims
from theodolite.studies.goldilocks.verdict import Claim, table, tally
from theodolite.studies.goldilocks.zone_claims import zone_claims
from theodolite.studies.records import Record
from theodolite.writing import write_whole


def report(path: str | Path) -> str:
    """Draw the figures beside the file or in the folder, and give the tables."""
    path = Path(path).expanduser()
    about, records = read(path)
    setting = Setting.from_about(about)
    if not records:
        raise UseError(f"{path} holds no records yet: run the study first")
    folder, stem = (path, "goldilocks") if path.is_dir() else (path.parent, path.stem)
    names = []
    for name, svg in (*figures(records, setting), *maps(records)):
        file = folder / f"{stem}-{name}.svg"
        write_whole(file, svg)
        names.append(file.name)
    found = claims(records, setting)
    lines = [table(found), "", tally(found)] if found else []
    return "\n".join([*lines, "", zones(records), "", f"Figures: {', '.join(names)}"])


def claims(records: Sequence[Record], setting: Setting) -> list[Claim]:
    """What was claimed before anything was run, as far as there are records to tell."""
    return [*zone_claims(records, setting), *training_claims(records)]


def zones(records: Sequence[Record]) -> str:
    """Where the zones are: a line for each network and variant."""
    lines = [f"{'zone':<20}{'peak':>6}  {'T from':>9} {'to':>9}  {'α from':>9} {'to':>9}"]
    for network in NETWORKS.values():
        for column in network.columns:
            found = [
                zone(curve(records, part="zone", network=network.name, column=column, row=row))
                for row in ("temperature", "alpha")
            ]
            along, scaled = found
            if along is None and scaled is None:
                continue
            peak = "–" if along is None else f"{along.peak:.2f}"
            cells = [
                "–" if each is None else _edge(edge)
                for each in found
                for edge in ((each.low, each.high) if each else (0.0, 0.0))
            ]
            lines.append(
                f"{network.name + ' ' + column:<20}{peak:>6}  {cells[0]:>9} {cells[1]:>9}  "
                f"{cells[2]:>9} {cells[3]:>9}"
            )
    return "\n".join(lines)


def _edge(exponent: float) -> str:
    """A boundary; open where the excess never falls below half of its peak.

    >>> _edge(-0.25), _edge(float("inf"))
    ('10^-0.25', 'open')
    """
    return f"10^{exponent:.2f}" if abs(exponent) < 1e9 else "open"
