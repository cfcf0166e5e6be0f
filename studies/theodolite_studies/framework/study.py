"""A study: cells that are run once each, claims, and figures, all from a file of records.

A study's folder, and the folder that a run of it writes, hold the same: `records.jsonl` and figures. Training
runs of a fleet go to a ledger beside them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.files import write_whole
from theodolite.core.progress import Progress
from theodolite.fleet.driver import conduct as conduct_runs
from theodolite.fleet.engine import Resources
from theodolite.fleet.ledger import Ledger
from theodolite.fleet.pool import Failure, pooled
from theodolite.fleet.run import Run
from theodolite.fleet.training import Workloads
from theodolite_studies.framework.claims import Claim, Decided, decide, report_claims
from theodolite_studies.framework.records import Record, Records, key_of, read_records, write_records

RECORDS, LEDGER = "records.jsonl", "ledger"
Cell = Mapping[str, Any]
"""What one run of a study is of, as values that JSON knows: `{"network": "mlp", "seed": 0}`."""
Row = Mapping[str, Any]
"""Of a ledger."""


@dataclass(frozen=True)
class Setting:
    """What decides the numbers of a study, but for the machine. Studies with more to decide extend it."""

    small: bool = False
    """Fewer and shorter runs, to see how the study goes."""

    def about(self) -> dict[str, Any]:
        """What a file of records must agree with to be continued."""
        return {}


@dataclass(frozen=True)
class FleetRuns:
    """The cells that a fleet trains, those with nothing but a `part`. Their runs go to a ledger."""

    runs: Callable[[Any, str, Sequence[Row]], Sequence[Run]]
    """Of a setting and a part, given the rows that the ledger has."""
    records: Callable[[Any, Sequence[Row]], Iterable[Record]]
    """What claims and figures need to know of the rows."""
    keys: tuple[str, ...]
    """What tells a record of the study from all others."""
    workloads: Callable[[Any], Workloads] = lambda setting: {}
    """Those that the runs name and that are not built in."""
    chunk: Callable[[Any, str], int | None] = lambda setting, part: None
    """Most models of a part in one program of the vectorised engine."""
    rounds: int = 1
    """How often a part is asked for its runs: it may want more once it has seen some rows."""


@dataclass(frozen=True)
class Study:
    """The claims of a paper, run again.

    `run` gives the records of a cell. Each is kept with the cell's own values, by which a cell that has ended
    is recognised. Claims, figures and notes see nothing but the records.
    """

    name: str
    cells: Callable[[Any], Sequence[Cell]]
    """Of a setting, in the order of their worth."""
    run: Callable[[Cell, Any, str], Iterable[Record]]
    """Of a cell, a setting and a device. A function of a module, as it is sent to other processes."""
    claims: Sequence[Claim] | Callable[[Any], Sequence[Decided]]
    """Rows of data, or a function of the study's data that decides them."""
    figures: Callable[[Any], Iterable[tuple[str, str]]]
    """Name and SVG of each, from the study's data."""
    notes: Callable[[Any], str] = lambda data: ""
    """What stands below the claims, such as a table."""
    data: Callable[[Sequence[Record], Any], Any] = lambda records, setting: records
    """What claims, figures and notes are given, from the records and their setting."""
    full: Setting = Setting()
    small: Setting = Setting(small=True)
    fleet: FleetRuns | None = None
    restored: Callable[[Record], Setting] | None = None
    """A setting from the first line of a file, where settings may be changed field by field."""

    def about(self, setting: Setting) -> dict[str, Any]:
        """The first line of the file of records."""
        return {"study": self.name, **setting.about()}

    def decide(self, records: Sequence[Record], setting: Setting | None = None) -> list[Decided]:
        """What records of a setting, the full one by default, say of each claim that they are about."""
        return self._decided(self.data(records, setting or self.full))

    def _decided(self, data: Any) -> list[Decided]:
        return list(self.claims(data)) if callable(self.claims) else decide(self.claims, data)

    def setting_of(self, about: Record) -> Setting:
        """The setting that a file of records was made with."""
        for setting in (self.full, self.small):
            if about == json.loads(json.dumps(self.about(setting))):
                return setting
        if self.restored is None:
            raise UseError(f"these are no records of the study {self.name}: they are about something else")
        return self.restored(about)


