"""A study of seconds to minutes: cells that are run once each, claims, and figures from what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite.fleet.pool import Failure, pooled
from theodolite_studies.framework.records import Record, Records, read_records
from theodolite_studies.framework.verdict import Claim, exceptions, table, tally

Cell = Mapping[str, Any]
"""What one run of a study is of, as values that JSON knows: `{"network": "mlp", "seed": 0}`."""


@dataclass(frozen=True)
class Study:
    """One paper's claims, run again.

    `run` gives the records of a cell; each of them is kept with the cell's own values in it, and with these a
    cell that is done is known again. `claims` and `figures` see nothing but the records.
    """

    name: str
    cells: Callable[[bool], Sequence[Cell]]
    """All cells; the fewer of a study that is only tried, if the argument is true."""
    run: Callable[[Cell], Iterable[Record]]
    """A function of a module, as it goes to other processes."""
    claims: Callable[[Sequence[Record]], Sequence[Claim]]
    """Thresholds were written down before anything was run."""
    figures: Callable[[Sequence[Record]], Iterable[tuple[str, str]]]
    """Name and SVG of each."""
    notes: Callable[[Sequence[Record]], str] = lambda records: ""
    """What stands below the claims, such as a table."""


def conduct(
    study: Study, out: str | Path, *, small: bool = False, jobs: int = 1, tell: Callable[[str], None] = print
) -> int:
    """Run the cells that are not yet in the file; how many failed. Those are told and left."""
    cells = list(study.cells(small))
    records = Records(out, {"study": study.name})
    keys = sorted({key for cell in cells for key in cell})
    ended = {_key(record, keys) for record in records.all}
    waiting = [cell for cell in cells if _key(cell, keys) not in ended]
    tell(f"{len(cells) - len(waiting)} of {len(cells)} cells are in {out}")
    failed = 0
    for count, (cell, result) in enumerate(pooled(_Errand(study.run), waiting, jobs, said=tell), 1):
        title = f"{count}/{len(waiting)}  {' '.join(str(value) for value in cell.values())}"
        if isinstance(result, Failure):
            failed += 1
            tell(f"{title}: failed: {result.reason}")
        else:
            records.append({**cell, **record} for record in result)
            tell(title)
    if failed:
        tell(f"{failed} of {len(waiting)} cells failed; the same command tries them again")
    return failed


def report(study: Study, path: str | Path) -> str:
    """Draw the figures beside the file of records, and give the claims."""
    path = Path(path).expanduser()
    about, records = read_records(path)
    if about.get("study") != study.name:
        raise UseError(f"{path} is about {about.get('study')!r}: it is no file of the study {study.name!r}")
    if not records:
        raise UseError(f"{path} holds no records yet: run the study first")
    drawn = {path.with_name(f"{path.stem}-{name}.svg"): svg for name, svg in study.figures(records)}
    found = study.claims(records)
    said = [table(found), tally(found), exceptions(found)] if found else []
    said += [study.notes(records), f"Figures: {', '.join(file.name for file in drawn)}" if drawn else ""]
    for file, svg in drawn.items():
        write_whole(file, svg)
    return "\n\n".join(each for each in said if each)


@dataclass(frozen=True)
class _Errand:
    """A cell's records as a list, which can be sent."""

    run: Callable[[Cell], Iterable[Record]]

    def __call__(self, cell: Cell) -> list[Record]:
        return list(self.run(cell))


def _key(values: Mapping[str, Any], keys: Iterable[str]) -> str:
    return json.dumps([values.get(key) for key in keys])
