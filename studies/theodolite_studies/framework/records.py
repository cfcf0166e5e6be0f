"""The records of a study: a file with a line of JSON for each, after one that says what is run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.files import parse_json, read_text, write_whole

Record = Mapping[str, Any]


class Records:
    """A file that grows by some lines whenever a cell ends. Killing the study loses no cell that has ended.

    Args:
        path: the file; made if it does not exist.
        about: what the study runs. A file about something else is refused.
        keys: what tells cells apart. Records of a cell that was being written when the study was killed are
            dropped.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = Records(Path(folder) / "study.jsonl", {"steps": 10})
    ...     first.append([{"seed": 0, "loss": 2.5}])
    ...     again = Records(Path(folder) / "study.jsonl", {"steps": 10})
    >>> again.all
    [{'seed': 0, 'loss': 2.5}]
    """

    def __init__(self, path: str | Path, about: Record, keys: Sequence[str] = ()) -> None:
        self.path = Path(path)
        self.all: list[Record] = []
        if self.path.exists():
            header, self.all = read_records(self.path)
            if header != json.loads(_line(about)):
                raise UseError(
                    f"{self.path} was made with other settings ({_line(header)}). Give --out another path, "
                    "or remove the file"
                )
            if keys and self.all and not read_text(self.path).endswith("\n"):
                torn = key_of(self.all[-1], keys)
                self.all = [record for record in self.all if key_of(record, keys) != torn]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_records(self.path, about, self.all)

    def append(self, records: Iterable[Record]) -> None:
        """Put records at the end, and wait until they are on the disk."""
        records = list(records)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{_line(record)}\n" for record in records))
            file.flush()
            os.fsync(file.fileno())
        self.all += records


def write_records(path: Path, about: Record, records: Iterable[Record]) -> None:
    """Write a whole file of records."""
    write_whole(path, "".join(f"{_line(line)}\n" for line in (about, *records)))


def key_of(record: Record, keys: Iterable[str]) -> str:
    """The values by which a record is told from others; a list, which is a measurement, is none of them."""
    values = (record.get(key) for key in keys)
    return json.dumps([None if isinstance(value, list) else value for value in values])


def read_records(path: str | Path) -> tuple[Record, list[Record]]:
    """What a file is about, and its records. An unfinished last line is left out."""
    path = Path(path)
    if not path.is_file():
        raise UseError(f"{path} is not there: run the study first")
    *whole, _ = read_text(path).split("\n")
    lines = [
        parse_json(line, f"{path} is not a file of records: line {number}")
        for number, line in enumerate(whole, 1)
    ]
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise UseError(f"{path} is not a file of records: its first line does not say what it is about")
    return lines[0], lines[1:]


def _line(record: Record) -> str:
    return json.dumps(record, separators=(",", ":"))


def select(records: Iterable[Record], **only: Any) -> list[Record]:
    """The records whose values are as given: equal to it, or accepted by it if it is a function.

    >>> select([{"seed": 0, "lr": 0.1}, {"seed": 1, "lr": 0.5}], lr=lambda lr: lr < 0.3)
    [{'seed': 0, 'lr': 0.1}]
    """
    return [
        record
        for record in records
        if all(
            wanted(record.get(key)) if callable(wanted) else record.get(key) == wanted
            for key, wanted in only.items()
        )
    ]


def distinct(records: Iterable[Record], key: str) -> list[Any]:
    """The values that the records have, each once, in their order."""
    return list(dict.fromkeys(record[key] for record in records))


def short(value: float, digits: int = 5) -> float | None:
    """A number of few digits for a file; None if it is not finite, which JSON cannot hold.

    >>> short(1.23456789e-7), short(math.nan)
    (1.2346e-07, None)
    """
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