def conduct(
    study: Study,
    out: str | Path,
    *,
    setting: Setting | None = None,
    parts: Sequence[str] = (),
    device: str = "cpu",
    jobs: int | None = None,
    engine: str = "auto",
    progress: Progress | None = None,
    tell: Callable[[str], None] = print,
) -> int:
    """Run the cells that a folder does not hold yet, in their order.

    Cells that fail are reported and left; the next call tries them again.

    Args:
        study: what to run.
        out: the folder; made if it does not exist.
        setting: the full one by default.
        parts: only cells with these values; see `chosen`.
        device: `cpu`, `cuda` or `cuda:1`.
        jobs: processes at a time; by default one for cells, and for a fleet one for each core.
        engine: of the fleet.
        progress: of the fleet.
        tell: called with each line.

    Returns:
        0; 1 if something failed; 130 after a Ctrl-C in a fleet.
    """
    setting, out = setting or study.full, Path(out).expanduser()
    cells = study.cells(setting)
    keys = sorted({key for cell in cells for key in cell})
    wanted = chosen(cells, parts)
    records = Records(out / RECORDS, study.about(setting), keys)
    resources = Resources(device=device) if jobs is None else Resources(device=device, jobs=jobs)
    status = 0
    for is_trained, some in itertools.groupby(wanted, lambda cell: study.fleet and cell.keys() == {"part"}):
        if not is_trained:
            errand = _Errand(study.run, setting, device)
            status |= _run_cells(errand, list(some), keys, records, jobs or 1, tell)
            continue
        for cell in some:
            assert study.fleet is not None
            found = _train(study, study.fleet, setting, cell["part"], out, engine, resources, progress, tell)
            if found == 130:
                return found
            status |= found
    return status


def chosen(cells: Sequence[Cell], parts: Sequence[str]) -> list[Cell]:
    """The cells that have the given values: alternatives of a key; of several keys all must match.

    >>> cells = [{"network": network, "rule": rule} for network in ("mlp", "gpt") for rule in ("sgd", "adam")]
    >>> chosen(cells, ["gpt"]) == cells[2:], chosen(cells, ["gpt", "sgd", "adam"]) == cells[2:]
    (True, True)
    >>> chosen(cells, ["cnn"])
    Traceback (most recent call last):
    theodolite.UseError: the study has no part 'cnn': it has mlp, gpt, sgd, adam
    """
    known: dict[str, dict[str, None]] = {}
    for cell in cells:
        for key, value in cell.items():
            if isinstance(value, str) and value:
                known.setdefault(key, {})[value] = None
    for word in parts:
        if not any(word in values for values in known.values()):
            words = dict.fromkeys(word for values in known.values() for word in values)
            raise UseError(f"the study has no part {word!r}: it has {', '.join(words)}")
    wanted = {key: set(parts) & values.keys() for key, values in known.items() if set(parts) & values.keys()}
    return [cell for cell in cells if all(cell.get(key) in words for key, words in wanted.items())]


def _run_cells(
    errand: _Errand,
    cells: Sequence[Cell],
    keys: Sequence[str],
    records: Records,
    jobs: int,
    tell: Callable[[str], None],
) -> int:
    ended = {key_of(record, keys) for record in records.all}
    waiting = [cell for cell in cells if key_of(cell, keys) not in ended]
    tell(f"{len(cells) - len(waiting)} of {len(cells)} cells are in {records.path}")
    failed = 0
    for count, (cell, result) in enumerate(pooled(errand, waiting, jobs, said=tell), 1):
        title = f"{count}/{len(waiting)}  {' '.join(str(value) for value in cell.values())}"
        if isinstance(result, Failure):
            failed += 1
            tell(f"{title}: failed: {result.reason}")
        else:
            records.append({**cell, **record} for record in result)
            tell(title)
    if failed:
        tell(f"{failed} of {len(waiting)} cells failed; the same command tries them again")
    return int(failed > 0)


