"""The records of a study: one line of JSON for each run that has ended, after one that says what is run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from theodolite.core.errors import UseError
from theodolite.core.files import parse_json, read_text, write_whole

Record = Mapping[str, Any]


class Records:
    """A file that grows by a line whenever a run ends. Whoever kills the study loses no line.

    Args:
        path: the file; made if it is not there.
        about: what the study runs. A file about something else is refused, not continued.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     first = Records(Path(folder) / "study.jsonl", {"steps": 10})
    ...     first.append([{"seed": 0, "loss": 2.5}])
    ...     again = Records(Path(folder) / "study.jsonl", {"steps": 10})
    >>> again.all
    [{'seed': 0, 'loss': 2.5}]
    """

    def __init__(self, path: str | Path, about: Record) -> None:
        self.path = Path(path)
        self.all: list[Record] = []
        if self.path.exists():
            header, self.all = read_records(self.path)
            if header != json.loads(_line(about)):
                raise UseError(
                    f"{self.path} was made with other settings ({_line(header)}). Give --out another path, "
                    "or remove the file"
                )
        self._rewrite(about)

    def append(self, records: Iterable[Record]) -> None:
        """Put records at the end, and wait until they are on the disk."""
        records = list(records)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{_line(record)}\n" for record in records))
            file.flush()
            os.fsync(file.fileno())
        self.all += records

    def _rewrite(self, about: Record) -> None:
        """The file with whole lines only."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, "".join(f"{_line(line)}\n" for line in (about, *self.all)))


def read_records(path: str | Path) -> tuple[Record, list[Record]]:
    """What a file is about, and its records. A last line that was not finished is left out."""
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