def _train(
    study: Study,
    fleet: FleetRuns,
    setting: Setting,
    part: str,
    out: Path,
    engine: str,
    resources: Resources,
    progress: Progress | None,
    tell: Callable[[str], None],
) -> int:
    able = dataclasses.replace(
        resources, workloads=fleet.workloads(setting), chunk=fleet.chunk(setting, part)
    )
    status = 0
    with Ledger.open(out / LEDGER, name=study.name, spec=study.about(setting)) as ledger:
        for turn in range(fleet.rounds):
            runs = {run.identity: run for run in fleet.runs(setting, part, ledger.rows())}
            left = len(runs.keys() - ledger.settled())
            if turn and not left:
                break
            tell(f"{part}: {len(runs)} runs, {left} of them to make")
            made = conduct_runs(list(runs.values()), ledger, engine=engine, resources=able, progress=progress)
            if not made.ok:
                tell(str(made))
                status = 1
            if made.stopped:
                return 130
    return status


@dataclass(frozen=True)
class _Errand:
    """A cell's records as a list, which can be sent."""

    run: Callable[[Cell, Any, str], Iterable[Record]]
    setting: Setting
    device: str

    def __call__(self, cell: Cell) -> list[Record]:
        return list(self.run(cell, self.setting, self.device))


def read(study: Study, path: str | Path) -> tuple[Setting, list[Record]]:
    """The setting of a folder or a file of records, and all its records, those of a ledger too."""
    path = Path(path).expanduser()
    about, records = read_records(path / RECORDS if path.is_dir() else path)
    if about.get("study") != study.name:
        raise UseError(f"{path} is about {about.get('study')!r}: it is no file of the study {study.name!r}")
    setting = study.setting_of(about)
    if study.fleet is not None and path.is_dir() and (path / LEDGER).exists():
        with Ledger.read(path / LEDGER) as ledger:
            records += study.fleet.records(setting, ledger.rows())
    return setting, records


def summarise(study: Study, out: str | Path, path: str | Path) -> None:
    """Write all records of a folder, those of its ledger too, to one file.

    What the file holds already, about the same setting, and the folder does not, stays: parts may be run on
    several machines.
    """
    assert study.fleet is not None
    path = Path(path).expanduser()
    setting, records = read(study, out)
    together = {key_of(record, study.fleet.keys): record for record in records}
    if path.exists():
        there, before = read(study, path)
        if study.about(there) != study.about(setting):
            raise UseError(f"{path} is about another setting of the study: give --summary another path")
        together = {key_of(record, study.fleet.keys): record for record in before} | together
    write_records(path, study.about(setting), (together[key] for key in sorted(together)))


def report(study: Study, path: str | Path, to: str | Path | None = None) -> str:
    """Decide the claims and draw the figures.

    Args:
        study: whose claims and figures.
        path: a folder or a file of records.
        to: the folder of the figures; that of the records by default.
    """
    path = Path(path).expanduser()
    setting, records = read(study, path)
    if not records:
        raise UseError(f"{path} holds no records yet: run the study first")
    data = study.data(records, setting)
    folder = Path(to).expanduser() if to is not None else path if path.is_dir() else path.parent
    prefix = "" if path.is_dir() or path.name == RECORDS else f"{path.stem}-"
    drawn = {folder / f"{prefix}{name}.svg": svg for name, svg in study.figures(data)}
    said = [report_claims(study._decided(data)), study.notes(data)]
    if drawn:
        folder.mkdir(parents=True, exist_ok=True)
        said.append(f"Figures: {', '.join(str(file) for file in drawn)}")
    for file, svg in drawn.items():
        write_whole(file, svg)
    if not any(said):
        raise UseError(f"{path}: its records are not those that this study writes: they decide no claim")
    return "\n\n".join(each for each in said if each)


def no_cell(cell: Cell, setting: Setting, device: str) -> Iterable[Record]:
    """The `run` of a study all of whose cells a fleet trains."""
    raise AssertionError(f"{cell} is trained by the fleet")


def tell_on_stderr(line: str) -> None:
    """Print a line at once, beside what the study prints at its end."""
    print(line, file=sys.stderr, flush=True)
